"""The session of this process, and the functions by which users and other packages use the session.

`init` is optional. A single process does not need it. If torch.distributed is already initialised (by Ray or by the
user), the library uses the existing default group. Otherwise `init` reads the launcher's variables, waits for the other
ranks, creates the process group, and selects the device. It also installs hooks that report an uncaught exception to
the launcher and the peers, and that end the process without a hang.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from syncline.session.asked import Asked
from syncline.session.ranks import World
from syncline.session.session import Session
from syncline.suggestions import suggests_arguments
from syncline.transport.base import Transport

_SESSION = Session()

is_joined, before_shutdown = _SESSION.is_joined, _SESSION.before_shutdown
job_store, timeout_seconds = _SESSION.job_store, _SESSION.timeout_seconds
disconnect, regroup = _SESSION.disconnect, _SESSION.regroup
begin_in_fork, leave_at_end = _SESSION.begin_in_fork, _SESSION.leave_at_end


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


def is_about_to_join() -> bool:
    """Return whether this process is a world of one rank that was started to join ranks which are training.

    `regroup` connects it to them.
    """
    return _SESSION.is_about_to_join
