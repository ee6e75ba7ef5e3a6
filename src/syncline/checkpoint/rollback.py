"""Load on all ranks or on none: compare the values that the ranks have loaded, and undo a failed load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from syncline.checkpoint.encoding import encode
from syncline.checkpoint.objects import is_node_loader, rng_state, set_rng_state, unwrapped
from syncline.data import DistributedSampler
from syncline.equality.fingerprint import fingerprint_of, fingerprints, hash_of
from syncline.equality.locate import differences, divergence_error
from syncline.gradients.wrapper_protocol import SynchronizedModule
from syncline.sharded.sharing import one_copy_of
from syncline.tensors.targets import as_bytes, check_dense
from syncline.transport.agreement import exchange, fingerprint
from syncline.transport.base import Transport
from syncline.trees import leaves, map_leaves
from syncline.user_code import warn_user
from syncline.words import DEFAULT_REMEDY

Restorer = Callable[[], object]
"""A function that restores an object to an earlier state."""

_REMEDY = (
    "Either the ranks have read different files, or a load_state_dict (or a hook on it) loads values that depend on "
    "the rank. Check that the path is on the same file system on all hosts. The load was undone on all ranks"
)


class Loadable(Protocol):
    """The interface of an object into which a state can be loaded: the part of `TrainState` that loading needs."""

    named: dict[str, Any]
    step: int

    def _resume_from_step(self, step: int) -> None:
        """Set the step of this state and of its wrapped modules."""


@contextmanager
def failing_together(
    transport: Transport, title: str, *, remedy: str = DEFAULT_REMEDY
) -> Iterator[list[str]]:
    """Raise an error on every rank if the `with` block fails on any rank. The end of the block is a collective call.

    Yields a list, to which the block can append lines of text that must be the same on all ranks; see `exchange`.

    Args:
        transport: the transport between the ranks.
        title: the name of the call, for messages.
        remedy: advice for the user if the lines differ.

    Raises:
        ContractMismatch: the lines differ between the ranks.
        TypeError, ValueError, SynclineError: the block failed on a rank. Raised on every rank.
    """
    lines: list[str] = []
    fault: Exception | None = None
    try:
        yield lines
    except Exception as error:
        fault = error
    exchange(transport, title, lines, fault=fault, remedy=remedy)


def load_together(
    transport: Transport, title: str, before: Before, load: Callable[[], Mapping[str, Any]]
) -> None:
    """Load on all ranks, and compare the results. If any rank fails, undo the load on all ranks. A collective call.

    The strides and the devices of tensors are not compared. The comparison costs one pass over memory (at the speed of
    XXH3 for tensors on the CPU) and one small collective.

    Args:
        transport: the transport between the ranks.
        title: the name of the call, for messages.
        before: the backup that undoes the load.
        load: a function that loads on this rank, and returns the values that must now be equal on all ranks, by name.
            `encode` must accept them.

    Raises:
        TypeError, ValueError, SynclineError: `load` failed on a rank. Raised on every rank.
        ReplicaDivergence: values that must be equal differ between the ranks. The message names the values and the
            groups of ranks with equal values. Every rank gets the same message.
    """
    fault: Exception | None = None
    values: dict[str, Any] = {}
    digest = b""
    with before.restored_on_failure(together=True):
        try:
            trees: dict[str, str] = {}
            for name, content in load().items():
                tree, tensors = encode(content, name)
                values |= tensors
                trees[f"{name}, values other than tensors"] = json.dumps(tree, sort_keys=True)
            if transport.size > 1:
                lines = [f"{name}  {_form(tensor)}" for name, tensor in values.items()]
                digest = hash_of(list(values.values())) + fingerprint(title, [*lines, *trees.values()])
            values |= trees
        except Exception as error:
            fault = error
        digests = exchange(transport, title, [], payload=digest, fault=fault, refusal="could not be loaded")
        if len(set(digests)) == 1:
            return
        # These fingerprints are the same on all kinds of devices.
        found_here = zip(values.items(), fingerprints(list(values.values())), strict=True)
        mine = {name: fingerprint_of((_form(value), found)) for (name, value), found in found_here}
        rows = [json.loads(row) for row in transport.all_gather_bytes(json.dumps(mine).encode())]
        names = list(dict.fromkeys(name for row in rows for name in row))
        found = differences(names, [[row.get(name, -1) for name in names] for row in rows])
        if found:
            raise divergence_error(
                title, found, num_compared=len(names), num_ranks=transport.size, remedy=_REMEDY
            )


def _form(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else ""


# ---------------------------------------------------------------------- the state before a load


class Before:
    """A backup of the state of objects. It is made before a load, and can undo the load.

    The tensors of a module are copied, and the copies take as much memory as the module. For torch's own optimizers the
    backup keeps references, because a load gives these optimizers new tensors. An optimizer class with its own
    `load_state_dict` may overwrite its tensors, so they are copied. The backup of most other objects is a copy of their
    `state_dict()`.

    Args:
        state: the objects to load into, and their step.
    """

    def __init__(self, state: Loadable) -> None:
        self._state = state
        self._step = state.step
        self._restorers = {name: (one, restorer_of(one)) for name, one in state.named.items()}
        self._rng = rng_state()

    @contextmanager
    def restored_on_failure(self, *, together: bool) -> Iterator[None]:
        """Restore the objects if the `with` block raises an error.

        Args:
            together: whether all ranks restore now. If not, a module of which the ranks of a host share one copy is
                not restored, because other ranks may have loaded it without an error.
        """
        try:
            yield
        except BaseException:
            for name, (one, restore) in self._restorers.items():
                parts = one.modules() if isinstance(one, nn.Module) else ()
                copies = [copy for copy in map(one_copy_of, parts) if copy is not None]
                if copies and not together:
                    continue
                try:
                    with ExitStack() as written:
                        for copy in copies:
                            written.enter_context(copy.writing())
                        restore()
                except Exception as error:
                    # Restore the other objects as well. The caller gets the error of the load.
                    warn_user(
                        f"a load failed, and {name} could not be restored to its state before that load: restoring "
                        f"{name} raised {type(error).__name__}: {error}. {name} may be partly loaded: create it again"
                    )
            set_rng_state(self._rng)
            self._state._resume_from_step(self._step)
            raise


def restorer_of(one: Any, *, is_stepped: bool = False) -> Restorer:
    """Return a function that restores the present state of a module, an optimizer, or another object with a state.

    Args:
        one: the object.
        is_stepped: whether an optimizer may step before it is restored, which overwrites the tensors in its state.
    """
    if isinstance(one, nn.Module):
        return _restorer_of_module(one)
    if isinstance(one, Optimizer):
        loads_in_place = type(one).load_state_dict is not Optimizer.load_state_dict
        return restorer_of_optimizer(one, copies_tensors=is_stepped or loads_in_place)
    if isinstance(one, DistributedSampler):
        return partial(vars(one).update, dict(vars(one)))
    # A loader that keeps its position would begin to iterate when it is asked for its state.
    if not isinstance(one, DataLoader) and not is_node_loader(one):
        with suppress(Exception):  # state_dict() may not work before the first load
            return _reloader(one.load_state_dict, deepcopy(one.state_dict()))
    return lambda: None


def _reloader(load: Callable[[Any], object], state: Any) -> Restorer:
    """Return a function that restores `state` by the user's code, `load(state)`, and ignores errors of this code.

    The function is called after another load has failed. The caller raises the error of that load.
    """

    def restore() -> None:
        with suppress(Exception):
            load(deepcopy(state))  # a copy, because `load` may keep parts of its argument

    return restore


def _restorer_of_module(module: nn.Module) -> Restorer:
    inner = unwrapped(module)
    parts = list(inner.modules())
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (table, dict(table)) for part in parts for table in (part._parameters, part._buffers)
    ]
    restorers = [
        *map(restorer_of_tensor, {*inner.parameters(), *inner.buffers()}),
        *(
            _reloader(part.set_extra_state, deepcopy(part.get_extra_state()))
            for part in parts
            if type(part).get_extra_state is not nn.Module.get_extra_state
        ),
    ]
    for part in module.modules():
        if isinstance(part, SynchronizedModule):
            with suppress(Exception):  # the state may be unavailable while communication is in progress
                restorers.append(_reloader(part.load_sync_state_dict, deepcopy(part.sync_state_dict())))

    def restore() -> None:
        for table, before in tables:
            table.clear()
            table.update(before)
        restore_all(restorers)

    return restore


# ---------------------------------------------------------------------- functions that restore one kind of state


def restore_all(restorers: Iterable[Restorer]) -> None:
    """Call all restorers in order."""
    for restore in restorers:
        restore()


def restorer_of_tensor(tensor: Tensor) -> Restorer:
    """Copy a tensor, and return a function that writes the copy back if the tensor has changed."""
    if is_lazy(tensor):  # a load or a forward turns it into an ordinary parameter
        kind, empty = type(tensor), tensor.data

        def restore_lazy() -> None:
            if type(tensor) is not kind:
                tensor.data = empty
                tensor.__class__ = kind

        return restore_lazy
    copy, strides = tensor.detach().clone(), _strides_of(tensor)

    def restore() -> None:
        if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
            tensor.data = copy
        elif _strides_of(tensor) != strides or not _has_same_bits(tensor, copy):
            with torch.no_grad():
                tensor.copy_(copy)

    return restore


def _strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided and not tensor.is_nested else None


def _has_same_bits(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether a tensor equals its copy bit for bit. Returns False if the tensor has no dense memory."""
    with suppress(ValueError):
        check_dense("tensor", tensor)
        return torch.equal(*(as_bytes(one.detach().resolve_conj().contiguous()) for one in (tensor, copy)))
    return False


