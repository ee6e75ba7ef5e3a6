"""Set the conditions of a run: the state, the inputs, the random numbers, and torch's settings.

`Subject` saves and restores the state, so that all runs begin from the same state and leave no trace. Other functions
give all ranks rank 0's inputs and random numbers, or change torch's settings during a run.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from syncline._torch.modules import is_compiler_loaded
from syncline._torch.tensors import set_deterministic
from syncline.checkpoint.objects import packed, rng_state, set_rng_state, unpacked
from syncline.checkpoint.rollback import (
    Restorer,
    restore_all,
    restorer_of_optimizer,
    restorer_of_registrations,
    restorer_of_tensor,
)
from syncline.ddp.wrapper import DistributedDataParallel as SynclineDDP
from syncline.debug.recording import qualified
from syncline.gradients.wrapper_protocol import replica_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.base import Transport
from syncline.trees import leaves, map_leaves


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """A description of the tensors that DistributedDataParallel keeps equal on all ranks in one computation."""

    reduced: frozenset[str] = frozenset()
    """The names of the parameters whose gradients are the same mean on all ranks after a backward."""
    exempt: frozenset[str] = frozenset()
    """The names of the parameters and buffers that may differ between ranks, because a wrapper ignores them."""
    why_apart: str = ""
    """The reason why replicas may differ at present; "" if replicas must be equal."""


def synchronization_of(roots: Mapping[str, nn.Module], *, with_gradients: bool = True) -> Synchronization:
    """Find out which tensors of these modules must be equal on all ranks.

    Args:
        roots: the modules, by the prefix for the names of their parts. They may be wrapped, or contain wrapped modules.
        with_gradients: whether the computation that is compared reduces gradients.

    Raises:
        ValueError: a module is sharded, so that no rank has all gradients.
    """
    reduced: set[str] = set()
    exempt: set[str] = set()
    why_apart = ""
    for prefix, root in roots.items():
        for path, module in root.named_modules():
            if not isinstance(module, DistributedDataParallel):
                continue
            # The names of a wrapped root are those of the module inside it.
            parts = (prefix,) if module is root else (prefix, path, "module")
            ignored = module.parameters_to_ignore
            exempt.update(qualified(*parts, name) for name in ignored)
            reduced.update(
                qualified(*parts, name)
                for name, parameter in module.module.named_parameters()
                if parameter.requires_grad and name not in ignored
            )
            replica = replica_of(module)
            if replica is not None:
                if with_gradients:
                    replica.refuse_sharded("no rank has all gradients, so they cannot be compared")
                why_apart = replica.drift_reason or why_apart
    return Synchronization(
        reduced=frozenset(reduced if with_gradients and not why_apart else ()),
        exempt=frozenset(exempt),
        why_apart=why_apart,
    )


class Subject:
    """A backup of the state of a computation. The constructor makes the backup, and `restore` writes it back.

    The state is parameters, buffers, gradients (values and objects), training flags, the state of Syncline's wrappers,
    optimizers, and random number generators. A tensor is written only if it has changed. The backup takes as much
    memory as the state.

    Args:
        modules: the modules, wrapped or not.
        optimizers: the optimizers whose state is restored, too. Inside `guarded`, no other optimizer may step.
        others: other objects whose state is restored, too. They have `state_dict` and `load_state_dict`.
        with_gradients: whether `.grad` of the parameters is restored, too.

    Raises:
        ValueError: a module is lazy, so its parameters have no values yet.

    Examples:
        >>> net = nn.Linear(1, 1)
        >>> before = net.weight.item()
        >>> subject = Subject([net])
        >>> _ = nn.init.zeros_(net.weight)
        >>> subject.restore()
        >>> net.weight.item() == before
        True
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        others: Sequence[Any] = (),
        *,
        with_gradients: bool = True,
    ) -> None:
        rng = rng_state()
        parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        registered = [one for part in parts for one in (*part._parameters.values(), *part._buffers.values())]
        tensors = list({id(one): one for one in registered if one is not None}.values())
        if any(map(is_lazy, tensors)):
            raise ValueError(
                "expected modules whose parameters have a shape, got a lazy module: run one forward with a real batch "
                "first, so that its parameters get their shape"
            )
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        gradients = [(parameter, parameter.grad) for parameter in parameters * with_gradients]
        copied = [*tensors, *(gradient for _, gradient in gradients if gradient is not None)]
        self._optimizers = optimizers
        self._restorers: list[Restorer] = [
            restorer_of_registrations(parts),
            *(partial(setattr, part, "training", part.training) for part in parts),
            *(restorer_of_optimizer(one, copies_tensors=True) for one in optimizers),
            *map(restorer_of_tensor, copied),
            *(partial(setattr, parameter, "grad", gradient) for parameter, gradient in gradients),
            *(partial(one.requires_grad_, one.requires_grad) for one in parameters),
            *(
                _reloader(part.load_sync_state_dict, saved)
                for part in parts
                if isinstance(part, SynclineDDP) and (saved := part.sync_state_dict())
            ),
            *(_reloader(one.load_state_dict, one.state_dict()) for one in others),
            partial(set_rng_state, rng),
        ]

    def restore(self) -> None:
        """Write back all of the state in the backup."""
        restore_all(self._restorers)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside the `with` block, refuse the step of an optimizer whose state could not be restored.

        Raises:
            ValueError: such an optimizer was about to step. Nothing was changed.
        """

        def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer not in self._optimizers:
                raise ValueError(
                    f"the function steps an optimizer of class {type(optimizer).__name__} that was not passed here, so "
                    "its state could not be restored: pass sl.TrainState(model=..., optimizer=...), or remove the "
                    "step from the function"
                )

        handle = register_optimizer_step_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()


def _reloader(load: Callable[[Any], object], state: Any) -> Restorer:
    """Copy `state`, and return a function that loads the copy."""
    saved = copy.deepcopy(state)
    return lambda: load(copy.deepcopy(saved))


# ---------------------------------------------------------------------- rank 0's inputs and random numbers


def copied_inputs(inputs: Any) -> Any:
    """Return the inputs with copies of their tensors, so that a step can write to them."""

    def copied(_: str, leaf: Any) -> Any:
        is_tensor = isinstance(leaf, Tensor)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_tensor else leaf

    return map_leaves(inputs, copied)


class Aligned(NamedTuple):
    """The inputs for a comparison between ranks, as `align_inputs` returns them."""

    inputs: Any
    why_not: str
    """The reason why rank 0's inputs could not be sent to the other ranks; "" if they were sent.

    The reason is the same on all ranks.
    """


def align_generators(transport: Transport) -> None:
    """Set this rank's random number generators to the state of rank 0's. A collective call."""
    state = transport.all_gather_bytes(packed() if transport.rank == 0 else b"")[0]
    if transport.rank:
        set_rng_state(unpacked(state))


def align_inputs(inputs: Any, transport: Transport) -> Aligned:
    """Return rank 0's inputs on every rank. A collective call.

    The shapes of the tensors may differ between the ranks.

    Args:
        inputs: nested dicts, lists and tuples of tensors and plain values. Plain values must already be equal on all
            ranks.
        transport: the transport between the ranks.

    Examples:
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     x = torch.full((2 + transport.rank,), 1.0 + transport.rank)
        ...     return align_inputs((x, "mean"), transport)
        >>> run_ranks(2, program)[1]
        Aligned(inputs=(tensor([1., 1.]), 'mean'), why_not='')
    """
    mine = [_described(name, leaf) for name, leaf in leaves(inputs)]
    rows = [json.loads(one) for one in transport.all_gather_bytes(json.dumps(mine).encode())]
    why_not = _why_not(rows)
    if why_not:
        return Aligned(inputs, why_not)
    shapes = {name: shape for name, _, shape in rows[0]}
    own = {name: leaf for name, leaf in leaves(inputs) if isinstance(leaf, Tensor)}
    aligned = {
        name: leaf.detach() if transport.rank == 0 else leaf.new_zeros(shapes[name])
        for name, leaf in own.items()
    }
    TensorBroadcaster(list(aligned.values()), transport).start(0).wait()
    for name, leaf in own.items():
        aligned[name].requires_grad_(leaf.requires_grad)
    return Aligned(map_leaves(inputs, lambda name, leaf: aligned.get(name, leaf)), "")


def _described(name: str, leaf: Any) -> tuple[str, str, list[int]]:
    """Return the name, kind and shape of an input. If it cannot be sent, the kind is "!" followed by the reason."""
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided or leaf.is_meta or leaf.is_nested:
            return name, f"!a tensor without dense memory ({leaf.layout} on {leaf.device.type})", []
        return name, str(leaf.dtype), list(leaf.shape)
    if isinstance(leaf, bool | int | float | str | bytes | None):
        return name, repr(leaf), []
    return name, f"!a {type(leaf).__name__}", []


def _why_not(of_ranks: Sequence[Sequence[tuple[str, str, list[int]]]]) -> str:
    """Return the reason why rank 0's inputs cannot replace those of the other ranks; "" if they can."""
    first = of_ranks[0]
    for name, kind, _ in first:
        if kind.startswith("!"):
            return f"{name or 'the input'} is {kind[1:]}, which cannot be sent to other ranks"
    for rank, rows in enumerate(of_ranks):
        if len(rows) != len(first):
            return f"rank 0 has {len(first)} inputs, rank {rank} has {len(rows)}"
        for (name, kind, _), (other, other_kind, _) in zip(first, rows, strict=True):
            if (name, kind) != (other, other_kind):
                here = f"on rank {rank} {other or 'the input'} is {other_kind}"
                return f"on rank 0 {name or 'the input'} is {kind}, {here}"
    return ""


# ---------------------------------------------------------------------- torch's settings


def uncompiled_code() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run uncompiled. Compiled code calls no hooks of inner modules."""
    return torch.compiler.set_stance("force_eager") if is_compiler_loaded() else nullcontext()


_WITHOUT_DETERMINISM = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic() -> Iterator[Callable[[], tuple[str, ...]]]:
    """In the `with` block, use deterministic algorithms where they exist, and fill uninitialized memory with NaN.

    Yields a function that returns the names of the operations without a deterministic implementation.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_deterministic(True, warn_only=warned_only or not was_on)
        settings.fill_uninitialized_memory = True
        try:
            yield lambda: tuple(
                dict.fromkeys(
                    match[1] for one in caught for match in _WITHOUT_DETERMINISM.finditer(str(one.message))
                )
            )
        finally:
            settings.fill_uninitialized_memory = filled
            set_deterministic(was_on, warn_only=warned_only)
