"""The verb `all_reduce_`, which reduces tensors over all ranks, in place."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from syncline.checks import checked_flag, suggests_arguments
from syncline.session.world import transport_of
from syncline.tensors.packing import CAP_BYTES
from syncline.tensors.reduction import TensorReducer, check_reducible
from syncline.tensors.targets import is_plain, mark_written, named_tensors
from syncline.transport.agreement import describe_tensors
from syncline.transport.base import ReduceOp, Transport, reductions_of
from syncline.transport.work import Disagreement, Work
from syncline.verbs.common import Group, Prepared, agree_on_call, refuse_one_copy, refuse_sharded, verb

T = TypeVar("T")

_SAME_TREE = "Pass the same tensors in the same containers, and the same op, on every rank."


@overload
def all_reduce_(
    target: T, op: ReduceOp = "sum", *, group: Group = None, async_op: Literal[False] = False
) -> T: ...


@overload
def all_reduce_(
    target: Any, op: ReduceOp = "sum", *, group: Group = None, async_op: Literal[True]
) -> Work: ...


@overload
def all_reduce_(target: T, op: ReduceOp = "sum", *, group: Group = None, async_op: bool) -> T | Work: ...


@suggests_arguments
def all_reduce_(target: Any, op: ReduceOp = "sum", *, group: Group = None, async_op: bool = False) -> Any:
    """Reduce the tensors of `target` over all ranks, in place. The result has the same bits on every rank.

    Tensors of one dtype and device are sent together, in few collectives. Autograd does not record the reduction. The
    ranks compare names, shapes and dtypes before any tensor is written. If `target` is a single tensor and is sent over
    shared memory, the ranks compare its shape during the transfer instead.

    Args:
        target: see `broadcast_`. If it is a module, its parameters and buffers are reduced.
        op: "sum", "mean", "max", "min" or "product". The default is "sum", as in torch. Integers have no mean.
        group: see `broadcast_`.
        async_op: whether to return at once, with a handle. Do not use `target` before you have waited for the handle.

    Returns:
        `target`. If `async_op` is True, a handle with a method `wait()`.

    Raises:
        ContractMismatch: the ranks passed different targets or operations. The text is the same on every rank.
        TypeError: `target` has an unsupported type, or contains something other than tensors. Every rank raises the
            error, even if only one rank's target is wrong.
        ValueError: `op` is unknown, or not defined for one of the tensors; a tensor cannot be written in place; the
            optimizer is sharded; or the ranks use one copy of the parameters. Every rank raises the error.

    Examples:
        >>> import torch, syncline as sl
        >>> sl.all_reduce_({"a": torch.ones(2), "b": torch.zeros(1)})
        {'a': tensor([1., 1.]), 'b': tensor([0.])}
    """
    transport = transport_of(group)
    with verb(transport, "all_reduce_"):
        if isinstance(async_op, bool) and transport.sees_calls and _is_sent_directly(target, op):
            # By `terms` the transfer compares shapes and callers. It compares operation, dtype and size in any case.
            work = transport.all_reduce(target, op, terms=_terms(target.shape, transport.turn.caller))
            if async_op:
                return _DirectWork(work, target, lambda: _agreed_reducer(target, op, transport).run())
            with suppress(Disagreement):
                work.wait()
                mark_written([target])
                return target
            _agreed_reducer(target, op, transport).run()
            return target
        reducer = _agreed_reducer(target, op, transport, async_op=async_op)
        if async_op:
            return reducer.start()
        reducer.run()
        return target


def _is_sent_directly(target: Any, op: str) -> bool:
    """Return whether this rank can send a target before the ranks compare targets. The answer may differ by rank."""
    return (
        type(target) is Tensor
        and target.layout is torch.strided
        and not target.is_nested
        and target.is_cpu
        and op in reductions_of(target.dtype)
        and is_plain(target)
        and target.nbytes <= CAP_BYTES
    )


def _terms(shape: torch.Size, caller: str) -> int:
    """Return a number, which is not 0, by which the transfer compares the shape and the caller between the ranks.

    Ranks with the same shape and caller get the same number.
    """
    terms = hash(shape)  # a hash of integers is the same in every process
    return (terms + zlib.crc32(caller.encode()) if caller else terms) or 1


def _agreed_reducer(
    target: Any, op: ReduceOp, transport: Transport, *, async_op: bool = False
) -> TensorReducer:
    """Check that all ranks passed matching targets, and return the reducer of this rank's target. A collective call."""

    def prepare() -> Prepared[list[Tensor]]:
        checked_flag("async_op", async_op)
        refuse_one_copy(target)
        refuse_sharded(target, "so the state cannot be reduced over the ranks")
        named = named_tensors(target)
        check_reducible(named, op)
        lines = [f"operation  {op}", *describe_tensors(named, kind="tensor", layout=False)]
        return Prepared([tensor for _, tensor in named], lines)

    tensors, _ = agree_on_call(transport, "sl.all_reduce_", prepare, remedy=_SAME_TREE)
    return TensorReducer(tensors, transport, op)


class _DirectWork(Work):
    """The pending reduction of a single tensor that was sent before the ranks compared their targets.

    Args:
        work: the pending transfer.
        target: the tensor.
        again: a function that compares the targets in full and then reduces them. It is called if the transfer detects
            that the calls of the ranks differ.
    """

    def __init__(self, work: Work, target: Tensor, again: Callable[[], None]) -> None:
        self._work = work
        self._target = target
        self._again: Callable[[], None] | None = again

    def wait(self, timeout_seconds: float | None = None) -> None:
        again = self._again
        if again is None:
            return
        with suppress(Disagreement):
            self._work.wait(timeout_seconds)
            mark_written([self._target])
            again = None
        self._again = None
        if again is not None:
            again()

    def is_completed(self) -> bool:
        return self._again is None or self._work.is_completed()
