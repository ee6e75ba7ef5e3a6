"""average_: every rank ends with the weighted mean of what all have."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from syncline.optim.attached import is_sharded
from syncline.sync.agreement import describe_tensors, exchange
from syncline.sync.divergence import have_met
from syncline.sync.metrics import checked_total, checked_weight
from syncline.sync.optimizers import OptimizerNumbers, is_setting
from syncline.sync.pooling import BufferAverage, running_statistics
from syncline.sync.reduction import TensorReducer, check_reducible
from syncline.sync.tensors import named_tensors
from syncline.transport.base import Transport, Work
from syncline.verbs.common import Group, WorkThen, refuse_one_copy
from syncline.world import transport_of

__all__ = ["average_"]

T = TypeVar("T")

_TITLE = "sl.average_"
_REMEDY = (
    "Call it with the same tree of tensors on every rank; of an optimizer, the settings must be equal, too."
)
_WEIGHT = struct.Struct("<d")


@overload
def average_(
    target: T, weight: float | Tensor = 1.0, *, group: Group = None, async_op: Literal[False] = False
) -> T: ...
@overload
def average_(
    target: Any, weight: float | Tensor = 1.0, *, group: Group = None, async_op: Literal[True]
) -> Work: ...
@overload
def average_(target: T, weight: float | Tensor = 1.0, *, group: Group = None, async_op: bool) -> T | Work: ...
def average_(
    target: Any, weight: float | Tensor = 1.0, *, group: Group = None, async_op: bool = False
) -> Any:
    """Make `target` its weighted mean over the ranks, in place; every rank ends with the same bits.

    Floating tensors become sum(weight * value) / sum(weight), right to rounding: 16-bit ones are added up in fp32. With
    equal weights that is the plain mean; replicas that are equal on 2, 4, 8, ... ranks then stay as they are, bit for
    bit (on other numbers of ranks, or with other weights, a last bit may change: on all ranks alike). Tied tensors stay
    tied and count once. Writing counts as an in-place change for autograd. Weights and fingerprint travel in one
    collective, tensors fused by dtype and device, with at most two packed copies of 32 MiB at a time.

    What has no mean: in a module, integers (BatchNorm's counter) become the maximum and a bool is true where it is
    true on any rank that counts; a `running_var` is pooled with its `running_mean` (docs/buffers.md). In an optimizer,
    step counts and other integers of the state become the maximum; settings of its parameter groups are left alone, but
    have to be equal. In a plain tree integers are refused.

    Args:
        target: a Module (parameters and buffers), an Optimizer (its state, not the parameters), a Tensor, or nested
            dicts, lists and tuples of tensors.
        weight: how much this rank counts: finite, at least 0. A rank of weight 0 contributes nothing, even if its
            values are NaN, and gets the result.
        group: see `broadcast_`.
        async_op: return at once; `target` is not to be touched before the handle was waited for.

    Returns:
        `target`, or with async_op a handle with `.wait()`.

    Raises:
        ContractMismatch: the ranks' targets or settings differ; the same text on every rank.
        TypeError: `target` is or contains something else.
        ValueError: a weight is negative, infinite or NaN, or all are 0; an integer in a plain tree; a tensor cannot be
            written in place; a sharded optimizer; on every rank, if only one does so.

    Example:
        >>> import torch, syncline as sl
        >>> model = torch.nn.BatchNorm1d(2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> num_samples = 64
        >>> model = sl.average_(model, weight=num_samples)
        >>> optimizer = sl.average_(optimizer, weight=num_samples)
    """
    transport = transport_of(group)
    averaged, lines, mine, fault = None, [], 0.0, None
    try:
        mine = checked_weight(weight)
        averaged = _Averaged(target)
        lines = averaged.lines
    except Exception as error:
        fault = error
    told = exchange(transport, _TITLE, lines, payload=_WEIGHT.pack(mine), fault=fault, remedy=_REMEDY)
    assert averaged is not None
    weights: list[float] = [_WEIGHT.unpack_from(payload)[0] for payload in told]
    total = checked_total(_TITLE, weights)
    if transport.size == 1:
        return WorkThen([], lambda: None) if async_op else target
    share = None if len(set(weights)) == 1 else mine / total
    if async_op:
        return averaged.start(transport, share)
    averaged.run(transport, share)
    return target


class _Averaged:
    """What of a target is averaged, and what takes the maximum.

    Args:
        target: see `average_`.

    Raises:
        TypeError, ValueError: it cannot be averaged.
    """

    def __init__(self, target: Any) -> None:
        self._means: list[tuple[str, Tensor]] = []
        self._others: list[Tensor] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._numbers: OptimizerNumbers | None = None
        named = named_tensors(target)
        self.lines = [f"target  {_kind(target)}", *describe_tensors(named, kind="tensor", layout=False)]
        """What the ranks have to agree on."""
        if isinstance(target, nn.Module):
            refuse_one_copy(target)
            self._take_module(target, named)
        elif isinstance(target, Optimizer):
            self._take_optimizer(target, named)
        else:
            self._means = named
        check_reducible(self._means, "mean")

    def _take_module(self, module: nn.Module, named: Sequence[tuple[str, Tensor]]) -> None:
        taking_part = {id(tensor) for _, tensor in named}
        if any(name.endswith("running_var") for name, _ in named):
            self._pairs = running_statistics((owner._buffers for owner in module.modules()), taking_part)
        pooled = {id(tensor) for pair in self._pairs for tensor in pair}
        for name, tensor in named:
            if id(tensor) in pooled or not _has_mean(tensor):
                self._others.append(tensor)
            else:
                self._means.append((name, tensor))

    def _take_optimizer(self, optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> None:
        if is_sharded(optimizer):
            raise ValueError(
                "this optimizer is sharded: each rank has state for its own share, so there is nothing to average"
            )
        for name, tensor in named:
            if is_setting(name):
                continue
            if not _has_mean(tensor):
                self._others.append(tensor)
            elif name.endswith(".step") and tensor.dim() == 0:
                self._steps.append((tensor, tensor.detach().to(torch.int64)))
            else:
                self._means.append((name, tensor))
        self._numbers = OptimizerNumbers(optimizer, settings=False)
        self.lines += self._numbers.lines
        integers, floats = self._numbers.tensors
        self._others += [twin for _, twin in self._steps] + [integers]
        self._means.append(("numbers", floats))

    def start(self, transport: Transport, share: float | None) -> Work:
        """Everything under way at once. `share` is this rank's of the whole weight; None if all have the same."""
        others = self._start_others(transport, share)
        return WorkThen([others, self._reducer(transport, share).start()], self._finish)

    def run(self, transport: Transport, share: float | None) -> None:
        """Average and wait, with bounded memory for copies."""
        others = self._start_others(transport, share)
        self._reducer(transport, share).run()
        others.wait()
        self._finish()

    def _reducer(self, transport: Transport, share: float | None) -> TensorReducer:
        op: Literal["mean", "sum"] = "mean" if share is None else "sum"
        tensors = [tensor for _, tensor in self._means]
        return TensorReducer(tensors, transport, op, share=share, rounds_once=True)

    def _start_others(self, transport: Transport, share: float | None) -> Work:
        if share is None:
            return BufferAverage(self._others, self._pairs, transport, divisor=transport.size)
        return BufferAverage(self._others, self._pairs, transport, counts=share > 0, share=share)

    def _finish(self) -> None:
        for step, twin in self._steps:
            step.data.copy_(twin)
        if self._numbers is not None:
            self._numbers.write_back()
        have_met(tensor for _, tensor in self._means)
        increment_version([*self._others, *(step for step, _ in self._steps)])


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _kind(target: Any) -> str:
    if isinstance(target, nn.Module):
        return "a module"
    return "an optimizer" if isinstance(target, Optimizer) else "tensors"
