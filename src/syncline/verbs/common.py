"""What verbs have in common."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from syncline.checks import checked_count
from syncline.differences import describe_ranks
from syncline.sharded.one_copy import has_one_copy
from syncline.transport.base import Transport, Work

__all__ = ["Group", "WorkThen", "global_rank", "rank_of_source", "refuse_one_copy"]


Group = dist.ProcessGroup | Transport | None


def rank_of_source(src: Any, group: Group, transport: Transport) -> int:
    """The rank of `transport` that global rank `src` is."""
    rank = checked_count("src", src)
    ranks = list(range(transport.size))
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise ValueError(
            f"expected src to be a global rank of the group, which consists of {describe_ranks(ranks)}, got {rank}"
        )
    return ranks.index(rank)


def global_rank(rank: int, group: Group) -> int:
    """The rank that torch calls rank `rank` of a group; of a transport it is `rank` itself."""
    return dist.get_process_group_ranks(group)[rank] if isinstance(group, dist.ProcessGroup) else rank


def refuse_one_copy(target: Any) -> None:
    """Raise if a module has parameters of which there is one copy for several ranks, which is equal already.

    Raises:
        ValueError: it has.
    """
    if isinstance(target, nn.Module) and has_one_copy(target):
        raise ValueError(
            f"parameters of {type(target).__name__} are shared by the ranks (sl.share_, or sharded=True): they are "
            "equal already, and are written inside of sl.write_shared alone"
        )


class WorkThen(Work):
    """Work, all of it, that is followed by something, once.

    Args:
        works: what is waited for, one after the other.
        then: what is done when all is there.
    """

    def __init__(self, works: Sequence[Work], then: Callable[[], None]) -> None:
        self._works = deque(works)
        self._then: Callable[[], None] | None = then

    def wait(self, timeout_seconds: float | None = None) -> None:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._works:
            self._works[0].wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._works.popleft()
        then, self._then = self._then, None
        if then is not None:
            then()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
