"""The state before a run, which is restored afterwards, and the tensors that must be equal on all ranks.

`Subject` saves and restores the state, so that each run begins from the same one and leaves no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from syncline.checkpoint.random_state import rng_state, set_rng_state
from syncline.ddp.wrapper import DistributedDataParallel as SynclineDDP
from syncline.debug.values import Value, values_of_named
from syncline.gradients.wrapper_protocol import replica_of

__all__ = ["Subject", "Synchronization", "synchronization_of", "unwrapped"]


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
        for wrapper, remembered in self._synchronization:
            if remembered:
                wrapper.load_sync_state_dict(copy.deepcopy(remembered))
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
                    f"the function steps a {type(optimizer).__name__} that is not known here, so its state could not "
                    "be put back: hand it over as sl.TrainState(model=..., optimizer=...), or leave the step out"
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
