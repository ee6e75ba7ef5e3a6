"""PowerSGD: a compression that sends the gradient of a weight matrix as two thin factors.

All ranks must compute the same bits from the same factors. The last bits of matrix products can differ between
processors or numbers of threads. Therefore `orthonormal_rows` and `sum_of_outer_products` use only elementwise
operations, in an order that depends only on the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_, foreach_zero_
from syncline.checks import checked_count, checked_flag, store
from syncline.compression.base import Averaging, Compression, Encoder, Layout, Mean, set_lost, total_of

_ZERO = 1e-24
"""The squared length up to which the remainder of a row counts as zero, after earlier rows were projected out.

Before that, each row is scaled so that its largest magnitude is 1."""


def orthonormal_rows(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each matrix, orthonormal rows that span the same space as the rows of the matrix.

    The method is Gram-Schmidt, applied twice, in float64. If a row is zero or a combination of earlier rows, it becomes
    zero. Rows with values that are not finite stay not finite. Matrices of similar width are computed together.

    Args:
        matrices: matrices with few rows and many columns.

    Returns:
        One matrix for each given matrix, of the same shape and dtype.

    Examples:
        >>> orthonormal_rows([torch.tensor([[3.0, 4.0], [6.0, 8.0]])])
        [tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])]
    """
    results: list[Tensor] = list(matrices)
    alike: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        num_rows, width = matrix.shape
        alike.setdefault((num_rows, 1 << (width - 1).bit_length()), []).append(index)
    for (num_rows, width), indices in alike.items():
        batch = torch.zeros(len(indices), num_rows, width, dtype=torch.float64, device=matrices[0].device)
        for rows, index in zip(batch, indices, strict=True):
            rows[:, : matrices[index].shape[1]] = matrices[index]
        _orthonormalize(batch)
        for rows, index in zip(batch, indices, strict=True):
            results[index] = rows[:, : matrices[index].shape[1]].to(matrices[index].dtype)
    return results


def sum_of_outer_products(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Compute `left.T @ right`, with the same bits on all ranks, and write it into `out`.

    Args:
        left: a matrix of shape (few, n).
        right: a matrix of shape (few, m).
        out: a matrix of shape (n, m).
    """
    torch.mul(left[0][:, None], right[0], out=out)
    for column, row in zip(left[1:], right[1:], strict=True):
        out.add_(column[:, None] * row)


def _orthonormalize(batch: Tensor) -> None:
    """Orthonormalize the rows of each matrix of a batch in place.

    Args:
        batch: the matrices, of shape (num_matrices, num_rows, width). The width is a power of two.
    """
    largest = batch.abs().amax(2, keepdim=True)
    batch /= torch.where(largest == 0, 1, largest)  # so that squares neither overflow nor underflow
    for _ in range(2):
        for k in range(batch.shape[1] - 1):
            row, rest = batch[:, k : k + 1], batch[:, k + 1 :]
            products = _sums(batch[:, k:] * row)  # (num_matrices, num_rows - k, 1)
            squared = products[:, :1]
            rest -= torch.where(squared <= _ZERO, 0, products[:, 1:] / squared) * row
    squared = _sums(batch * batch)
    batch.copy_(torch.where(squared <= _ZERO, 0, batch / squared.sqrt()))


def _sums(terms: Tensor) -> Tensor:
    """Return the sums over the last dimension, whose size is a power of two. The dimension is kept with size 1."""
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms


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
        self._rank = power_sgd.rank
        self._shapes: dict[int, tuple[int, int]] = {}
        """The matrix shapes (n, m) of the tensors that are compressed, by the index of the tensor in the layout."""
        self._starts: dict[int, Tensor] = {}
        """The matrices of shape (rank, m) from which the next iterations start, by the index of the tensor."""
        for index, shape in enumerate(layout.shapes):
            if len(shape) < 2 or 0 in shape:
                continue
            n, m = shape[0], math.prod(shape[1:])
            if (n + m) * self._rank < n * m:
                self._shapes[index] = (n, m)
                # The same for all tensors of one width, so that the result does not depend on the bucket layout.
                generator = torch.Generator().manual_seed(power_sgd.seed)
                start = torch.randn(self._rank, m, generator=generator, dtype=torch.float32)
                self._starts[index] = start.to(layout.device, layout.dtype)
        self._rest = [index for index in range(len(layout.shapes)) if index not in self._shapes]

    def means(self) -> tuple[Layout, ...]:
        numels = self.layout.numels
        rest = sum(numels[index] for index in self._rest)
        left = sum(self._rank * n for n, _ in self._shapes.values())
        right = sum(self._rank * m for _, m in self._shapes.values())
        first = self.layout.flat(left + rest)
        return (first, self.layout.flat(right)) if right else (first,)

    def memory_of(self, index: int) -> dict[str, Tensor]:
        return {"start": self._starts[index]} if index in self._starts else {}

    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        pieces = total_of(values, residual, lost).split(self.layout.numels)
        matrices = {index: pieces[index].view(shape) for index, shape in self._shapes.items()}
        rest = [pieces[index] for index in self._rest]
        lefts = [(self._starts[index] @ matrix.t()).view(-1) for index, matrix in matrices.items()]
        first = yield Mean(torch.cat([*lefts, *rest]))
        sizes = [left.numel() for left in lefts]
        *lefts, rest_mean = first.mean.split([*sizes, first.mean.numel() - sum(sizes)])
        if lost is not None:
            self._write_rest(pieces, None if first.lost is None else first.lost[sum(sizes) :])
        places = values.split(self.layout.numels)
        self._write_rest(places, rest_mean)
        if not matrices:
            return values
        factors = orthonormal_rows([left.view(self._rank, -1) for left in lefts])
        rights = [left @ matrix for left, matrix in zip(factors, matrices.values(), strict=True)]
        flat = torch.cat([right.view(-1) for right in rights])
        second = yield Mean(flat if lost is None else flat.clone())
        widths = [self._rank * m for _, m in self._shapes.values()]
        right_means = [right.view(self._rank, -1) for right in second.mean.split(widths)]
        if lost is not None:
            received = flat if second.lost is None else flat.sub_(second.lost)
            for matrix, left, right in zip(matrices.values(), factors, received.split(widths), strict=True):
                matrix.addmm_(left.t(), right.view(self._rank, -1), alpha=-1)
            set_lost(lost, lost)
        for index, left, right in zip(matrices, factors, right_means, strict=True):
            sum_of_outer_products(left, right, out=places[index].view(self._shapes[index]))
            self._start_next_from(index, right)
        return values

    def _write_rest(self, places: Sequence[Tensor], flat: Tensor | None) -> None:
        """Write values into the places of the tensors that are not compressed.

        Args:
            places: a view for each tensor of the layout.
            flat: the values of the uncompressed tensors, one after the other. Pass None to write zeros.
        """
        targets = [places[index] for index in self._rest]
        if not targets:
            return
        if flat is None:
            foreach_zero_(targets)
        else:
            foreach_copy_(targets, list(flat.split([target.numel() for target in targets])))

    def _start_next_from(self, index: int, right: Tensor) -> None:
        """Store a scaled copy of the right factor, from which the next iteration of a tensor starts.

        Only the directions of the rows matter, so the largest element of each row is scaled to 1. If a row of the
        factor is zero or not finite, the next iteration starts from the old row.
        """
        largest = right.abs().amax(1, keepdim=True)
        is_usable = (largest > 0) & (largest < float("inf"))
        start = self._starts[index]
        start.copy_(torch.where(is_usable, right / largest, start))
