"""The position of each rank: the step, phase and bucket that it is in, and the call that it waits in.

`Board` holds this rank's own position; the code that does the work writes it. A `Place` is a snapshot of it that other
ranks receive as text. Errors about missing ranks are built from places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from syncline.liveness.store import decode

MAIN_LANE = "main"
"""The first lane of every transport; see `Transport.lane`."""

_BEFORE = "before the first step"

FORWARD = "forward"
"""The phase of a forward of a wrapper in training mode."""

EVAL_FORWARD = "forward in eval mode"


class Board:
    """The position of this rank. Its attributes are plain because the hot path of every step writes them.

    Attributes:
        step: the training step under way, from 1; None before the first.
        phase: the part of the step, in words.
        bucket: the bucket of gradients that is being waited for or sent; None if there is none.
        opening: the call that ranks agree on or run, such as "sl.mean"; None if there is none (see
            `transport/agreement.py`).
    """

    __slots__ = ("bucket", "opening", "phase", "step")

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase = _BEFORE
        self.bucket: int | None = None
        self.opening: str | None = None

    @contextmanager
    def called(self, title: str) -> Iterator[None]:
        """Attribute each collective inside of the block to the call `title`, unless it is part of another call."""
        before = self.opening
        self.opening = before or title
        try:
            yield
        finally:
            self.opening = before


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A call that a rank has been waiting in for a while."""

    lane: str
    """The lane of the call."""
    call: int | None
    """The number of the collective on that lane, from 1; None for a message, which only two ranks count."""
    words: str
    """The call in words."""
    number: int = 0
    """The number of this long wait on the rank. Two snapshots with the same number show the same wait."""
    blocks_rank: bool = True
    """Whether the rank does nothing else meanwhile, because no other thread of it has ever started a collective."""
    is_torchs: bool = False
    """Whether torch.distributed itself was called. The lane is then a group of torch's, see `calls.py`."""

    def __str__(self) -> str:
        if self.is_torchs:
            return f"{self.words} (call {self.call} on {self.lane})"
        nth = "a message" if self.call is None else f"call {self.call}"
        return f"{self.words} ({nth} on the {self.lane} lane)"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The position of a rank when it was last seen.

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
    """The call that it waits in; None while it does not wait, or if the wait has only just begun."""
    num_started: dict[str, int] = field(default_factory=dict)
    """Number of collectives that it has started, by lane."""
    code: str | None = None
    """The line of the user's code that it is in."""
    has_left: bool = False
    """Whether it has left in good order, by shutdown() or at the end of its program."""
    seen: float = 0.0
    """Time of the snapshot, in seconds since the epoch."""

    @staticmethod
    def of(
        board: Board,
        *,
        wait: Wait | None = None,
        num_started: dict[str, int] | None = None,
        code: str | None = None,
        has_left: bool = False,
        seen: float = 0.0,
    ) -> Place:
        """Return a snapshot of `board`, together with the state of its transport."""
        return Place(
            step=board.step,
            phase=board.phase,
            bucket=board.bucket,
            opening=board.opening,
            wait=wait,
            num_started=num_started or {},
            code=code,
            has_left=has_left,
            seen=seen,
        )

    def is_as(self, other: Place) -> bool:
        """Return whether both places are equal except for the line of code and the time."""
        return replace(self, code=other.code, seen=other.seen) == other

    @property
    def sends_buffers(self) -> bool:
        """Whether the rank is in a forward that sends the module's buffers."""
        if self.phase == FORWARD and self.wait is not None:  # SyncBatchNorm waits in this phase as well
            return self.wait.lane.startswith("buffers") or self.wait.words.startswith("broadcast")
        return self.phase == EVAL_FORWARD

    def is_in(self, wait: Wait) -> bool:
        """Return whether the rank waits in the same call (by lane and number), even if it called something else."""
        return self.wait is not None and (self.wait.lane, self.wait.call) == (wait.lane, wait.call)

    def to_json(self) -> str:
        """Return the place as text."""
        fields = dict(vars(self))  # `dataclasses.asdict` copies all values and is ten times slower
        if self.wait is not None:
            fields["wait"] = vars(self.wait)
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> Place:
        """Return the place that `to_json` has written."""
        return decode(Place, text, "the place of a rank")

    def __str__(self) -> str:
        words = [_BEFORE if self.step is None else f"step {self.step}"]
        if self.phase != _BEFORE:
            words.append(self.phase)
        if self.bucket is not None:
            words.append(f"bucket {self.bucket}")
        if self.has_left:
            words.append("has left in good order")
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


def who_is_where(
    places: Mapping[int, Place], *, size: int, here: int | None = None, now: float | None = None
) -> str:
    """Return one line of text per rank.

    Args:
        places: where ranks were seen.
        size: number of ranks.
        here: the rank that reports; None if all ranks report the same text.
        now: seconds since the epoch, used to show the age of other ranks' reports; None omits the age.

    Example:
        >>> seen = {1: Place(step=2, phase="forward", seen=10.0), 2: Place(step=3, phase="backward", seen=12.5)}
        >>> print(who_is_where(seen, size=3, here=2, now=12.5))
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
