"""TopK: a compression that sends only the values of largest magnitude, with their indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.checks import checked_flag, checked_number, store, suggests_arguments
from syncline.compression.base import Averaging, Compression, Encoder, Gather, Layout, set_lost, total_of
from syncline.compression.kernels import address, library_for, run

_MANY = 1 << 16
"""A CPU that searches this many values or more is faster if it first selects candidates."""

_NUM_SAMPLES = 1 << 14

_MARGIN = 1.25
"""The intended number of candidates, divided by the number of values to find."""


@suggests_arguments
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

    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        if not values.numel():
            return values
        chosen = selected(values, self._num_sent, residual=residual, lost=lost)
        gathered = yield Gather(chosen.values, chosen.places)
        if lost is not None:
            # The values that the other ranks have received from this rank are not lost.
            received, places = gathered.values[self.layout.rank], chosen.places.long()
            lost.index_copy_(0, places, (lost[places] - received).nan_to_num_(0.0, 0.0, 0.0))
            if not chosen.all_finite:
                set_lost(lost, lost)
        mean = values.zero_()
        # Add one rank at a time. Its indices are distinct, so the order of additions is the same on all ranks.
        for row, row_places in zip(gathered.values / self.layout.num_ranks, gathered.beside, strict=True):
            mean.index_add_(0, row_places, row)
        return mean


class Selected(NamedTuple):
    """The values of largest magnitude, in ascending order of their indices."""

    places: Tensor
    """The indices, as int32."""
    values: Tensor
    all_finite: bool
    """Whether it is certain that all values are finite, also those that were not selected."""


def largest_places(values: Tensor, number: int) -> Tensor:
    """Return the indices of the values of largest magnitude, in ascending order.

    Of equal magnitudes, the lowest indices are returned. NaN counts as the largest magnitude. The choice is the same on
    all devices, because magnitudes are compared by their bits.

    Args:
        values: a flat tensor of float32 or float64.
        number: the number of indices to return.

    Examples:
        >>> largest_places(torch.tensor([1.0, -5.0, 0.0, 3.0]), 2).tolist()
        [1, 3]
    """
    bits = torch.int64 if values.dtype is torch.float64 else torch.int32
    sizes = values.view(bits) & torch.iinfo(bits).max
    numel = sizes.numel()
    if sizes.device.type != "cpu" or numel < _MANY or 2 * _MARGIN * number > numel:
        return _first_largest(sizes, number)
    # A sample gives a limit that only a few values exceed. If these are enough, they contain the largest of all.
    samples = sizes[:: numel // _NUM_SAMPLES]
    num_above = min(len(samples), math.ceil(_MARGIN * number / numel * len(samples)) + 8)
    limit = samples.topk(num_above).values[-1]
    candidates = (sizes >= limit).nonzero().view(-1)
    if len(candidates) < number:
        return _first_largest(sizes, number)
    return candidates[_first_largest(sizes[candidates], number)]


def _first_largest(sizes: Tensor, number: int) -> Tensor:
    """Return the indices of the largest integers, in ascending order; of equal integers, the lowest indices."""
    smallest = sizes.topk(number).values[-1]
    above, equal = sizes > smallest, sizes == smallest
    chosen = above | (equal & (equal.cumsum(0) <= number - above.sum()))
    return chosen.nonzero_static(size=number).view(-1)  # the size is known, so a device does not wait


def selected(
    values: Tensor, number: int, *, residual: Tensor | None = None, lost: Tensor | None = None
) -> Selected:
    """Add the residual to the values, write all sums to `lost`, and return the sums of largest magnitude.

    The sums are those of `total_of`, and the choice is that of `largest_places`.
    """
    native = library_for(values, residual, lost)
    if native is None:
        total = total_of(values, residual, lost)
        indices = largest_places(total, number)
        return Selected(indices.to(torch.int32), total[indices], all_finite=False)
    places = torch.empty(number, dtype=torch.int32, device="cpu")
    chosen = torch.empty(number, dtype=torch.float32, device="cpu")
    target = values if lost is None else lost
    addresses = (values.data_ptr(), address(residual), target.data_ptr())
    results = (places.data_ptr(), chosen.data_ptr())
    found = run(native.select, *addresses, values.numel(), number, *results)
    return Selected(places, chosen, all_finite=found == 0)
