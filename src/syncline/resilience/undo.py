"""Snapshots of the state at the beginning of the body of a step, so that the body can be run again.

Parameters and the state of optimizers are not copied: only an optimizer's step changes them, and a completed step is
not repeated (see `steps.py`). The rest of the state that a body usually changes is small: buffers, learning rates, the
counters of schedulers and scalers, and random number generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline._torch.optimizers import schedulers_inside
from syncline.checkpoint.objects import reading_generators
from syncline.ddp.replica import Replica
from syncline.ddp.wrapper import DistributedDataParallel


def remember_generators() -> Callable[[], None]:
    """Return a function that restores the present states of the generators of Python, numpy and torch."""
    numpy = sys.modules.get("numpy")
    of_python = random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    with reading_generators():
        of_torch = torch.get_rng_state()
        of_cuda: Iterable[Tensor] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        for index, state in enumerate(of_cuda):
            torch.cuda.set_rng_state(state, index)

    return restore


Restorer = Callable[[], object]
"""A function that restores an object to an earlier state."""


class Undo:
    """The objects that the body of a step changes.

    Args:
        named: the objects of the training state, by name. Modules, optimizers, learning rate schedulers and GradScalers
            are restored. The sampler is not, because only a commit changes its position.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._optimizers = [one for one in named.values() if isinstance(one, Optimizer)]
        self._counters = _counters(named)
        modules = {part for one in named.values() if isinstance(one, nn.Module) for part in one.modules()}
        self._tables = [part._buffers for part in modules if part._buffers]
        self._parameters = [parameter for part in modules for parameter in part.parameters(recurse=False)]
        self._restorers: list[Restorer] = []

    def begin(self) -> None:
        """Remember the present state."""
        self._restorers = [
            *([_restorer_of_buffers(self._tables)] if self._tables else ()),
            *(_restorer_of_values(group) for one in self._optimizers for group in one.param_groups),
            *(_restorer_of_values(vars(one)) for one in self._counters),
            remember_generators(),
        ]

    def restore(self) -> None:
        """Restore the state that `begin` has remembered, and clear the gradients."""
        self.clear_gradients()
        for restore in self._restorers:
            restore()

    def clear_gradients(self) -> None:
        """Clear the gradients. Each attempt of a step computes its own."""
        for parameter in self._parameters:
            parameter.grad = None


class Residuals:
    """The state of the compressions of wrapped modules. An attempt in which no optimizer stepped does not change it.

    Args:
        wrappers: the wrapped modules.
    """

    def __init__(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        replicas = [wrapper._replica for wrapper in wrappers]
        self._replicas = [one for one in replicas if one.config.compression is not None]
        self._made: list[int] = []

    def begin(self) -> None:
        """Remember the present state. Residuals are not copied."""
        self._made = [_num_steps(replica) for replica in self._replicas]
        for replica in self._replicas:
            if replica.state.compression is not None:
                replica.state.compression._keep()

    def end(self) -> None:
        """Restore the state, unless the optimizers of the module have stepped."""
        for replica, made in zip(self._replicas, self._made, strict=True):
            if replica.state.compression is not None and _num_steps(replica) == made:
                replica.state.compression._undo()


def _num_steps(replica: Replica) -> int:
    return sum(attached.num_steps for attached in replica.gradients.riders.settings.optimizers)


def _restorer_of_buffers(tables: list[dict[str, Tensor | None]]) -> Restorer:
    before = [table.copy() for table in tables]
    buffers = [buffer for table in tables for buffer in table.values() if buffer is not None]
    copies = [buffer.detach().clone() for buffer in buffers]

    def restore() -> None:
        for table, values in zip(tables, before, strict=True):
            table.update(values)
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)

    return restore


_UNCHANGEABLE = frozenset({bool, float, int, str, tuple, type(None)})


def _restorer_of_values(values: dict[str, Any]) -> Restorer:
    """Return a function that restores settings or attributes: numbers, tensors of one element, lists and dictionaries.

    Lists, dictionaries and tensors stay the same objects, because others may refer to them.
    """
    before = {
        key: (value, value if type(value) in _UNCHANGEABLE else _copied(value))
        for key, value in values.items()
        if key != "params"
    }

    def restore() -> None:
        for key in values.keys() - before.keys() - {"params"}:
            del values[key]
        for key, (value, copy) in before.items():
            if isinstance(value, Tensor):
                value.detach().copy_(copy)
            elif isinstance(value, list):
                value[:] = copy
            elif isinstance(value, dict):
                value.clear()
                value.update(copy)
            values[key] = value

    return restore


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict) else value


def _counters(named: Mapping[str, Any]) -> list[Any]:
    """Return the schedulers and scalers, and the schedulers inside of schedulers."""
    found: list[Any] = []
    ahead = list(named.values())
    while ahead:
        one = ahead.pop()
        if isinstance(one, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
            found.append(one)
            ahead += schedulers_inside(one)
    return found
