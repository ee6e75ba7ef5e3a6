"""Names the ranks whose program has ended, but whose process goes on to run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from syncline._torch import elastic
from syncline.session.process import forget_program_end, has_program_ended
from syncline.tools.launch.losses import processes_of
from syncline.tools.launch.output import say

_LINGERING_SECONDS = 30.0

_LOOK_SECONDS = 1.0


@contextlib.contextmanager
def lingering_ranks_named() -> Iterator[None]:
    """In a context in which torch's launcher runs, say once of each rank that it lingers, and how to see why.

    It is not ended: it may wait for a thread, or write a file in a handler of `atexit`, as the user wants it.
    """
    paths: set[str] = set()
    since: dict[int, float] = {}  # by process number; infinity once it has been named
    looked_at = -math.inf

    def look(ranks: SubprocessContext, now: float) -> None:
        nonlocal looked_at
        looked_at = now
        paths.update(ranks.error_files.values())
        for local_rank, process in enumerate(processes_of(ranks)):
            if process.poll() is not None or not has_program_ended(ranks.error_files[local_rank]):
                continue
            if now - since.setdefault(process.pid, now) >= _LINGERING_SECONDS:
                since[process.pid] = math.inf
                say(
                    f"rank {ranks.envs[local_rank]['RANK']} (pid {process.pid}) ended its program "
                    f"{_LINGERING_SECONDS:g} s ago, but its process still runs: a thread, an exit handler or a "
                    f"destructor has not ended. To see where: py-spy dump --pid {process.pid}"
                )

    def watched(poll: Callable[[SubprocessContext], Any]) -> Callable[[SubprocessContext], Any]:
        def look_and_poll(ranks: SubprocessContext) -> Any:
            if (now := time.monotonic()) >= looked_at + _LOOK_SECONDS:
                look(ranks, now)
            return poll(ranks)

        return look_and_poll

    try:
        with elastic.POLL.replaced(watched):
            yield
    finally:
        for path in paths:  # perhaps among the logs that the user keeps
            forget_program_end(path)
