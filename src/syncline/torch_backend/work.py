"""The work objects and futures that the collectives of the backend return.

`BackendWork.wait` raises the error of an operation. Torch's DistributedDataParallel uses the future instead of `wait`,
so the future must raise the error, too. A `then` callback therefore computes the value of the future, and raises the
error. `Future.set_exception` cannot be used, because the C++ reducer of DistributedDataParallel would then try to read
tensors from the error.
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
from syncline.liveness.at_exit import AT_EXIT
from syncline.transport.work import DONE, Work

_POLL_SECONDS = 0.0005
"""The time between two checks of a running operation, during a wait with a timeout."""

_AT_EXIT_SECONDS = 1.0
"""How long a future stays incomplete at the end of the process. Then it is completed for exit handlers that wait."""


class Finisher:
    """A thread that completes futures, in the order of the calls of `complete`. It starts at the first such call.

    Args:
        name: the name of the group. It is part of the thread's name.
    """

    def __init__(self, name: str) -> None:
        self.pending: set[BackendWork] = set()
        """The works that have not ended yet. The set keeps these works and their tensors alive until they end."""
        self._name = name
        self._queue: SimpleQueue[tuple[BackendWork, Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._completing = threading.Lock()
        """Held while a future is completed and its callbacks run. The end of the process keeps this lock."""
        self._is_at_exit = False
        """Whether the end of the process has the lock, and exit handlers of the program still run."""

    def complete(self, work: BackendWork, future: Future[Any]) -> None:
        """Let the thread wait until `work` has ended, and then complete `future`. Callbacks of `future` then run.

        An exit handler that the program registered before Syncline's waits itself: the thread might still be inside
        C++ code when Python shuts down, right after the handler.
        """
        if AT_EXIT.is_over:
            self._is_at_exit = True
            self._finish(work, future)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"syncline {self._name}", daemon=True)
            self._thread.start()
            AT_EXIT.acquire(self._completing)
        self._queue.put((work, future))

    def close(self) -> None:
        """Let the thread end when it has completed all futures that were requested before this call."""
        if self._thread is not None:
            self._queue.put(None)
        self.pending.clear()

    def _run(self) -> None:
        # No C++ frame should be on the stack during the wait. If Python shuts down while a thread is inside a C++ call,
        # the process may abort.
        while (item := self._queue.get()) is not None:
            self._finish(*item)
            del item  # release its tensors before the wait for the next item

    def _finish(self, work: BackendWork, future: Future[Any]) -> None:
        with suppress(BaseException):  # `work` keeps the error, and the future's callback raises it
            work.end()
        if not self._is_at_exit:
            # If the end of the process has the lock, Python mostly ends this thread here, outside of C++ code. If not,
            # an exit handler that the program registered before Syncline's may be waiting for this future.
            self._is_at_exit = not self._completing.acquire(timeout=_AT_EXIT_SECONDS)
        with suppress(
            Exception
        ):  # a callback's error belongs to this future, and the others have to be completed
            future.set_result(None)
        if not self._is_at_exit:
            self._completing.release()


class BackendWork(dist.Work):
    """A running operation of a transport, as a `Work` object of torch.

    Args:
        work: the transport's work.
        result: the tensors that hold the result when the operation has ended.
        finisher: the finisher of the group.
        finish: a function to call when `work` is done, for instance to copy the result. Pass None for no function.
        source: for a receive, the rank that sends the message. For other operations, -1.
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
        """Block until the operation has ended and its result can be used.

        Args:
            timeout: how long to wait. None or zero means the timeout of the group. If the timeout of the group expires,
                the group cannot be used any more. If a timeout that was passed here expires, the operation continues.

        Raises:
            SynclineError: the operation failed or a timeout expired.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        deadline = time.monotonic() + seconds
        while seconds and not self.is_completed():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"the operation did not end within {seconds:g} s, the timeout that was passed to wait(). The "
                    "operation is still under way: call wait() again to continue the wait"
                )
            time.sleep(_POLL_SECONDS)
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
        """Return a future whose value is the list of result tensors. If the operation fails, the future raises."""
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
        """Wait for the operation in the calling thread, and then copy the result to its tensors."""
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


ENDED = BackendWork(DONE, [], Finisher("ended"))
"""The work object that a call returns when its operation has already ended. All such calls share one object."""

ENDED.wait()
