"""Do all ranks train on the same data? A plain DataLoader without a sampler makes them, and nothing else would say so.

In the first synchronized backwards each rank sends, with the control data, one number for some elements of its own
gradients, taken before they are reduced. Where the data differ, so do the numbers: nearly always in the first step, and
then nothing more is sent. Only if they are equal on all ranks in several steps in a row is there a warning.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from syncline.errors import SameDataWarning
from syncline.gradients.riders.base import Holder, Rider, Words
from syncline.user_code import warn_user

__all__ = [
    "SameData",
]


_NUM_STEPS = 10
"""So many steps in a row are no chance."""

_MAX_STEPS = 30
"""Steps that say nothing, for all gradients are zero, are waited for no longer."""

_NUM_SAMPLES = 64
"""Elements of each bucket that are looked at."""


class SameData(Rider):
    """Compares this rank's gradients with those of the others until it is known whether they differ.

    Example:
        >>> SameData().is_open
        True
    """

    num_bits = 8

    def __init__(self) -> None:
        self.is_open = True
        """Whether it is still to be found out."""
        self._seen = 0
        self._is_zero = True
        self._equal_steps: list[int] = []
        self._num_steps = 0

    def look_at(self, bucket: Holder) -> None:
        """Read some elements of a dense bucket of this rank's gradients, before they are reduced."""
        if not self.is_open or bucket.is_sparse:
            return
        gradients = bucket.own()
        sample = gradients[:: max(1, gradients.numel() // _NUM_SAMPLES)].tolist()
        self._is_zero = self._is_zero and not any(sample)
        self._seen = zlib.crc32(repr(sample).encode(), self._seen)

    def word(self) -> int:
        """Return a number for what was looked at, 1 to 255; 0 if all of it is zero, or nothing more is asked."""
        return 0 if self._is_zero or not self.is_open else 1 + self._seen % 255

    def hear(self, words: Words) -> None:
        """Decide, on all ranks alike, whether the data differ; warn on rank 0 if all train on the same data."""
        self._compare({0 if word is None else word for word in words.of_rank}, words.step)
        if len(self._equal_steps) == _NUM_STEPS and self.is_open:
            self.is_open = False
            if not words.rank:
                warn_user(_text(self._equal_steps, len(words.of_rank)), SameDataWarning)

    def hear_silence(self, step: int) -> None:
        """Count a step in which all gradients that were looked at are zero."""
        self._compare(set(), step)

    def _compare(self, found: set[int], step: int) -> None:
        if not self.is_open:
            return
        self._seen, self._is_zero = 0, True
        self._num_steps += 1
        if len(found) > 1 or self._num_steps > _MAX_STEPS:
            self.is_open = False
        elif found and 0 not in found:
            self._equal_steps.append(step)


def _text(steps: Sequence[int], num_ranks: int) -> str:
    return (
        f"every rank computed the same gradients in steps {steps[0]} to {steps[-1]}: the {num_ranks} ranks train on "
        "the same data, and do the work of one. Give the DataLoader sampler=sl.DistributedSampler(dataset), or seed "
        "by rank what draws the batches. If it is meant (training on full batches), say so: "
        'warnings.filterwarnings("ignore", category=sl.SameDataWarning). This warning comes once'
    )
