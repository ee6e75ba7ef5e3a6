"""all_reduce_: reduce tensors over all ranks, in place."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from syncline.checks import checked_flag
from syncline.session.world import transport_of
from syncline.tensors.packing import CAP_BYTES
from syncline.tensors.reduction import TensorReducer, check_reducible
from syncline.tensors.targets import is_plain, mark_written, named_tensors
from syncline.transport.agreement import describe_tensors
from syncline.transport.base import ReduceOp, Transport, reductions_of
from syncline.transport.work import Disagreement, Work
from syncline.verbs.common import Group, Prepared, agree_on_call, refuse_one_copy, refuse_sharded

T = TypeVar("T")

_SAME_TREE = "Call it with the same tree of tensors and the same op on every rank."


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


def all_reduce_(target: Any, op: ReduceOp = "sum", *, group: Group = None, async_op: bool = False) -> Any:
    """Reduce `target` over all ranks, in place. The result has the same bits on every rank.

    Tensors of one dtype and device are sent together in few collectives. Autograd does not record the reduction. The
    ranks compare names, shapes and dtypes before any tensor is written. Over shared memory, a single tensor is sent at
    once, and its shape is compared during the transfer.

    Args:
        target: see `broadcast_`. If it is a module, its parameters and buffers are reduced.
        op: "sum" (as in torch), "mean", "max", "min" or "product". Integers have no mean.
        group: see `broadcast_`.
        async_op: return at once. Do not use `target` before you have waited for the handle.

    Returns:
        `target`. With async_op, a handle with `.wait()`.

    Raises:
        ContractMismatch: the targets or operations of the ranks differ. The text is the same on every rank.
        TypeError: `target` is of another type, or contains something else. Every rank raises the error, even if only
            one rank's target is wrong.
        ValueError: `op` is unknown or not defined for a tensor, or a tensor cannot be written in place. Every rank
            raises the error.

    Example:
        >>> import torch, syncline as sl
        >>> sl.all_reduce_({"a": torch.ones(2), "b": torch.zeros(1)})
        {'a': tensor([1., 1.]), 'b': tensor([0.])}
    """
    transport = transport_of(group)
    with transport.turn:
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
    """Return whether a target can be sent before the ranks compare it. The answer may differ between ranks."""
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
    """Return a number that is equal on all ranks with the same shape and caller, and not 0."""
    terms = hash(shape)  # a hash of integers is the same in every process
    return (terms + zlib.crc32(caller.encode()) if caller else terms) or 1


def _agreed_reducer(
    target: Any, op: ReduceOp, transport: Transport, *, async_op: bool = False
) -> TensorReducer:
    """Check that the targets of all ranks are alike, and return the reducer of this rank's target."""

    def prepare() -> Prepared[list[Tensor]]:
        checked_flag("async_op", async_op)
        refuse_one_copy(target)
        refuse_sharded(target, "so it cannot be reduced over the ranks")
        named = named_tensors(target)
        check_reducible(named, op)
        lines = [f"operation  {op}", *describe_tensors(named, kind="tensor", layout=False)]
        return Prepared([tensor for _, tensor in named], lines)

    tensors, _ = agree_on_call(transport, "sl.all_reduce_", prepare, remedy=_SAME_TREE)
    return TensorReducer(tensors, transport, op)


class _DirectWork(Work):
    """The work of a single tensor that was sent before the ranks compared the tensor.

    Args:
        work: the work of the transport.
        target: the tensor.
        again: compares the targets in full and reduces them. It is called if the transfer detects a difference.
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
