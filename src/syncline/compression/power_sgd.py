"""PowerSGD: a compression that sends the gradient of a weight matrix as two thin factors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.checks import checked_count, checked_flag, store
from syncline.compression.base import Averaging, Compression, Encoder, Layout, Mean, set_lost
from syncline.compression.factors import Factors
from syncline.compression.kernels import NativeFactors, can_encode
from syncline.suggestions import suggests_arguments


@suggests_arguments
@dataclass(frozen=True, repr=False)
class PowerSGD(Compression):
    """A compression that approximates each matrix by the product of two thin factors, and sends the factors instead.

    Each averaging computes the factors by one power iteration, which starts from the result of the previous averaging.
    A tensor of shape (n, ...) counts as a matrix of shape (n, m). It is compressed if (n + m) * rank is less than
    n * m. Other tensors (vectors, small matrices) are sent uncompressed, in one message with the first factors.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019, arXiv 1905.13727, algorithms 1 and 2.

    Args:
        rank: the number of rows of each factor. The product of the factors is a matrix of this rank. A higher number
            gives a better approximation, and more bytes.
        error_feedback: True to keep the error of the approximation, and add it to the next values. Without error
            feedback, most of a gradient is lost for good.
        seed: the seed of the random matrices from which the first iteration starts.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `rank` is below 1.

    Examples:
        >>> print(PowerSGD())
        PowerSGD(rank=2)
    """

    rank: int = 2
    error_feedback: bool = True
    seed: int = 0

    is_linear = True
    sends_little = True
    is_order_dependent = True
    gives = "means"

    def __post_init__(self) -> None:
        rank, seed = checked_count("rank", self.rank, at_least=1), checked_count("seed", self.seed)
        store(self, rank=rank, seed=seed)
        checked_flag("error_feedback", self.error_feedback)

    def encoder(self, layout: Layout) -> Encoder:
        return _PowerSGDEncoder(self, layout)


class _PowerSGDEncoder(Encoder):
    """The encoder of PowerSGD, which encodes a matrix of shape (n, m) by two factors.

    The shape of the left factor is (rank, n), and that of the right factor is (rank, m).
    """

    def __init__(self, power_sgd: PowerSGD, layout: Layout) -> None:
        super().__init__(layout)
        rank = power_sgd.rank
        shapes = [_matrix_shape(shape, rank) for shape in layout.shapes]
        self._factors, self._native = Factors(rank, shapes), NativeFactors(rank, shapes)
        self._starts = torch.empty(self._factors.right_numel, device=layout.device, dtype=layout.dtype)
        """The matrices of shape (rank, m) from which the next iterations start, one after the other."""
        self._start_of: dict[int, Tensor] = {}
        """The view of each matrix in `_starts`, by the index of the tensor in the layout."""
        end = 0
        for index, (n, m) in enumerate(shapes):
            if n:
                begin, end = end, end + rank * m
                # The same for all tensors of one width, so that the result does not depend on the bucket layout.
                generator = torch.Generator().manual_seed(power_sgd.seed)
                start = self._starts[begin:end].view(rank, m)
                self._start_of[index] = start.copy_(
                    torch.randn(rank, m, generator=generator, dtype=torch.float32, device="cpu")
                )

    def means(self) -> tuple[Layout, ...]:
        factors = self._factors
        first = self.layout.flat(factors.left_numel + factors.rest_numel)
        return (first, self.layout.flat(factors.right_numel)) if factors.right_numel else (first,)

    def memory_of(self, index: int) -> dict[str, Tensor]:
        return {"start": self._start_of[index]} if index in self._start_of else {}

    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        factors = self._native if can_encode(values, residual, lost) else self._factors
        first = yield Mean(factors.left(values, self._starts, residual=residual, lost=lost))
        total, means = values if lost is None else lost, first.mean.contiguous()
        if lost is not None and first.lost is not None:
            self._keep_rest(lost, first.lost[factors.left_numel :])
        rights = factors.right(total, means, out=values)
        if not factors.right_numel:
            return values
        lefts, mine = means[: factors.left_numel], rights.clone()
        is_kept = lost is None

        def keep_error() -> None:
            nonlocal is_kept
            if not is_kept:
                factors.subtract(total, lefts, mine)
            is_kept = True

        second = yield Mean(rights, meanwhile=keep_error)
        if second.lost is not None:
            mine.sub_(second.lost)
        keep_error()
        factors.mean(lefts, second.mean.contiguous(), self._starts, values)
        return values

    def _keep_rest(self, lost: Tensor, error: Tensor) -> None:
        """Write the error of the tensors that have no factors into their places."""
        places = self._factors.rest(lost)
        for place, piece in zip(places, error.split([place.numel() for place in places]), strict=True):
            set_lost(place, piece)


def _matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return n and m of a tensor that is compressed. Of another one, return 0 and the number of its elements.

    Examples:
        >>> _matrix_shape((64, 8, 8), 2), _matrix_shape((64,), 2), _matrix_shape((2, 64), 2)
        ((64, 64), (0, 64), (0, 128))
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return 0, numel
    n, m = shape[0], numel // shape[0]
    return (n, m) if (n + m) * rank < numel else (0, numel)
