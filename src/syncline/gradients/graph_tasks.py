"""Which graph tasks of the autograd engine make up one backward.

An ordinary backward is one graph task. A re-entrant checkpoint runs a task of its own from inside of another, so a
backward may show itself first in an inner one, go on in the outer, and come back. The engine says only which task
runs now (a number that grows) and when a task has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from syncline._torch.autograd import is_inside_another_backward

__all__ = ["Entry", "Turns"]


_NONE = -1


class Entry(enum.Enum):
    """What it means that a gradient shows itself in some task."""

    BEGINS = "a backward begins"
    GOES_ON = "the backward goes on, perhaps in another of its tasks"
    INTERRUPTS = "a backward begins, but the one before never came to its end"
    TOO_LATE = "the backward goes on, but all its gradients were there and it was taken for ended"


class Turns:
    """Follows the tasks of one backward after another.

    Args:
        is_inside: whether the task that runs now was started from inside of another; asked a few times a backward.

    Example:
        >>> turns = Turns(is_inside=lambda: False)
        >>> turns.enter(7).name
        'BEGINS'
        >>> turns.join(7)
        >>> turns.enter(7).name, turns.ends_backward(7, is_complete=True)
        ('GOES_ON', True)
    """

    def __init__(self, is_inside: Callable[[], bool] = is_inside_another_backward) -> None:
        self.current = _NONE
        """The task that gradients come from; compared by each of them."""
        self._is_inside = is_inside
        self._tasks: set[int] = set()
        self.outermost: int | None = None
        """The task that is known not to be inside of another, told by who knows."""
        self._ended_inside = False

    @property
    def is_running(self) -> bool:
        """Whether a backward has begun and not ended."""
        return bool(self._tasks)

    def enter(self, task: int) -> Entry:
        """A gradient comes from `task`, which is not the current one."""
        if self._tasks:
            if task in self._tasks:
                self.current = task
                return Entry.GOES_ON
            # Ids grow, so a smaller one is what a re-entrant backward began in.
            if task < max(self._tasks) or self._is_inside():
                return Entry.GOES_ON
            return Entry.INTERRUPTS
        if self._ended_inside and self._is_inside():
            return Entry.TOO_LATE
        self._ended_inside = False
        return Entry.BEGINS

    def join(self, task: int) -> None:
        """`task` is part of this backward; its end has to be told."""
        self._tasks.add(task)
        self.current = task

    def knows(self, task: int) -> bool:
        """Whether `task` is part of this backward."""
        return task in self._tasks

    def ends_backward(self, task: int, *, is_complete: bool) -> bool:
        """`task` has ended: whether the backward has, too.

        Args:
            task: which.
            is_complete: whether every gradient is there.
        """
        if task not in self._tasks:
            return False
        if self.outermost is not None:
            return task == self.outermost
        if task != min(self._tasks):
            return False  # it was inside of that one, whose end comes
        if self._is_inside():
            # Inside of one that has shown nothing of itself. If all is there, nothing should follow.
            self._ended_inside = is_complete
            return is_complete
        return True

    def forget(self) -> None:
        """The backward is over, however it ended."""
        self._tasks.clear()
        self.current = _NONE
        self.outermost = None

    def forward_begins(self) -> None:
        """So whatever backward comes next is not the rest of the last one."""
        self._ended_inside = False
