"""Helpers of several verbs: groups and source ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from syncline.checks import checked_count
from syncline.differences import describe_ranks
from syncline.sharded.one_copy import has_one_copy
from syncline.transport.base import Transport

__all__ = ["Group", "global_rank", "rank_of_source", "refuse_one_copy"]


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
