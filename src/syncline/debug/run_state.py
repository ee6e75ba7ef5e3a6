"""The conditions of a run: the state before it, rank 0's inputs and random numbers for all ranks, and torch's settings.

`Subject` saves and restores the state, so that each run begins from the same one and leaves no trace.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from syncline._torch.modules import is_compiler_loaded
from syncline._torch.tensors import set_deterministic
from syncline.checkpoint.objects import packed, rng_state, set_rng_state, unpacked
from syncline.ddp.wrapper import DistributedDataParallel as SynclineDDP
from syncline.debug.values import Value, values_of_named
from syncline.gradients.wrapper_protocol import replica_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.base import Transport
from syncline.trees import leaves, map_leaves


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """The synchronization of all modules that a function computes with."""

    reduced: frozenset[str] = frozenset()
    """Names of parameters whose gradients are the same mean on all ranks after a backward."""
    exempt: frozenset[str] = frozenset()
    """Names of parameters and buffers that differ per rank."""
    why_apart: str = ""
    """The reason why replicas may differ now; "" if they must be equal."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel, torch's or Syncline's; any other module unchanged."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def synchronization_of(roots: Mapping[str, nn.Module], *, with_gradients: bool = True) -> Synchronization:
    """Return how these modules are synchronized: which of their tensors must be equal on all ranks.

    Args:
        roots: modules by the prefix of their parts' names; wrapped, not wrapped, or with wrapped ones inside.
        with_gradients: whether gradients are reduced in the compared computation.

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
            own = {name: ".".join(filter(None, (*parts, name))) for name in module.parameters_to_ignore}
            exempt.update(own.values())
            reduced.update(
                ".".join(filter(None, (*parts, name)))
                for name, parameter in module.module.named_parameters()
                if parameter.requires_grad and name not in own
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
    """A copy of the state at construction; `restore` writes it back.

    The state is parameters, buffers, gradients (values and objects), training flags, the state of Syncline's wrappers,
    optimizers, and random number generators. A tensor is written only if it has changed. The copy takes as much memory
    as the state itself.

    Args:
        modules: the modules, wrapped or not.
        optimizers: optimizers whose state is restored too. Inside `guarded`, no others may step.
        others: other objects with `state_dict` and `load_state_dict`.
        with_gradients: whether `.grad` may be changed, and is restored.

    Example:
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
        self._rng = rng_state()
        everyone = dict.fromkeys(inner for module in modules for inner in module.modules())
        self._modules = list(everyone)
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, dict(table))
            for module in self._modules
            for table in (module._parameters, module._buffers)
        ]
        self._flags = [(module, module.training) for module in self._modules]
        tensors = {
            id(tensor): tensor for _, saved in self._tables for tensor in saved.values() if tensor is not None
        }
        self._parameters = [tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]
        self._gradients = [(parameter, parameter.grad) for parameter in self._parameters * with_gradients]
        self._trained = [(parameter, parameter.requires_grad) for parameter in self._parameters]
        held = [gradient for _, gradient in self._gradients if gradient is not None]
        self._optimizers = {optimizer: _Optimizer(optimizer) for optimizer in optimizers}
        for one in self._optimizers.values():
            held += one.tensors
        self._copies = _Copies([*tensors.values(), *held])
        self._synchronization = [
            (module, copy.deepcopy(module.sync_state_dict()))
            for module in self._modules
            if isinstance(module, SynclineDDP)
        ]
        self._others = [(one, copy.deepcopy(one.state_dict())) for one in others]

    def restore(self) -> None:
        """Restore the whole state."""
        for table, saved in self._tables:
            if [*map(id, table.values())] != [*map(id, saved.values())] or [*table] != [*saved]:
                table.clear()
                table.update(saved)
        for module, is_training in self._flags:
            module.training = is_training
        for one in self._optimizers.values():
            one.restore()
        self._copies.restore()
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for wrapper, sync_state in self._synchronization:
            if sync_state:
                wrapper.load_sync_state_dict(copy.deepcopy(sync_state))
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        set_rng_state(self._rng)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse the step of an optimizer whose state could not be restored.

        Raises:
            ValueError: such an optimizer would have stepped; it has changed nothing.
        """

        def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer not in self._optimizers:
                raise ValueError(
                    f"the function steps a {type(optimizer).__name__} that was not passed here, so its state could "
                    "not be restored: pass sl.TrainState(model=..., optimizer=...), or remove the step"
                )

        handle = register_optimizer_step_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()


class _Copies:
    """Copies of tensors, written back into tensors that have changed."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._before = _bits(tensors)

    def restore(self) -> None:
        now = _bits([tensor for tensor, _ in self._tensors])
        for (tensor, saved), was, is_now in zip(self._tensors, self._before, now, strict=True):
            if was != is_now or not was.bits:
                with torch.no_grad():
                    tensor.detach().copy_(saved)


