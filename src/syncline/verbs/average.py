"""The verb `average_`, which replaces tensors by their weighted mean over all ranks, in place.

A `Likeness` recognizes the tensors of an earlier call, so that the plan of that call can be used again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.buffers.pooling import BufferAverage, running_statistics
from syncline.checks import checked_flag, checked_number, suggests_arguments
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
    verb,
)
from syncline.verbs.diverge import record_equal


class Likeness:
    """A record of all properties of named tensors except their values, by which the tensors are recognized later.

    The properties include names, types, shapes, strides, dtypes, devices and addresses. As long as the tensors fit this
    record, a plan that depends only on these properties stays valid. The record has no references to the tensors, not
    even weak references. So a module can release its tensors, `tensor.data = other` frees memory as usual, and
    `torch.utils.swap_tensors` works, which rejects tensors with weak references.

    Args:
        walked: the dense tensors with their names, in the order in which `walk` returns them.

    Examples:
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
        self._known = [_facts(name, tensor) for name, tensor in walked]

    def fits(self, walked: Sequence[tuple[str, Tensor]]) -> bool:
        """Return whether these are the recorded tensors. The check takes a fifth of the time that a new plan takes."""
        return len(walked) == len(self._known) and all(
            tensor.layout is torch.strided and _facts(name, tensor) == known  # a sparse tensor has no address
            for (name, tensor), known in zip(walked, self._known, strict=True)
        )


