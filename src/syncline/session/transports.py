"""The transports of a process, one for each process group. All ranks of a group select its transport together.

A transport sends tensors through shared memory, through shared memory within each host and torch.distributed between
hosts, or through torch.distributed alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from syncline._torch.process_groups import is_living
from syncline.errors import SynclineError
from syncline.liveness.connection import StoreConnection
from syncline.liveness.processes import RankProcess, refuse_in_forks
from syncline.session.ranks import default_group
from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.hierarchy import HierarchicalTransport
from syncline.transport.shared_memory.hub import Exchange, SharedMemoryUnavailable
from syncline.transport.shared_memory.transport import SharedMemoryTransport
from syncline.transport.threads import ThreadGroup
from syncline.transport.watched import WatchedTransport
from syncline.user_code import warn_user


@dataclass
class _Entry:
    """A process group of this process, and its transport, which is None until the ranks have selected it."""

    group: dist.ProcessGroup
    is_default: bool
    transport: Transport | None = None
    lock: Any = field(default_factory=threading.RLock)
    """The lock that a thread holds while it selects the transport, because other threads may use the group, too."""


class Transports:
    """The transports of the process groups of this process, and the transport of a world of one rank.

    Args:
        before_first: a function that is called when a call other than `init` uses a process group for the first time.
        check_alone: a function that raises an error if this process must not be a world of one rank.
    """

    def __init__(self, before_first: Callable[[], None], check_alone: Callable[[], None]) -> None:
        self._before_first = before_first
        self._check_alone = check_alone
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._inherited: list[_Entry] = []
        """The groups of the parent process, if this process is a fork."""
        self._alone: Transport | None = None
        self._has_lost_default = False
        """Whether the program, and not `shutdown`, has destroyed a default group of several ranks."""
        self._has_warned = False
        refuse_in_forks(self)

    def of(self, group: dist.ProcessGroup | Transport | None, asked: str) -> Transport:
        """Return the transport of a group. `world.transport_of` documents this method.

        Args:
            group: a process group. None means torch's default group, or a world of one rank if there is no such group.
            asked: "auto", "c10d" or "shm". It matters only if the ranks have not yet selected the transport.
        """
        if isinstance(group, Transport):
            return group
        default = default_group()
        known = self._entries.get(id(default if group is None else group))
        if known is not None and known.group is default and known.transport is not None:
            # The fast path of almost every call: a default group exists as long as it is the default.
            return known.transport
        with self._lock:
            self.forget_destroyed()
            if default is not None:
                self._has_lost_default = False
            found = group if group is not None else default
            if found is None:
                return self._of_one_rank()
            known = self._entry(found, is_default=found is default)
        with known.lock:
            return known.transport or self.select(known.group, asked)

    def _of_one_rank(self) -> Transport:
        if self._has_lost_default:
            raise SynclineError(
                "the program destroyed the default process group by torch.distributed.destroy_process_group(), so this "
                "process has no other ranks to synchronize with. Synchronize before that call, or join the ranks again "
                "by sl.init() or torch.distributed.init_process_group(). To continue without the other ranks, call "
                "sl.shutdown() first"
            )
        self._check_alone()
        if self._alone is None:
            self._alone = ThreadGroup(1).transport(0)
        return self._alone

    def _entry(self, group: object, *, is_default: bool) -> _Entry:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"expected group to be a process group that contains this rank, got {group!r}. dist.new_group returns "
                "such a value on ranks outside of the new group: on those ranks, do not pass the value to Syncline"
            )
        if id(group) not in self._entries:
            if not is_living(group):
                raise ValueError(
                    "expected group to be an existing process group, but this process group was destroyed: pass "
                    "another group, or None for the default group"
                )
            self._entries[id(group)] = _Entry(group, is_default)
            self._before_first()
        return self._entries[id(group)]

    def known(self, group: dist.ProcessGroup) -> Transport | None:
        """Return the transport of a group. Return None if the ranks have not selected it yet."""
        entry = self._entries.get(id(group))
        return None if entry is None else entry.transport

    def select(
        self,
        group: dist.ProcessGroup,
        asked: str,
        timeout_seconds: float | None = None,
        compare: Callable[[Transport], object] = lambda c10d: None,
        connection: StoreConnection | None = None,
        gather: Exchange | None = None,
        processes: Sequence[RankProcess | None] = (),
    ) -> Transport:
        """Select the transport of a group, and return the transport. All ranks of the group must call this method.

        Args:
            group: the process group.
            asked: "auto", "c10d" or "shm", the same on all ranks.
            timeout_seconds: how long an operation can wait for the other ranks. None means the timeout of the group.
            compare: a function that is called first, with a transport between the ranks. It raises an error if the
                ranks passed different arguments to `init`.
            connection: see `C10dTransport`.
            gather: a function with which the ranks set up shared memory. Pass None to use the group itself.
            processes: the process of each rank, None for an unknown one. All ranks pass the same ones. It is empty if
                the ranks have to exchange their hosts.
        """
        host_keys = [None if process is None else process.host for process in processes]
        # Where all ranks share memory, their notices are there.
        may_share_memory = gather is not None and asked != "c10d" and len(set(host_keys)) < 2
        c10d = C10dTransport(
            group,
            timeout_seconds=timeout_seconds,
            connection=connection,
            processes=processes,
            exchanges_notices=not may_share_memory,
        )
        try:
            compare(c10d)
            selected = self._best_over(c10d, asked, gather, host_keys)
            if may_share_memory and not isinstance(selected, SharedMemoryTransport):
                c10d.exchange_notices(connection)
        except BaseException:
            c10d.close()
            raise
        self._entries.setdefault(id(group), _Entry(group, is_default=True)).transport = selected
        return selected

    def _best_over(
        self, c10d: C10dTransport, asked: str, gather: Exchange | None, host_keys: Sequence[str | None]
    ) -> Transport:
        """Return the requested transport. For "auto", return the best transport that all ranks can use.

        All ranks of the group must call this method.

        Args:
            c10d: a transport between the ranks. If another transport is returned, that transport closes `c10d`.
            asked: "auto", "c10d" or "shm", the same on all ranks.
            gather: see `select`.
            host_keys: the key of each rank's host, None for an unknown one.

        Raises:
            SharedMemoryUnavailable: "shm" was requested and is not available. All ranks raise the error with the same
                reason.
        """
        if asked == "c10d":
            return c10d
        try:
            if asked == "shm":
                return SharedMemoryTransport.over(c10d, gather)
            return HierarchicalTransport.over(c10d, gather=gather, keys=host_keys)
        except SharedMemoryUnavailable as error:
            if asked == "shm":
                text = f'sl.init(transport="shm"): {error}'
                if not error.is_worth_a_warning:
                    text += f'\nUse transport="auto": shared memory within each host, {c10d.name} between the hosts'
                raise SharedMemoryUnavailable(text) from error
            if error.is_worth_a_warning and not self._has_warned and c10d.rank == 0:
                self._has_warned = True
                warn_user(
                    f"{error}\n{c10d.name} sends tensors on the CPU instead, which is slower",
                    UserWarning,
                )
            return c10d

    def selected(self) -> list[Transport]:
        """Return the transports that the ranks have selected so far, at most one for each process group."""
        return [known.transport for known in list(self._entries.values()) if known.transport is not None]

    def refuse_a_fork(self) -> None:
        """Keep the groups of the parent process in a fork, and forget those that the parent has destroyed.

        The destructor of a Gloo group waits for threads, and a fork does not have the threads of its parent.
        """
        self._inherited += self._entries.values()
        self._entries = {key: known for key, known in self._entries.items() if is_living(known.group)}

    def forget_destroyed(self) -> None:
        """Close and forget the transports of process groups that were destroyed."""
        for key in [key for key, known in self._entries.items() if not is_living(known.group)]:
            known = self._entries.pop(key)
            if known.transport is not None:
                self._has_lost_default |= known.is_default and known.transport.size > 1
                known.transport.close()

    def continue_alone(self) -> None:
        """Forget destroyed groups, so that this process can be a world of one rank. `shutdown` calls this method."""
        with self._lock:
            self._alone = None
            self.forget_destroyed()
            self._has_lost_default = False

    def close(self, *, goes_on: bool = False) -> None:
        """Close the transports of all process groups.

        Args:
            goes_on: whether this process creates new groups after this. After a failure, the resources of the old ones
                are then released at once, and not when their operations have timed out.
        """
        with self._lock:
            for transport in self.selected():
                transport.close()
                if goes_on and isinstance(transport, WatchedTransport):
                    transport.health.drop_groups()
            self._entries.clear()
