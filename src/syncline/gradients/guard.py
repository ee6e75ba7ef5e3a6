"""What has to be equal on all ranks when gradients are reduced, beside the gradients themselves.

Two things go wrong on one rank alone and cannot be seen in the gradients: a batch that was skipped (its forward ran and
its backward did not, so this rank's next batch is averaged with its peers' current one), and an optimizer that will do
something else with the same mean (another learning rate, a step more or less). Each rank sends the number of forwards
without a backward and one number for its optimizers with the control data. Only if the latter differ are the settings
themselves exchanged.

A forward without a backward need not be wrong: rank 0 may compute an accuracy, and drop or keep the output. So ranks
that differ in it are warned, once, and nothing raises: if a batch was skipped, its rank runs out of batches before the
others do, and that is an error (`UnevenInputs`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from syncline.differences import describe_ranks
from syncline.gradients.outputs import tensors_in, when_backward_reaches
from syncline.gradients.tail import MAX_FINGERPRINT, RankControl
from syncline.optimizers.attached import AttachedOptimizer
from syncline.user_code import warn_user

__all__ = ["StepGuard"]


_MAX_WATCHED_TENSORS = 8
"""An output of more tensors is not watched, for each costs a microsecond."""


class StepGuard:
    """Counts forwards that wait for a backward, and watches attached optimizers.

    Example:
        >>> import torch
        >>> guard = StepGuard()
        >>> guard.forward_ended(torch.ones(2, requires_grad=True) * 2)
        >>> guard.num_waiting
        1
    """

    def __init__(self) -> None:
        self.optimizers: list[AttachedOptimizer] = []
        self.num_waiting = 0
        """Forwards since the last reduction that no backward has reached."""
        self._has_warned = False
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
        """A number that is equal on two ranks if their optimizers' settings are; 0 where none is attached."""
        if not self.optimizers:
            return 0
        for optimizer in self.optimizers:
            optimizer.told_settings = optimizer.settings()
        settings = tuple(optimizer.told_settings for optimizer in self.optimizers)
        return 1 + zlib.crc32(repr(settings).encode()) % MAX_FINGERPRINT

    def compare_forwards(self, ranks: Sequence[RankControl], *, rank: int, step: int) -> None:
        """Warn on rank 0, once, if some ranks ran a forward without a backward and others did not.

        Args:
            ranks: what each rank sent.
            rank: this one.
            step: the step under way.
        """
        if self._has_warned:
            return
        waiting = {r: control.num_waiting for r, control in enumerate(ranks) if not control.joined}
        if len(set(waiting.values())) < 2:
            return
        self._has_warned = True
        if rank:
            return
        fewest = min(waiting.values())
        ahead = [r for r, number in waiting.items() if number > fewest]
        counts = ", ".join(f"rank {r}: {number}" for r, number in waiting.items())
        warn_user(
            f"step {step}, backward: {describe_ranks(ahead)} ran forwards in training mode that had no backward "
            f"({counts}). If a batch was skipped there (its loss was not finite, say), the ranks now average gradients "
            "of different batches, and that rank will run out of batches before the others: decide on all ranks "
            "whether to skip, by sl.mean of a flag. If these forwards need no backward, run them under torch.no_grad() "
            "or through ddp.module. This warning comes once"
        )

    def facts(self) -> list[str]:
        """Return the same in words, one line each."""
        lines: list[str] = []
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
