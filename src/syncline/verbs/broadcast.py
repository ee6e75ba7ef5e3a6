"""The verbs `broadcast_` and `keep_best_`, which copy tensors from one rank to all others, in place."""

from __future__ import annotations

import math
import struct
from typing import Any, Literal, TypeVar, overload

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from syncline.checks import (
    checked_choice,
    checked_count,
    checked_flag,
    checked_number,
    number_in,
    suggests_arguments,
)
from syncline.optimizers.contents import OptimizerNumbers
from syncline.session.world import transport_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.tensors.targets import named_tensors
from syncline.transport.agreement import describe_tensors
from syncline.transport.base import Transport
from syncline.transport.work import CombinedWork, Work
from syncline.verbs.common import Group, Prepared, agree_on_call, refuse_one_copy, refuse_sharded, verb
from syncline.verbs.diverge import record_equal
from syncline.words import describe_ranks

T = TypeVar("T")

_REMEDY = (
    "Pass the same tensors in the same containers, and the same src, on every rank. "
    "(Of tied tensors, only the first is named.)"
)

_KEEP_BEST = "sl.keep_best_"

_SAME_MODE = "Pass the same tensors in the same containers, and the same mode, on every rank."

_SCORE = struct.Struct("<d")


@overload
def broadcast_(target: T, src: int = 0, *, group: Group = None, async_op: Literal[False] = False) -> T: ...


@overload
def broadcast_(target: Any, src: int = 0, *, group: Group = None, async_op: Literal[True]) -> Work: ...


@overload
def broadcast_(target: T, src: int = 0, *, group: Group = None, async_op: bool) -> T | Work: ...


@suggests_arguments
def broadcast_(target: Any, src: int = 0, *, group: Group = None, async_op: bool = False) -> Any:
    """Copy the values of `target` from rank `src` to all other ranks, in place.

    Tensors of all dtypes are sent together, in few collectives. Tied weights stay tied. If `target` is an optimizer,
    the tensors and the numbers (learning rate, step counts) of its state and its parameter groups are sent, but not the
    parameters. The ranks compare names, shapes and dtypes before any tensor is sent. Strides may differ between ranks.
    Autograd treats the write as an in-place change: a backward through a graph that was recorded before raises an error
    instead of computing wrong gradients. On rank `src` nothing is written.

    Args:
        target: a Module (its parameters and buffers), an Optimizer, a Tensor, or nested dicts, lists and tuples of
            tensors.
        src: the rank to copy from. As in torch, this is a global rank. If `group` is a Syncline transport, it is a rank
            of that transport.
        group: the ranks that take part: a `torch.distributed` process group or a Syncline transport. None means the
            default group, or a world of one rank if torch.distributed is not initialised.
        async_op: whether to return at once, with a handle. Do not use `target` before you have waited for the handle.

    Returns:
        `target`. If `async_op` is True, a handle with a method `wait()`.

    Raises:
        ContractMismatch: the ranks passed different targets or sources. The text is the same on every rank.
        TypeError: `target` has an unsupported type, or contains something other than tensors; or `src` is not an
            integer. Every rank raises the error, even if only one rank has the cause.
        ValueError: a tensor cannot be written in place, `src` is not a rank of the group, or the optimizer is sharded.
            Every rank raises the error, even if only one rank has the cause.

    Examples:
        >>> import torch, syncline as sl
        >>> model = sl.broadcast_(torch.nn.Linear(2, 1))
        >>> work = sl.broadcast_(model, async_op=True)
        >>> work.wait()
    """
    transport = transport_of(group)
    with verb(transport, "broadcast_"):

        def prepare() -> Prepared[tuple[_Replaced, int]]:
            checked_flag("async_op", async_op)
            src_rank = _rank_of_source(src, group, transport)
            replaced = _Replaced(target)
            return Prepared((replaced, src_rank), [f"source  rank {src}", *replaced.lines])

        (replaced, src_rank), _ = agree_on_call(transport, "sl.broadcast_", prepare, remedy=_REMEDY)
        if async_op:
            return replaced.start(transport, src_rank)
        replaced.run(transport, src_rank)
        return target


