"""A backup of objects from before a load, so that a failed load leaves nothing half changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from syncline.checkpoint.random_state import rng_state, set_rng_state
from syncline.data.sampler import DistributedSampler
from syncline.gradients.wrapper_protocol import SynchronizedModule
from syncline.sharded.one_copy import OneCopy, one_copy_of

__all__ = ["Before"]


class Before:
    """The state of objects before a load.

    A module's tensors are copied, which takes as much memory as its gradients take in training. For torch's optimizers
    references are enough, because loading gives them new tensors. An optimizer with its own `load_state_dict` may
    write into its tensors, so they are copied. For any other object, the backup is its `state_dict()`.

    Args:
        named: the objects to load into, by name.
        step: the step of the `TrainState`.
    """

    def __init__(self, named: Mapping[str, Any], step: int) -> None:
        self.step = step
        self._named = dict(named)
        self._undo = {name: _undo_of(one) for name, one in named.items()}
        self._rng = rng_state()

    def restore(self, *, together: bool) -> None:
        """Restore the objects.

        Args:
            together: whether all ranks do this now. Otherwise modules of which ranks share one copy are left alone,
                because other ranks may have loaded them.
        """
        for name, undo in self._undo.items():
            copies = _one_copies(self._named[name])
            if copies and not together:
                continue
            try:
                with ExitStack() as written:
                    for copy in copies:
                        written.enter_context(copy.writing())
                    undo()
            except Exception as error:
                # Restore the other objects as well; the error that is raised is that of the load.
                warnings.warn(
                    f"{name} could not be made what it was before the load, which failed: {type(error).__name__}: "
                    f"{error}. It may have been loaded in part: make it anew",
                    RuntimeWarning,
                    stacklevel=2,
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
    remembered: Any = None
    if isinstance(module, SynchronizedModule):
        with suppress(Exception):  # it may be unavailable while communication is in progress
            remembered = deepcopy(module.sync_state_dict())
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
        if remembered is not None and isinstance(module, SynchronizedModule):
            wrapper = module
            _try(lambda: wrapper.load_sync_state_dict(remembered))

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
