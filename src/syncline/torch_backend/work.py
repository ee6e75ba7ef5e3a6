"""The work objects and futures that the collectives of the backend return.

`Work.wait` raises the errors of an operation. A caller that uses the future instead (torch's DistributedDataParallel)
gets the errors from the future. A `then` callback computes the value of the future, and raises these errors.
`Future.set_exception` would not do, because the reducer of DistributedDataParallel would read tensors from the error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from syncline.errors import CollectiveTimeout
from syncline.transport.work import Work

_POLL_SECONDS = 0.0005
"""How long a wait with a timeout sleeps before it looks again whether the operation is done."""


class Finisher:
    """A thread that completes futures in the order in which they were requested. It starts with the first request.

    Args:
        name: name of the group, used in the thread's name.
    """

    def __init__(self, name: str) -> None:
        self.pending: set[BackendWork] = set()
        """Works that have not ended yet. The set keeps them and their tensors alive until then."""
        self._name = name
        self._queue: SimpleQueue[tuple[BackendWork, Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def complete(self, work: BackendWork, future: Future[Any]) -> None:
        """Let the thread wait for `work` and then set `future`, whose callbacks read the result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"syncline {self._name}", daemon=True)
            self._thread.start()
        self._queue.put((work, future))

    def close(self) -> None:
        """Let the thread end after all requested works."""
        if self._thread is not None:
            self._queue.put(None)
        self.pending.clear()

    def _run(self) -> None:
        # No C++ frame may be on the stack during the wait. If Python shuts down while a thread is inside a C++ call,
        # the process aborts.
        while (item := self._queue.get()) is not None:
            work, future = item
            with suppress(BaseException):  # `work` keeps the error, and the future's callback raises it
                work.end()
            future.set_result(None)
            del item, work, future  # release their tensors before the wait for the next item


class BackendWork(dist.Work):
    """An operation under way, as an object of torch.

    Args:
        work: the transport's work.
        result: the tensors that hold the result after the operation.
        finisher: the finisher of the group.
        finish: a function to call when the transport is done, for instance to copy the result; None for no function.
        source: the rank that sends the message, for a receive; else -1.
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
            timeout: how long to wait. None or zero means the timeout of the group. After the timeout of the group, the
                group cannot be used any more. After any other timeout, the operation is still under way.

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

    _source_rank = source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the result's tensors, or of the error."""
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
        """Wait in this thread, and copy the result to its tensors."""
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
                    f"the operation was not done within {seconds:g} s, the timeout of this wait. The operation is "
                    "still under way, so you can wait again"
                )
            time.sleep(_POLL_SECONDS)


class _EndedWork(dist.Work):
    """The work of a call that has waited already. All such calls return the same object."""

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