def _bits(tensors: Sequence[Tensor]) -> tuple[Value, ...]:
    return values_of_named([("", tensor) for tensor in tensors])


class _Optimizer:
    """An optimizer's state and settings. Tensors are kept as the same objects; `_Copies` restores their values."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {parameter: _saved(entries) for parameter, entries in optimizer.state.items()}
        self._groups = [_saved(group) for group in optimizer.param_groups]
        self.tensors = [
            leaf
            for holder in (*self._state.values(), *self._groups)
            for leaf in holder.values()
            if isinstance(leaf, Tensor)
        ]

    def restore(self) -> None:
        state = self._optimizer.state
        for parameter in [parameter for parameter in state if parameter not in self._state]:
            del state[parameter]
        for parameter, entries in self._state.items():
            state.setdefault(parameter, {}).clear()
            state[parameter].update(_saved(entries))
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(_saved(saved), params=parameters)


def _saved(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as they are and copies of everything else, without a group's parameters."""
    return {
        key: value if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in entries.items()
        if key != "params"
    }


# ---------------------------------------------------------------------- rank 0's inputs and random numbers


class Aligned(NamedTuple):
    """The result of `align_inputs`."""

    inputs: Any
    why_not: str
    """The reason why the inputs could not be aligned; "" if they were. The same on all ranks."""


def align_generators(transport: Transport) -> None:
    """Set this rank's random number generators to the state of rank 0's. A collective call."""
    state = transport.all_gather_bytes(packed() if transport.rank == 0 else b"")[0]
    if transport.rank:
        set_rng_state(unpacked(state))


def align_inputs(inputs: Any, transport: Transport) -> Aligned:
    """Return rank 0's inputs; shapes of tensors may differ between the ranks. A collective call.

    Args:
        inputs: nested dicts, lists and tuples of tensors and plain values. The plain values must be equal already.
        transport: the transport between the ranks.

    Example:
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
    aligned = {
        name: _like(leaf, shapes[name], is_source=transport.rank == 0)
        for name, leaf in leaves(inputs)
        if isinstance(leaf, Tensor)
    }
    TensorBroadcaster(list(aligned.values()), transport).start(0).wait()
    for name, leaf in leaves(inputs):
        if isinstance(leaf, Tensor):
            aligned[name].requires_grad_(leaf.requires_grad)
    return Aligned(map_leaves(inputs, lambda name, leaf: aligned.get(name, leaf)), "")


def _like(tensor: Tensor, shape: Sequence[int], *, is_source: bool) -> Tensor:
    """Return a tensor to receive rank 0's values; on rank 0 it is the tensor itself, without its graph."""
    return tensor.detach() if is_source else torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def _described(name: str, leaf: Any) -> tuple[str, str, list[int]]:
    """Return name, kind (or after "!" the reason why it cannot be sent) and shape."""
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided or leaf.is_meta or leaf.is_nested:
            return name, f"!a tensor that is not an ordinary one ({leaf.layout} on {leaf.device.type})", []
        return name, str(leaf.dtype), list(leaf.shape)
    if isinstance(leaf, bool | int | float | str | bytes | None):
        return name, repr(leaf), []
    return name, f"!a {type(leaf).__name__}", []


def _why_not(of_ranks: Sequence[Sequence[tuple[str, str, list[int]]]]) -> str:
    first = of_ranks[0]
    for name, kind, _ in first:
        if kind.startswith("!"):
            return f"{name or 'the input'} is {kind[1:]}, which is not sent to other ranks"
    for rank, rows in enumerate(of_ranks):
        if len(rows) != len(first):
            return f"rank 0 has {len(first)} inputs, rank {rank} has {len(rows)}"
        for (name, kind, _), (other, other_kind, _) in zip(first, rows, strict=True):
            if (name, kind) != (other, other_kind):
                return f"on rank 0 {name or 'the input'} is {kind}, on rank {rank} {other or 'it'} is {other_kind}"
    return ""


# ---------------------------------------------------------------------- torch's settings


@contextmanager
def uncompiled_code() -> Iterator[None]:
    """Run compiled modules without compilation, because compiled code does not call the hooks of inner modules."""
    if not is_compiler_loaded():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


_WITHOUT_DETERMINISM = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic() -> Iterator[Callable[[], tuple[str, ...]]]:
    """Use deterministic algorithms where they exist, and fill uninitialized memory with NaN.

    Yields a function that returns the operations without a deterministic implementation.
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
