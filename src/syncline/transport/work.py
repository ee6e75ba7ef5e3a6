"""The class `Work`, which represents an operation under way, and works that combine or measure other works."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from syncline.errors import CollectiveMismatch
from syncline.transport.statistics import Counts


class Disagreement(CollectiveMismatch):
    """The error for calls with `terms` (see `Transport.all_reduce`) that differ between ranks.

    No tensor was written, and the transport can still be used.
    """


class Work(ABC):
    """One operation under way. Keep a reference to this object until `wait` has returned.

    After `wait` has raised a `Disagreement`, the transport can still be used. After `wait` has raised any other error,
    every later operation on the transport raises an error, too.
    """

    @abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the operation is done. After that, the caller can use the tensors.

        Args:
            timeout_seconds: how long to wait. Pass None for the transport's own timeout.

        Raises:
            CollectiveTimeout: a rank did not make the same call in time.
            PeerLost: a rank's process has ended, or the connection to a rank is lost.
            PeerFailed: another rank raised an exception.
            CollectiveMismatch: the ranks called different operations, or the sizes of their tensors differ.
            Disagreement: operations, sizes or `terms` differ between the ranks, and all ranks passed `terms`.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Return True if `wait` would return or raise at once. This method itself never blocks and never raises."""


class _DoneWork(Work):
    """The work of an operation that was complete when the call returned, as in a group of one rank."""

    __slots__ = ()

    def wait(self, timeout_seconds: float | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True


DONE: Work = _DoneWork()


_Part = tuple[Work, Callable[[], object] | None]

_DONE_PART: _Part = (DONE, None)


class CombinedWork(Work):
    """A work that stands for several operations. `wait` waits for them one after the other, with one deadline.

    Args:
        parts: pairs of an operation and a function. `wait` calls the function after the operation is done, for instance
            to copy a received tensor. Use None for no function. To call a function after all operations, append the
            pair `(DONE, function)`.
        at_end: a function that `wait` calls when all parts are done or an error is raised. Pass None for no function.
    """

    __slots__ = ("_at_end", "_parts")

    def __init__(self, parts: Iterable[_Part], *, at_end: Callable[[], object] | None = None) -> None:
        self._parts = list(parts)
        self._at_end = at_end

    @staticmethod
    def of(works: Iterable[Work]) -> CombinedWork:
        """Return a work that stands for all of `works`, without functions to call after them."""
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
    """A work that wraps another work, and adds the duration of each `wait` to the transport's statistics."""

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
