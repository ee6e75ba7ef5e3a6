"""One process's view of the training group: it agrees on the membership with the others, and connects to them."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
import uuid
from collections.abc import Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from syncline import environment
from syncline._torch.process_groups import PrefixStore
from syncline.errors import CollectiveTimeout, PeerFailed, PeerLost, SynclineError, UnevenInputs
from syncline.liveness.connection import StoreConnection
from syncline.liveness.failed_wait import is_of_backend
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore
from syncline.resilience.faults import Fault, call_if_exception_closed, is_fault
from syncline.resilience.membership import Adopt, Leave, Member, Membership, Propose, Rules
from syncline.resilience.register import SILENT_SECONDS, Entry, Line, Register
from syncline.resilience.watch import Pulse, Watch
from syncline.session.process import record_steps
from syncline.session.world import (
    disconnect,
    is_about_to_join,
    job_store,
    regroup,
    timeout_seconds,
    transport_of,
    world,
)
from syncline.transport.watched import WatchedTransport
from syncline.words import describe_ranks

_LOG = logging.getLogger("syncline")

_POLL_SECONDS = 0.001

_JOIN_POLL_SECONDS = 0.01
"""The polling interval of a process that waits to join. It is longer, because the wait can be long."""

_DISCONNECTING_SECONDS = environment.patience(10.0)
"""How long to wait for the report of a rank that has disconnected."""

_CAUSE_SECONDS = environment.patience(0.5)
"""How long to look for a lost rank after an error whose class does not indicate a loss."""

_NEWCOMER_SECONDS = 0.5
"""The interval at which rank 0 checks whether a process wants to join."""


def _names_a_loss(error: Exception) -> bool:
    """Return whether the class of an error indicates that a rank was lost."""
    if isinstance(error, SynclineError):
        return isinstance(error, PeerLost | PeerFailed | CollectiveTimeout)
    return isinstance(error, RuntimeError) and is_of_backend(error)


class NotNeeded(SystemExit):
    """The exception that ends a process which waited to join, because the other ranks have ended their loop."""

    def __init__(self) -> None:
        super().__init__(0)


class Group:
    """The processes of one call of `sl.steps`. The constructor is a collective call, except in a process that joins.

    Args:
        rules: the conditions for a smaller or larger generation. `max_ranks=0` stands for the size of the first one.
    """

    def __init__(self, rules: Rules) -> None:
        self._register: Register | None = None
        self.change = ""
        """A description of how the present generation differs from the last one that trained."""
        self.num_lost = 0
        """The number of members of the last generation that trained which are not in the present one."""
        self.joins = is_about_to_join()
        """Whether this process, a spare or a replacement, has yet to join the others in `begin`."""
        self.is_left_behind = False
        """Whether the others train on without this process, so that the job survives its end."""
        self._has_fault = False
        """Whether an exception in the body of a step ends this process."""
        here = world()
        self.first_size = here.size
        """The number of ranks with which the loop began."""
        if here.size == 1 and not self.joins:  # no rank can be lost
            return
        # A job can run several loops, one after the other. Each rank counts its loops in the store.
        store = SignedStore(job_store())
        if self.joins:
            number = int(store.get("loop"))
        else:
            number = store.count_up(f"loops of rank {here.rank}")
            store.set("loop", str(number))
        self._key = f"members {number}"
        name = f"{socket.gethostname()} {'new' if self.joins else here.rank} {uuid.uuid4().hex[:8]}"
        members = PrefixStore(self._key, job_store())
        # While the others wait for this process, it waits for the network.
        silence_seconds = SILENT_SECONDS + rules.patience_seconds
        entry = Entry(name=name, host=here.host, process=RankProcess.own())
        register = Register(members, entry, silence_seconds, timeout_seconds())
        self._connection = StoreConnection(members)
        self._watch = Watch()
        self._pulse = Pulse(Line(members, silence_seconds), name, self._watch)
        self._register = register
        rules = replace(rules, timeout_seconds=timeout_seconds())
        if not self.joins:
            present = register.enrol(here.rank, here.size, rules)
            if here.size > len(present.members):
                disconnect()
                self.joins = name not in present.members
        if self.joins:
            present = register.ask_to_join()
        self.first_size = register.first_size
        self._error_file = environment.error_file()
        if self._error_file is not None:
            record_steps(self._error_file, name)
        self._member = Member(name, present, replace(rules, max_ranks=rules.max_ranks or self.first_size))
        self._last_trained = present
        if dist.is_initialized():
            self._watch_next(present)
        self._looked_at = time.monotonic()

    def begin(self) -> Membership | None:
        """Return the generation to connect to before the first step; None if the ranks are connected already.

        Raises:
            NotNeeded: the others have ended their loop before this process could join.
        """
        if self.joins:
            membership = self._agree(-1, _JOIN_POLL_SECONDS)
            self.joins = False
            return membership
        if self._register is None or dist.is_initialized():
            return None
        return self._member.membership

    def someone_waits(self) -> bool:
        """Return whether a process waits to join, and there is room for it. Only rank 0 checks, not in every step."""
        register = self._register
        if register is None or world().rank != 0 or time.monotonic() - self._looked_at < _NEWCOMER_SECONDS:
            return False
        self._looked_at = time.monotonic()
        members = self._member.membership.members
        if len(members) >= self._member.rules.max_ranks:
            return False
        waiting = [name for name in register.newcomers() if name not in members]
        return bool(waiting) and not register.ended(waiting) >= set(waiting)

    def is_loss(self, error: BaseException) -> bool:
        """Return whether an error is due to a lost rank, so that the others agree on a membership and repeat the step.

        Some classes of errors indicate a loss. But the end of a process can surface as any other error, too. So any
        error counts as a loss if a member was killed, or if another member has stopped to agree on a membership. If the
        cause is in this process itself, the repeated step raises the error again.
        """
        if not isinstance(error, Exception):
            return False
        if _names_a_loss(error):
            return True
        patience_seconds = 0.0
        if isinstance(error, UnevenInputs):
            # The others may have detected a loss. Then they disconnect before they report, which looks like a normal
            # shutdown. Ranks that have really left the loop do not report.
            patience_seconds = _DISCONNECTING_SECONDS
        elif isinstance(error, SynclineError | OSError):  # but not an error of the user's program
            patience_seconds = _CAUSE_SECONDS
        try:
            return self._is_any_lost(patience_seconds)
        except PeerLost:  # the launcher has ended; `error` is more informative
            return False

    def _is_any_lost(self, patience_seconds: float) -> bool:
        """Return whether a member was killed, or another member has stopped for the next generation.

        Args:
            patience_seconds: how long to wait for such a sign.
        """
        register = self._register
        if register is None:
            return False
        present = self._member.membership
        others = [name for name in present.members if name != self._member.name]
        deadline = time.monotonic() + patience_seconds
        while True:
            observed = register.observe(present)
            if observed.decided is not None or not observed.reports.keys().isdisjoint(others):
                return True
            if register.killed(others):
                return True
            if len(observed.ended) >= len(others) or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def agree(self, num_commits: int, loss: Exception | None) -> Membership:
        """Agree with the other processes on the next generation.

        Args:
            num_commits: the number of commits of this process; -1 if it has joined, but has not loaded the state.
            loss: the error that made this process stop; None if all stop after the same step to let a process join.

        Raises:
            PeerLost: this process cannot continue.
        """
        if self._register is None:
            assert loss is not None
            raise loss
        self._watch.end()
        if dist.is_initialized():  # False if a rank was lost while the ranks connected
            if (
                loss is not None
            ):  # a rank that has not detected the loss may wait for this one in a collective
                transport_of(None).abort(f"it stops, because it has noticed a loss: {loss}")
            disconnect()
        first = "" if loss is None else f". The first error: {loss}"
        try:
            return self._agree(num_commits, _POLL_SECONDS)
        except PeerLost as left:
            has_said_so = str(left) in first  # if the watch lost it first
            raise PeerLost(f"{left}{'' if has_said_so else first}") from loss
        except NotNeeded:
            raise PeerLost(
                f"the others have ended before this process could load their state{first}"
            ) from loss

    def _agree(self, num_commits: int, poll_seconds: float) -> Membership:
        """Report the number of commits, and wait until the next generation with this process has been decided."""
        register, member = self._register, self._member
        assert register is not None
        report = member.stop(step=num_commits, now=time.monotonic())
        while True:
            current = member.membership
            register.report(current.generation + 1, report)
            if member.name in current.members:
                register.stop_others(current.generation + 1)
            while member.membership is current:  # without the state, it may wait for several generations
                observed = register.observe(current)
                action = member.look(observed, now=time.monotonic())
                if isinstance(action, Adopt):
                    former = self._last_trained
                    self.change = _change_in_words(former, current, action.membership)
                    self.num_lost = len({*former.members} - {*action.membership.members})
                    return action.membership
                if isinstance(action, Leave):
                    self.is_left_behind = observed.decided is not None
                    raise PeerLost(f"sl.steps ends on this rank: {action.reason}")
                if isinstance(action, Propose):
                    register.propose(action.membership)
                    continue
                others = {*current.members} - {member.name}
                if num_commits < 0 and register.ended(sorted(others)) >= others:
                    _LOG.warning("syncline: this process was not needed: the other ranks have ended sl.steps")
                    raise NotNeeded
                time.sleep(poll_seconds)

    def connect(self, membership: Membership) -> None:
        """Connect to the other members of a generation.

        Raises:
            PeerLost, CollectiveTimeout: a member was lost meanwhile.
        """
        register = self._register
        assert register is not None
        register.meet(membership)
        members = membership.members
        hosts = [register.entries[name].host for name in members]
        rank = members.index(self._member.name)

        def has_ended(ranks: Sequence[int]) -> list[int]:
            register.check_generation(membership.generation)
            ended = register.ended([members[one] for one in ranks])
            return [one for one in ranks if members[one] in ended]

        regroup(
            f"{self._key} {membership.generation}",
            rank=rank,
            size=len(hosts),
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            connection=self._connection,
            has_ended=has_ended,
            processes=[register.entries[name].process for name in members],
        )
        self._watch_next(membership)

    def settle(self) -> None:
        """Record that the present generation trains: its members are connected, and all have the state."""
        self._last_trained = self._member.membership

    def _watch_next(self, membership: Membership) -> None:
        """Watch the next member while this generation trains."""
        register, members, transport = self._register, membership.members, transport_of(None)
        assert register is not None
        if isinstance(transport, WatchedTransport):
            following = members[(members.index(self._member.name) + 1) % len(members)]
            self._watch.begin(membership, register.entries[following], transport)

    def wait_for_all(self) -> Exception | None:
        """Wait until all members have made this call. Return the error if a member is lost, or else None."""
        if self._register is not None:
            try:
                transport_of(None).barrier().wait()
            except Exception as error:
                if not self.is_loss(error):
                    raise
                return error
        return None

    def stay_behind(self, why: str) -> NoReturn:
        """Disconnect this process and raise an error, because the others train on without it.

        Raises:
            PeerLost: always.
        """
        disconnect()
        self.is_left_behind = True
        raise PeerLost(f"sl.steps ends on this rank: {why}")

    def end_by_fault(self, step: int, error: BaseException) -> None:
        """Record that an exception ends this process. The job ends if another process raised the same one."""
        if self._register is None or not is_fault(error):
            return
        self.is_left_behind = self._has_fault = True
        with contextlib.suppress(PeerLost, MemoryError):  # the others detect that it has ended anyway
            if self._register.record_fault(step, Fault.of(error)):
                self.is_left_behind = False
                _LOG.error("syncline: %s", _ends_the_job(step, Fault.of(error)))

    def check_faults(self, step: int, loss: Exception) -> None:
        """Check that a step has not failed on several processes by the same exception.

        Raises:
            PeerFailed: several processes have raised the same exception in this step.
        """
        fault = None if self._register is None else self._register.repeated_fault(step)
        if fault is not None:
            raise PeerFailed(_ends_the_job(step, fault)) from loss

    def leave(self, *, is_closed: bool) -> None:
        """Record that this process has left the loop. Only the generator of the loop may call this.

        Args:
            is_closed: whether the program closes the generator before the last step.
        """
        if self._register is not None:
            self._watch.end()
            self._pulse.close()
            self._register.end()
            if self._error_file is not None and not self.is_left_behind:
                record_steps(self._error_file, None)
                if is_closed and not self._has_fault:  # an exception outside of the body is a loss, too
                    is_lost = partial(record_steps, self._error_file, self._member.name)
                    call_if_exception_closed(sys._getframe(1), is_lost)


def _ends_the_job(step: int, fault: Fault) -> str:
    return (
        f"step {step} failed by the same exception on more than one process: {fault}. So the program is at fault, and "
        "not a process. The job ends"
    )


def _change_in_words(before: Membership, tried: Membership, after: Membership) -> str:
    """Return how a generation differs from the last one that trained.

    Args:
        before: the last generation that trained.
        tried: the generation right before `after`: `before` itself, or one that failed to connect.
        after: the generation to describe.
    """
    gone, come = set(before.members) - set(after.members), set(after.members) - set(before.members)
    missed = set(tried.members) - set(before.members) - set(after.members)
    lost = [rank for rank, name in enumerate(before.members) if name in gone]
    words = [f"{describe_ranks(lost)} of {len(before.members)} {_were(lost)} lost"] if lost else []
    if come:
        words.append(f"{_processes(come)} joined")
    if missed:
        words.append(f"{_processes(missed)} {_were(missed)} lost while joining")
    return " and ".join(words) or "a connection was lost"


def _were(some: Sized) -> str:
    return "was" if len(some) == 1 else "were"


def _processes(some: Sized) -> str:
    return f"{len(some)} {'process' if len(some) == 1 else 'processes'}"
