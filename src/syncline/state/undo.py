"""How things were before a load, so that one that fails leaves nothing half changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from syncline.data.sampler import DistributedSampler
from syncline.state.chance import rng_state, set_rng_state
from syncline.sync.one_copy import OneCopy, one_copy_of

__all__ = ["Before"]


class Before:
    """How things were.

    A module's tensors are copied, which takes the memory that its gradients take in training. Of an optimizer there are
    references: loading gives it other tensors. Of anything else there is what its `state_dict()` gives.

    Args:
        named: what is loaded, by name.
        step: of the `TrainState`.
    """

    def __init__(self, named: Mapping[str, Any], step: int) -> None:
        self.step = step
        self._named = dict(named)
        self._undo = {name: _undo_of(one) for name, one in named.items()}
        self._rng = rng_state()

    def restore(self, *, together: bool) -> None:
        """Make things what they were.

        Args:
            together: whether all ranks do this now. Alone, a rank leaves modules as they are of which ranks have one
                copy: others may have loaded them.
        """
        for name, undo in self._undo.items():
            copies = _one_copies(self._named[name])
            if copies and not together:
                continue
            with ExitStack() as written:
                for copy in copies:
                    written.enter_context(copy.writing())
                undo()
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
        return _nothing  # one with a place begins to iterate when it is asked for that
    with suppress(Exception):  # it is not known to work before a load
        state = deepcopy(one.state_dict())
        return lambda: _try(lambda: one.load_state_dict(state))
    return _nothing


def _undo_of_module(module: nn.Module) -> Callable[[], None]:
    remembered: Any = None
    if isinstance(module, DistributedDataParallel):
        save: Any = getattr(module, "sync_state_dict", None)
        with suppress(Exception):  # as long as something is under way, there is none
            remembered = deepcopy(save()) if save else None
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    tensors = [one for one in (*inner.parameters(), *inner.buffers()) if not is_lazy(one)]
    copies = [(one, one.detach().clone()) for one in tensors]
    extras = [
        (part, deepcopy(part.get_extra_state()))
        for part in inner.modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]

    def undo() -> None:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        for part, extra in extras:
            _try(lambda part=part, extra=extra: part.set_extra_state(extra))  # type: ignore[misc]
        if remembered is not None:
            load: Any = module.load_sync_state_dict
            _try(lambda: load(remembered))

    return undo


def _undo_of_optimizer(optimizer: Any) -> Callable[[], None]:
    state, groups = optimizer.state, optimizer.param_groups

    def undo() -> None:
        optimizer.state, optimizer.param_groups = state, groups

    return undo


def _nothing() -> None:
    """Nothing is to be undone."""


def _try(fn: Callable[[], object]) -> None:
    """Code of others, which may fail as it has just done; the error that counts is the first."""
    with suppress(Exception):
        fn()
