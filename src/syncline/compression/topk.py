"""TopK: only the largest values travel, with their places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.checks import checked_flag, checked_number, store
from syncline.compression.base import Averaged, Averaging, Compression, Encoder, Gather, Layout

__all__ = ["TopK", "largest_places"]


_MANY = 1 << 16
"""From so many values on, a CPU finds the largest faster among candidates."""

_NUM_SAMPLES = 1 << 14

_MARGIN = 1.25
"""How many more candidates are aimed at than are needed."""


@dataclass(frozen=True)
class TopK(Compression):
    """Each rank sends the `ratio` largest of its values and where they stand, an int32 each; the rest counts as zero.

    Values of one place are added up in rank order and divided by the number of ranks. Bytes received grow with ranks.
    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017, arXiv 1704.05021; Stich et al.,
    "Sparsified SGD with Memory", 2018, arXiv 1809.07599.

    Args:
        ratio: which part of the values travels, above 0 and up to 1; one at least.
        error_feedback: keep what did not travel, and add it to what is averaged next; without it small values never
            travel at all.

    Raises:
        TypeError, ValueError: an argument makes no sense: another ratio, say.

    Example:
        >>> print(TopK(ratio=0.05))
        TopK(ratio=0.05)
    """

    ratio: float = 0.01
    error_feedback: bool = True

    is_linear = False
    gives = "rows"

    def __post_init__(self) -> None:
        store(
            self,
            ratio=checked_number("ratio", self.ratio, above=0, at_most=1),
            error_feedback=checked_flag("error_feedback", self.error_feedback),
        )

    def encoder(self, layout: Layout) -> Encoder:
        return _TopKEncoder(self, layout)


class _TopKEncoder(Encoder):
    def __init__(self, topk: TopK, layout: Layout) -> None:
        super().__init__(layout)
        if layout.numel >= 2**31:
            raise ValueError(
                f"TopK sends places as int32: expected fewer than 2**31 values at once, got {layout.numel}; use "
                "smaller buckets"
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
        # A rank at a time, whose places are all different: so the order of additions is the same everywhere.
        for row, row_places in zip(gathered.values / self.layout.num_ranks, gathered.beside, strict=True):
            mean.index_add_(0, row_places, row)
        return Averaged(mean, values if wants_lost else None)


def largest_places(values: Tensor, number: int) -> Tensor:
    """Where the `number` largest values stand, by magnitude, in no particular order; NaN is larger than anything.

    Example:
        >>> sorted(largest_places(torch.tensor([1.0, -5.0, 0.0, 3.0]), 2).tolist())
        [1, 3]
    """
    sizes = values.abs()
    numel = sizes.numel()
    if sizes.device.type != "cpu" or numel < _MANY or 2 * _MARGIN * number > numel:
        return sizes.topk(number, sorted=False).indices
    # Those above a limit, found in a sample, hold the largest of all if they are enough; and they are few.
    samples = sizes[:: numel // _NUM_SAMPLES]
    num_above = min(len(samples), math.ceil(_MARGIN * number / numel * len(samples)) + 8)
    limit = samples.topk(num_above).values[-1]
    candidates = (~(sizes < limit)).nonzero().view(-1)  # NaN is not smaller
    if len(candidates) < number:
        return sizes.topk(number, sorted=False).indices
    return candidates[sizes[candidates].topk(number, sorted=False).indices]