def restorer_of_optimizer(optimizer: Any, *, copies_tensors: bool) -> Restorer:
    """Return a function that restores the state and the settings of an optimizer.

    Args:
        optimizer: the optimizer.
        copies_tensors: whether to copy the tensors in the state and the settings. This is needed if a load may
            overwrite these tensors. If False, the function keeps references to them.
    """
    state, groups = optimizer.state, optimizer.param_groups
    settings = [(group, _copied(group)) for group in groups]
    entries = [(parameter, _copied(values)) for parameter, values in state.items()]
    others = [{key: value for key, value in group.items() if key != "params"} for _, group in settings]
    kept = leaves([*others, *(values for _, values in entries)]) if copies_tensors else ()
    restorers = [restorer_of_tensor(leaf) for _, leaf in kept if isinstance(leaf, Tensor)]

    def restore() -> None:
        optimizer.state, optimizer.param_groups = state, groups
        groups[:] = [group for group, _ in settings]
        for group, values in settings:
            group.clear()
            group.update(_copied(values))
        state.clear()
        state.update((parameter, _copied(values)) for parameter, values in entries)
        restore_all(restorers)

    return restore


def _copied(tree: Any) -> Any:
    """Return a copy of nested containers and plain values, with the same tensors in it."""
    return map_leaves(tree, lambda _, leaf: leaf if isinstance(leaf, Tensor) else deepcopy(leaf))
