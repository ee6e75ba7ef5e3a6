"""The position of each rank: its step, phase and bucket, and the call in which it waits.

A `Board` holds the current position of this rank. Syncline writes to the board at each step. A `Place` is a snapshot of
a rank's position. Each rank publishes its place as text for its peers. Errors about missing ranks show the places of
all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from syncline.liveness.store import decode
from syncline.words import describe_ranks

MAIN_LANE = "main"
"""The name of the first lane of every transport. `Transport.lane` explains lanes."""

BUFFERS_LANE = "buffers"
"""The purpose of the lane for buffers, with which the name of this lane begins."""


class StepPhase(StrEnum):
    """The parts of a training step. Their values are the words in messages."""

    BEFORE_STEPS = "before the first step"
    FORWARD = "forward"
    """A wrapper's forward in training mode."""
    EVAL_FORWARD = "forward in eval mode"
    """A wrapper's forward in eval mode, which may send the module's buffers."""
    AFTER_FORWARD = "after forward"
    BACKWARD = "backward"
    AFTER_CHANGE = "backward, where the module has changed since it was wrapped"
    AFTER_BACKWARD = "after backward"
    OPTIMIZER_STEP = "optimizer.step()"
    PARAMETER_SYNC = "the parameter sync"
    AFTER_STEP = "after step"


_BETWEEN = {StepPhase.BEFORE_STEPS, StepPhase.AFTER_FORWARD, StepPhase.AFTER_BACKWARD, StepPhase.AFTER_STEP}
"""The phases in which the user's own code runs."""


@dataclass(slots=True, eq=False)
class Board:
    """The current position of this rank. Every step writes to its attributes, so they are plain attributes."""

    step: int | None = None
    """The number of the current training step, from 1; None before the first step."""
    phase: StepPhase = StepPhase.BEFORE_STEPS
    """The part of the step that this rank runs."""
    bucket: int | None = None
    """The index of the bucket of gradients that this rank sends or waits for; None while it handles no bucket."""
    opening: str | None = None
    """The title of the call of Syncline that the ranks agree on or run now, such as "sl.mean"; None at other times.

    `transport/agreement.py` sets this title.
    """

    @contextmanager
    def called(self, title: str) -> Iterator[None]:
        """Make errors inside the `with` block name the call `title`, unless an outer block already names a call."""
        before = self.opening
        self.opening = before or title
        try:
            yield
        finally:
            self.opening = before


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A call in which a rank waits for its peers."""

    lane: str
    """The name of the lane of the call."""
    call: int | None
    """The index of the collective on that lane, from 1; None for a message, because only two ranks count it."""
    words: str
    """A description of the call, for messages."""
    number: int = 0
    """An id of this wait on the rank. Two snapshots with the same id show the same wait."""
    blocks_rank: bool = True
    """Whether the whole rank waits, because no other thread of the rank has ever started a collective."""
    is_torchs: bool = False
    """Whether the program called torch.distributed itself. The lane is then a process group; see `calls.py`."""

    def __str__(self) -> str:
        if self.is_torchs:
            return f"{self.words} (call {self.call} on {self.lane})"
        nth = "a message" if self.call is None else f"call {self.call}"
        return f"{self.words} ({nth} on the {self.lane} lane)"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A snapshot of the position of one rank. The attributes `step` to `opening` are those of `Board`.

    Examples:
        >>> print(Place(step=12, phase=StepPhase.BACKWARD, bucket=0, code="train.py:34 in main"))
        step 12, backward, bucket 0, at train.py:34 in main
        >>> Place.from_json(Place(step=1).to_json()) == Place(step=1)
        True
    """

    step: int | None = None
    phase: StepPhase = StepPhase.BEFORE_STEPS
    bucket: int | None = None
    opening: str | None = None
    wait: Wait | None = None
    """The call in which the rank has waited for a while; None if it does not wait or has just begun to wait."""
    num_started: dict[str, int] = field(default_factory=dict)
    """The number of collectives that the rank has started on each lane, by the name of the lane."""
    code: str | None = None
    """The line of the user's code that the rank runs, such as "train.py:34 in main"; None if it is unknown."""
    has_left: bool = False
    """Whether the rank has shut down normally, by sl.shutdown() or at the end of its program."""
    seen: float = 0.0
    """The time of the snapshot, in seconds of the monotonic clock of its rank."""
    clock: str = ""
    """The key of that clock (`clock_key`). The times of two clocks cannot be compared."""

    @staticmethod
    def of(
        board: Board, *, wait: Wait | None = None, code: str | None = None, has_left: bool = False
    ) -> Place:
        """Return a snapshot of `board`."""
        position = {one.name: getattr(board, one.name) for one in fields(board)}
        return Place(**position, wait=wait, code=code, has_left=has_left)

    def is_as(self, other: Place) -> bool:
        """Return whether this place equals `other`, apart from the line of code and the time."""
        return replace(self, code=other.code, seen=other.seen) == other

    @property
    def sends_buffers(self) -> bool:
        """Whether the rank is in a forward that sends the module's buffers."""
        if self.phase is StepPhase.FORWARD:  # SyncBatchNorm waits in this phase as well
            return self.wait is not None and self.wait.lane.startswith(BUFFERS_LANE)
        return self.phase is StepPhase.EVAL_FORWARD

    def is_in(self, wait: Wait) -> bool:
        """Return whether the rank waits in the call of `wait`: in a call on the same lane, with the same index.

        The operations are not compared, because ranks may have made different calls with the same index.
        """
        return self.wait is not None and (self.wait.lane, self.wait.call) == (wait.lane, wait.call)

    def to_json(self) -> str:
        """Return the place as JSON."""
        fields = dict(vars(self))  # `dataclasses.asdict` copies all values and is ten times slower
        if self.wait is not None:
            fields["wait"] = vars(self.wait)
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> Place:
        """Return the place that `to_json` has converted to `text`."""
        return decode(Place, text, "the place of a rank")

    def __str__(self) -> str:
        words = [StepPhase.BEFORE_STEPS if self.step is None else f"step {self.step}"]
        if self.phase is not StepPhase.BEFORE_STEPS:
            words.append(self.phase)
        if self.bucket is not None:
            words.append(f"bucket {self.bucket}")
        if self.has_left:
            return ", ".join([*words, "has shut down normally"])
        if self.wait is not None:
            called = self.wait if self.opening is None else replace(self.wait, words=self.opening)
            words.append(f"waiting in {called}")
        elif self.opening is not None:
            words.append(f"in {self.opening}")
        if self.code is not None:
            words.append(f"at {self.code}")
        return ", ".join(words)


