"""Rider: a hash of the settings of attached optimizers.

The learning rate or the number of steps of an optimizer may differ between ranks. The gradients do not show this. So
each rank reports a hash of the settings of its optimizers. The settings themselves are exchanged only if the hashes
differ.
"""

from __future__ import annotations

import zlib

from syncline.errors import ContractMismatch
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words
from syncline.optimizers.attached import AttachedOptimizer
from syncline.words import describe_difference

_NUM_BITS = 24
_MAX: int = 2**_NUM_BITS - 1


class Settings(Rider):
    """A comparison of the settings of attached optimizers: learning rates, other settings, and the number of steps."""

    subject = "settings of optimizers"
    num_bits = _NUM_BITS

    def __init__(self) -> None:
        self.optimizers: list[AttachedOptimizer] = []

    def word(self, backward: Backward) -> int:
        """Return a hash of the settings of all attached optimizers. Return 0 if no optimizer is attached."""
        if not self.optimizers:
            return 0
        for optimizer in self.optimizers:
            optimizer.compared_settings = optimizer.settings()
        settings = tuple(optimizer.compared_settings for optimizer in self.optimizers)
        return 1 + zlib.crc32(repr(settings).encode()) % _MAX

    def facts(self) -> list[str]:
        """Return the settings of all attached optimizers as lines of text."""
        return [line for at, optimizer in enumerate(self.optimizers) for line in optimizer.describe(at)]

    def receive(self, words: Words) -> None:
        """Compare the hashes of all ranks.

        Raises:
            ContractMismatch: the settings differ between ranks. Every rank raises the error with the same text.
        """
        if len(set(words.active.values())) < 2:
            return
        lines = words.exchange(self.facts())
        shown = [
            lines[rank] if rank in words.active else ["joined: no inputs left"] for rank in range(len(lines))
        ]
        raise ContractMismatch(
            describe_difference(
                f"step {words.step}, backward: the attached optimizers",
                shown,
                remedy="Give the optimizers the same settings on all ranks, and step them equally often. A possible "
                "cause is a scheduler that was stepped on one rank only. sl.broadcast_(optimizer) copies the settings "
                "of rank 0 to all ranks.",
            )
        )
