"""When a worker is killed, its peers get a moment to say where that met them, before they are ended.

The launcher beneath ends all other workers in the same breath in which it sees a death. Those find out by themselves
within milliseconds, and raise an error that names rank, step and collective, which is all that is known of a death
without words. Whether they are faster than the launcher would be a matter of luck.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from syncline._torch import elastic

__all__ = ["Ended", "time_for_last_words"]

Ended = dict[int, tuple[int, int]]
"""Process number and exit code by local rank, in the order in which the ends were seen."""

_POLL_SECONDS = 0.01
_ORDERLY = (-signal.SIGINT, -signal.SIGTERM)
"""Exit codes of workers that somebody has asked to end: of these nobody needs to be told."""


@contextlib.contextmanager
def time_for_last_words(seconds: float, note: Callable[[Ended], None]) -> Iterator[None]:
    """While this is open, workers whose peer was killed have `seconds` to end by themselves.

    Args:
        seconds: how long.
        note: called with the workers that have ended, before the launcher ends the others.
    """
    if not elastic.CLOSE.is_there:
        yield
        return

    def make(close: Callable[..., None]) -> Callable[..., None]:
        def close_later(ranks: SubprocessContext, *args: Any, **kwargs: Any) -> None:
            note(_wait_for_ends(ranks, seconds))
            close(ranks, *args, **kwargs)

        return close_later

    with elastic.CLOSE.replaced(make):
        yield


def _wait_for_ends(ranks: SubprocessContext, seconds: float) -> Ended:
    """Return the workers that have ended; if one was killed, wait until all have, or the time is up."""
    workers = {local_rank: handler.proc for local_rank, handler in ranks.subprocess_handlers.items()}
    ended: Ended = {}

    def look() -> None:
        for local_rank, worker in workers.items():
            code = worker.poll()
            if code is not None:
                ended.setdefault(local_rank, (worker.pid, code))

    look()
    if any(code < 0 and code not in _ORDERLY for _, code in ended.values()):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(ended) < len(workers):
            time.sleep(_POLL_SECONDS)
            look()
    return ended
