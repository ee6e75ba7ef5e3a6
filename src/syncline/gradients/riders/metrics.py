"""Rider: metrics that are averaged over ranks (see `DistributedDataParallel.report`).

A rank's word holds its own mean of each metric since the last synchronized backward, and the weight of this mean, as
float32. Every rank receives all words and computes the means over ranks in float64, in rank order. So the means have
the same bits on every rank.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from syncline.checks import number_in, what_it_is
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words

_BITS = 64
"""The number of bits of one metric in a word: 32 for its mean, and 32 for its weight."""


class Metrics(Rider):
    """The metrics that this rank reported, and their means over ranks.

    Examples:
        >>> from syncline.transport.threads import ThreadGroup
        >>> one, other = Metrics(), Metrics()
        >>> for metrics, loss, weight in ((one, 2.0, 3), (other, 6.0, 1)):
        ...     metrics.add({"loss": loss}, weight)
        ...     metrics.use_names(["loss"])
        >>> from syncline.gradients.backward import Backward, BackwardState
        >>> backward = Backward(step=1, state=BackwardState.FILLING)
        >>> words = (one.word(backward), other.word(backward))
        >>> one.receive(Words(words, step=1, transport=ThreadGroup(2).transport(0)))
        >>> one.record()
        {'metrics': {'loss': 3.0}}
    """

    subject = "metrics"

    def __init__(self) -> None:
        self.num_bits = 0
        self._means: Mapping[str, float] = {}
        """The means over ranks of the last backward, by name. It is empty if no rank reported a metric."""
        self._names: tuple[str, ...] = ()
        self._reports: list[tuple[Mapping[str, Any], float]] = []

    def add(self, values: Mapping[str, Any], weight: float) -> None:
        """Keep values for the next synchronized backward. Until then the program does not wait for their devices.

        Args:
            values: a number or a tensor of one element for each metric, by name.
            weight: the weight of these values in the means.
        """
        self._reports.append((values, weight))

    def has_names(self, names: Iterable[str]) -> bool:
        """Return whether the ranks have agreed to report metrics of all these names."""
        return set(names) <= set(self._names)

    def wanted_names(self) -> list[str]:
        """Return the names of all metrics: first the agreed names, then new names in the order of the reports."""
        return list(dict.fromkeys([*self._names, *(name for values, _ in self._reports for name in values)]))

    def use_names(self, names: Sequence[str]) -> None:
        """Report the metrics of these names from now on. All ranks must pass the same names.

        The number of bits changes, so the caller must lay out the tail of the last bucket again.
        """
        self._names = tuple(names)
        self.num_bits = _BITS * len(names)

    def word(self, backward: Backward) -> int:
        """Return a word with this rank's mean and weight of each metric. A metric without a report has weight 0."""
        return self._own_word() if self._reports else 0

    def _own_word(self) -> int:
        numbers = [number for name in self._names for number in self._own(name)]
        # A number that is too large for float32 becomes infinity.
        rounded = torch.tensor(numbers, dtype=torch.float64, device="cpu").float().tolist()
        return int.from_bytes(struct.pack(f">{len(rounded)}f", *rounded), "big")

    def receive(self, words: Words) -> None:
        """Compute the means over ranks from all ranks' words."""
        self._average(list(words.active.values()))

    def receive_nothing(self, step: int) -> None:
        """Clear the means, because no rank reported anything."""
        self._means = {}

    def conclude_alone(self) -> None:
        """Use this rank's own means as the result, because there is one rank or this backward is not reduced."""
        if not self._reports:  # as in almost every step
            self._means = {}
            return
        self._average([self._own_word()])
        self._reports.clear()

    def record(self) -> Mapping[str, Any]:
        """Return the means of the last backward, and drop them, so that no later record contains them."""
        means, self._means = self._means, {}
        return {"metrics": means}

    def forget(self) -> None:
        """Drop this rank's values at the end of a backward. They have been averaged by then."""
        self._reports.clear()

    def _own(self, name: str) -> tuple[float, float]:
        """Return this rank's mean of a metric, and the weight of the mean."""
        own = [(float(number_in(values[name])), weight) for values, weight in self._reports if name in values]
        return _weighted_mean(own)

    def _average(self, words: Sequence[int]) -> None:
        form = struct.Struct(f">{2 * len(self._names)}f")
        rows = [form.unpack(word.to_bytes(form.size, "big")) for word in words]
        means = {
            name: _weighted_mean([row[2 * at : 2 * at + 2] for row in rows])
            for at, name in enumerate(self._names)
        }
        self._means = {name: mean for name, (mean, weight) in means.items() if weight}


def check_metric(name: str, value: Any) -> Any:
    """Return a metric's value as a float, or as a detached tensor of one element.

    Raises:
        TypeError: `value` is neither a real number nor a tensor of one element.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
        what = f"a Tensor of shape {tuple(value.shape)}"
    else:
        number = number_in(value)
        if isinstance(number, Real):
            return float(number)
        what = what_it_is(value)
    raise TypeError(
        f"expected each of the metrics to be a real number or a tensor of one element, got {what} for {name!r}"
    )


def _weighted_mean(parts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the weighted mean of (value, weight) pairs, and the sum of the weights.

    A value of weight 0 does not count, even if the value is NaN.
    """
    counted = [(value, weight) for value, weight in parts if weight]
    total = math.fsum(weight for _, weight in counted)
    if not total:
        return 0.0, 0.0
    products = [value * weight for value, weight in counted]
    # math.fsum raises for infinities of both signs, and their sum is NaN in any order.
    return (math.fsum(products) if all(map(math.isfinite, products)) else sum(products)) / total, total
