"""What has to be equal on all ranks when gradients are reduced, beside the gradients themselves.

Two things go wrong on one rank alone and cannot be seen in the gradients: a forward whose backward never came (a
batch was skipped, so this rank's next batch would be averaged with its peers' current one), and an optimizer that
will do something else with the same mean (another learning rate, a step more or less). Each rank boils them down to
one number that travels with the control data; only if the numbers differ are the facts themselves exchanged.
"""

from __future__ import annotations

import zlib
from itertools import islice
from typing import Any

from torch import Tensor

from syncline.sync.attached import AttachedOptimizer
from syncline.sync.control import MAX_FINGERPRINT
from syncline.sync.outputs import tensors_in, when_backward_reaches

__all__ = ["StepGuard"]

_MAX_WATCHED_TENSORS = 8
"""An output of more tensors is not watched, for each costs a microsecond."""


class StepGuard:
    """Counts forwards that wait for a backward, and watches attached optimizers.

    Example:
        >>> import torch
        >>> guard = StepGuard()
        >>> guard.forward_ended(torch.ones(2, requires_grad=True) * 2)
        >>> guard.facts()
        ['forwards whose backward has not come: 1']
    """

    def __init__(self) -> None:
        self.optimizers: list[AttachedOptimizer] = []
        self.num_waiting = 0
        """Forwards since the last reduction that no backward has reached."""
        self.era = 0
        """Counts reductions that left forwards waiting; what is of an earlier one counts no more."""

    def forward_ended(self, output: object) -> None:
        """A forward ended whose backward is expected to be reduced."""
        if isinstance(output, Tensor):
            tensors = [output] if output.requires_grad else []
        else:
            differentiable = (tensor for tensor in tensors_in(output) if tensor.requires_grad)
            tensors = list(islice(differentiable, _MAX_WATCHED_TENSORS + 1))
        if not 0 < len(tensors) <= _MAX_WATCHED_TENSORS:
            return
        self.num_waiting += 1
        watch = _Watch(self, self.era)
        for tensor in tensors:
            when_backward_reaches(tensor, watch)

    def reduction_ended(self) -> None:
        """What waits for a backward now is a matter of the next reduction no more."""
        if self.num_waiting:
            self.num_waiting = 0
            self.era += 1

    def fingerprint(self) -> int:
        """A number that is equal on two ranks if their facts are; 0 where there is nothing to tell."""
        if not self.num_waiting and not self.optimizers:
            return 0
        for optimizer in self.optimizers:
            optimizer.told_settings = optimizer.settings()
        facts = (self.num_waiting, *(optimizer.told_settings for optimizer in self.optimizers))
        return 1 + zlib.crc32(repr(facts).encode()) % MAX_FINGERPRINT

    def facts(self) -> list[str]:
        """The same in words, a line each."""
        lines = [f"forwards whose backward has not come: {self.num_waiting}"]
        for number, optimizer in enumerate(self.optimizers):
            lines += optimizer.describe(number)
        return lines


class _Watch:
    """The hook on the tensors of one output; the first of them that gets a gradient counts."""

    __torch_unserializable__ = True  # a pickled output leaves it behind

    __slots__ = ("_era", "_guard")

    def __init__(self, guard: StepGuard, era: int) -> None:
        self._guard: StepGuard | None = guard
        self._era = era

    def __call__(self, gradient: Any) -> None:
        guard, self._guard = self._guard, None
        if guard is not None and guard.era == self._era:
            guard.num_waiting -= 1
