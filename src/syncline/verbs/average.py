"""average_: replace tensors by their weighted mean over all ranks, in place.

`Likeness` recognizes the tensors of an earlier call, so that its plan can be used again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.buffers.pooling import BufferAverage, running_statistics
from syncline.checks import checked_flag, checked_number
from syncline.optimizers.contents import OptimizerNumbers, is_setting
from syncline.session.registry import REGISTRY
from syncline.session.world import transport_of
from syncline.tensors.reduction import ReductionPlan, TensorReducer, check_reducible
from syncline.tensors.targets import distinct_tensors, mark_written, named_tensors, walk
from syncline.transport.agreement import describe_tensors, fingerprint
from syncline.transport.base import Transport
from syncline.transport.work import DONE, CombinedWork, Work
from syncline.verbs.common import (
    Group,
    Prepared,
    agree_on_call,
    checked_total,
    refuse_one_copy,
    refuse_sharded,
)
from syncline.verbs.diverge import record_equal


class Likeness:
    """A record of named tensors, used to recognize them later when only their values have changed.

    A plan derived from their names, types, shapes, strides, dtypes, devices and addresses stays valid while they fit
    this record. It keeps no references to the tensors, not even weak ones. So a module can release its tensors,
    `tensor.data = other` frees memory as usual, and `torch.utils.swap_tensors` works (it refuses tensors with weak
    references).

    Args:
        walked: names and dense tensors, as from `walk`.

    Example:
        >>> import torch
        >>> weight = torch.zeros(2, 2)
        >>> likeness = Likeness([("weight", weight)])
        >>> likeness.fits([("weight", weight.add_(1))])
        True
        >>> weight.data = weight.data.t()
        >>> likeness.fits([("weight", weight)])
        False
    """

    def __init__(self, walked: Sequence[tuple[str, Tensor]]) -> None:
        self._known = [
            (
                name,
                type(tensor),
                _place(tensor),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor.device,
                tensor.is_conj(),
                tensor.is_neg(),
            )
            for name, tensor in walked
        ]

    def fits(self, walked: Sequence[tuple[str, Tensor]]) -> bool:
        """Return whether these are the recorded tensors. This takes a fifth of the time to plan them again."""
        if len(walked) != len(self._known):
            return False
        for (name, tensor), known in zip(walked, self._known, strict=True):
            known_name, kind, place, shape, strides, dtype, device, is_conj, is_neg = known
            if (
                tensor.layout is not torch.strided  # a sparse tensor has no address
                or _place(tensor) != place
                or type(tensor) is not kind
                or tensor.dtype is not dtype
                or tensor.device != device
                or tensor.shape != shape
                or tensor.stride() != strides
                or tensor.is_conj() is not is_conj
                or tensor.is_neg() is not is_neg
                or name != known_name
            ):
                return False
        return True


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor, or its id if it is empty, because empty tensors have no distinct address."""
    return tensor.data_ptr() or id(tensor)


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
    """Replace `target` by its weighted mean over the ranks, in place; every rank ends with the same bits.

    Floating-point tensors become sum(weight * value) / sum(weight), correct up to rounding; 16-bit tensors are summed
    in fp32. With equal weights this is the plain mean. Replicas that are equal on 2, 4, 8, ... ranks then stay
    unchanged, bit for bit; with other numbers of ranks or other weights a last bit may change, on all ranks alike.
    Tied tensors stay tied and count once. For autograd, writing is an in-place change. One collective carries weights
    and fingerprint. Tensors are fused by dtype and device, with at most two packed copies of 32 MiB at a time.

    Values without a mean: in a module, integers (BatchNorm's counter) become the maximum, and a bool becomes true if
    it is true on any rank with a weight above 0. A `running_var` is pooled with its `running_mean` (docs/buffers.md).
    In an optimizer, step counts and other integers of the state become the maximum. The settings of its parameter
    groups are not changed, but must be equal. In a plain tree integers are refused.

    Args:
        target: a Module (parameters and buffers), an Optimizer (its state, not the parameters), a Tensor, or nested
            dicts, lists and tuples of tensors.
        weight: the weight of this rank: finite, at least 0. A rank of weight 0 contributes nothing, even if its
            values are NaN, and gets the result.
        group: see `broadcast_`.
        async_op: return at once; do not use `target` before waiting for the handle.

    Returns:
        `target`, or with async_op a handle with `.wait()`.

    Raises:
        ContractMismatch: the ranks' targets or settings differ; the same text on every rank.
        TypeError: `target` is or contains something else.
        ValueError: a weight is negative, infinite or NaN, or all are 0; a plain tree has an integer; a tensor cannot
            be written in place; or the optimizer is sharded. On every rank, even if the cause is on one.

    Example:
        >>> import torch, syncline as sl
        >>> model = torch.nn.BatchNorm1d(2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> num_samples = 64
        >>> model = sl.average_(model, weight=num_samples)
        >>> optimizer = sl.average_(optimizer, weight=num_samples)
    """
    transport = transport_of(group)
    with transport.turn:

        def prepare() -> Prepared[_Averaged]:
            checked_flag("async_op", async_op)
            payload = _WEIGHT.pack(checked_number("weight", weight, at_least=0))
            averaged = _averaged(target)
            return Prepared(averaged, averaged.lines, payload, averaged.digest)

        averaged, payloads = agree_on_call(transport, _TITLE, prepare, remedy=_REMEDY)
        weights: list[float] = [_WEIGHT.unpack_from(payload)[0] for payload in payloads]
        total = checked_total(_TITLE, weights)
        if transport.size == 1:
            return DONE if async_op else target
        fraction = None if len(set(weights)) == 1 else weights[transport.rank] / total
        if async_op:
            return averaged.start(transport, fraction)
        averaged.run(transport, fraction)
        return target


