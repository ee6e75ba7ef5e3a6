"""Rider: whether a process waits to join this job, so that all ranks let it in after the same step (`sl.steps`)."""

from __future__ import annotations

from collections.abc import Callable

from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words


class Newcomers(Rider):
    """A report of whether this rank has seen a process that waits to join. The word is 0 outside of `sl.steps`."""

    subject = "processes that wait to join"
    num_bits = 1

    def __init__(self) -> None:
        self.look: Callable[[], bool] | None = None
        """A function that looks whether a process waits. `sl.steps` sets it while it runs."""
        self.are_waiting = False
        """Whether a rank has reported that a process waits. `sl.steps` resets it."""

    def word(self, backward: Backward) -> int:
        """Return 1 if this rank has seen a process that waits, else 0."""
        return int(self.look is not None and self.look())

    def receive(self, words: Words) -> None:
        """Remember whether a rank has seen a process that waits."""
        self.are_waiting = self.are_waiting or words.any_set