def _facts(name: str, tensor: Tensor) -> tuple[object, ...]:
    """Return the properties of a tensor on which a plan depends."""
    return (
        name,
        type(tensor),
        tensor.data_ptr() or id(tensor),  # because empty tensors have no address
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


T = TypeVar("T")

_TITLE = "sl.average_"

_REMEDY = (
    "Pass the same tensors in the same containers on every rank. If the target is an optimizer, its settings must be "
    "equal, too."
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


@suggests_arguments
def average_(
    target: Any, weight: float | Tensor = 1.0, *, group: Group = None, async_op: bool = False
) -> Any:
    """Replace the tensors of `target` by their weighted means over the ranks, in place. All ranks get the same bits.

    Floating-point tensors become sum(weight * value) / sum(weight), correct up to rounding. 16-bit tensors are summed
    in fp32. With equal weights, the result is the plain mean, and replicas that are equal on 2, 4, 8, ... ranks keep
    their exact bits. With other numbers of ranks or unequal weights, the last bit may change, in the same way on all
    ranks. Tied tensors stay tied and count once. Autograd treats the write as an in-place change. One collective sends
    the weights and compares the targets. Then tensors of one dtype and device are sent together. At most two packed
    copies of 32 MiB exist at a time.

    Some values have no mean. In a module, integers (BatchNorm's counter) become the maximum, and a bool becomes true
    if it is true on any rank with a weight above 0. A `running_var` is pooled with its `running_mean`:
    docs/answers/buffers.md. In an optimizer, step counts and other integers of the state become the maximum. The
    settings of the parameter groups must be equal on all ranks, and do not change. Tensors of integers outside of
    modules and optimizers are an error.

    Args:
        target: a Module (its parameters and buffers), an Optimizer (its state, but not the parameters), a Tensor, or
            nested dicts, lists and tuples of tensors.
        weight: the weight of this rank, finite and at least 0. If the weight of a rank is 0, its values are not used,
            even if they are NaN, but the rank receives the result.
        group: see `broadcast_`.
        async_op: whether to return at once, with a handle. Do not use `target` before you have waited for the handle.

    Returns:
        `target`. If `async_op` is True, a handle with a method `wait()`.

    Raises:
        ContractMismatch: the ranks passed different targets, or the settings of optimizers differ. The text is the same
            on every rank.
        TypeError: `target` has an unsupported type, or contains something other than tensors. Every rank raises the
            error, even if only one rank's target is wrong.
        ValueError: a weight is negative, infinite or NaN, or all weights are 0; a tensor of integers is not part of a
            module or an optimizer; a tensor cannot be written in place; the optimizer is sharded; or the ranks use one
            copy of the parameters. Every rank raises the error, even if only one rank has the cause.

    Examples:
        >>> import torch, syncline as sl
        >>> model = torch.nn.BatchNorm1d(2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> num_samples = 64
        >>> model = sl.average_(model, weight=num_samples)
        >>> optimizer = sl.average_(optimizer, weight=num_samples)
    """
    transport = transport_of(group)
    with verb(transport, "average_"):

        def prepare() -> Prepared[_Averaged]:
            checked_flag("async_op", async_op)
            payload = _WEIGHT.pack(checked_number("weight", weight, at_least=0))
            averaged = _averaged(target)
            digest = averaged.plan.digest if averaged.plan else None
            return Prepared(averaged, averaged.lines, payload, digest)

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
    """Return the tensors of a target, grouped by the operation that is applied to them.

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


@dataclass(frozen=True)
class _Averaged:
    """The tensors of a target, grouped by the operation that is applied to them."""

    lines: list[str]
    """The lines that describe the target. They must be equal on all ranks."""
    means: Sequence[Tensor]
    """The tensors that are replaced by their mean."""
    others: Sequence[Tensor] = ()
    """The tensors that are not replaced by their mean: integers, bools, and the running statistics that are pooled."""
    pairs: Sequence[tuple[Tensor, Tensor]] = ()
    """The running statistics among `others` that are pooled, in pairs of a running mean and a running variance."""
    steps: Sequence[tuple[Tensor, Tensor]] = ()
    """The step counts of an optimizer, each paired with its integer copy, which is one of `others`."""
    numbers: OptimizerNumbers | None = None
    """The numbers in the optimizer's state that are not tensors; None if the target is not an optimizer."""
    plan: _ModulePlan | None = None
    """The stored plan of the module; None if the target is not a module."""

    def start(self, transport: Transport, fraction: float | None) -> Work:
        """Start all transfers at once, and return the handle for which to wait.

        Args:
            transport: the transport between the ranks.
            fraction: this rank's weight, divided by the sum of all weights. Pass None if all weights are equal.
        """
        others = self._start_others(transport, fraction)
        means = self._reducer(transport, fraction).start()
        return CombinedWork([(others, None), (means, self._finish)])

    def run(self, transport: Transport, fraction: float | None) -> None:
        """Average the tensors, and wait for the result. Unlike `start`, `run` bounds the memory for packed copies."""
        others = self._start_others(transport, fraction)
        self._reducer(transport, fraction).run()
        others.wait()
        self._finish()

    def _reducer(self, transport: Transport, fraction: float | None) -> TensorReducer:
        op: Literal["mean", "sum"] = "mean" if fraction is None else "sum"
        reduction = self.plan.reduction if self.plan else None
        reducer = TensorReducer(
            self.means, transport, op, fraction=fraction, rounds_once=True, plan=reduction
        )
        if self.plan:
            self.plan.reduction = reducer.plan
        return reducer

    def _start_others(self, transport: Transport, fraction: float | None) -> Work:
        if fraction is None:
            return BufferAverage(self.others, self.pairs, transport, divisor=transport.size)
        return BufferAverage(self.others, self.pairs, transport, fraction=fraction)

    def _finish(self) -> None:
        with torch.inference_mode():  # because only inference mode allows writing to inference tensors
            for step, twin in self.steps:
                step.data.copy_(twin)
        if self.numbers is not None:
            self.numbers.write_back()
        record_equal(self.means)
        mark_written([*self.others, *(step for step, _ in self.steps)])


# ---------------------------------------------------------------------- a module


class _ModulePlan:
    """A plan for averaging a module, which is valid as long as the tensors of the module fit `likeness`.

    The plan has no references to the tensors.

    Args:
        module: the module.
        walked: the tensors of the module with their names, as `walk` returns them.

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
        self.means = [place[i] for i, is_without_mean in is_other.items() if not is_without_mean]
        """The indices in `walked` of the tensors that are replaced by their mean."""
        self.others = [place[i] for i, is_without_mean in is_other.items() if is_without_mean]
        """The indices in `walked` of the tensors without a mean."""
        self.pairs = [(place[id(mean)], place[id(variance)]) for mean, variance in pairs]
        self.reduction: ReductionPlan | None = None
        """The plan by which the last call reduced `means`; None before the first call."""


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
    refuse_sharded(optimizer, "so the state cannot be averaged over the ranks")
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