def _averaged(target: Any) -> _Averaged:
    """Determine how each tensor of a target is averaged.

    Raises:
        TypeError, ValueError: the target cannot be averaged.
    """
    if isinstance(target, nn.Module):
        return _of_module(target)
    named = named_tensors(target)
    if isinstance(target, Optimizer):
        return _of_optimizer(target, named)
    check_reducible(named, "mean")
    return _Averaged(["target  tensors", *_described(named)], [tensor for _, tensor in named])


class _Averaged:
    """The tensors of a target, grouped by the operation that is applied to them.

    Args:
        lines: the description that must be equal on all ranks.
        means: the tensors that are replaced by their mean.
        others: the tensors without a mean; they take the maximum, or are pooled.
        pairs: running means and variances among `others`, to be pooled.
        steps: step counts of an optimizer, each with the integer among `others` that stands for it.
        numbers: the numbers of an optimizer that are not tensors.
        plan: the cached plan of a module.
    """

    def __init__(
        self,
        lines: list[str],
        means: Sequence[Tensor],
        others: Sequence[Tensor] = (),
        pairs: Sequence[tuple[Tensor, Tensor]] = (),
        *,
        steps: Sequence[tuple[Tensor, Tensor]] = (),
        numbers: OptimizerNumbers | None = None,
        plan: _ModulePlan | None = None,
    ) -> None:
        self.lines = lines
        self.digest = plan.digest if plan else None
        self._means = means
        self._others = others
        self._pairs = pairs
        self._steps = steps
        self._numbers = numbers
        self._plan = plan

    def start(self, transport: Transport, fraction: float | None) -> Work:
        """Start all transfers at once; `fraction` is this rank's weight over their sum, None if all are equal."""
        others = self._start_others(transport, fraction)
        means = self._reducer(transport, fraction).start()
        return CombinedWork([(others, None), (means, self._finish)])

    def run(self, transport: Transport, fraction: float | None) -> None:
        """Average and wait, with bounded memory for copies."""
        others = self._start_others(transport, fraction)
        self._reducer(transport, fraction).run()
        others.wait()
        self._finish()

    def _reducer(self, transport: Transport, fraction: float | None) -> TensorReducer:
        op: Literal["mean", "sum"] = "mean" if fraction is None else "sum"
        reduction = self._plan.reduction if self._plan else None
        reducer = TensorReducer(
            self._means, transport, op, fraction=fraction, rounds_once=True, plan=reduction
        )
        if self._plan:
            self._plan.reduction = reducer.plan
        return reducer

    def _start_others(self, transport: Transport, fraction: float | None) -> Work:
        if fraction is None:
            return BufferAverage(self._others, self._pairs, transport, divisor=transport.size)
        return BufferAverage(self._others, self._pairs, transport, counts=fraction > 0, fraction=fraction)

    def _finish(self) -> None:
        with torch.inference_mode():  # in which any tensor may be written, inference tensors included
            for step, twin in self._steps:
                step.data.copy_(twin)
        if self._numbers is not None:
            self._numbers.write_back()
        record_equal(self._means)
        mark_written([*self._others, *(step for step, _ in self._steps)])


