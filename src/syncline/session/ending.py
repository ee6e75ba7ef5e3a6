"""The end of a process: reports of an uncaught exception to the launcher and the peers, and an end without a hang."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType

import torch.distributed as dist

from syncline import environment, tracebacks
from syncline._torch.process_groups import living_groups
from syncline.liveness.at_exit import AT_EXIT, keep_for_ever
from syncline.session import process
from syncline.transport.base import Transport
from syncline.user_code import warn_user

_DESTROY_SECONDS = 10.0


class ReportingHook:
    """A `sys.excepthook` that also reports the exception to the launcher (in the error file) and to the peers.

    Args:
        before: the previous hook, which `remove` installs again.
        prefix: the text to print before each line, unless the previous hook belongs to the program and prints itself.
        report: a function that reports the exception to the peers.
    """

    def __init__(
        self,
        before: Callable[..., object],
        report: Callable[[BaseException, TracebackType | None], None],
        prefix: str = "",
    ) -> None:
        self._before = before
        self._report = report
        self._path = environment.error_file()
        self._print = tracebacks.printing_hook(
            before,
            error_file=self._path,
            is_whole=environment.wants_whole_tracebacks(),
            prefix=prefix,
        )
        self._pid = os.getpid()
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        is_rank = os.getpid() == self._pid  # a fork inherits the hook
        if is_rank and self._path is not None:
            described = tracebacks.describe(error, tb)
            process.record_failure(error, self._path, brief=described.brief, whole=described.whole)
        # Print before the peers are informed. Once one rank has ended, the launcher soon ends the others.
        self._print(kind, error, tb)
        if is_rank:
            self._report(error, tb)

    def remove(self) -> None:
        """Install the previous hook again, unless the program has replaced this hook since."""
        if sys.excepthook is self:
            sys.excepthook = self._before


def report_to_peers(transports: Iterable[Transport], error: BaseException, tb: TracebackType | None) -> None:
    """Report the exception to the peers. Each rank that waits for this rank, now or later, raises `PeerFailed`."""
    text = tracebacks.describe(error, tb).brief
    for transport in transports:
        with contextlib.suppress(Exception):
            transport.abort(tracebacks.summary(error), traceback=text)


def has_failed() -> bool:
    """Return whether this process ends because of an exception.

    This includes `sys.exit(1)`: Python does not record its SystemExit, but the error file of the launcher shows it.
    """
    path = environment.error_file()
    return getattr(sys, "last_type", None) is not None or (path is not None and os.path.exists(path))


def uncaught_exception() -> BaseException | None:
    """Return the uncaught exception that ends this process. Return None if no exception ends this process.

    The result is also None in an interactive prompt, which an uncaught exception does not end.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def keep_groups() -> None:
    """Prevent the destructors of torch's process groups from running when the process ends.

    Call this function if an exception ends the process. Then collectives may be pending that the peers will never join.
    The destructor of a group would wait for these collectives until the timeout, while the peers wait for this process.
    Without the destructor, the process ends at once, and the kernel closes its connections.
    """
    keep_for_ever(living_groups())


class Destroyer:
    """A thread that destroys the default process group.

    The thread is started in advance, because Python 3.12 starts no thread while it exits.
    """

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._is_done = threading.Event()
        self._destroy = False
        self._held: list[object] = []
        self._error: Exception | None = None
        """The error with which torch has refused to destroy the group."""
        self._thread = threading.Thread(target=self._run, name="syncline-shutdown", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._decided.wait()
        try:
            if self._destroy:
                dist.destroy_process_group()
        except Exception as error:
            self._error = error
        self._is_done.set()
        self._held.clear()

    def hold(self, group: object) -> None:
        """Hold a reference to a group until it has been destroyed, and drop it in this thread.

        Dropping the last reference to a Gloo group waits for threads of the group, which can take 20 ms.
        """
        self._held.append(group)

    def end(self, *, destroy: bool) -> None:
        """Destroy the process group if `destroy` is True, and end the thread.

        Wait at most 10 seconds for this, because a collective may be pending that other ranks have not joined. If the
        group has not been destroyed by then, warn.
        """
        self._destroy = destroy
        AT_EXIT.wait_for(self._thread)
        self._decided.set()
        if not self._is_done.wait(_DESTROY_SECONDS):
            warn_user(
                f"sl.shutdown() could not destroy the process group within {_DESTROY_SECONDS:g} s, because other "
                "ranks have not joined a pending collective. Wait for all asynchronous work before sl.shutdown()",
                UserWarning,
            )
        if self._error is not None:
            error, self._error = self._error, None
            warn_user(f"torch could not destroy the process group: {error!r}", UserWarning)
