"""The position of each rank: its step, phase and bucket, and the call in which it waits.

`Board` holds the position of this rank. The code that trains writes to the board. A `Place` is a snapshot of a rank's
position, which the rank sends to its peers as text. Errors about missing ranks show the places of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from syncline.liveness.store import decode

MAIN_LANE = "main"
"""The name of the first lane of every transport; see `Transport.lane`."""

_BEFORE = "before the first step"

FORWARD = "forward"
"""The phase of a forward of a wrapper in training mode."""

EVAL_FORWARD = "forward in eval mode"
"""The phase of a forward of a wrapper in eval mode, in which the module's buffers are sent."""


@dataclass(slots=True, eq=False)
class Board:
    """The position of this rank. Its attributes are plain, because the hot path of every step writes to them."""

    step: int | None = None
    """The current training step, from 1; None before the first step."""
    phase: str = _BEFORE
    """The part of the step, in words."""
    bucket: int | None = None
    """The bucket of gradients that the rank sends or waits for; None if there is none."""
    opening: str | None = None
    """The call of Syncline that the ranks agree on or run now, such as "sl.mean"; None if there is none.

    See `transport/agreement.py`.
    """

    @contextmanager
    def called(self, title: str) -> Iterator[None]:
        """Let errors inside the block name the call `title`, unless an outer block names another call."""
        before = self.opening
        self.opening = before or title
        try:
            yield
        finally:
            self.opening = before


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A call in which a rank has been waiting for a while."""

    lane: str
    """The lane of the call."""
    call: int | None
    """The number of the collective on that lane, from 1; None for a message, which only two ranks count."""
    words: str
    """The call in words."""
    number: int = 0
    """A number that identifies this long wait on the rank. Two snapshots with the same number show the same wait."""
    blocks_rank: bool = True
    """Whether no other thread of the rank has ever started a collective, so that the whole rank waits."""
    is_torchs: bool = False
    """Whether this is a call of torch.distributed by the program. The lane is then a process group; see `calls.py`."""

    def __str__(self) -> str:
        if self.is_torchs:
            return f"{self.words} (call {self.call} on {self.lane})"
        nth = "a message" if self.call is None else f"call {self.call}"
        return f"{self.words} ({nth} on the {self.lane} lane)"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A snapshot of the position of a rank.

    Example:
        >>> print(Place(step=12, phase="backward", bucket=0, code="train.py:34 in main"))
        step 12, backward, bucket 0, at train.py:34 in main
        >>> Place.from_json(Place(step=1).to_json()) == Place(step=1)
        True
    """

    step: int | None = None
    phase: str = _BEFORE
    bucket: int | None = None
    opening: str | None = None
    wait: Wait | None = None
    """The call in which the rank waits; None if the rank does not wait, or has only just begun to wait."""
    num_started: dict[str, int] = field(default_factory=dict)
    """Number of collectives that the rank has started, by lane."""
    code: str | None = None
    """The line of the user's code that the rank runs."""
    has_left: bool = False
    """Whether the rank has shut down normally, by sl.shutdown() or at the end of its program."""
    seen: float = 0.0
    """Time of the snapshot, in seconds since the epoch."""

    @staticmethod
    def of(
        board: Board, *, wait: Wait | None = None, code: str | None = None, has_left: bool = False
    ) -> Place:
        """Return a snapshot of `board`."""
        return Place(
            step=board.step,
            phase=board.phase,
            bucket=board.bucket,
            opening=board.opening,
            wait=wait,
            code=code,
            has_left=has_left,
        )

    def is_as(self, other: Place) -> bool:
        """Return whether two places are equal except for the line of code and the time."""
        return replace(self, code=other.code, seen=other.seen) == other

    @property
    def sends_buffers(self) -> bool:
        """Whether the rank is in a forward that sends the module's buffers."""
        if self.phase == FORWARD and self.wait is not None:  # SyncBatchNorm waits in this phase as well
            return self.wait.lane.startswith("buffers") or self.wait.words.startswith("broadcast")
        return self.phase == EVAL_FORWARD

    def is_in(self, wait: Wait) -> bool:
        """Return whether the rank waits in the same call as `wait`, compared by lane and number.

        The operations may differ if the ranks made different calls.
        """
        return self.wait is not None and (self.wait.lane, self.wait.call) == (wait.lane, wait.call)

    def to_json(self) -> str:
        """Return the place as text."""
        fields = dict(vars(self))  # `dataclasses.asdict` copies all values and is ten times slower
        if self.wait is not None:
            fields["wait"] = vars(self.wait)
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> Place:
        """Return the place that `to_json` returned as text."""
        return decode(Place, text, "the place of a rank")

    def __str__(self) -> str:
        words = [_BEFORE if self.step is None else f"step {self.step}"]
        if self.phase != _BEFORE:
            words.append(self.phase)
        if self.bucket is not None:
            words.append(f"bucket {self.bucket}")
        if self.has_left:
            words.append("has shut down normally")
            return ", ".join(words)
        if self.wait is not None:
            called = self.wait if self.opening is None else replace(self.wait, words=self.opening)
            words.append(f"waiting in {called}")
        elif self.opening is not None:
            words.append(f"in {self.opening}")
        if self.code is not None:
            words.append(f"at {self.code}")
        return ", ".join(words)


_MAX_LINES = 32


def describe_places(
    places: Mapping[int, Place], *, size: int, here: int | None = None, now: float | None = None
) -> str:
    """Return the places of all ranks in words, one line per rank.

    Args:
        places: the places that are known, by rank.
        size: number of ranks.
        here: this rank, whose place is current; None if all ranks show the same text.
        now: seconds since the epoch, used to show the age of other ranks' reports; None omits the age.

    Example:
        >>> seen = {1: Place(step=2, phase="forward", seen=10.0), 2: Place(step=3, phase="backward", seen=12.5)}
        >>> print(describe_places(seen, size=3, here=2, now=12.5))
          rank 0: it has reported nothing
          rank 1: step 2, forward (last report 2.5 s ago)
          rank 2: step 3, backward
    """
    lines = []
    for rank in range(min(size, _MAX_LINES)):
        place = places.get(rank)
        words = "it has reported nothing" if place is None else str(place)
        if place is not None and now is not None and rank != here:
            words += f" (last report {max(0.0, now - place.seen):.1f} s ago)"
        lines.append(f"  rank {rank}: {words}")
    if size > _MAX_LINES:
        lines.append(f"  and {size - _MAX_LINES} more ranks")
    return "\n".join(lines)
