"""Descriptions of a rank's calls and of a group's failure, used in the errors of transports."""

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
from syncline.liveness.store import decode

__all__ = [
    "ENDLESS_WAIT",
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
"""Remedy for ranks that called different operations."""

ENDLESS_WAIT = "the ranks wait for each other in different calls, and none of them can ever continue:"
"""Heading over the places of ranks, none of which can continue."""

ONE_RANK_EVALUATES = (
    "a forward of the wrapper sends the module's buffers (BatchNorm's statistics), so all ranks must run it. To "
    "evaluate on one rank, call ddp.module(x) there; or call ddp.sync_buffers_() on all ranks, and then the "
    "wrapper under torch.no_grad() on one"
)
"""Remedy for a forward that not all ranks run."""

_UNEVEN = (
    "the rank that left made fewer steps than this rank: give every rank the same number of batches "
    "(DistributedSampler pads them, drop_last=True drops the rest), or run the loop inside ddp.join(), which lets "
    "ranks end at different times (not with sharded=True)"
)

_LEFT_OUT = (
    "all ranks must call {call} equally often, but the rank that left ended without calling it: move it out of any "
    "branch that depends on the rank (if rank == 0), and let no rank return before it"
)

_KINDS: dict[str, type[SynclineError]] = {
    kind.__name__: kind
    for kind in (CollectiveMismatch, CollectiveTimeout, PeerFailed, PeerLost, UnevenInputs)
}

_MAX_TEXT_CHARS = 32 * 1024


@dataclass(frozen=True)
class Call:
    """A call of one rank. All ranks that meet must make the same call, or be the two sides of a message."""

    operation: str
    detail: str = ""
    numel: int | None = None
    dtype: torch.dtype | None = None
    terms: int = 0
    """A number that the ranks have to agree on as well; 0 if they have agreed before."""

    def agrees_with(self, other: Call) -> bool:
        """Return whether two ranks may meet with these calls."""
        if {self.operation, other.operation} == {"send", "recv"}:
            return (self.numel, self.dtype) == (other.numel, other.dtype)
        return self == other

    def __str__(self) -> str:
        size = "" if self.numel is None else f" of {self.numel} elements, {self.dtype}"
        return f"{self.operation}{f'({self.detail})' if self.detail else ''}{size}"


@dataclass(frozen=True)
class Failure:
    """The reason why a group is broken. Every rank creates its own exception object from it."""

    kind: type[SynclineError]
    text: str
    aborted_by: int | None = None
    is_common: bool = False
    """Whether the text describes all ranks and is the same on each of them."""
    stuck_ranks: Sequence[int] = ()
    """Ranks that are proved to wait forever, wherever they wait."""

    def on_rank(self, rank: int | None) -> SynclineError:
        """Return the error that `rank` raises; `rank` is None for a caller outside the group."""
        if self.aborted_by is None:
            return self.kind(self.text)
        if rank == self.aborted_by:
            return SynclineError(f"this transport was aborted on rank {rank}: {self.text}")
        return self.kind(f"rank {self.aborted_by} aborted the group: {self.text}")

    def to_json(self, rank: int) -> str:
        """Return the text that `rank` publishes. A long text is cut to its end, where a traceback names the error."""
        rank_of_text = None if self.is_common else rank
        text = self.text[-_MAX_TEXT_CHARS:]
        record = _Record(self.kind.__name__, text, rank_of_text, list(self.stuck_ranks))
        return json.dumps(vars(record))

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        """Return the failure that another rank has published.

        Raises:
            SynclineError: the text was not written by `to_json`.
        """
        record = decode(_Record, text, "the reason for the end of a group")
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
    """A failure in the form in which it is published."""

    kind: str
    text: str
    rank: int | None
    stuck_ranks: list[int] = field(default_factory=list)


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words.

    Example:
        >>> named_ranks([2]), named_ranks([0, 3])
        ('rank 2', 'ranks 0, 3')
    """
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def remedy_for_left(here: Place, left: Iterable[Place]) -> str:
    """Return the remedy for ranks that have left in good order while this rank waits for them.

    Args:
        here: where this rank is.
        left: where the other ranks were when they left.

    Example:
        >>> remedy_for_left(Place(step=4, phase="backward"), [Place(step=3)])[:41]
        'the rank that left made fewer steps than '
        >>> remedy_for_left(Place(step=3, opening="sl.Checkpointer.save"), [Place(step=3)])[:40]
        'all ranks must call sl.Checkpointer.save'
    """
    if here.phase == EVAL_FORWARD:
        return ONE_RANK_EVALUATES
    if here.sends_buffers:
        return f"{_UNEVEN}. If it is no training step: {ONE_RANK_EVALUATES}"
    if here.opening is None or any((place.step or 0) < (here.step or 0) for place in left):
        return _UNEVEN
    return _LEFT_OUT.format(call=here.opening)


def lane_name(purpose: str, nth: int) -> str:
    """Return the name of the `nth` lane for one purpose, from 1.

    Example:
        >>> lane_name("gradients", 1), lane_name("gradients", 2)
        ('gradients', 'gradients 2')
    """
    return purpose if nth == 1 else f"{purpose} {nth}"
