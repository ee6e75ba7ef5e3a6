"""Rider: forwards in training mode that had no backward.

If one rank alone skips a batch after its forward, the gradients do not show it. The next batch of this rank is then
averaged with the current batches of the other ranks. So each rank reports how many of its forwards wait for a backward.

A forward without a backward is not always a mistake: rank 0 may compute an accuracy from its output. So a difference
between ranks causes one warning, and no error. If a rank has skipped a batch, it runs out of batches before the other
ranks do, which is an error (`UnevenInputs`).
"""

from __future__ import annotations

from syncline.gradients.backward import Backward
from syncline.gradients.outputs import Outputs
from syncline.gradients.riders.base import Rider, Words
from syncline.user_code import warn_user
from syncline.words import describe_ranks


class Forwards(Rider):
    """The number of forwards that wait for a backward. The word 255 stands for 255 or more forwards."""

    subject = "forwards without a backward"
    num_bits = 8

    def __init__(self) -> None:
        self.outputs = Outputs()
        """The outputs of the wrapper's forwards, which count those that no backward has reached."""
        self._has_warned = False

    def word(self, backward: Backward) -> int:
        """Return the number of waiting forwards, at most 255."""
        return min(self.outputs.num_waiting, 255)

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
        self.outputs.reduced()