@suggests_arguments
def keep_best_(
    target: Any, score: float | Tensor, mode: Literal["max", "min"] = "max", *, group: Group = None
) -> int:
    """Copy the values of `target` from the rank with the best score to all other ranks, in place.

    One collective sends the scores and compares names, shapes and dtypes. Then the values of the best rank are sent in
    the same way as by `broadcast_`.

    Args:
        target: a Module, an Optimizer, a Tensor, or nested dicts, lists and tuples of tensors; see `broadcast_`.
        score: this rank's score, a number or a tensor with one element. A score of NaN is never the best.
        mode: "max" if the highest score is the best, "min" if the lowest score is the best.
        group: see `broadcast_`.

    Returns:
        The rank with the best score. If several ranks have the best score, the lowest of these ranks is returned. As in
        torch, the result is a global rank. If `group` is a Syncline transport, it is a rank of that transport.

    Raises:
        ContractMismatch: the ranks passed different targets or modes. The text is the same on every rank.
        TypeError: `target` has an unsupported type, or contains something other than tensors; or `score` is not a
            number. Every rank raises the error.
        ValueError: the mode is unknown, all scores are NaN, a tensor cannot be written in place, the optimizer is
            sharded, or the ranks use one copy of the parameters. Every rank raises the error.

    Examples:
        >>> import torch, syncline as sl
        >>> model, validation_loss = torch.nn.Linear(2, 1), 0.25
        >>> sl.keep_best_(model, validation_loss, mode="min")
        0
    """
    transport = transport_of(group)
    with verb(transport, "keep_best_"):

        def prepare() -> Prepared[_Replaced]:
            checked_choice("mode", mode, ("max", "min"))
            payload = _SCORE.pack(_checked_score(score))
            refuse_one_copy(target)
            replaced = _Replaced(target)
            return Prepared(replaced, [f"mode  {mode}", *replaced.lines], payload)

        replaced, payloads = agree_on_call(transport, _KEEP_BEST, prepare, remedy=_SAME_MODE)
        scores: list[float] = [_SCORE.unpack_from(payload)[0] for payload in payloads]
        candidates = [rank for rank, number in enumerate(scores) if not math.isnan(number)]
        if not candidates:
            raise ValueError(
                f"{_KEEP_BEST}: expected a score that is not NaN on at least one rank, got NaN on all {transport.size} "
                "ranks, so no rank is the best, and no values were copied"
            )
        choose = max if mode == "max" else min
        # Of equal scores this is the first, so the lowest rank.
        best = choose(candidates, key=scores.__getitem__)
        if transport.size > 1:
            replaced.run(transport, best)
        # As in torch, a global rank.
        return dist.get_process_group_ranks(group)[best] if isinstance(group, dist.ProcessGroup) else best


def _rank_of_source(src: Any, group: Group, transport: Transport) -> int:
    """Return the rank that the process with the global rank `src` has in `transport`.

    If `group` is a Syncline transport, `src` is already a rank of that transport.

    Raises:
        TypeError: `src` is not an integer.
        ValueError: `src` is not a rank of the group.
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


def _checked_score(score: Any) -> float:
    """Return the score as a float. Infinite scores and NaN are allowed, but complex numbers are not."""
    number = number_in(score)
    is_nan = isinstance(number, float) and math.isnan(number)
    return math.nan if is_nan else checked_number("score", number, finite=False)


class _Replaced:
    """The values of a target that a broadcast replaces: its tensors and, if it is an optimizer, its numbers.

    Args:
        target: see `broadcast_`.

    Raises:
        TypeError, ValueError: the target cannot be broadcast.
    """

    def __init__(self, target: Any) -> None:
        named = named_tensors(target)
        self._tensors: list[Tensor] = [tensor for _, tensor in named]
        self._numbers: OptimizerNumbers | None = None
        self.lines = describe_tensors(named, kind="tensor", layout=False)
        """The lines that describe the target. They must be equal on all ranks."""
        refuse_sharded(
            target,
            "so the state of one rank must not be copied to the others. To make the state consistent, call "
            "optimizer.load_state_dict(optimizer.state_dict()) on all ranks",
        )
        if isinstance(target, Optimizer):
            self._numbers = OptimizerNumbers(target)
            self._tensors += self._numbers.tensors
            self.lines += self._numbers.lines

    def start(self, transport: Transport, src_rank: int) -> Work:
        """Start to broadcast all values at once, and return the handle for which to wait."""
        work = TensorBroadcaster(self._tensors, transport).start(src_rank)
        return CombinedWork([(work, lambda: self._finish(is_source=transport.rank == src_rank))])

    def run(self, transport: Transport, src_rank: int) -> None:
        """Broadcast the values, and wait for them. Unlike `start`, `run` bounds the memory for packed copies."""
        TensorBroadcaster(self._tensors, transport).run(src_rank)
        self._finish(is_source=transport.rank == src_rank)

    def _finish(self, *, is_source: bool) -> None:
        if self._numbers is not None and not is_source:
            self._numbers.write_back()
        record_equal(self._tensors)
