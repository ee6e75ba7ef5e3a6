"""`Work`, an operation under way, and works that combine or measure other works."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from syncline.errors import CollectiveMismatch
from syncline.transport.statistics import Counts


class Disagreement(CollectiveMismatch):
    """An error for ranks whose calls or terms differ. No tensor was written, and the transport remains usable."""


class Work(ABC):
    """One operation under way. Keep the object until `wait` has returned.

    After an error in `wait`, every later operation on the transport raises as well. Only after `Disagreement`, the
    transport remains usable.
    """

    @abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the operation is done and its tensors may be used.

        Args:
            timeout_seconds: how long to wait; None means the transport's own timeout.

        Raises:
            CollectiveTimeout: a rank did not make the same call in time.
            PeerLost: a rank's process has ended, or the connection to a rank is lost.
            PeerFailed: another rank raised an exception.
            CollectiveMismatch: the ranks called different operations, or the sizes of their tensors differ.
            Disagreement: operations, sizes or terms differ, and all calls had terms.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once. This method never blocks and never raises."""


class _DoneWork(Work):
    """An operation that is complete when it starts, for instance in a group of one rank."""

    __slots__ = ()

    def wait(self, timeout_seconds: float | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True


DONE: Work = _DoneWork()


_Part = tuple[Work, Callable[[], object] | None]

_DONE_PART: _Part = (DONE, None)


class CombinedWork(Work):
    """Several operations as one work. `wait` waits for them one after the other, with one deadline.

    Args:
        parts: the operations, each with a function to call after its wait (to copy a received tensor, for instance) or
            None. For a function to call after all operations, add the part `(DONE, function)`.
        at_end: a function to call once all parts are complete, and also whenever a wait raises.
    """

    __slots__ = ("_at_end", "_parts")

    def __init__(self, parts: Iterable[_Part], *, at_end: Callable[[], object] | None = None) -> None:
        self._parts = list(parts)
        self._at_end = at_end

    @staticmethod
    def of(works: Iterable[Work]) -> CombinedWork:
        """Return several operations as one work, without functions to call after them."""
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
    """An operation whose `wait` adds the time spent waiting to the transport's statistics."""

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
