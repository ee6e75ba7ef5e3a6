"""The processes that train together, as one of them sees them: it agrees with the others, and connects to them."""

from __future__ import annotations

import socket
import time
import uuid
from dataclasses import replace

import torch.distributed as dist

from syncline import environment
from syncline._torch.process_groups import PrefixStore
from syncline.errors import CollectiveTimeout, PeerFailed, PeerLost, SynclineError
from syncline.liveness.failed_wait import is_of_backend
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore
from syncline.resilience.membership import Adopt, Leave, Member, Membership, Propose, Rules
from syncline.resilience.register import Entry, Register
from syncline.session.process import record_steps
from syncline.session.world import disconnect, job_store, regroup, transport_of, world
from syncline.words import describe_ranks

_POLL_SECONDS = 0.001


def is_loss(error: BaseException) -> bool:
    """Return whether an error means that a rank takes no part any more."""
    if isinstance(error, SynclineError):
        return isinstance(error, PeerLost | PeerFailed | CollectiveTimeout)
    return isinstance(error, RuntimeError) and is_of_backend(error)


class Group:
    """The processes of one call of `sl.steps`. The constructor is a collective call.

    Args:
        rules: when a smaller generation may begin.
    """

    def __init__(self, rules: Rules) -> None:
        self._register: Register | None = None
        self._lost = ""
        here = world()
        if here.size == 1:  # nobody can be lost
            return
        transport = transport_of(None)
        # A job can run several loops, one after the other. Each rank counts its loops in the store.
        number = SignedStore(job_store()).count_up(f"loops of rank {here.rank}")
        self._key = f"members {number}"
        store = PrefixStore(self._key, job_store())
        name = f"{socket.gethostname()} {here.rank} {uuid.uuid4().hex[:8]}"
        self._register = Register(store, Entry(name=name, host=here.host, process=RankProcess.own()))
        first = self._register.enrol(here.rank, here.size, transport.timeout_seconds)
        self._error_file = environment.error_file()
        if self._error_file is not None:
            record_steps(self._error_file, are_running=True)
        self._member = Member(name, first, replace(rules, timeout_seconds=transport.timeout_seconds))

    @property
    def lost(self) -> str:
        """The ranks of the former generation that are not in the present one, in words."""
        return self._lost

    def agree(self, num_commits: int, loss: Exception) -> Membership:
        """Agree with the other processes on who is left.

        Args:
            num_commits: the number of commits of this process.
            loss: the error that made this process stop.

        Raises:
            PeerLost: this process cannot go on.
        """
        register = self._register
        if register is None:
            raise loss
        member = self._member
        current = member.membership
        # A rank that has not noticed the loss may wait for this one in a collective.
        if dist.is_initialized():  # not if a rank was lost while they connected
            transport_of(None).abort(f"it stops, because it has noticed a loss: {loss}")
            disconnect()
        report = member.stop(step=num_commits, now=time.monotonic())
        register.report(current.generation + 1, report)
        while True:
            action = member.look(register.observe(current), now=time.monotonic())
            if isinstance(action, Adopt):
                left = set(current.members) - set(action.membership.members)
                lost = [rank for rank, name in enumerate(current.members) if name in left]
                self._lost = f"{describe_ranks(lost)} of {len(current.members)}" if lost else "a connection"
                return action.membership
            if isinstance(action, Leave):
                raise PeerLost(
                    f"sl.steps ends on this rank: {action.reason}. The first error: {loss}"
                ) from loss
            if isinstance(action, Propose):
                register.propose(action.membership)
            else:
                time.sleep(_POLL_SECONDS)

    def connect(self, membership: Membership) -> None:
        """Connect to the other members of a generation.

        Raises:
            PeerLost, CollectiveTimeout: one of them was lost meanwhile.
        """
        register = self._register
        assert register is not None
        register.meet(membership)
        hosts = [register.entries[name].host for name in membership.members]
        rank = membership.members.index(self._member.name)
        regroup(
            f"{self._key} {membership.generation}",
            rank=rank,
            size=len(hosts),
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
        )

    def wait_for_all(self) -> Exception | None:
        """Wait until all members have reached this place. Return the error if one of them is lost, or else None."""
        if self._register is not None:
            try:
                transport_of(None).barrier().wait()
            except Exception as error:
                if not is_loss(error):
                    raise
                return error
        return None

    def leave(self) -> None:
        """Record that this process has left the loop, and takes no more part."""
        if self._register is not None:
            self._register.end()
            if self._error_file is not None:
                record_steps(self._error_file, are_running=False)
