"""Load on all ranks or on none: compare what the ranks have loaded, and undo a load that failed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from syncline.checkpoint.encoding import encode
from syncline.checkpoint.files import checksum, memory_of
from syncline.checkpoint.objects import rng_state, set_rng_state
from syncline.data import DistributedSampler
from syncline.equality.fingerprint import fingerprint_of, fingerprints
from syncline.equality.locate import differences, divergence_error
from syncline.gradients.wrapper_protocol import SynchronizedModule
from syncline.sharded.sharing import OneCopy, one_copy_of
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.user_code import warn_user

_REMEDY = (
    "The ranks have read different files (is the path on the same file system on all hosts?), or a load_state_dict, or "
    "a hook on it, loads other values depending on the rank. The load was undone on all ranks"
)


class Loadable(Protocol):
    """The parts of a `TrainState` that a load changes."""

    named: dict[str, Any]
    step: int

    def _resume_from_step(self, step: int) -> None:
        """Set the step, also in wrapped modules."""


def load_together(
    transport: Transport, title: str, before: Before, load: Callable[[], Mapping[str, Any]]
) -> None:
    """Load on all ranks and compare the results; if any rank fails, undo the load on all. A collective call.

    Args:
        transport: the transport between the ranks.
        title: the name of the call, for messages.
        before: the state before the load.
        load: loads on this rank, and returns the values that must now be equal on all ranks.

    Raises:
        TypeError, ValueError, SynclineError: `load` failed on a rank; on every rank.
        ReplicaDivergence: see `agree_on_loaded`.
    """
    with before.restored_on_failure(together=True):
        fault: Exception | None = None
        loaded: Mapping[str, Any] = {}
        try:
            loaded = load()
        except Exception as error:
            fault = error
        agree_on_loaded(transport, title, loaded, fault=fault)


def agree_on_loaded(
    transport: Transport, title: str, contents: Mapping[str, Any], *, fault: Exception | None = None
) -> None:
    """Raise unless `contents` are equal on all ranks; a collective call.

    The cost is one pass over memory (at the speed of XXH3 for tensors on the CPU) and one small collective. Strides and
    devices may differ.

    Args:
        transport: the transport between the ranks.
        title: the name of the call, for messages.
        contents: values that `encode` accepts, by name.
        fault: see `exchange`.

    Raises:
        ReplicaDivergence: a value differs. The message names it and the ranks that agree; it is the same on every rank.

    Example:
        >>> from syncline.errors import ReplicaDivergence
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     agree_on_loaded(transport, "loading", {"model": {"weight": torch.tensor([transport.rank // 2])}})
        >>> try:
        ...     run_ranks(3, program)
        ... except ReplicaDivergence as error:
        ...     print(error.tensor, error.minority_ranks)
        model.weight (2,)
    """
    values: dict[str, Any] = {}
    digest = b""
    try:
        trees: dict[str, str] = {}
        for name, content in contents.items():
            tree, tensors = encode(content, name)
            values |= tensors
            trees[f"{name}, values other than tensors"] = json.dumps(tree, sort_keys=True)
        values |= trees
        if transport.size > 1 and fault is None:
            digest = _digest(values)
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


def _digest(values: Mapping[str, Any]) -> bytes:
    """Return 32 bytes that are equal on two ranks if their values are equal."""
    elsewhere = iter(fingerprints([one for one in values.values() if not _is_in_host_memory(one)]))
    lines = [
        (
            name,
            _form(one),
            checksum(memory_of(one.contiguous())) if _is_in_host_memory(one) else next(elsewhere),
        )
        for name, one in values.items()
    ]
    return hashlib.sha256(json.dumps(lines).encode()).digest()


def _is_in_host_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cpu


def _form(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else ""


# ---------------------------------------------------------------------- the state before a load


class Before:
    """The state of objects before a load.

    A module's tensors are copied, which takes as much memory as its gradients take in training. For torch's optimizers
    references are enough, because loading gives them new tensors. An optimizer with its own `load_state_dict` may
    write into its tensors, so they are copied. For any other object, the backup is its `state_dict()`.

    Args:
        state: the objects to load into, and their step.
    """

    def __init__(self, state: Loadable) -> None:
        self._state = state
        self._step = state.step
        self._undo = {name: (one, _undo_of(one)) for name, one in state.named.items()}
        self._rng = rng_state()

    @contextmanager
    def restored_on_failure(self, *, together: bool) -> Iterator[None]:
        """Restore the objects if the block raises.

        Args:
            together: whether all ranks do this now. Otherwise modules of which ranks share one copy are left alone,
                because other ranks may have loaded them.
        """
        try:
            yield
        except BaseException:
            self._restore(together=together)
            self._state._resume_from_step(self._step)
            raise

    def _restore(self, *, together: bool) -> None:
        for name, (one, undo) in self._undo.items():
            copies = _one_copies(one)
            if copies and not together:
                continue
            try:
                with ExitStack() as written:
                    for copy in copies:
                        written.enter_context(copy.writing())
                    undo()
            except Exception as error:
                # Restore the other objects as well. The caller gets the error of the load.
                warn_user(
                    f"a load failed, and {name} could not be restored to its state before that load: restoring it "
                    f"raised {type(error).__name__}: {error}. It may be partly loaded: create it again"
                )
        set_rng_state(self._rng)


def _one_copies(one: Any) -> list[OneCopy]:
    found = [one_copy_of(part) for part in one.modules()] if isinstance(one, nn.Module) else []
    return [copy for copy in found if copy is not None]


def _undo_of(one: Any) -> Callable[[], None]:
    if isinstance(one, nn.Module):
        return _undo_of_module(one)
    if isinstance(one, Optimizer):
        return _undo_of_optimizer(one)
    if isinstance(one, DistributedSampler):
        kept = dict(vars(one))
        return lambda: vars(one).update(kept)
    if isinstance(one, DataLoader):
        return _nothing  # a loader with a position begins to iterate when it is asked for its state
    with suppress(Exception):  # state_dict() may not work before the first load
        state = deepcopy(one.state_dict())
        return lambda: _try(lambda: one.load_state_dict(state))
    return _nothing


def _undo_of_module(module: nn.Module) -> Callable[[], None]:
    sync_state: Any = None
    if isinstance(module, SynchronizedModule):
        with suppress(Exception):  # it may be unavailable while communication is in progress
            sync_state = deepcopy(module.sync_state_dict())
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    parts = list(inner.modules())
    # A load may replace parameters and buffers by others.
    places = [(kept, dict(kept)) for part in parts for kept in (part._parameters, part._buffers)]
    tensors = [_undo_of_tensor(tensor) for tensor in {*inner.parameters(), *inner.buffers()}]
    extras = [
        (part, deepcopy(part.get_extra_state()))
        for part in parts
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]

    def undo() -> None:
        for kept, before in places:
            kept.clear()
            kept.update(before)
        with torch.no_grad():
            for undo_tensor in tensors:
                undo_tensor()
        for part, extra in extras:
            _try(lambda part=part, extra=extra: part.set_extra_state(extra))  # type: ignore[misc]
        if sync_state is not None and isinstance(module, SynchronizedModule):
            wrapper = module
            _try(lambda: wrapper.load_sync_state_dict(sync_state))

    return undo


def _undo_of_tensor(tensor: Tensor) -> Callable[[], None]:
    if is_lazy(tensor):  # a load turns it into an ordinary parameter
        kind, empty = type(tensor), tensor.data

        def undo_lazy() -> None:
            if type(tensor) is not kind:
                tensor.data = empty
                tensor.__class__ = kind

        return undo_lazy
    copy = tensor.detach().clone()

    def undo() -> None:
        if tensor.shape == copy.shape and tensor.dtype == copy.dtype:
            tensor.copy_(copy)
        else:
            tensor.data = copy

    return undo


def _undo_of_optimizer(optimizer: Any) -> Callable[[], None]:
    state, groups = optimizer.state, optimizer.param_groups
    settings = [(group, dict(group)) for group in groups]
    keeps_tensors = type(optimizer).load_state_dict is Optimizer.load_state_dict
    of_parameters = None if keeps_tensors else {p: deepcopy(values) for p, values in state.items()}

    def undo() -> None:
        optimizer.state, optimizer.param_groups = state, groups
        groups[:] = [group for group, _ in settings]
        for group, before in settings:
            group.clear()
            group.update(before)
        if of_parameters is not None:
            state.clear()
            state.update(of_parameters)

    return undo


def _nothing() -> None:
    """Do nothing, because nothing has to be undone."""


def _try(fn: Callable[[], object]) -> None:
    """Call user code that may fail as the load has just failed; ignore its error in favor of the first."""
    with suppress(Exception):
        fn()
