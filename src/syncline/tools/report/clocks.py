"""The clocks of several hosts, compared by what the ranks did together (pure functions).

Processes of one host read the same clock. The clocks of two hosts differ by an unknown offset. No messages are needed
to find it: a rank can have the result of a bucket only after each other rank has sent its part. So each bucket bounds
the offset from both sides, and the tightest bounds of many steps leave an interval of the length of one message there
and back. Clocks drift apart by some microseconds a second, so the offset is found anew in each window of steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WINDOW_STEPS = 200
"""The number of steps for which an offset is taken to be constant."""


class Meeting(NamedTuple):
    """One operation in which a process took part, together with all others."""

    step: int
    began: int
    """When the process sent its part."""
    ended: int
    """When the process had the result."""


class Offset(NamedTuple):
    """What to add to a time of a clock in the steps from `from_step` on, so that it is a time of the first clock."""

    from_step: int
    offset: int
    error: int
    """The offset is certain up to this number of microseconds."""


class Clock(NamedTuple):
    """The offsets of one clock."""

    offsets: Sequence[Offset]

    def at(self, step: int) -> int:
        """Return what to add to times in this step."""
        if not self.offsets:
            return 0
        index = bisect_right(self.offsets, step, key=lambda one: one.from_step) - 1
        return self.offsets[max(0, index)].offset

    @property
    def error(self) -> int:
        """The largest error of the offsets, in microseconds."""
        return max((one.error for one in self.offsets), default=0)


SAME = Clock(())
"""The clock to which others are compared."""


Meetings = Mapping[tuple[object, ...], Meeting]
"""Operations by a key that is the same in all processes."""


def compared(first: Meetings, other: Meetings) -> Clock | None:
    """Return the offsets of a clock. None if the two processes have never met.

    Args:
        first: the meetings of a process that reads the first clock, by key.
        other: the meetings of a process that reads the other clock.

    Examples:
        >>> first = {(1,): Meeting(1, 100, 130), (2,): Meeting(2, 200, 220)}
        >>> other = {(1,): Meeting(1, 1105, 1125), (2,): Meeting(2, 1190, 1225)}
        >>> compared(first, other)
        Clock(offsets=[Offset(from_step=1, offset=-1000, error=25)])
    """
    windows: dict[int, list[int]] = {}
    for key in first.keys() & other.keys():
        one, two = first[key], other[key]
        bounds = windows.setdefault(one.step // WINDOW_STEPS, [-(1 << 62), 1 << 62, one.step])
        # two.ended + offset >= one.began, and one.ended >= two.began + offset
        bounds[0] = max(bounds[0], one.began - two.ended)
        bounds[1] = min(bounds[1], one.ended - two.began)
        bounds[2] = min(bounds[2], one.step)
    if not windows:
        return None
    return Clock(
        [
            Offset(step, (low + high) // 2, abs(high - low) // 2)
            for _, (low, high, step) in sorted(windows.items())
        ]
    )
