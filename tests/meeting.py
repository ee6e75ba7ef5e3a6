"""Ranks that meet without a transport: processes at the store, and calls in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

__all__ = ["in_threads", "meet_at_the_store"]


def meet_at_the_store(key: str = "meeting", *, without: int | None = None) -> None:
    """Wait until all ranks have called this function, except for one that was killed.

    Call it before a rank is killed. A barrier of Gloo would not do: it can end on that rank while its last messages are
    still on their way to others, and these would then raise the error in the barrier.

    Args:
        key: a name of the meeting, which only its first use in a test may have.
        without: the rank that was killed; None if all ranks are there.
    """
    group = dist.group.WORLD
    assert group is not None
    store = group.get_group_store()
    store.set(f"{key} {dist.get_rank()}", "")
    store.wait([f"{key} {rank}" for rank in range(dist.get_world_size()) if rank != without])


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Make these calls at once, each in a thread, and wait for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
