"""The ranks of this host that are lost in `sl.steps`, where others train on without them.

[Note: what launchers record]

The launchers of a resilient job on several hosts share a store, which is in the launcher of the first host, and which
the ranks use as well. Each launcher records there that it runs, and, in the end, that its ranks have ended. The
launcher with the store waits for all others, because their ranks need the store; a launcher that shows no sign of life
is not waited for. torch's own wait at this place ends after five minutes in any case: late if a host was lost, and too
early if the ranks of another host still train.

A launcher also records the end of each of its ranks that was lost. The ranks of other hosts cannot see it, and would
wait for the rank as long as for a silent one.
"""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from subprocess import Popen

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from syncline import environment
from syncline._torch import elastic
from syncline._torch.process_groups import PrefixStore, TCPStore
from syncline.errors import PeerLost
from syncline.liveness.connection import StoreSilent, interruptibly
from syncline.liveness.store import SignedStore
from syncline.resilience.register import Line
from syncline.resilience.watch import Pulse, Watch
from syncline.session.listening import is_of_this_host
from syncline.session.process import came_to_steps, forget_rank, is_in_steps, name_in_steps
from syncline.session.stop_request import EXIT_STOPPED
from syncline.tools.launch.failures import Failure
from syncline.tools.launch.output import say
from syncline.tracebacks import forget_printed

_SILENT_SECONDS = environment.patience(15.0)
"""The time without a pulse after which a launcher counts as lost. Its ranks have stopped waiting by then."""

_POLL_SECONDS = 0.05

_CONNECT_TIMEOUT = timedelta(seconds=30)

_ENDED = "its ranks have ended"
"""The final record of a launcher. Before, it records its number, because another launcher may take its place."""


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

    def look(
        self, ranks: SubprocessContext, codes: Mapping[int, int | None], *, may_restart: bool
    ) -> set[int]:
        """Find the ranks that were lost in `sl.steps`. Start them again if this is allowed.

        Args:
            ranks: the ranks of this host.
            codes: the exit code of each rank that has ended, and None for the others.
            may_restart: whether ranks may be started again.

        Returns:
            The ranks that were started again.
        """
        self._end_those_who_cannot_join(ranks)
        processes, paths = processes_of(ranks), ranks.error_files
        failed = {rank for rank, code in codes.items() if code not in (None, 0, EXIT_STOPPED)}
        lost_now, restarted = failed - self.ranks, set[int]()
        if not all(is_in_steps(paths[rank]) or rank in self._joining for rank in lost_now):
            return restarted  # another rank has failed, which ends the job
        for rank in sorted(lost_now):
            path, lost = paths[rank], processes[rank]
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
            restarted.add(rank)
        return restarted

    def _end_those_who_cannot_join(self, ranks: SubprocessContext) -> None:
        """End the restarted ranks that have not entered `sl.steps`, if all other ranks have ended."""
        waiting = {rank for rank in self._joining if not came_to_steps(ranks.error_files[rank])}
        if not waiting:
            return
        processes = processes_of(ranks)
        others = (process for rank, process in enumerate(processes) if rank not in waiting)
        if not any(process.poll() is None for process in others) and not self._other_hosts_run():
            for rank in waiting:
                processes[rank].send_signal(signal.SIGKILL)

    def _other_hosts_run(self) -> bool:
        """Return whether there are ranks on other hosts."""
        return self._other_hosts is not None and self._other_hosts.are_running()

    def must_stay(self) -> bool:
        """Return whether this launcher must outlive its ranks, because other launchers need its store."""
        return (
            self._other_hosts is not None and self._other_hosts.has_store and self._other_hosts.are_running()
        )

    def wait_for_other_hosts(self) -> bool:
        """Wait for other launchers, after the ranks of this host have ended. Return False if there is no other host."""
        self.end()
        while self.must_stay():
            time.sleep(_POLL_SECONDS)
        return self._other_hosts is not None

    def end(self) -> None:
        """Record that the ranks of this host have ended, also if they have failed."""
        if self._other_hosts is not None:
            self._other_hosts.withdraw()

    def _others_train(self, ranks: SubprocessContext) -> bool:
        return self._other_hosts_run() or any(
            process.poll() is None and is_in_steps(ranks.error_files[rank])
            for rank, process in enumerate(processes_of(ranks))
        )


def processes_of(ranks: SubprocessContext) -> list[Popen[bytes]]:
    """Return the process of each rank of this host."""
    return [handler.proc for _, handler in sorted(ranks.subprocess_handlers.items())]


class _Reports(Watch):
    """The watch of a launcher. It watches no neighbour, and only reports once why its pulse fails."""

    has_reported = False

    def has_failed(self, error: Exception) -> None:
        if not isinstance(error, PeerLost) and not self.has_reported:
            self.has_reported = True
            say(f"cannot show the other hosts that this launcher runs, and tries again: {error}")


class OtherHosts:
    """The other launchers of the job.

    Args:
        variables: the environment variables of a rank of this host, which name the store.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._own = int(variables["GROUP_RANK"])
        self._others = [n for n in range(int(variables["GROUP_WORLD_SIZE"])) if n != self._own]
        address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        self.has_store = is_of_this_host(address)
        """Whether the store of the job is in the launcher of this host."""
        store = interruptibly(
            lambda: TCPStore(address, port, is_master=False, timeout=_CONNECT_TIMEOUT, wait_for_workers=False)
        )
        launchers = PrefixStore(f"syncline launchers {variables['TORCHELASTIC_RESTART_COUNT']}", store)
        self._line = Line(launchers, _SILENT_SECONDS)
        self._seen: dict[int, tuple[list[str | None], float]] = {}
        """The last records of each other launcher, and the time when they were first seen."""
        self.are_training_without_this_host = bool(self._read([f"pulse {self._own}"])) and self.are_running()
        """Whether this launcher takes the place of one that was lost."""
        self._life = uuid.uuid4().hex
        self._record(self._life)
        self._pulse = Pulse(Line(launchers, _SILENT_SECONDS), str(self._own), _Reports())

    def record_lost(self, name: str) -> None:
        """Record in the store that a rank of this host has ended. `name` is its name in `sl.steps`."""
        with contextlib.suppress(PeerLost):
            self._line.record_lost(name)

    def are_running(self) -> bool:
        """Return whether another launcher still has ranks."""
        try:
            found = self._read([f"{kind} {n}" for n in self._others for kind in ("pulse", "state")])
        except StoreSilent:
            return True  # nothing shows that they have ended
        except PeerLost:
            return False
        now = time.monotonic()
        is_any_running = False
        for n in self._others:
            shown = [found.get(f"pulse {n}"), found.get(f"state {n}")]
            if n not in self._seen or self._seen[n][0] != shown:
                self._seen[n] = shown, now
            is_any_running |= shown[1] != _ENDED and now - self._seen[n][1] < _SILENT_SECONDS
        return is_any_running

    def withdraw(self) -> None:
        """Record that the ranks of this host have ended."""
        self._pulse.close()
        state = f"state {self._own}"
        with contextlib.suppress(PeerLost):
            if self._read([state]).get(state) == self._life:
                self._record(_ENDED)

    def _record(self, state: str) -> None:
        self._line.ask(partial(SignedStore.set, key=f"state {self._own}", text=state))

    def _read(self, keys: Sequence[str]) -> Mapping[str, str]:
        return self._line.ask(partial(SignedStore.readable, keys=keys))
