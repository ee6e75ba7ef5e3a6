"""The rider interface: a rider is a small fact that every rank must learn from every other rank in the same step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from syncline.gradients.backward import Backward
from syncline.transport.base import Transport


class Holder(Protocol):
    """A bucket, dense or sparse, as riders see it."""

    is_sparse: bool

    def own(self) -> Tensor:
        """Return this rank's gradients, before they are sent."""
        ...

    def own_parts(self) -> list[tuple[int, Tensor]]:
        """Return the same memory by parameter index."""
        ...

    def handed_out(self) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the reduced values as one tensor, and the present `.grad` tensors by parameter index."""
        ...


@dataclass(frozen=True, slots=True)
class Words:
    """The words that all ranks reported for one rider in one step; the same on every rank.

    Example:
        >>> from syncline.transport.threads import ThreadGroup
        >>> words = Words((3, 0, None), step=1, transport=ThreadGroup(3).transport(0))
        >>> words.active, words.any_joined
        ({0: 3, 1: 0}, True)
    """

    of_rank: tuple[int | None, ...]
    """One word per rank; None for a rank that has no inputs left and takes part with zeros (see `join`)."""
    step: int
    """The step that has just been reduced."""
    transport: Transport
    """The transport over which details are exchanged, by all ranks or by none."""

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def active(self) -> Mapping[int, int]:
        """The words of the ranks that have inputs, by rank."""
        return {rank: word for rank, word in enumerate(self.of_rank) if word is not None}

    @property
    def any_joined(self) -> bool:
        return None in self.of_rank

    @property
    def any_set(self) -> bool:
        """Whether any rank reported something."""
        return any(self.of_rank)

    def exchange(self, lines: Sequence[str]) -> list[list[str]]:
        """Gather lines of text from all ranks; a collective call. A rank without inputs sends no lines."""
        mine = [] if self.of_rank[self.rank] is None else list(lines)
        return [json.loads(row) for row in self.transport.all_gather_bytes(json.dumps(mine).encode())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The result that a step left in `.grad`."""

    step: int
    buckets: Sequence[Holder]
    """The buckets that were handed out; empty on a rank that took part with zeros."""
    can_overflow: bool
    """Whether finite gradients may have given a result that is not finite, because a sum was sent or a hook reduced."""
    is_mean: bool
    """Whether each bucket holds the mean over all ranks, the same on every rank."""
    any_nonfinite: bool
    """Whether some rank reported that its own gradients are not finite."""


class Rider:
    """One fact per rank and step: a word that this rank reports, and a conclusion that all ranks draw from all words.

    A synchronized backward calls these methods in this order: `begin_step`; `look_at` for each bucket before it is
    sent; `word` when the last bucket is sent; `hear`, or `hear_silence` if no rank reported anything; `conclude` when
    `.grad` holds the result; and `forget`, even after an error. If `hear` or `conclude` raises, it raises on every
    rank.

    Attributes:
        num_bits: the number of bits of a word.
    """

    num_bits: int

    def begin_step(self, step: int) -> None:
        """Prepare for a backward that is reduced.

        Args:
            step: the step that begins.
        """

    def look_at(self, bucket: Holder) -> None:
        """Read this rank's gradients before they are sent."""

    def word(self, backward: Backward) -> int:
        """Return this rank's word, from 0 (nothing to report) to 2**num_bits - 1.

        Args:
            backward: the backward that is being reduced.
        """
        return 0

    def hear(self, words: Words) -> None:
        """Read the words of all ranks, and draw the conclusion before anything is applied."""

    def hear_silence(self, step: int) -> None:
        """Note that no rank reported anything in this step, for any rider."""

    def conclude(self, reduced: Reduced) -> None:
        """Act on the result in `.grad`. Called after `hear` in each reduced step."""

    def forget(self) -> None:
        """Reset what belongs to one backward; called when it is over."""


class Riders:
    """All riders of a reducer, in the order in which they draw their conclusions; the same on all ranks."""

    def __init__(self, riders: Sequence[Rider], transport: Transport) -> None:
        self._riders = riders
        self._transport = transport
        # Calling an empty method costs about as much as calling a short one, so only overridden methods are called.
        self._beginning = [one for one in riders if type(one).begin_step is not Rider.begin_step]
        self._looking = [one for one in riders if type(one).look_at is not Rider.look_at]
        self._hearing_silence = [one for one in riders if type(one).hear_silence is not Rider.hear_silence]
        self._concluding = [one for one in riders if type(one).conclude is not Rider.conclude]
        self._forgetting = [one for one in riders if type(one).forget is not Rider.forget]

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of bits of each word."""
        return tuple(rider.num_bits for rider in self._riders)

    def begin_step(self, step: int) -> None:
        """Begin a backward that is reduced."""
        for rider in self._beginning:
            rider.begin_step(step)

    def look_at(self, bucket: Holder) -> None:
        """Show the riders a bucket before it is sent."""
        for rider in self._looking:
            rider.look_at(bucket)

    def words(self, backward: Backward) -> list[int]:
        """Return this rank's words."""
        return [rider.word(backward) for rider in self._riders]

    def hear(self, rows: Sequence[Sequence[int] | None], step: int) -> None:
        """Give each rider its words from all ranks.

        Args:
            rows: the words of each rank; None for a rank without inputs. Empty if no rank reported anything.
            step: the step that was reduced.
        """
        if not rows:
            for rider in self._hearing_silence:
                rider.hear_silence(step)
            return
        for at, rider in enumerate(self._riders):
            of_rank = tuple(None if row is None else row[at] for row in rows)
            rider.hear(Words(of_rank, step, self._transport))

    def conclude(self, reduced: Reduced) -> None:
        """Let the riders act on the result in `.grad`."""
        for rider in self._concluding:
            rider.conclude(reduced)

    def forget(self) -> None:
        """Reset all riders after a backward, even after an error."""
        for rider in self._forgetting:
            rider.forget()
