"""Rider: forwards in training mode that had no backward.

The gradients do not show that one rank alone skipped a batch. Its forward ran and its backward did not, so this rank's
next batch is averaged with the current batch of the other ranks. Each rank therefore reports how many forwards wait for
a backward.

A forward without a backward need not be wrong: rank 0 may compute an accuracy, and drop or keep the output. So a
difference between ranks gives one warning, and no error. If a batch was skipped, that rank runs out of batches before
the others do, which is an error (`UnevenInputs`).
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
"""An output of more tensors is not watched, because each tensor costs a microsecond."""


class Forwards(Rider):
    """A count of the forwards that wait for a backward; 255, the largest word, stands for 255 or more.

    Example:
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
        """Number of forwards since the last reduction that no backward has reached."""
        self.era = 0
        """Number of reductions after which forwards still waited. Forwards of an earlier era no longer count."""
        self._has_warned = False

    def forward_ended(self, output: object) -> None:
        """Count a forward whose backward is expected to be reduced."""
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
        """Warn on rank 0, once, if the number of waiting forwards differs between ranks."""
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
        """Reset the count after a reduction, so that the next reduction counts only later forwards."""
        if self.num_waiting:
            self.num_waiting = 0
            self.era += 1


class _Watch:
    """The hook on the tensors of one output. The first tensor that gets a gradient ends the wait for a backward."""

    __torch_unserializable__ = True  # pickling an output leaves the hook out

    __slots__ = ("_era", "_forwards")

    def __init__(self, forwards: Forwards, era: int) -> None:
        self._forwards: Forwards | None = forwards
        self._era = era

    def __call__(self, gradient: Any) -> None:
        forwards, self._forwards = self._forwards, None
        if forwards is not None and forwards.era == self._era:
            forwards.num_waiting -= 1
