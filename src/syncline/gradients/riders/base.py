"""The interface of riders. A rider is a small fact that every rank reports to all other ranks in each step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from syncline.gradients.backward import Backward
from syncline.transport.base import Transport


class Holder(Protocol):
    """The methods of a dense or sparse bucket that riders may call."""

    is_sparse: bool

    def own(self) -> Tensor:
        """Return this rank's own gradients in the bucket as one tensor. Call this method before the bucket is sent."""
        ...

    def unchecked(self) -> Tensor:
        """Return that part of `own()` whose values were not found to be finite when they were copied."""
        ...

    def own_parts(self) -> list[tuple[int, Tensor]]:
        """Return the parts of the result of `own`, as pairs of a parameter's index and the part of this parameter."""
        ...

    def handed_out(self) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the reduced values as one tensor, and pairs of a parameter's index and its present `.grad`."""
        ...


@dataclass(frozen=True, slots=True)
class Words:
    """The words that all ranks reported for one rider in one step. A word is an integer. Every rank gets all words.

    Examples:
        >>> from syncline.transport.threads import ThreadGroup
        >>> words = Words((3, 0, None), step=1, transport=ThreadGroup(3).transport(0))
        >>> words.active, words.any_joined
        ({0: 3, 1: 0}, True)
    """

    of_rank: tuple[int | None, ...]
    """The word of each rank, in rank order. It is None for a rank without inputs, which sends zeros (see `join`)."""
    step: int
    """The step in which the ranks reported the words."""
    transport: Transport
    """The transport over which the ranks can exchange details. An exchange is a collective call."""

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def active(self) -> Mapping[int, int]:
        """The words of the ranks that still have inputs, as a mapping from rank to word."""
        return {rank: word for rank, word in enumerate(self.of_rank) if word is not None}

    @property
    def any_joined(self) -> bool:
        return None in self.of_rank

    @property
    def any_set(self) -> bool:
        """Whether any rank reported a word other than 0."""
        return any(self.of_rank)

    def exchange(self, lines: Sequence[str]) -> list[list[str]]:
        """Gather lines of text from all ranks, and return the lines of each rank. This is a collective call.

        A rank without inputs sends no lines.
        """
        mine = [] if self.of_rank[self.rank] is None else list(lines)
        return [json.loads(row) for row in self.transport.all_gather_bytes(json.dumps(mine).encode())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The result of the reduction in one step, which `.grad` holds now."""

    step: int
    buckets: Sequence[Holder]
    """The buckets whose results were written to `.grad`. It is empty on a rank without inputs, which sent zeros."""
    can_overflow: bool
    """Whether the result may be infinite or NaN although all ranks' own gradients are finite. This is possible if the
    gradients were summed (under `normalize_by`), or if a communication hook reduced the buckets."""
    is_mean: bool
    """Whether each bucket holds the mean over all ranks, which is the same on every rank."""
    any_nonfinite: bool
    """Whether some rank reported that its own gradients were not finite before they were reduced."""


class Rider:
    """A small fact that every rank reports in each step. All ranks draw the same conclusion from all ranks' facts.

    A rank encodes its fact as a word of `num_bits` bits. A synchronized backward calls the methods in this order:

    1. `begin_step`;
    2. `look_at` for each bucket, before the bucket is sent;
    3. `word`, when the last bucket is sent;
    4. `receive`, or `receive_nothing` if no rank reported anything;
    5. `conclude`, when `.grad` holds the result;
    6. `record`;
    7. `forget`, even after an error.

    If `receive` or `conclude` raises an error, every rank raises it.

    Attributes:
        subject: a description of the fact, which the contract and the timeline show.
        num_bits: the number of bits of a word.
    """

    subject: str
    num_bits: int

    def begin_step(self, step: int) -> None:
        """Prepare for a backward whose gradients will be reduced.

        Args:
            step: the number of the step.
        """

    def look_at(self, bucket: Holder) -> None:
        """Read this rank's gradients in a bucket before they are sent.

        Args:
            bucket: the bucket that will be sent.
        """

    def word(self, backward: Backward) -> int:
        """Return this rank's word, from 0 (nothing to report) to `2**num_bits - 1`.

        Args:
            backward: the backward that is being reduced.
        """
        return 0

    def receive(self, words: Words) -> None:
        """Read the words of all ranks, before the reduced gradients are written to `.grad`."""

    def receive_nothing(self, step: int) -> None:
        """Handle a step in which no rank reported anything for any rider."""

    def conclude(self, reduced: Reduced) -> None:
        """Act on the reduced gradients in `.grad`. Each synchronized backward calls this method after `receive`."""

    def record(self) -> Mapping[str, Any]:
        """Return the fields of `BackwardRecord` that this rider sets, by name."""
        return {}

    def forget(self) -> None:
        """Drop the state of one backward. This method is called at the end of the backward, even after an error."""


class Riders:
    """All riders of a wrapper, in the order in which they conclude. The order is the same on all ranks."""

    def arrange(self, riders: Sequence[Rider], transport: Transport) -> None:
        """Call these riders in this order from now on."""

        def overriding(method: str) -> list[Rider]:
            return [rider for rider in riders if getattr(type(rider), method) is not getattr(Rider, method)]

        self.riders = riders
        self._transport = transport
        # Calling an empty method costs about as much as calling a short one, so only overridden methods are called.
        self._beginning = overriding("begin_step")
        self._looking = overriding("look_at")
        self._receiving_nothing = overriding("receive_nothing")
        self._concluding = overriding("conclude")
        self._recording = overriding("record")
        self._forgetting = overriding("forget")

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of bits of each rider's word."""
        return tuple(rider.num_bits for rider in self.riders)

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects of the riders that send at least one bit."""
        return tuple(rider.subject for rider in self.riders if rider.num_bits)

    def begin_step(self, step: int) -> None:
        """Prepare all riders for a backward whose gradients will be reduced."""
        for rider in self._beginning:
            rider.begin_step(step)

    def look_at(self, bucket: Holder) -> None:
        """Let the riders read this rank's gradients in a bucket before it is sent."""
        for rider in self._looking:
            rider.look_at(bucket)

    def words(self, backward: Backward) -> list[int]:
        """Return this rank's words, one per rider."""
        return [rider.word(backward) for rider in self.riders]

    def receive(self, rows: Sequence[Sequence[int] | None], step: int) -> None:
        """Pass each rider the words that all ranks reported for it.

        Args:
            rows: the words of each rank, in the order of the riders. The row of a rank without inputs is None. Pass no
                rows if no rank reported anything.
            step: the step that was reduced.
        """
        if not rows:
            for rider in self._receiving_nothing:
                rider.receive_nothing(step)
            return
        for at, rider in enumerate(self.riders):
            of_rank = tuple(None if row is None else row[at] for row in rows)
            rider.receive(Words(of_rank, step, self._transport))

    def conclude(self, reduced: Reduced) -> None:
        """Let the riders act on the reduced gradients in `.grad`."""
        for rider in self._concluding:
            rider.conclude(reduced)

    def record(self) -> dict[str, Any]:
        """Return the fields of `BackwardRecord` that the riders set, by name."""
        fields: dict[str, Any] = {}
        for rider in self._recording:
            fields.update(rider.record())
        return fields

    def forget(self) -> None:
        """Let all riders drop the state of one backward. This method is called even after an error."""
        for rider in self._forgetting:
            rider.forget()
