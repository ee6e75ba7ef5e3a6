"""The ranks of this host that are lost in `sl.steps`, where others train on without them, and those that stay: their
program has ended, but their process goes on to run."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from syncline import environment
from syncline._torch import elastic
from syncline.session.process import (
    came_to_steps,
    forget_program_end,
    forget_rank,
    has_program_ended,
    is_in_steps,
    name_in_steps,
)
from syncline.tools.launch.failures import Failure
from syncline.tools.launch.hosts import OtherHosts
from syncline.tools.launch.output import say
from syncline.tracebacks import forget_printed


class Losses:
    """The lost ranks of this host, and those that were started again in their place.

    Args:
        num_restarts: how many lost ranks are started again, to join the others.
    """

    def __init__(self, num_restarts: int) -> None:
        self.ranks: set[int] = set()
        """The local ranks that were lost, and were not started again."""
        self._num_restarts = num_restarts
        self._joining: set[int] = set()
        """The local ranks that were started again."""
        self._other_hosts: OtherHosts | None = None

    def begin(self, ranks: SubprocessContext) -> None:
        """Begin, before the ranks are started. If other hosts are training already, the ranks join them."""
        self.ranks, self._joining = set(), set()
        if int(ranks.envs[0]["GROUP_WORLD_SIZE"]) > 1:
            self._other_hosts = others = OtherHosts(ranks.envs[0])
            if others.are_training_without_this_host:
                self._joining = set(ranks.envs)
                for variables in ranks.envs.values():
                    variables[environment.JOINS] = "1"

    def see(self, ranks: SubprocessContext, failed: set[int], *, may_restart: bool) -> bool:
        """Find the ranks among the failed ones that were lost in `sl.steps`. Start them again if this is allowed.

        Returns:
            Whether a rank was started again.
        """
        is_any_restarted = False
        paths = ranks.error_files
        lost_now = {rank for rank in failed - self.ranks if is_in_steps(paths[rank]) or rank in self._joining}
        if not failed <= self.ranks | lost_now:
            return False  # another rank has failed, which ends the job
        for rank in sorted(lost_now):
            path = paths[rank]
            lost = processes_of(ranks)[rank]
            if is_in_steps(path) and self._other_hosts is not None:
                self._other_hosts.record_lost(name_in_steps(path))
            is_restarted = may_restart and self._num_restarts > 0 and self._others_train(ranks)
            failure = Failure(rank=rank, pid=lost.pid, return_code=lost.returncode, record=None)
            then = (
                "train on, and it is started again, to join them" if is_restarted else "train on without it"
            )
            say(f"local rank {rank} (pid {lost.pid}) {failure.ending}; the other ranks {then}")
            if not is_restarted:
                self.ranks.add(rank)
                continue
            self._num_restarts -= 1
            self._joining.add(rank)
            forget_rank(path)
            forget_printed(path)
            elastic.start_again(ranks, rank, {environment.JOINS: "1"})
            is_any_restarted = True
        return is_any_restarted

    def end_those_who_cannot_join(self, ranks: SubprocessContext) -> None:
        """End the ranks that have not come to `sl.steps` before the others have ended."""
        processes = processes_of(ranks)
        waiting = [rank for rank in self._joining if not came_to_steps(ranks.error_files[rank])]
        if not waiting or any(
            process.poll() is None for rank, process in enumerate(processes) if rank not in waiting
        ):
            return
        if not self.other_hosts_run():
            for rank in waiting:
                processes[rank].send_signal(signal.SIGKILL)

    def other_hosts_run(self) -> bool:
        """Return whether there are ranks on other hosts."""
        return self._other_hosts is not None and self._other_hosts.are_running()

    def must_stay(self) -> bool:
        """Return whether this launcher must not end, although its ranks have, because others need its store."""
        return self._other_hosts is not None and self._other_hosts.has_store and self.other_hosts_run()

    def wait_for_other_hosts(self) -> bool:
        """Wait for other launchers, after the ranks of this host have ended. Return False if there is no other host."""
        self.end()
        if self._other_hosts is not None:
            self._other_hosts.wait()
        return self._other_hosts is not None

    def end(self) -> None:
        """Record that the ranks of this host have ended, also if they have failed."""
        if self._other_hosts is not None:
            self._other_hosts.withdraw()

    def _others_train(self, ranks: SubprocessContext) -> bool:
        return self.other_hosts_run() or any(
            process.poll() is None and is_in_steps(ranks.error_files[rank])
            for rank, process in enumerate(processes_of(ranks))
        )


def processes_of(ranks: SubprocessContext) -> list[Popen[bytes]]:
    """Return the process of each rank of this host."""
    return [handler.proc for _, handler in sorted(ranks.subprocess_handlers.items())]


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
