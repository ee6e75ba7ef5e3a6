"""The graph tasks of the autograd engine that make up one backward.

An ordinary backward is one graph task. A re-entrant checkpoint runs a task inside another one. The first gradient of
such a backward may therefore come from an inner task; the outer task follows, and more inner tasks may come. The
engine reports only which task is running now (a growing number) and when a task has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from syncline._torch.autograd import is_inside_another_backward

__all__ = ["Entry", "GraphTasks"]


_NONE = -1


class Entry(enum.Enum):
    """The meaning of a gradient that becomes ready in some task."""

    BEGINS = "a backward begins"
    CONTINUES = "the backward continues, perhaps in another of its tasks"
    INTERRUPTS = "a backward begins, but the one before has not ended"
    TOO_LATE = "the backward continues, but all its gradients were ready, so that it was ended"


class GraphTasks:
    """A state machine that assigns graph tasks to one backward after another.

    Args:
        is_inside: returns whether the running task was started inside another one; called a few times per backward.

    Example:
        >>> tasks = GraphTasks(is_inside=lambda: False)
        >>> tasks.enter(7).name
        'BEGINS'
        >>> tasks.join(7)
        >>> tasks.enter(7).name, tasks.ends_backward(7, is_complete=True)
        ('CONTINUES', True)
    """

    def __init__(self, is_inside: Callable[[], bool] = is_inside_another_backward) -> None:
        self.current = _NONE
        """The task that gradients currently come from; each gradient compares its task with it."""
        self._is_inside = is_inside
        self._tasks: set[int] = set()
        self.outermost: int | None = None
        """The task known not to run inside another, if the caller has set it."""
        self._ended_inside = False

    @property
    def is_running(self) -> bool:
        """Whether a backward has begun and has not ended."""
        return bool(self._tasks)

    def enter(self, task: int) -> Entry:
        """Classify a gradient from `task`, which is not the current one."""
        if self._tasks:
            if task in self._tasks:
                self.current = task
                return Entry.CONTINUES
            # Ids grow, so a task with a smaller id is the outer one, in which a re-entrant backward began.
            if task < max(self._tasks) or self._is_inside():
                return Entry.CONTINUES
            return Entry.INTERRUPTS
        if self._ended_inside and self._is_inside():
            return Entry.TOO_LATE
        self._ended_inside = False
        return Entry.BEGINS

    def join(self, task: int) -> None:
        """Add `task` to this backward; the caller must report its end through `ends_backward`."""
        self._tasks.add(task)
        self.current = task

    def knows(self, task: int) -> bool:
        """Return whether `task` is part of this backward."""
        return task in self._tasks

    def ends_backward(self, task: int, *, is_complete: bool) -> bool:
        """Return whether the backward ended with `task`, which has just ended.

        Args:
            task: the id of the task.
            is_complete: whether every gradient is ready.
        """
        if task not in self._tasks:
            return False
        if self.outermost is not None:
            return task == self.outermost
        if task != min(self._tasks):
            return False  # it ran inside the smallest task, which is still to end
        if self._is_inside():
            # The task ran inside another one that has produced no gradient yet. If all gradients are ready, no
            # more should follow.
            self._ended_inside = is_complete
            return is_complete
        return True

    def forget(self) -> None:
        """Clear the state after a backward, whether it completed or failed."""
        self._tasks.clear()
        self.current = _NONE
        self.outermost = None

    def forward_begins(self) -> None:
        """Note that a forward begins, so that the next backward starts a new step."""
        self._ended_inside = False
