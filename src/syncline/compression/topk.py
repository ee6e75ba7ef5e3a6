"""TopK: a compression that sends only the values of largest magnitude, with their indices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.checks import checked_flag, checked_number, store
from syncline.compression.base import Averaged, Averaging, Compression, Encoder, Gather, Layout

_MANY = 1 << 16
"""A CPU that searches this many values or more is faster if it first selects candidates."""

_NUM_SAMPLES = 1 << 14

_MARGIN = 1.25
"""The intended number of candidates, divided by the number of values to find."""


@dataclass(frozen=True, repr=False)
class TopK(Compression):
    """A compression that sends only the values of largest magnitude, each with an int32 index.

    Each rank selects its own largest values, and all its other values count as zero. The values that the ranks sent for
    an index are added up in rank order, and divided by the number of ranks. The number of bytes that a rank receives
    grows with the number of ranks.

    Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017, arXiv 1704.05021; Stich et
    al., "Sparsified SGD with Memory", 2018, arXiv 1809.07599.

    Args:
        ratio: the fraction of the values that is sent, above 0 and up to 1. At least one value is sent.
        error_feedback: True to keep the values that were not sent, and add them to the next values. Without error
            feedback, small values are never sent.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `ratio` is out of bounds.

    Examples:
        >>> print(TopK(ratio=0.05))
        TopK(ratio=0.05)
    """

    ratio: float = 0.01
    error_feedback: bool = True

    is_linear = False
    gives = "rows"

    def __post_init__(self) -> None:
        store(self, ratio=checked_number("ratio", self.ratio, above=0, at_most=1))
        checked_flag("error_feedback", self.error_feedback)

    def encoder(self, layout: Layout) -> Encoder:
        return _TopKEncoder(self, layout)


class _TopKEncoder(Encoder):
    def __init__(self, topk: TopK, layout: Layout) -> None:
        super().__init__(layout)
        if layout.numel >= 2**31:
            raise ValueError(
                f"TopK: expected fewer than 2**31 values in one tensor or bucket, got {layout.numel}. Indices are sent "
                "as int32. Use smaller buckets (bucket_cap_mb=)"
            )
        self._num_sent = math.ceil(topk.ratio * layout.numel)

    def mean(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        if not values.numel():
            return Averaged(values)
        places = largest_places(values, self._num_sent)
        gathered = yield Gather(values[places], places.to(torch.int32))
        if wants_lost:
            values.index_add_(0, places, gathered.values[self.layout.rank], alpha=-1)
        mean = torch.zeros_like(values) if wants_lost else values.zero_()
        # Add one rank at a time. Its indices are distinct, so the order of additions is the same on all ranks.
        for row, row_places in zip(gathered.values / self.layout.num_ranks, gathered.beside, strict=True):
            mean.index_add_(0, row_places, row)
        return Averaged(mean, values if wants_lost else None)


def largest_places(values: Tensor, number: int) -> Tensor:
    """Return the indices of the values of largest magnitude, in any order. NaN counts as the largest magnitude.

    Args:
        values: a flat tensor.
        number: the number of indices to return.

    Examples:
        >>> sorted(largest_places(torch.tensor([1.0, -5.0, 0.0, 3.0]), 2).tolist())
        [1, 3]
    """
    sizes = values.abs()
    numel = sizes.numel()
    if sizes.device.type != "cpu" or numel < _MANY or 2 * _MARGIN * number > numel:
        return sizes.topk(number, sorted=False).indices
    # A sample gives a limit that only a few values exceed. If these are enough, they contain the largest of all.
    samples = sizes[:: numel // _NUM_SAMPLES]
    num_above = min(len(samples), math.ceil(_MARGIN * number / numel * len(samples)) + 8)
    limit = samples.topk(num_above).values[-1]
    candidates = (~(sizes < limit)).nonzero().view(-1)  # includes NaN, which is not smaller than anything
    if len(candidates) < number:
        return sizes.topk(number, sorted=False).indices
    return candidates[sizes[candidates].topk(number, sorted=False).indices]
