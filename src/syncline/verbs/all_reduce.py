"""all_reduce_: every rank ends with the sum, the mean, ... of what all have."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from torch import Tensor
from torch.autograd.graph import increment_version

from syncline.plan.packing import CAP_BYTES
from syncline.sync.agreement import describe_tensors, exchange
from syncline.sync.reduction import TensorReducer, check_reducible
from syncline.sync.tensors import is_plain, named_tensors
from syncline.transport.base import ReduceOp, Work
from syncline.verbs.common import Group, refuse_one_copy
from syncline.world import transport_of

__all__ = ["all_reduce_"]

T = TypeVar("T")

_SAME_TREE = "Call it with the same tree of tensors and the same op on every rank."


@overload
def all_reduce_(
    target: T, op: ReduceOp = "mean", *, group: Group = None, async_op: Literal[False] = False
) -> T: ...
@overload
def all_reduce_(
    target: Any, op: ReduceOp = "mean", *, group: Group = None, async_op: Literal[True]
) -> Work: ...
@overload
def all_reduce_(target: T, op: ReduceOp = "mean", *, group: Group = None, async_op: bool) -> T | Work: ...
def all_reduce_(target: Any, op: ReduceOp = "mean", *, group: Group = None, async_op: bool = False) -> Any:
    """Reduce `target` over all ranks, in place; every rank ends with the same bits.

    Tensors of one dtype and device travel together in few collectives, and no gradient flows through. Names, shapes and
    dtypes are agreed on before anything is sent. A single tensor on an engine that sees by itself what the ranks call
    (shared memory) is sent at once.

    Args:
        target: see `broadcast_`. Of a module parameters and buffers: integer buffers have no mean.
        op: "sum", "mean", "max", "min" or "product".
        group: see `broadcast_`.
        async_op: return at once; `target` is not to be touched before the handle was waited for.

    Returns:
        `target`, or with async_op a handle with `.wait()`.

    Raises:
        ContractMismatch, CollectiveMismatch: the ranks' targets or operations differ; on every rank.
        TypeError: `target` is or contains something else.
        ValueError: `op` is unknown or not defined for a tensor, or a tensor cannot be written in place.

    Example:
        >>> import torch, syncline as sl
        >>> sl.all_reduce_({"a": torch.ones(2), "b": torch.zeros(1)}, "sum")
        {'a': tensor([1., 1.]), 'b': tensor([0.])}
    """
    transport = transport_of(group)
    if transport.sees_calls and type(target) is Tensor and target.is_cpu and target.nbytes <= CAP_BYTES:
        # Whether it is plain may differ from rank to rank, but not what is sent.
        if is_plain(target):
            work = transport.all_reduce(target, op)  # which refuses what cannot be reduced
            increment_version(target)
        else:
            check_reducible(named_tensors(target), op)
            work = TensorReducer([target], transport, op).start()
        if async_op:
            return work
        work.wait()
        return target
    tensors: list[Tensor] = []
    lines: list[str] = []
    fault = None
    try:
        refuse_one_copy(target)
        named = named_tensors(target)
        check_reducible(named, op)
        tensors = [tensor for _, tensor in named]
        lines = [f"operation  {op}", *describe_tensors(named, kind="tensor", layout=False)]
    except Exception as error:
        fault = error
    exchange(transport, "sl.all_reduce_", lines, fault=fault, remedy=_SAME_TREE)
    reducer = TensorReducer(tensors, transport, op)
    if async_op:
        return reducer.start()
    reducer.run()
    return target
