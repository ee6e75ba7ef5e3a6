"""Search for NaN and infinity in tensors, and in the gradients that this rank is about to send.

On the CPU most elements are checked when they are copied into their bucket (`copying.py`). For the others, the first
check computes their sum. If an element is not finite, the sum is not finite either. But the sum of finite numbers may
overflow. So if the sum is not finite, a second check reads the least and the greatest element, which cannot overflow.

On an accelerator the program must not wait for each bucket. So kernels compute the largest magnitude of each
parameter's gradient. The program waits once for all of these results, just before the last bucket is sent, or reads
them in a later step without waiting (`LateResult`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_norm
from syncline.gradients.riders.base import Holder

Parts = Sequence[tuple[int, Tensor]]
"""Pairs of a parameter's index and its gradient. Several tensors with the same index are parts of one gradient."""

Found = Mapping[int, str]
"""A description of the elements that are not finite, by parameter index. Finite gradients have no entry."""


class OwnGradients:
    """The search for NaN and infinity in the gradients that this rank sends in one backward."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}
        """A description of each gradient's elements that are not finite, by parameter index."""
        self._sizes: list[tuple[int, Tensor]] = []
        """The parameter index and the largest magnitude of each gradient that an accelerator is checking."""

    def check(self, bucket: Holder) -> bool:
        """Check a bucket that is about to be sent. Return whether all its elements are known to be finite.

        On an accelerator this method only starts the check, and returns False. `wait` returns what the check has found.
        """
        values = bucket.unchecked()
        if values.device.type != "cpu":
            self.check_later(bucket.own_parts())
            return False
        if is_finite(values):
            return True
        self.found.update(describe(bucket.own_parts()))
        return False

    def check_later(self, parts: Parts) -> None:
        """Start to compute the largest magnitude of each gradient without waiting for the device."""
        parts = [(index, values) for index, values in parts if values.numel()]
        if parts:
            sizes = foreach_norm([_as_real(values) for _, values in parts], math.inf)
            self._sizes += zip((index for index, _ in parts), sizes, strict=True)

    def check_gradients(self, parts: Parts) -> None:
        """Check gradients that are in no bucket. `wait` returns the result."""
        on_cpu = [(index, values) for index, values in parts if values.is_cpu]
        self.found.update(describe([part for part in on_cpu if not is_finite(part[1])]))
        elsewhere: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for index, values in parts:
            if not values.is_cpu:
                elsewhere.setdefault((values.device, values.dtype), []).append((index, values))
        for group in elsewhere.values():
            self.check_later(group)

    def leave(self) -> LateResult | None:
        """Let the accelerators finish their checks, and return the result for later; None if they check nothing."""
        sizes, self._sizes = self._sizes, []
        devices = dict.fromkeys(size.device for _, size in sizes)
        here = [[(index, size) for index, size in sizes if size.device == device] for device in devices]
        parts = [
            ([index for index, _ in part], torch.stack([size.detach().float() for _, size in part]))
            for part in here
        ]
        return LateResult(parts) if sizes else None

    def wait(self) -> Found:
        """Wait once for the checks of all buckets. Return the description of all elements that are not finite."""
        for device in {size.device for _, size in self._sizes}:
            here = [(index, size) for index, size in self._sizes if size.device == device]
            for (index, _), size in zip(here, torch.stack([size for _, size in here]).tolist(), strict=True):
                if not math.isfinite(size):
                    self.found[index] = _kind_of(size)
        self._sizes = []
        return self.found


class LateResult:
    """The result of checks on accelerators, which is copied to the host without waiting for them.

    Args:
        parts: for each device, parameter indices, and a number for each of them, (num_indices,).

    Examples:
        >>> late = LateResult([([7, 8], torch.tensor([2.0, math.nan]))])
        >>> late.is_there, late.nonfinite()
        (True, {8: 'NaN'})
    """

    def __init__(self, parts: Sequence[tuple[list[int], Tensor]]) -> None:
        self._parts: list[tuple[list[int], Tensor]] = []
        self._events: list[torch.Event] = []
        for indices, here in parts:
            on_host = here
            if here.device.type != "cpu":  # the copy is asynchronous only into pinned memory
                on_host = torch.empty(here.shape, dtype=here.dtype, device="cpu", pin_memory=True)
                on_host.copy_(here, non_blocking=True)
                self._events.append(torch.Event(here.device))
                self._events[-1].record()
            self._parts.append((indices, on_host))

    @property
    def is_there(self) -> bool:
        """Whether the accelerators have finished, so that the methods do not wait."""
        return all(event.query() for event in self._events)

    def numbers(self) -> dict[int, Any]:
        """Return the numbers by parameter index."""
        return {
            index: number
            for indices, numbers in self._parts
            for index, number in zip(indices, numbers.tolist(), strict=True)
        }

    def nonfinite(self) -> Found:
        """Return the kind of the numbers that are not finite, by parameter index."""
        return {i: _kind_of(number) for i, number in self.numbers().items() if not math.isfinite(number)}


def _kind_of(size: float) -> str:
    return "NaN" if math.isnan(size) else "infinity"


def is_finite(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Wait for the device, and return whether all elements of a tensor are finite.

    Args:
        values: a tensor of any shape.
        dtype: the dtype to which the values will be converted later. They must be finite in this dtype. Pass None if
            they will not be converted.

    Examples:
        >>> big = torch.full((2,), 3e38)
        >>> is_finite(big), bool(big.sum().isfinite()), is_finite(big, torch.float16)
        (True, False, False)
    """
    if not values.numel():
        return True
    values = _as_real(values)
    if dtype is None or dtype.to_real() is values.dtype:
        if math.isfinite(values.sum().item()):
            return True
        dtype = values.dtype
    # Rounding keeps the order, so all values fit if the extremes do. aminmax() returns NaN if there is one.
    return bool(torch.stack(values.aminmax()).to(dtype.to_real()).isfinite().all())


def describe(parts: Parts) -> dict[int, str]:
    """Wait for the device, and describe each gradient's elements that are not finite, by parameter index.

    Examples:
        >>> describe([(7, torch.ones(2)), (8, torch.tensor([1.0, float("nan"), float("-inf")]))])
        {8: 'NaN in 1 and infinity in 1 of 3 elements'}
    """
    found = {}
    for index, values in parts:
        counts = {"NaN": int(values.isnan().sum()), "infinity": int(values.isinf().sum())}
        if any(counts.values()):
            what = " and ".join(f"{kind} in {count}" for kind, count in counts.items() if count)
            found[index] = f"{what} of {values.numel()} element{'s' if values.numel() != 1 else ''}"
    return found


def zero_nonfinite_(values: Tensor) -> None:
    """Replace each NaN and each infinity in `values` by zero, in place."""
    _as_real(values).nan_to_num_(0.0, 0.0, 0.0)


def _as_real(values: Tensor) -> Tensor:
    """Return a view of the tensor's memory as real numbers. A complex number becomes its real and imaginary parts."""
    if not values.is_complex():
        return values
    return torch.view_as_real(values.conj() if values.is_conj() else values)
