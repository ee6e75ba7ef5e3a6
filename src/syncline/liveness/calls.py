"""What a rank called, and why a group is broken: the words of a transport's errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from syncline.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailed,
    PeerLost,
    SynclineError,
    UnevenInputs,
)
from syncline.liveness.board import EVAL_FORWARD, Place
from syncline.liveness.store_messages import decode

__all__ = [
    "ONE_RANK_EVALUATES",
    "SAME_CALLS",
    "Call",
    "Failure",
    "lane_name",
    "named_ranks",
    "remedy_for_left",
]


SAME_CALLS = (
    "every rank must make the same calls in the same order, with equal sizes and dtypes: "
    "look for a branch that depends on the rank, or for unequal numbers of batches"
)
"""What to do about ranks that called different things."""

ONE_RANK_EVALUATES = (
    "a forward of the wrapper sends the module's buffers (BatchNorm's statistics), so all ranks must run it. To "
    "evaluate on one rank, call ddp.module(x) there; or call ddp.sync_buffers_() on all ranks, and then the "
    "wrapper under torch.no_grad() on one"
)
"""What to do about a forward that not all ranks run."""

_UNEVEN = (
    "who has left made fewer steps than this rank: give every rank the same number of batches (DistributedSampler "
    "fills up, drop_last=True cuts off), or put the loop under ddp.join(), which lets ranks end at different times "
    "(not with sharded=True)"
)

_LEFT_OUT = (
    "{call} is for all ranks to call, equally often, and who has left has ended without it: take it out of a branch "
    "that depends on the rank (if rank == 0), and let no rank return before it"
)

_KINDS: dict[str, type[SynclineError]] = {
    kind.__name__: kind
    for kind in (CollectiveMismatch, CollectiveTimeout, PeerFailed, PeerLost, UnevenInputs)
}

_MAX_TEXT_CHARS = 32 * 1024


@dataclass(frozen=True)
class Call:
    """What one rank called; the ranks of one meeting must call the same (or the two sides of a message)."""

    operation: str
    detail: str = ""
    numel: int | None = None
    dtype: torch.dtype | None = None
    terms: int = 0
    """What else the ranks have to agree on; 0 where they have agreed before."""

    def agrees_with(self, other: Call) -> bool:
        """Whether two ranks may meet with these calls."""
        if {self.operation, other.operation} == {"send", "recv"}:
            return (self.numel, self.dtype) == (other.numel, other.dtype)
        return self == other

    def __str__(self) -> str:
        size = "" if self.numel is None else f" of {self.numel} elements, {self.dtype}"
        return f"{self.operation}{f'({self.detail})' if self.detail else ''}{size}"


@dataclass(frozen=True)
class Failure:
    """Why a group is broken; every rank raises an exception object of its own made from it."""

    kind: type[SynclineError]
    text: str
    aborted_by: int | None = None
    is_common: bool = False
    """The text speaks of all ranks, and is the same whoever raises it."""
    stuck_ranks: Sequence[int] = ()
    """Ranks for which it is proved that they can never go on, wherever they wait."""

    def on_rank(self, rank: int | None) -> SynclineError:
        """What `rank` raises; None for somebody outside the group."""
        if self.aborted_by is None:
            return self.kind(self.text)
        if rank == self.aborted_by:
            return SynclineError(f"this transport was aborted on rank {rank}: {self.text}")
        return self.kind(f"rank {self.aborted_by} aborted the group: {self.text}")

    def to_json(self, rank: int) -> str:
        """As text that `rank` tells the others; of a long one only the end, where tracebacks have their point."""
        rank_of_text = None if self.is_common else rank
        text = self.text[-_MAX_TEXT_CHARS:]
        record = _Record(self.kind.__name__, text, rank_of_text, list(self.stuck_ranks))
        return json.dumps(vars(record))

    @staticmethod
    def from_json(told: str | bytes) -> Failure:
        """What another rank has told.

        Raises:
            SynclineError: it is not what `to_json` makes.
        """
        record = decode(_Record, told, "the reason for the end of a group")
        kind = _KINDS.get(record.kind, PeerFailed)
        return Failure(
            kind,
            record.text,
            aborted_by=record.rank,
            is_common=record.rank is None,
            stuck_ranks=tuple(record.stuck_ranks),
        )


@dataclass(frozen=True)
class _Record:
    """A failure as it travels."""

    kind: str
    text: str
    rank: int | None
    stuck_ranks: list[int] = field(default_factory=list)


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words.

    Example:
        >>> named_ranks([2]), named_ranks([0, 3])
        ('rank 2', 'ranks 0, 3')
    """
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def remedy_for_left(here: Place, left: Iterable[Place]) -> str:
    """What to do about ranks that have ended in good order while this one waits for them.

    Args:
        here: where this rank is.
        left: where the others were at their end.

    Example:
        >>> remedy_for_left(Place(step=4, phase="backward"), [Place(step=3)])[:38]
        'who has left made fewer steps than thi'
        >>> remedy_for_left(Place(step=3, opening="sl.Checkpointer.save"), [Place(step=3)])[:52]
        'sl.Checkpointer.save is for all ranks to call, equal'
    """
    if here.phase == EVAL_FORWARD:
        return ONE_RANK_EVALUATES
    if here.sends_buffers:
        return f"{_UNEVEN}. If it is no training step: {ONE_RANK_EVALUATES}"
    if here.opening is None or any((place.step or 0) < (here.step or 0) for place in left):
        return _UNEVEN
    return _LEFT_OUT.format(call=here.opening)


def lane_name(purpose: str, nth: int) -> str:
    """The name of the `nth` lane for one purpose, from 1.

    Example:
        >>> lane_name("gradients", 1), lane_name("gradients", 2)
        ('gradients', 'gradients 2')
    """
    return purpose if nth == 1 else f"{purpose} {nth}"
