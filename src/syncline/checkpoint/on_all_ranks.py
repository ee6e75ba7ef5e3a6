"""Run file operations so that all ranks get the same outcome: all results, or the same error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from syncline.differences import describe_ranks, ranks_with
from syncline.errors import CheckpointCorrupt, SynclineError
from syncline.transport.base import Transport

__all__ = ["Refused", "everywhere", "on_rank_0"]


T = TypeVar("T")


class Refused(Exception):
    """A failed file operation, such as a full disk or a damaged file; raised on every rank."""


def _by_ranks(texts: Mapping[int, str], num_ranks: int) -> str:
    """Return each text with the ranks that gave it; without ranks if all gave the same text."""
    if len(texts) == num_ranks and len(set(texts.values())) == 1:
        return texts[0]
    return "; ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_with(texts).items())


def everywhere(lane: Transport, fn: Callable[[], T]) -> list[T]:
    """Call `fn` on each rank and return all results, as JSON represents them; a collective call.

    Args:
        lane: the transport between the ranks.
        fn: the file operation of this rank.

    Raises:
        Refused: a file operation failed on any rank; on every rank.
        SynclineError: `fn` failed otherwise on another rank. On the rank where it failed, the error of `fn` is raised.

    Example:
        >>> from syncline.transport.threads import run_ranks
        >>> run_ranks(2, lambda transport: everywhere(transport, lambda: transport.rank * 10))
        [[0, 10], [0, 10]]
    """
    told: dict[str, Any] = {}
    fault = None
    try:
        told["found"] = fn()
    except (OSError, CheckpointCorrupt) as error:
        told["refused"] = str(error)
    except Exception as error:
        fault = error
        told["failed"] = f"{type(error).__name__}: {error}"
    everyone = [json.loads(one) for one in lane.all_gather_bytes(json.dumps(told).encode())]
    if fault is not None:
        raise fault
    for what in ("failed", "refused"):
        texts = {rank: one[what] for rank, one in enumerate(everyone) if what in one}
        if texts:
            error_class = Refused if what == "refused" else SynclineError
            raise error_class(_by_ranks(texts, lane.size))
    return [one["found"] for one in everyone]


def on_rank_0(lane: Transport, fn: Callable[[], T]) -> T:
    """Call `fn` on rank 0 only and return its result on all ranks; a collective call, see `everywhere`."""
    return cast(T, everywhere(lane, lambda: fn() if lane.rank == 0 else None)[0])