# ---------------------------------------------------------------------- a module


class _ModulePlan:
    """A plan for averaging a module, valid while its tensors are the same; it keeps none of them alive.

    Args:
        module: the module.
        walked: its tensors, as from `walk`.

    Raises:
        ValueError: the module cannot be averaged.
    """

    def __init__(self, module: nn.Module, walked: Sequence[tuple[str, Tensor]]) -> None:
        named = distinct_tensors(walked)
        taking_part = {id(tensor) for _, tensor in named}
        pairs: list[tuple[Tensor, Tensor]] = []
        if any(name.endswith("running_var") for name, _ in named):
            pairs = running_statistics((owner._buffers for owner in module.modules()), taking_part)
        pooled = {id(tensor) for pair in pairs for tensor in pair}
        is_other = {id(tensor): id(tensor) in pooled or not _has_mean(tensor) for _, tensor in named}
        check_reducible([(name, tensor) for name, tensor in named if not is_other[id(tensor)]], "mean")
        place = {id(tensor): index for index, (_, tensor) in reversed([*enumerate(walked)])}
        self.lines = ["target  a module", *_described(named)]
        self.digest = fingerprint(_TITLE, self.lines)
        self.likeness = Likeness(walked)
        self.means = [place[i] for i, is_so in is_other.items() if not is_so]
        """The indices in `walked` of the tensors that are replaced by their mean."""
        self.others = [place[i] for i, is_so in is_other.items() if is_so]
        self.pairs = [(place[id(mean)], place[id(variance)]) for mean, variance in pairs]
        self.reduction: ReductionPlan | None = None
        """The reduction plan of the last call."""


def _of_module(module: nn.Module) -> _Averaged:
    refuse_one_copy(module)
    walked = walk(module)
    plans = REGISTRY.by_module(_ModulePlan)
    plan = plans.get(module)
    if plan is None or not plan.likeness.fits(walked):
        plan = plans[module] = _ModulePlan(module, walked)
    tensors = [tensor for _, tensor in walked]
    return _Averaged(
        plan.lines,
        [tensors[i] for i in plan.means],
        [tensors[i] for i in plan.others],
        [(tensors[i], tensors[k]) for i, k in plan.pairs],
        plan=plan,
    )


# ---------------------------------------------------------------------- an optimizer


def _of_optimizer(optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> _Averaged:
    refuse_sharded(optimizer, "so there is nothing to average")
    means: list[tuple[str, Tensor]] = []
    others: list[Tensor] = []
    steps: list[tuple[Tensor, Tensor]] = []
    for name, tensor in named:
        if is_setting(name):
            continue
        if not _has_mean(tensor):
            others.append(tensor)
        elif name.endswith(".step") and tensor.dim() == 0:
            steps.append((tensor, tensor.detach().to(torch.int64)))
        else:
            means.append((name, tensor))
    numbers = OptimizerNumbers(optimizer, settings=False)
    integers, floats = numbers.tensors
    others += [twin for _, twin in steps] + [integers]
    means.append(("numbers", floats))
    check_reducible(means, "mean")
    lines = ["target  an optimizer", *_described(named), *numbers.lines]
    return _Averaged(lines, [tensor for _, tensor in means], others, steps=steps, numbers=numbers)


def _described(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    return describe_tensors(named, kind="tensor", layout=False)


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
