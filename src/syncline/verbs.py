"""Synchronization without a wrapper and without a backward: functions to call when you want it.

Each is a collective: every rank of the group has to call it, in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from syncline.optim.attached import is_sharded
from syncline.plan.difference import describe_ranks
from syncline.sync.agreement import describe_tensors, exchange
from syncline.sync.metrics import weighted_mean
from syncline.sync.optimizers import OptimizerNumbers
from syncline.sync.reduction import check_reducible, reduce_tensors
from syncline.sync.tensors import TensorBroadcaster, is_plain, named_tensors
from syncline.transport.base import ReduceOp, Transport, Work
from syncline.world import transport_of

__all__ = ["all_reduce_", "barrier", "broadcast_", "mean"]

T = TypeVar("T")
Group = dist.ProcessGroup | Transport | None

_SAME_TREE = "Call it with the same tree of tensors and the same op on every rank."
_REMEDY = (
    "Call it with the same tree of tensors and the same src on every rank. "
    "(Of tied tensors only the first is named.)"
)


@overload
def broadcast_(target: T, src: int = 0, *, group: Group = None, async_op: Literal[False] = False) -> T: ...
@overload
def broadcast_(target: Any, src: int = 0, *, group: Group = None, async_op: Literal[True]) -> Work: ...
@overload
def broadcast_(target: T, src: int = 0, *, group: Group = None, async_op: bool) -> T | Work: ...
def broadcast_(target: Any, src: int = 0, *, group: Group = None, async_op: bool = False) -> Any:
    """Make `target` what it is on rank `src`, in place, on every rank.

    All dtypes travel together in few collectives. Tied weights stay tied. Of an optimizer, the tensors and the
    numbers (learning rate, step counts) of its state and parameter groups are sent, not the parameters. Names,
    shapes and dtypes are agreed on before anything is sent; strides may differ. Writing counts as an in-place
    change for autograd, so a graph made before cannot give wrong gradients unnoticed. On `src` nothing is
    written.

    Args:
        target: a Module (parameters and buffers), an Optimizer, a Tensor, or nested dicts, lists and tuples of
            tensors.
        src: whose values: a global rank, as in torch (with a Syncline transport: a rank of it).
        group: the group to broadcast in: a `torch.distributed` process group, a Syncline transport, or None for
            the default group (or a world of one, where torch.distributed is not initialised).
        async_op: return at once; `target` is not to be touched before the handle was waited for.

    Returns:
        `target`, or with async_op a handle with `.wait()`.

    Raises:
        ContractMismatch: the ranks' targets or sources differ; the same text on every rank.
        TypeError: `target` is or contains something else than the above, or `src` is no integer; on every rank,
            if only one does so.
        ValueError: a tensor cannot be written in place, or `src` is not a rank of the group; on every rank too.

    Example:
        >>> import torch, syncline as sl
        >>> model = sl.broadcast_(torch.nn.Linear(2, 1))
        >>> work = sl.broadcast_(model, async_op=True)
        >>> work.wait()
    """
    transport = transport_of(group)
    tensors: list[Tensor] = []
    lines: list[str] = []
    numbers: OptimizerNumbers | None = None
    src_rank, fault = 0, None
    try:
        src_rank = _rank_of_source(src, group, transport)
        named = named_tensors(target)
        tensors = [tensor for _, tensor in named]
        lines = [f"source  rank {src}", *describe_tensors(named, kind="tensor", layout=False)]
        if is_sharded(target):
            raise ValueError(
                "this optimizer is sharded: each rank has state for its own share, and nothing of it is equal. "
                "optimizer.load_state_dict(optimizer.state_dict()) on all ranks goes through torch's ordinary form"
            )
        if isinstance(target, Optimizer):
            numbers = OptimizerNumbers(target)
            tensors += numbers.tensors
            lines += numbers.lines
    except Exception as error:
        fault = error
    exchange(transport, "sl.broadcast_", lines, fault=fault, remedy=_REMEDY)
    broadcaster = TensorBroadcaster(tensors, transport)
    if transport.rank == src_rank:
        numbers = None
    if async_op:
        work = broadcaster.start(src_rank)
        return _WorkThen(work, numbers.write_back) if numbers is not None else work
    broadcaster.run(src_rank)
    if numbers is not None:
        numbers.write_back()
    return target


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
    if transport.sees_calls and type(target) is Tensor and target.is_cpu:
        # Whether it is plain may differ from rank to rank, but not what is sent.
        if is_plain(target):
            work = transport.all_reduce(target, op)  # which refuses what cannot be reduced
            increment_version(target)
        else:
            check_reducible(named_tensors(target), op)
            work = reduce_tensors([target], transport, op)
        if async_op:
            return work
        work.wait()
        return target
    tensors: list[Tensor] = []
    lines: list[str] = []
    fault = None
    try:
        named = named_tensors(target)
        check_reducible(named, op)
        tensors = [tensor for _, tensor in named]
        lines = [f"operation  {op}", *describe_tensors(named, kind="tensor", layout=False)]
    except Exception as error:
        fault = error
    exchange(transport, "sl.all_reduce_", lines, fault=fault, remedy=_SAME_TREE)
    work = reduce_tensors(tensors, transport, op)
    if async_op:
        return work
    work.wait()
    return target


def barrier(group: Group = None) -> None:
    """Return when every rank of the group has called it.

    Args:
        group: see `broadcast_`.

    Raises:
        CollectiveTimeout: a rank did not come before the deadline.
        CollectiveMismatch: a rank called something else.
    """
    exchange(transport_of(group), "sl.barrier", [])


@overload
def mean(values: float, weight: float | Tensor = 1.0, *, group: Group = None) -> float: ...
@overload
def mean(values: T, weight: float | Tensor = 1.0, *, group: Group = None) -> T: ...
def mean(values: Any, weight: float | Tensor = 1.0, *, group: Group = None) -> Any:
    """The weighted mean of `values` over the ranks; the same bits on every rank.

    Up to eight numbers cost one collective, more of them two; each tensor of 4,096 elements or more one besides.

    Args:
        values: a number, a tensor, or nested dicts, lists, tuples and dataclasses of them; names, shapes and
            dtypes must be the same on all ranks. Nothing is changed in place.
        weight: how much this rank counts, say the number of items behind its values: finite, at least 0. A rank
            of weight 0 contributes nothing, even if its values are NaN.
        group: see `broadcast_`.

    Returns:
        The same containers. Numbers (int and bool too) become float; tensors keep shape, dtype and device, but
        integer and bool tensors become float32. Detached from autograd.

    Raises:
        ContractMismatch: the ranks' values have different structures; the same text on every rank.
        ValueError: a weight is negative, infinite or NaN, or all weights are 0; on every rank.
        TypeError: a leaf is neither number nor tensor; on every rank.

    Example:
        >>> import syncline as sl
        >>> loss, num_correct, num_samples = 0.25, 60, 64
        >>> sl.mean({"loss": loss, "accuracy": num_correct / num_samples}, weight=num_samples)
        {'loss': 0.25, 'accuracy': 0.9375}
    """
    return weighted_mean(values, weight, transport_of(group))


def _rank_of_source(src: Any, group: Group, transport: Transport) -> int:
    """The rank of `transport` that global rank `src` is."""
    try:
        rank = operator.index(src)
    except TypeError:
        raise TypeError(f"expected src to be a rank, an integer; got {src!r}") from None
    ranks = list(range(transport.size))
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise ValueError(
            f"expected src to be a global rank of the group, which consists of {describe_ranks(ranks)}; got {rank}"
        )
    return ranks.index(rank)


class _WorkThen(Work):
    """Work that is followed by something, once."""

    def __init__(self, inner: Work, then: Callable[[], None]) -> None:
        self._inner = inner
        self._then: Callable[[], None] | None = then

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._inner.wait(timeout_seconds)
        then, self._then = self._then, None
        if then is not None:
            then()

    def is_completed(self) -> bool:
        return self._inner.is_completed()
