"""The end of a process: report an uncaught exception to the launcher and the peers, and end without a hang."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType

import torch.distributed as dist

from syncline import environment
from syncline._torch.process_groups import living_groups
from syncline.session import process
from syncline.transport.base import Transport
from syncline.user_code import warn_user

_DESTROY_SECONDS = 10.0


class ReportingHook:
    """An excepthook that also reports to the launcher, by the error file, and to the peers.

    Args:
        before: the hook that prints the exception; it is called first, and `remove` puts it back.
        report: reports the exception to the peers.
    """

    def __init__(
        self,
        before: Callable[..., object],
        report: Callable[[BaseException, TracebackType | None], None],
    ) -> None:
        self._before = before
        self._report = report
        self._path = environment.error_file()
        self._pid = os.getpid()
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        is_rank = os.getpid() == self._pid  # a fork inherits the hook
        if is_rank and self._path is not None:
            process.record_failure(error, self._path, tb)
        # Print before the peers are informed. Once one rank has ended, the launcher soon ends the others.
        self._before(kind, error, tb)
        if is_rank:
            self._report(error, tb)

    def remove(self) -> None:
        """Put the former hook back, unless the program has set another one."""
        if sys.excepthook is self:
            sys.excepthook = self._before


def report_to_peers(transports: Iterable[Transport], error: BaseException, tb: TracebackType | None) -> None:
    """Report the exception to the peers. Ranks waiting for this one, now or later, raise `PeerFailed` with its text."""
    lines = traceback.format_exception(type(error), error, tb)
    reason = "it ended by an uncaught exception:\n" + "".join(lines).rstrip()
    for transport in transports:
        with contextlib.suppress(Exception):
            transport.abort(reason)


def has_failed() -> bool:
    """Return whether an exception ends this process. Python does not record `sys.exit(1)`; the error file does."""
    path = environment.error_file()
    return getattr(sys, "last_type", None) is not None or (path is not None and os.path.exists(path))


def uncaught_exception() -> BaseException | None:
    """Return the exception that ends this process; None if there is none, or if its prompt survived it."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def keep_groups() -> None:
    """Keep torch's process groups from being destroyed when the process ends.

    An exception ends this process, perhaps while collectives are pending that its peers will never join. The destructor
    of a group would wait for these collectives until the timeout, while the peers wait for this process. Without it,
    the kernel closes the connections at once.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(living_groups()))


class Destroyer:
    """A thread that destroys the default group, started in advance: Python 3.12 starts no thread while it exits."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._destroy = False
        self._thread = threading.Thread(target=self._run, name="syncline-shutdown", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._decided.wait()
        if self._destroy:
            dist.destroy_process_group()

    def end(self, *, destroy: bool) -> None:
        """End the thread, but wait only a limited time for a collective that other ranks have not joined."""
        self._destroy = destroy
        self._decided.set()
        self._thread.join(_DESTROY_SECONDS)
        if self._thread.is_alive():
            warn_user(
                f"shutdown: after {_DESTROY_SECONDS:g} s a collective is still under way that other ranks have not "
                "joined; the process group is left behind. Wait for asynchronous work before shutdown()",
                UserWarning,
            )
