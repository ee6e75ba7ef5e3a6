"""Rider: forwards in training mode that had no backward.

If one rank alone skips a batch after its forward, the gradients do not show it. The next batch of this rank is then
averaged with the current batches of the other ranks. So each rank reports how many of its forwards wait for a backward.

A forward without a backward is not always a mistake: rank 0 may compute an accuracy from its output. So a difference
between ranks causes one warning, and no error. If a rank has skipped a batch, it runs out of batches before the other
ranks do, which is an error (`UnevenInputs`).
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch import Tensor

from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words
from syncline.gradients.usage import tensors_in, when_backward_reaches
from syncline.user_code import warn_user
from syncline.words import describe_ranks

_MAX_WATCHED_TENSORS = 8
"""The largest number of tensors that are watched in one output. To watch a tensor costs a microsecond."""


class Forwards(Rider):
    """A count of the forwards that wait for a backward. The word 255 stands for 255 or more forwards.

    Examples:
        >>> import torch
        >>> forwards = Forwards()
        >>> forwards.forward_ended(torch.ones(2, requires_grad=True) * 2)
        >>> forwards.num_waiting
        1
    """

    subject = "forwards without a backward"
    num_bits = 8

    def __init__(self) -> None:
        self.num_waiting = 0
        """The number of forwards that ran after the last reduction and that no backward has reached."""
        self.era = 0
        """The number of reductions so far that left waiting forwards. Forwards of an earlier era no longer count."""
        self._has_warned = False

    def forward_ended(self, output: object) -> None:
        """Count a forward whose backward is expected to be synchronized, and watch its output for that backward."""
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

    def word(self, backward: Backward) -> int:
        """Return the number of waiting forwards, at most 255."""
        return min(self.num_waiting, 255)

    def receive(self, words: Words) -> None:
        """Warn on rank 0 if the number of waiting forwards differs between ranks. The warning comes only once."""
        waiting = words.active
        if self._has_warned or len(set(waiting.values())) < 2:
            return
        self._has_warned = True
        if words.rank:
            return
        fewest = min(waiting.values())
        ahead = [rank for rank, number in waiting.items() if number > fewest]
        counts = ", ".join(f"rank {rank}: {number}" for rank, number in waiting.items())
        warn_user(
            f"step {words.step}, backward: {describe_ranks(ahead)} ran forwards in training mode that had no backward "
            f"({counts}). If {describe_ranks(ahead)} skipped a batch (because its loss was not finite, for example), "
            "the ranks now average gradients of different batches, and will not run out of batches in the same step. "
            "Let all ranks skip the same batches: compute sl.mean of a flag. If these forwards need no backward, run "
            "them under torch.no_grad() or through ddp.module. This warning comes only once"
        )

    def forget(self) -> None:
        """Reset the count after a reduction, so that the next word counts only later forwards."""
        if self.num_waiting:
            self.num_waiting = 0
            self.era += 1


class _Watch:
    """The hook on the tensors of one output. When a backward reaches one of them, the forward no longer waits."""

    __torch_unserializable__ = True  # pickling an output leaves the hook out

    __slots__ = ("_era", "_forwards")

    def __init__(self, forwards: Forwards, era: int) -> None:
        self._forwards: Forwards | None = forwards
        self._era = era

    def __call__(self, gradient: Any) -> None:
        forwards, self._forwards = self._forwards, None
        if forwards is not None and forwards.era == self._era:
            forwards.num_waiting -= 1