_MAX_LINES = 32


def describe_places(places: Mapping[int, Place], *, size: int, ages: Mapping[int, str] | None = None) -> str:
    """Describe the place of each rank in one line of text, and join the lines.

    Args:
        places: the known places, by rank.
        size: the number of ranks.
        ages: how old the places of other ranks are, by rank, in words. Pass None if all ranks show the same text.

    Examples:
        >>> seen = {1: Place(step=2, phase=StepPhase.FORWARD), 2: Place(step=3, phase=StepPhase.BACKWARD)}
        >>> print(describe_places(seen, size=3, ages={1: "2.5 s ago"}))
          rank 0: it has reported nothing
          rank 1: at its last report, 2.5 s ago: step 2, forward
          rank 2: step 3, backward
    """
    lines = []
    for rank in range(min(size, _MAX_LINES)):
        place = places.get(rank)
        words = "it has reported nothing" if place is None else str(place)
        if place is not None and not place.has_left and ages is not None and rank in ages:
            words = f"at its last report, {ages[rank]}: {words}"
        lines.append(f"  rank {rank}: {words}")
    if size > _MAX_LINES:
        lines.append(f"  and {size - _MAX_LINES} more ranks")
    return "\n".join(lines)


def describe_late(
    late: Sequence[int], places: Mapping[int, Place], here: Place, call: str, seconds: float
) -> str:
    """Return a sentence that says which ranks are late, for what, and where they were last seen.

    Args:
        late: the ranks that did not come; empty if they are unknown.
        places: the known places, by rank.
        here: the place of this rank, which waited.
        call: the call in which it waited, in words: the name of the operation, and perhaps the size of its tensor.
        seconds: how long it waited.

    Examples:
        >>> seen = {1: Place(step=4, phase=StepPhase.AFTER_STEP, code="base.py:37 in load")}
        >>> describe_late([1], seen, Place(step=5, phase=StepPhase.FORWARD), "broadcast", 20.02)
        'rank 1 did not reach forward of step 5 within 20 s; last seen at base.py:37 in load'
        >>> here = Place(step=4, phase=StepPhase.AFTER_STEP)
        >>> describe_late([0, 1], seen, here, "all_reduce(max) of 4 elements", 1.5)
        'ranks 0, 1 did not reach all_reduce(max) (step 4, after step) within 1.5 s; rank 0 has reported nothing'
    """
    known = [places[rank] for rank in late if rank in places]
    within = f"{_goal(known, here, call)} within {round(seconds, 1 if seconds >= 1 else 3):g} s"
    if not late:
        return f"not every rank reached {within}"
    place, subject = places.get(late[0]), f"rank {late[0]} "
    if place is None:
        seen = f"{'it ' if len(late) == 1 else subject}has reported nothing"
    else:
        where = f": {place}" if place.code is None else f" at {place.code}"
        seen = f"{'' if len(late) == 1 else f'{subject}was '}last seen{where}"
    return f"{describe_ranks(late)} did not reach {within}; {seen}"


def _goal(late: Sequence[Place], here: Place, call: str) -> str:
    """Return what the late ranks did not reach: the phase of this rank, or its call if they may be in this phase."""
    is_part = here.opening is None and here.phase not in _BETWEEN
    if is_part and all(_is_earlier(place, here) for place in late):
        return here.phase if here.step is None else f"{here.phase} of step {here.step}"
    title = here.opening or call.partition(" of ")[0]
    where = Place(step=here.step, phase=here.phase, bucket=here.bucket)
    return title if where == Place() else f"{title} ({where})"


def _is_earlier(place: Place, here: Place) -> bool:
    """Return whether a rank at `place` has certainly not reached the phase of `here`."""
    if (place.step or 0) != (here.step or 0):
        return (place.step or 0) < (here.step or 0)
    return here.phase is StepPhase.BACKWARD and place.phase in (StepPhase.FORWARD, StepPhase.AFTER_FORWARD)
