"""What happens to files on one rank, told to all: its result, or the same error everywhere."""

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
    """A disk that is full, a file that is damaged: on every rank."""


def _by_ranks(texts: Mapping[int, str], num_ranks: int) -> str:
    """Each text with the ranks that gave it; without, where all did."""
    if len(texts) == num_ranks and len(set(texts.values())) == 1:
        return texts[0]
    return "; ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_with(texts).items())


def everywhere(lane: Transport, fn: Callable[[], T]) -> list[T]:
    """What `fn` returns on each rank, as JSON holds it; a collective call.

    Args:
        lane: between the ranks.
        fn: what happens to files on this rank.

    Raises:
        Refused: it failed somewhere, by what happens to files; on every rank.
        SynclineError: it failed otherwise on another rank; on that rank what `fn` raised.

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
    """What `fn` returns on rank 0, which alone calls it; as JSON holds it. A collective call; see `everywhere`."""
    return cast(T, everywhere(lane, lambda: fn() if lane.rank == 0 else None)[0])
