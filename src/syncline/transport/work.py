"""`Work`: an operation under way. Works that consist of others, or measure them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from syncline.errors import CollectiveMismatch
from syncline.transport.statistics import Counts


class Disagreement(CollectiveMismatch):
    """An error for ranks whose calls have different terms. Nothing was written, and the transport remains usable."""


class Work(ABC):
    """One operation under way. Keep the object until `wait` has returned.

    An error in `wait` ends the transport: every later operation on it raises as well. `Disagreement` is the exception.
    """

    @abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the operation is done and its tensors may be used.

        Args:
            timeout_seconds: how long to wait; None means the transport's own timeout.

        Raises:
            CollectiveTimeout: a rank did not arrive in time.
            PeerLost: a rank's process or connection is gone.
            PeerFailed: another rank raised an exception.
            CollectiveMismatch: the ranks called different operations, or sizes differ.
            Disagreement: operations, sizes or terms differ, and all calls had terms.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once. Never blocks, never raises."""


class _DoneWork(Work):
    """An operation that was complete when it was started, for instance in a group of one rank."""

    __slots__ = ()

    def wait(self, timeout_seconds: float | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True


DONE: Work = _DoneWork()


_Part = tuple[Work, Callable[[], object] | None]

_DONE_PART: _Part = (DONE, None)


class CombinedWork(Work):
    """Several operations as one work. They are waited for in turn, against one deadline.

    Args:
        parts: the operations, each with the action that completes it, such as writing what was received; None if there
            is none. An action after the last operation is a part as well: `(DONE, action)`.
        at_end: called once all parts are complete, and also whenever a wait raises.
    """

    __slots__ = ("_at_end", "_parts")

    def __init__(self, parts: Iterable[_Part], *, at_end: Callable[[], object] | None = None) -> None:
        self._parts = list(parts)
        self._at_end = at_end

    @staticmethod
    def of(works: Iterable[Work]) -> CombinedWork:
        """Return operations that need no actions as one work."""
        return CombinedWork([(work, None) for work in works])

    def wait(self, timeout_seconds: float | None = None) -> None:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        at_end = self._at_end
        try:
            for index, (work, action) in enumerate(self._parts):
                work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if action is not None:
                    action()
                self._parts[index] = _DONE_PART  # releases the tensors of this part
            self._at_end = None
        finally:
            if at_end is not None:
                at_end()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work, _ in self._parts)


class MeasuredWork(Work):
    """An operation that adds the time spent in `wait` to the transport's statistics."""

    __slots__ = ("_counts", "_inner")

    def __init__(self, inner: Work, counts: Counts) -> None:
        self._inner = inner
        self._counts = counts

    def wait(self, timeout_seconds: float | None = None) -> None:
        start = time.perf_counter()
        try:
            self._inner.wait(timeout_seconds)
        finally:
            self._counts.waited_seconds += time.perf_counter() - start

    def is_completed(self) -> bool:
        return self._inner.is_completed()
