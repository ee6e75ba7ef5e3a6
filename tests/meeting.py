"""Ranks that meet and end without a transport: processes at the store, and calls in threads."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from support.states import wait_until
from syncline.liveness.connection import innermost

__all__ = [
    "end_by_sigkill",
    "group_store",
    "in_threads",
    "meet_at_the_store",
    "stop",
    "tell",
    "texts_of_all_ranks",
    "wait_for",
]


def group_store() -> dist.Store:
    """Return the store at which the ranks of a test have met: it works whatever happens to their transport."""
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()


def tell(key: str) -> None:
    """Let the ranks go on that `wait_for` this key."""
    group_store().set(key, "")


def wait_for(key: str) -> None:
    """Wait until a rank has called `tell` with this key."""
    group_store().wait([key])


def texts_of_all_ranks(text: str) -> list[str]:
    """Return what each rank has passed, in the order of ranks. Each test can call this once."""
    group_store().set(f"text {dist.get_rank()}", text)
    return [group_store().get(f"text {rank}").decode() for rank in range(dist.get_world_size())]


def meet_at_the_store(key: str = "meeting", *, without: int | None = None) -> None:
    """Wait until all ranks have called this function, except for one that was killed.

    Call it before a rank is killed. A barrier of Gloo would not do: it can end on that rank while its last messages are
    still on their way to others, and these would then raise the error in the barrier.

    Args:
        key: a name of the meeting, which only its first use in a test may have.
        without: the rank that was killed; None if all ranks are there.
    """
    store = group_store()
    store.set(f"{key} {dist.get_rank()}", "")
    store.wait([f"{key} {rank}" for rank in range(dist.get_world_size()) if rank != without])


def end_by_sigkill() -> None:
    """Kill this rank, but not while a thread of it writes to the file of the tests' store: half a text would stay."""
    with open(_path_of_the_store()) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGKILL)


def stop(pid: int) -> None:
    """Stop a rank, but not while it has locked the file of the tests' store: nobody could use that then."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: _all_threads_stand_still(pid))
        if _store_is_free():
            return
        os.kill(pid, signal.SIGCONT)


def _all_threads_stand_still(pid: int) -> bool:
    states = [
        (task / "stat").read_text().rpartition(")")[2].split()[0]
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return set(states) <= {"T", "t"}


def _store_is_free() -> bool:
    with open(_path_of_the_store()) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _path_of_the_store() -> str:
    path: str = innermost(group_store()).path
    return path


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Make these calls at once, each in a thread, and wait for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
