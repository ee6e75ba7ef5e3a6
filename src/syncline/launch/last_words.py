"""When a worker is killed, its peers get a moment to say where that met them, before they are ended.

The launcher beneath ends all other workers in the same breath in which it sees a death. Those find out by themselves
within milliseconds, and raise an error that names rank, step and collective, which is all that is known of a death
without words. Whether they are faster than the launcher would be a matter of luck.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

__all__ = ["time_for_last_words"]

_POLL_SECONDS = 0.01
_ORDERLY = (-signal.SIGINT, -signal.SIGTERM)
"""Exit codes of workers that somebody has asked to end: of these nobody needs to be told."""


@contextlib.contextmanager
def time_for_last_words(seconds: float) -> Iterator[None]:
    """While this is open, workers whose peer was killed have `seconds` to end by themselves."""
    close = SubprocessContext._close

    def close_later(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        workers = [handler.proc for handler in self.subprocess_handlers.values()]
        codes = [worker.poll() for worker in workers]
        if any(code is not None and code < 0 and code not in _ORDERLY for code in codes):
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
                time.sleep(_POLL_SECONDS)
        close(self, death_sig, timeout)

    SubprocessContext._close = close_later  # type: ignore[method-assign]
    try:
        yield
    finally:
        SubprocessContext._close = close  # type: ignore[method-assign]
