"""Rider: a hash of this rank's gradients, by which ranks detect that all of them train on the same data.

A plain DataLoader without a sampler gives all ranks the same data, and no error shows this. So in the first
synchronized backwards each rank reports a hash of some elements of its own gradients before they are reduced. If the
data differ between ranks, the hashes nearly always differ in the first step, and nothing more is reported. If the
hashes are equal on all ranks in `_NUM_STEPS` steps, rank 0 warns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from syncline.errors import SameDataWarning
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Holder, Rider, Words
from syncline.user_code import warn_user

_NUM_STEPS = 10
"""The number of steps with equal hashes after which rank 0 warns. So many equal hashes are no accident."""

_MAX_STEPS = 30
"""The number of steps after which the comparison ends in any case. All-zero gradients are no evidence."""

_NUM_SAMPLES = 64
"""The number of elements of each bucket that are hashed."""


class SameData(Rider):
    """A comparison of all ranks' gradients, which ends when it is known whether the gradients differ.

    Examples:
        >>> SameData().is_open
        True
    """

    subject = "equal data"
    num_bits = 8

    def __init__(self) -> None:
        self.is_open = True
        """Whether ranks still compare their gradients."""
        self._seen = 0
        """The hash of the elements sampled so far in this step."""
        self._is_zero = True
        """Whether all elements sampled so far in this step are zero."""
        self._equal_steps: list[int] = []
        self._num_steps = 0

    def look_at(self, bucket: Holder) -> None:
        """Hash some elements of this rank's gradients in a dense bucket, before they are reduced."""
        if not self.is_open or bucket.is_sparse:
            return
        gradients = bucket.own()
        sample = gradients[:: max(1, gradients.numel() // _NUM_SAMPLES)].tolist()
        self._is_zero = self._is_zero and not any(sample)
        self._seen = zlib.crc32(repr(sample).encode(), self._seen)

    def word(self, backward: Backward) -> int:
        """Return the hash of the sampled elements, from 1 to 255.

        Return 0 if all sampled elements are zero, or if the comparison has ended.
        """
        return 0 if self._is_zero or not self.is_open else 1 + self._seen % 255

    def receive(self, words: Words) -> None:
        """Compare the hashes of all ranks. Rank 0 warns if they have been equal in enough steps."""
        self._compare({0 if word is None else word for word in words.of_rank}, words.step)
        if len(self._equal_steps) == _NUM_STEPS and self.is_open:
            self.is_open = False
            if not words.rank:
                warn_user(_text(self._equal_steps, len(words.of_rank)), SameDataWarning)

    def receive_nothing(self, step: int) -> None:
        """Count a step in which no rank reported a hash. All ranks' sampled elements are zero then."""
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
        f"every rank computed the same gradients in steps {steps[0]} to {steps[-1]}, so the {num_ranks} ranks train "
        "on the same data. If the DataLoader has no distributed sampler, pass sampler=sl.DistributedSampler(dataset). "
        "If it has one, something else is equal: seed the generators of drawn batches, noise, masks or time steps "
        "differently on each rank. If the ranks are meant to train on the same data, silence this warning by "
        'warnings.filterwarnings("ignore", category=sl.SameDataWarning). This warning comes only once'
    )
