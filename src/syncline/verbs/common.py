"""Helpers of several verbs: groups, source ranks, and work with a final action."""

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
    """Return the rank in `transport` of global rank `src`."""
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
    """Return torch's global rank of rank `rank` in a group; for a transport, `rank` itself."""
    return dist.get_process_group_ranks(group)[rank] if isinstance(group, dist.ProcessGroup) else rank


def refuse_one_copy(target: Any) -> None:
    """Raise if ranks share one copy of a module's parameters, which are therefore equal already.

    Raises:
        ValueError: they do.
    """
    if isinstance(target, nn.Module) and has_one_copy(target):
        raise ValueError(
            f"parameters of {type(target).__name__} are shared by the ranks (sl.share_, or sharded=True): they are "
            "equal already, and are written inside of sl.write_shared alone"
        )


class WorkThen(Work):
    """Several works, followed by one final action.

    Args:
        works: the works, waited for one after the other.
        then: called once, after all works are complete.
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
