"""Requests to stop this process, which a signal or the program makes.

A signal handler can interrupt the main thread between any two instructions. So the handler only records the request.
`Checkpointer.stop_if_asked` reads the request, saves a checkpoint, and stops the ranks.

[Note: the second signal]

A first SIGTERM asks the process to save and end. A second SIGTERM asks the process to end at once. However, one request
may arrive as two signals: a scheduler signals all processes of a job, and the launcher, which is one of them, passes
the signal on. So a signal that arrives within two seconds of the first belongs to the same request. A signal that
arrives later has the effect that it had before this handler was installed. Signals that by convention do not end a
process (SIGUSR1) can arrive any number of times.

This module imports only `checks.py` and the standard library. `checks.py` imports only the standard library.
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

EXIT_STOPPED: int = 75
"""The exit code of ranks that were asked to stop, agreed on a step, and saved their state after this step.

The C header sysexits.h calls this code EX_TEMPFAIL, which means: try again.
"""

STOP_SIGNALS: tuple[str, ...] = tuple(name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""The signals by which schedulers announce the end of a job. All send SIGTERM. SLURM often sends SIGUSR1 as well.

On Windows, which has no SIGUSR1, the tuple contains only SIGTERM.
"""

SAME_REQUEST_SECONDS = 2.0
"""Signals to end a process that arrive within this time belong to one request."""

_ENDING = frozenset(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
"""The signals that by convention end a process.

When such a signal arrives again, it has the effect that it had before the handler was installed.
"""


class Stopped(SystemExit):
    """The exception that ends ranks with the exit code `EXIT_STOPPED` after they have stopped together and saved."""

    is_agreed_stop = True  # read by name, see `process.is_agreed_stop`

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


class _Handler:
    """The handler of one signal. It is installed as long as at least one `StopRequest` listens for the signal."""

    def __init__(self, number: signal.Signals, before: Any) -> None:
        self.number = number
        self.before = before
        """The previous handler of the signal: a callable or SIG_DFL."""
        self.requests: list[StopRequest] = []
        self.first_at: float | None = None
        """The value of `time.monotonic` when the signal first arrived; None before it arrived, and after `rearm`."""
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # This process is a fork, such as a worker of a DataLoader. Signals that end a process end the fork. Other
            # signals are sent to all processes of the job but are meant for the ranks, so the fork ignores them.
            if self.number in _ENDING:
                self._do_as_before(frame)
            return
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
        is_another = self.number in _ENDING and now - self.first_at >= SAME_REQUEST_SECONDS
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


class StopRequest:
    """A record of whether this process is asked to stop, and why. Signal handlers and any thread can call `ask`.

    Examples:
        >>> request = StopRequest()
        >>> request.ask("got SIGTERM")
        >>> request.ask("got SIGUSR1")
        >>> request.is_asked, request.why
        (True, 'got SIGTERM')
    """

    __slots__ = ("_handlers", "is_asked", "why")

    def __init__(self) -> None:
        self.is_asked = False
        self.why: str | None = None
        """The reason of the first request; None if no stop was requested."""
        self._handlers: list[_Handler] = []

    def ask(self, why: str) -> None:
        """Ask for a stop, and record the reason `why`. The reason of a later request does not replace the first one."""
        # No lock: a signal handler that interrupts the code that holds the lock would wait forever.
        if self.why is None:
            self.why = why
        self.is_asked = True

    def listen(self, signals: Sequence[signal.Signals]) -> bool:
        """Install handlers, so that each of these signals calls `ask` until `forget` is called.

        A handler that the program has installed is called as well. An ignored signal stays ignored.

        Returns:
            True in the main thread. False in any other thread, because only the main thread can install handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in signals:
            handler: Any = signal.getsignal(number)
            # None means that code outside of Python has set the handler.
            if handler is None or handler == signal.SIG_IGN:
                continue
            if not isinstance(handler, _Handler):
                handler = _Handler(number, handler)
                signal.signal(number, handler)
            if self not in handler.requests:
                handler.requests.append(self)
                self._handlers.append(handler)
        return True

    def forget(self) -> None:
        """Undo `listen`. If no other `StopRequest` listens for a signal, install the previous handler of the signal."""
        while self._handlers:
            handler = self._handlers.pop()
            handler.requests.remove(self)
            installed: Any = signal.getsignal(handler.number)
            if not handler.requests and installed is handler:
                # Another thread than the main thread gets a ValueError. `handler` then calls the previous handler.
                with contextlib.suppress(ValueError):
                    signal.signal(handler.number, handler.before)

    def rearm(self) -> None:
        """Make the next signal count as a first signal, because the program has acted on this request."""
        for handler in self._handlers:
            handler.first_at = None


def checked_signals(names: Iterable[str | int]) -> tuple[signal.Signals, ...]:
    """Return the signals with these names or numbers, in this order and without duplicates.

    Raises:
        TypeError: `names` is a single string, or contains something that is not a name or a number.
        ValueError: this system has no such signal, or no process can handle the signal.

    Examples:
        >>> [one.name for one in checked_signals(["SIGTERM", "usr1"])]
        ['SIGTERM', 'SIGUSR1']
    """
    if isinstance(names, str):
        raise TypeError(
            f"expected stop_signals to be a tuple of signals, got the text {names!r}: write ({names!r},)"
        )
    if not isinstance(names, Iterable):
        raise TypeError(
            f"expected stop_signals to be a tuple of signals, got {names!r}: write () for no signals"
        )
    found = [_signal(name) for name in names]
    return tuple(dict.fromkeys(found))


def _signal(name: str | int) -> signal.Signals:
    text = f"expected stop_signals to contain names of signals, such as 'SIGUSR1', got {name!r}"
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise TypeError(text)
    key = f"SIG{name.upper().removeprefix('SIG')}" if isinstance(name, str) else name
    try:
        found = signal.Signals[key] if isinstance(key, str) else signal.Signals(key)
    except (KeyError, ValueError):
        raise ValueError(text + did_you_mean(key, signal.Signals.__members__)) from None
    if found.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(
            f"expected stop_signals to contain only signals that a program can handle, got {found.name}: leave it out, "
            "because the system does not let programs handle it"
        )
    return found
