"""The session of this process, and the functions by which users and other packages use the session.

`init` is optional. A single process does not need it. If torch.distributed is already initialised (by Ray or by the
user), the library uses the existing default group. Otherwise `init` reads the launcher's variables, waits for the other
ranks, creates the process group, and selects the device. It also installs hooks that report an uncaught exception to
the launcher and the peers, and that end the process without a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from syncline._torch.process_groups import Store
from syncline.checks import suggests_arguments
from syncline.liveness.connection import StoreConnection
from syncline.liveness.gathering import Ended
from syncline.liveness.processes import RankProcess
from syncline.session.asked import Asked
from syncline.session.ranks import World
from syncline.session.session import Session
from syncline.transport.base import Transport

_SESSION = Session()


@suggests_arguments
def init(
    transport: str = "auto",
    *,
    timeout: timedelta | float = 300.0,
    device: torch.device | str | int | None = None,
) -> World:
    """Join the other ranks that the launcher has started. Without a launcher, return a world of one rank.

    Call `init` on all ranks. The ranks compare their arguments before any process group exists, and select the
    transport of the default group together. A second call with the same arguments returns the same `World`. If
    torch.distributed is already initialised, `init` uses the existing group, and `shutdown` does not destroy the group.

    Args:
        transport: how tensors are sent. "c10d": torch.distributed (Gloo on CPUs, NCCL on GPUs). "shm": shared memory
            for tensors on the CPU; all ranks raise an error if it is not available, for example on several hosts.
            "auto": the best transport that all ranks of a group can use. For tensors on the CPU this is shared memory
            on one host. On several hosts it is shared memory within each host and Gloo between hosts. All other tensors
            use torch.distributed.
        timeout: how long to wait for other ranks, in `init` and in every collective: a timedelta, or a number of
            seconds.
        device: the device on which this rank computes. None means the GPU of its local rank, or the CPU if there is no
            GPU. A GPU becomes torch's current device.

    Returns:
        The world of this process.

    Raises:
        TypeError, ValueError: an argument, or a variable of the launcher, is invalid. An argument that is invalid on
            one rank raises the same error on all ranks.
        ContractMismatch: the ranks passed different arguments. The text is the same on every rank.
        SynclineError: `init` was called before with other arguments, or the ranks have different world sizes, or two
            processes claim the same rank, or "shm" was requested and is not available.
        CollectiveTimeout: some ranks did not arrive in time. The text names these ranks.

    Examples:
        >>> import syncline as sl
        >>> sl.init().size
        1
        >>> sl.shutdown()
    """
    return _SESSION.init(lambda: Asked.of(transport, timeout, device))


def shutdown() -> None:
    """Undo `init`. Do nothing if `init` was not called since the last `shutdown`.

    Call `shutdown` on all ranks. It waits for pending saves, unless an exception is being handled. Then it closes the
    transports. It destroys the process group if `init` has created the group.
    """
    _SESSION.shutdown()


def is_joined() -> bool:
    """Return whether the process has called `init`, and has not left the other ranks since."""
    return _SESSION.is_joined()


def world() -> World:
    """Return the world of this process.

    `init` or torch.distributed defines the world. If neither is initialised, it is a world of one rank.

    Raises:
        SynclineError: a launcher started several ranks, and this process has not joined them yet.

    Examples:
        >>> world().rank
        0
    """
    return _SESSION.world()


def transport_of(group: dist.ProcessGroup | Transport | None = None) -> Transport:
    """Return the transport of a group. Every call with this group returns the same object as long as the group exists.

    `init` selects the transport of the default group. For any other group, or without `init`, all ranks of the group
    must make the first call, because they select the transport together.

    Args:
        group: a process group. None means torch's default group, or a world of one rank if there is no such group. A
            transport is returned unchanged.

    Raises:
        ValueError: this rank is not in `group`, or the program has destroyed `group`.
        SynclineError: "shm" was requested and is not available. Or `group` is None, and either the program has
            destroyed a default group of several ranks, or a launcher started several ranks and this process has not
            joined them.

    Examples:
        >>> transport_of(None).size
        1
    """
    return _SESSION.transport_of(group)


def job_store() -> Store:
    """Return the store in which the ranks of the default group have met. Its keys are those of this job only.

    Raises:
        SynclineError: there is no default group.
    """
    return _SESSION.job_store()


def is_about_to_join() -> bool:
    """Return whether this process is a world of one rank that was started to join ranks which are training.

    `regroup` connects it to them.
    """
    return _SESSION.is_about_to_join


def timeout_seconds() -> float:
    """Return the timeout of `init`, or that of the default group."""
    return _SESSION.timeout_seconds()


def disconnect() -> None:
    """Close all process groups of this process, so that the other ranks detect that it has stopped sending.

    `regroup` then creates a new default group.
    """
    _SESSION.disconnect()


def regroup(
    key: str,
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    connection: StoreConnection,
    has_ended: Ended,
    processes: Sequence[RankProcess | None],
) -> World:
    """Create torch's default group anew, with other ranks. First close all process groups of this process.

    All ranks of the new group must make this call. Ranks of the former group may have ended. The device stays the same.

    Args:
        key: a text that no earlier call of the job had, the same on all ranks of the new group.
        rank, size: the rank of this process in the new group, and the number of ranks.
        local_rank, local_size: the rank of this process among the ranks of its host, and their number.
        connection: a connection to the store in which the ranks have met (`job_store`). Later calls may reuse it.
        has_ended: a function that takes ranks of the new group, and returns those whose processes have ended. It may
            raise an error, which ends this call.
        processes: the process of each rank of the new group; None for one whose system does not show it.

    Returns:
        The new world of this process.

    Raises:
        PeerLost, CollectiveTimeout: a rank was lost meanwhile.
    """
    return _SESSION.regroup(
        key,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        connection=connection,
        has_ended=has_ended,
        processes=processes,
    )


def before_shutdown(wait: Callable[[], object]) -> None:
    """Register a method that `shutdown` calls.

    Args:
        wait: a bound method that waits for pending work. If its object is freed, `shutdown` does not call it.
    """
    _SESSION.before_shutdown(wait)


def begin_in_fork() -> None:
    """Forget what the parent process has joined.

    Call this function in a fork that becomes a rank itself. The parent must not be joined to other ranks.
    """
    _SESSION.begin_in_fork()


def leave_at_end() -> None:
    """Leave the other ranks, as the end of an interpreter does. Call this in a process that ends without `atexit`."""
    _SESSION.leave_at_end()
