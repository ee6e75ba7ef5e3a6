"""Functions that several verbs use: ranks of groups, refused targets, and the comparison of calls between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn

from syncline.checks import checked_count
from syncline.sharded.attached import is_sharded
from syncline.sharded.sharing import has_one_copy
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.words import describe_ranks

Group = dist.ProcessGroup | Transport | None

T = TypeVar("T")


class Prepared(NamedTuple, Generic[T]):
    """The arguments of a call, checked on this rank."""

    value: T
    lines: Sequence[str]
    """The description of the call, which must be equal on all ranks."""
    payload: bytes = b""
    """The bytes to send to all ranks in the same collective; see `exchange`."""
    digest: bytes | None = None
    """The fingerprint of the lines; None if it must be computed."""


def agree_on_call(
    transport: Transport, title: str, prepare: Callable[[], Prepared[T]], *, remedy: str
) -> tuple[T, list[bytes]]:
    """Check the arguments of a call on each rank, and that all ranks make the same call. A collective call.

    Args:
        transport: connects the ranks.
        title: the name of the verb, for messages.
        prepare: checks this rank's arguments. If it raises an error on one rank, all ranks raise that error.
        remedy: the last sentence of an error about calls that differ, which says what to do.

    Returns:
        The value that `prepare` has returned on this rank, and the payload of each rank.

    Raises:
        ContractMismatch, CollectiveMismatch, TypeError, ValueError, SynclineError: see `exchange`.
    """
    prepared: Prepared[T] | None = None
    fault = None
    try:
        prepared = prepare()
    except Exception as error:
        fault = error
    lines, payload, digest = ([], b"", None) if prepared is None else prepared[1:]
    payloads = exchange(transport, title, lines, payload=payload, fault=fault, remedy=remedy, digest=digest)
    assert prepared is not None
    return prepared.value, payloads


def rank_of_source(src: Any, group: Group, transport: Transport) -> int:
    """Return the rank in `transport` of global rank `src`.

    Raises:
        TypeError, ValueError: `src` is not an integer, or not a rank of the group.
    """
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
    """Return torch's global rank of a rank in a process group. In a Syncline transport, ranks stay as they are."""
    return dist.get_process_group_ranks(group)[rank] if isinstance(group, dist.ProcessGroup) else rank


def refuse_one_copy(target: Any) -> None:
    """Raise if the target is a module of whose parameters the ranks use one copy.

    Raises:
        ValueError: the ranks use one copy, so the parameters are already equal.
    """
    if isinstance(target, nn.Module) and has_one_copy(target):
        raise ValueError(
            f"the ranks use one copy of the parameters of {type(target).__name__} (sl.share_, or sharded=True), so the "
            "parameters are already equal. Write them only inside of sl.write_shared"
        )


def refuse_sharded(target: Any, consequence: str) -> None:
    """Raise if the target is a sharded optimizer.

    Args:
        target: the target of a verb.
        consequence: the end of the message, a clause that begins with "so".

    Raises:
        ValueError: the target is a sharded optimizer.
    """
    if is_sharded(target):
        raise ValueError(
            f"this optimizer is sharded, and each rank has the state of its own shard only, {consequence}"
        )


def checked_total(title: str, weights: Sequence[float]) -> float:
    """Return the sum of the ranks' weights.

    Raises:
        ValueError: the sum is 0 or not finite.
    """
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ValueError(
            f"{title}: expected weights with a finite sum above 0, got {list(weights)} (in rank order). Give at least "
            "one rank a weight above 0, or leave the call out on all ranks"
        )
    return total
