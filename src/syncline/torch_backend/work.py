"""What a call of the torch.distributed backend returns: torch's `Work`, and its future.

Errors come out of `Work.wait`. Who takes the future instead (torch's DistributedDataParallel) gets them there: the
future's value is computed by a `then` callback, because an error that is set with `Future.set_exception` is a value
to the reducer of that class, which then reads tensors from it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from syncline.errors import CollectiveTimeout
from syncline.transport.base import Work

__all__ = ["ENDED", "BackendWork", "Finisher", "Several"]


_POLL_SECONDS = 0.0005


class Several(Work):
    """Operations that are waited for together."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout_seconds: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout_seconds)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Finisher:
    """A thread that completes futures in the order in which they were asked for; started when it is needed.

    Args:
        name: of the group, for the thread's name.
    """

    def __init__(self, name: str) -> None:
        self.pending: set[BackendWork] = set()
        """Works that nobody has waited for: they and their tensors must live until they are done."""
        self._name = name
        self._queue: SimpleQueue[tuple[BackendWork, Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def complete(self, work: BackendWork, future: Future[Any]) -> None:
        """Wait for `work`, then set `future`, whose callbacks read the result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"syncline {self._name}", daemon=True)
            self._thread.start()
        self._queue.put((work, future))

    def close(self) -> None:
        """Let the thread end when all that it was given is done."""
        if self._thread is not None:
            self._queue.put(None)
        self.pending.clear()

    def _run(self) -> None:
        # Nothing of C++ is on the stack during the wait: a thread that is in the middle of it when Python shuts down
        # would abort the process.
        while (item := self._queue.get()) is not None:
            work, future = item
            with suppress(BaseException):  # kept: the future's callback raises it
                work.end()
            future.set_result(None)
            del item, work, future  # and with them what they hold, while the next one is awaited


class BackendWork(dist.Work):
    """An operation under way.

    Args:
        work: the transport's.
        result: the tensors that hold the result in the end.
        finisher: of the group.
        finish: what is left to do when the transport is done (copies into tensors that it could not fill itself).
        source: the sender's rank in the group, of a message.
    """

    def __init__(
        self,
        work: Work,
        result: list[Tensor],
        finisher: Finisher,
        finish: Callable[[], object] | None = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._work: Work | None = work
        self._result = result
        self._finisher = finisher
        self._finish = finish
        self._source = source
        self._future: Future[list[Tensor]] | None = None
        self._error: BaseException | None = None
        finisher.pending.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result may be used.

        Args:
            timeout: how long; none or zero means the group's own timeout, after which the group cannot be used any
                more. After any other the operation is still under way.

        Raises:
            SynclineError: the operation failed.
        """
        if timeout:
            self._wait_until_completed(timeout.total_seconds())
        if self._future is None:
            self.end()
            return True
        try:
            self._future.wait()
        except RuntimeError:
            if self._error is None:
                raise
            raise self._error from None
        return True

    def is_completed(self) -> bool:
        if self._future is not None:
            return self._future.done()
        if self._work is None:
            return True
        if not self._work.is_completed():
            return False
        with suppress(RuntimeError):  # `wait` raises it
            self.end()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[list[Tensor]]:
        """The result's tensors, when they are filled; or the error."""
        if self._future is None:
            start: Future[Any] = Future()
            ended = self._work is None or self._work.is_completed()
            self._future = start.then(self._value)
            if ended:
                start.set_result(None)
            else:
                self._finisher.complete(self, start)
        return self._future

    def _value(self, _: Future[Any]) -> list[Tensor]:
        self.end()
        return self._result

    def end(self) -> None:
        """Wait, on this thread, and put the result where it belongs."""
        if self._error is not None:
            raise self._error
        if self._work is None:
            return
        try:
            self._work.wait()
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._work = self._finish = None
            self._finisher.pending.discard(self)

    def _wait_until_completed(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"not done within the {seconds:g} seconds that this wait allowed; the operation is still under way"
                )
            time.sleep(_POLL_SECONDS)


class _EndedWork(dist.Work):
    """Of a call that has already waited; one object for all of them."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result([])
        return future


ENDED = _EndedWork()
