"""Functions that several verbs use: the comparison of calls between ranks, and checks of targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn

from syncline._torch.autograd import profiled
from syncline._torch.tensors import outside_of_transforms
from syncline.events import called
from syncline.sharded.attached import is_sharded
from syncline.sharded.sharing import has_one_copy
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport

Group = dist.ProcessGroup | Transport | None

T = TypeVar("T")


class Prepared(NamedTuple, Generic[T]):
    """The checked arguments of a call on this rank, and the description that the ranks compare."""

    value: T
    lines: Sequence[str]
    """The lines that describe the call. They must be equal on all ranks."""
    payload: bytes = b""
    """The bytes that this rank sends to all ranks together with the description; see `exchange`."""
    digest: bytes | None = None
    """The fingerprint of `lines`; None if `exchange` has to compute it."""


@contextmanager
def verb(transport: Transport, name: str) -> Iterator[None]:
    """Run one call of a verb: no other thread calls anything on this transport meanwhile, and observers see the call.

    A verb that is called inside of a transform of torch.func runs outside of it.

    Args:
        transport: the transport of the call.
        name: the name of the verb, without `sl.`.
    """
    with transport.turn, profiled(name), called(name, transport.rank), outside_of_transforms():
        yield


def agree_on_call(
    transport: Transport, title: str, prepare: Callable[[], Prepared[T]], *, remedy: str
) -> tuple[T, list[bytes]]:
    """Check the arguments of a call on each rank, and check that all ranks make the same call. A collective call.

    Args:
        transport: the transport between the ranks.
        title: the name of the verb. Messages show it.
        prepare: a function that checks the arguments of this rank. If it raises an error on one rank, all ranks raise
            this error.
        remedy: the last sentence of an error about different calls, which says what to do.

    Returns:
        The `value` that `prepare` has returned on this rank, and the payloads of all ranks in rank order.

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


def refuse_one_copy(target: Any) -> None:
    """Raise an error if `target` is a module with parameters of which the ranks use one common copy.

    Raises:
        ValueError: the ranks use one copy of the parameters, so the parameters are already equal.
    """
    if isinstance(target, nn.Module) and has_one_copy(target):
        raise ValueError(
            f"the ranks use one copy of the parameters of {type(target).__name__} (sl.share_, or sharded=True), so the "
            "parameters are already equal and need no synchronization. Write them only inside of sl.write_shared"
        )


def refuse_sharded(target: Any, consequence: str) -> None:
    """Raise an error if `target` is a sharded optimizer.

    Args:
        target: the target of a verb.
        consequence: the end of the message, which is a clause that begins with "so".

    Raises:
        ValueError: `target` is a sharded optimizer.
    """
    if is_sharded(target):
        raise ValueError(
            f"this optimizer is sharded: each rank has only the state of its own shard, {consequence}"
        )


def checked_total(title: str, weights: Sequence[float]) -> float:
    """Return the sum of the weights of all ranks.

    Args:
        title: the name of the verb. The error message begins with it.
        weights: the weight of each rank.

    Raises:
        ValueError: the sum is 0 or not finite.
    """
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ValueError(
            f"{title}: expected weights with a finite sum above 0, got {list(weights)} (in rank order). Give at least "
            "one rank a weight above 0, or omit the call on all ranks"
        )
    return total
