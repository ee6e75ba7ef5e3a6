"""Whether this process was asked to stop, by a signal or by the program itself.

What follows from it is not decided here: a handler of a signal runs between any two instructions of the main thread, so
all it does is to note the request. `Checkpointer.stop_if_asked` reads it.

[Note: the second signal]

Whoever sends SIGTERM once wants the process to end well, whoever sends it again wants it to end. But one wish may
arrive twice: a scheduler signals all processes of a job, and the launcher among them passes the signal on. So what
comes within two seconds is taken for the same wish, and what comes later does what the signal did before anybody
listened. Signals that end nobody by convention (SIGUSR1) may come as often as they like.

This module needs nothing but the standard library, and `given.py`, which needs no more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from syncline.checks import did_you_mean

__all__ = [
    "EXIT_STOPPED",
    "STOP_SIGNALS",
    "StopRequest",
    "Stopped",
    "checked_signals",
    "forget",
    "listen",
    "rearm",
]


EXIT_STOPPED: int = 75
"""The exit code of ranks that were asked to stop, agreed on a step and saved there (EX_TEMPFAIL: try again)."""

STOP_SIGNALS: tuple[str, ...] = tuple(
    name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)  # Windows has no SIGUSR1
"""By what schedulers announce the end: SIGTERM everywhere, SIGUSR1 by custom under SLURM."""

_SAME_WISH_SECONDS = 2.0

_ENDING = frozenset(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
"""Signals of which the second does what it did before."""


class Stopped(SystemExit):
    """All ranks have stopped after the same step, and what they had is saved; the exit code is `EXIT_STOPPED`."""

    is_agreed_stop = True  # known by name, see `process.is_agreed_stop`

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


class StopRequest:
    """Whether somebody wants this process to stop, and why. Safe in signal handlers and from any thread.

    Example:
        >>> request = StopRequest()
        >>> request.ask("got SIGTERM")
        >>> request.ask("got SIGUSR1")
        >>> request.is_asked, request.why
        (True, 'got SIGTERM')
    """

    __slots__ = ("is_asked", "why")

    def __init__(self) -> None:
        self.is_asked = False
        self.why: str | None = None
        """What was given first."""

    def ask(self, why: str) -> None:
        """Ask to stop; the first reason stays."""
        # No lock: a handler that interrupts whoever holds it would wait forever.
        if self.why is None:
            self.why = why
        self.is_asked = True


# ---------------------------------------------------------------------- signals


class _Handler:
    """What a signal does while somebody listens."""

    def __init__(self, number: signal.Signals, before: Any) -> None:
        self.number = number
        self.before = before
        """What it did: a callable, or SIG_DFL."""
        self.requests: list[StopRequest] = []
        self.first_at: float | None = None
        """When it came first, in `time.monotonic` seconds."""
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A fork, such as a worker of a DataLoader. It ends when it is told to; a signal that was meant for the
            # ranks, and sent to all processes of the job, is none of its business.
            if self.number in _ENDING:
                self._do_as_before(frame)
            return
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
        is_another = self.number in _ENDING and now - self.first_at >= _SAME_WISH_SECONDS
        if is_another or not self.requests:
            self._do_as_before(frame)
            return
        for request in tuple(self.requests):
            request.ask(f"got {self.number.name}")
        if callable(self.before) and self.before is not signal.default_int_handler:
            self.before(number, frame)

    def _do_as_before(self, frame: FrameType | None) -> None:
        if callable(self.before):
            self.before(int(self.number), frame)
        else:
            signal.signal(self.number, signal.SIG_DFL)
            os.kill(os.getpid(), self.number)


_handlers: dict[signal.Signals, _Handler] = {}


def checked_signals(names: Iterable[str | int]) -> tuple[signal.Signals, ...]:
    """The signals of these names or numbers, in their order.

    Raises:
        TypeError: it is one text, or something else is among them.
        ValueError: there is no such signal here, or no process can listen to it.

    Example:
        >>> [one.name for one in checked_signals(["SIGTERM", "usr1"])]
        ['SIGTERM', 'SIGUSR1']
    """
    if isinstance(names, str):
        raise TypeError(f"expected stop_signals to be a tuple of names, got {names!r}: write ({names!r},)")
    if not isinstance(names, Iterable):
        raise TypeError(f"expected stop_signals to be a tuple of names, got {names!r}: write () for none")
    found = [_signal(name) for name in names]
    return tuple(dict.fromkeys(found))


def _signal(name: str | int) -> signal.Signals:
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise TypeError(f"expected stop_signals to hold names of signals, such as 'SIGUSR1', got {name!r}")
    try:
        if isinstance(name, int):
            found = signal.Signals(name)
        else:
            upper = name.upper()
            found = signal.Signals[upper if upper.startswith("SIG") else f"SIG{upper}"]
    except (KeyError, ValueError):
        raise ValueError(
            f"expected stop_signals to hold names of signals, such as 'SIGUSR1', got {name!r}{_near(name)}"
        ) from None
    if found.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"{found.name} ends or halts a process without asking it: nobody can listen to it")
    return found


def _near(name: str | int) -> str:
    if not isinstance(name, str):
        return ""
    upper = name.upper()
    return did_you_mean(upper if upper.startswith("SIG") else f"SIG{upper}", signal.Signals.__members__)


def listen(request: StopRequest, signals: Sequence[signal.Signals]) -> bool:
    """From now on these signals ask `request`, until `forget`.

    A handler of the program's own is called as well. A signal that is ignored stays ignored.

    Returns:
        Whether it could be done: only the main thread can.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    for number in signals:
        handler = signal.getsignal(number)
        if handler is None or handler == signal.SIG_IGN:  # None: whoever set it did so outside of Python
            continue
        if not isinstance(handler, _Handler):
            handler = _handlers[number] = _Handler(number, handler)
            signal.signal(number, handler)
        if request not in handler.requests:
            handler.requests.append(request)
    return True


def forget(request: StopRequest) -> None:
    """The inverse of `listen`: signals that nobody listens to any more do what they did before."""
    for number, handler in list(_handlers.items()):
        if request not in handler.requests:
            continue
        handler.requests.remove(request)
        current: Any = signal.getsignal(number)
        if not handler.requests and current is handler:
            with contextlib.suppress(ValueError):  # not in the main thread: the handler itself does as before
                signal.signal(number, handler.before)
                del _handlers[number]


def rearm() -> None:
    """A signal that comes now counts as the first: what the last one asked for is done."""
    for handler in list(_handlers.values()):
        handler.first_at = None
