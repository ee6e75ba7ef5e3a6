"""Riders: signs that the programs of the ranks differ, or do not, which the gradients do not show.

[Note: settings of optimizers]

The learning rate or the number of steps of an optimizer may differ between ranks. The gradients do not show this. So
each rank reports a hash of the settings of its optimizers. The settings themselves are exchanged only if the hashes
differ.

[Note: forwards without a backward]

If one rank alone skips a batch after its forward, the next batch of this rank is averaged with the current batches of
the other ranks. So each rank reports how many of its forwards wait for a backward. A forward without a backward is not
always a mistake: rank 0 may compute an accuracy from its output. So a difference between ranks causes one warning, and
no error. If a rank has skipped a batch, it runs out of batches before the other ranks do, which is an error
(`UnevenInputs`).

[Note: equal data]

A plain DataLoader without a sampler gives all ranks the same data. So in the first synchronized backwards each rank
reports a hash of some elements of its own gradients before they are reduced. If the data differ between ranks, the
hashes nearly always differ in the first step, and nothing more is reported. If the hashes are equal on all ranks in
`_NUM_STEPS` steps, rank 0 warns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from syncline.errors import ContractMismatch, SameDataWarning
from syncline.gradients.backward import Backward
from syncline.gradients.outputs import Outputs
from syncline.gradients.riders.base import Holder, Rider, Words
from syncline.optimizers.attached import AttachedOptimizer
from syncline.user_code import warn_user
from syncline.words import describe_difference, describe_ranks

_SETTINGS_BITS = 24
_SETTINGS_MAX: int = 2**_SETTINGS_BITS - 1


class Settings(Rider):
    """A comparison of the settings of attached optimizers: learning rates, other settings, and the number of steps."""

    subject = "settings of optimizers"
    num_bits = _SETTINGS_BITS

    def __init__(self) -> None:
        self.optimizers: list[AttachedOptimizer] = []

    def word(self, backward: Backward) -> int:
        """Return a hash of the settings of all attached optimizers. Return 0 if no optimizer is attached."""
        if not self.optimizers:
            return 0
        for optimizer in self.optimizers:
            optimizer.compared_settings = optimizer.settings()
        settings = tuple(optimizer.compared_settings for optimizer in self.optimizers)
        return 1 + zlib.crc32(repr(settings).encode()) % _SETTINGS_MAX

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
