"""PowerSGD: a compression that sends the gradient of a weight matrix as two thin factors.

All ranks must compute the same bits from the same factors. The last bits of matrix products can differ between
processors, numbers of threads, and the two forms: `Factors` in PyTorch, and `NativeFactors`. Therefore
`orthonormal_rows` and `sum_of_outer_products` use only elementwise operations, in an order that depends only on the
sizes. Both forms give the same bits for them. The factors that a rank sends, and the error that it keeps, may differ in
their last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_, foreach_zero_
from syncline.checks import checked_count, checked_flag, store, suggests_arguments
from syncline.compression.base import (
    Averaging,
    Compression,
    Encoder,
    Layout,
    Mean,
    pairwise_sums,
    set_lost,
    total_of,
)
from syncline.compression.kernels import address, library_for, run
from syncline.native import library

_ZERO = 1e-24
"""The squared length up to which the remainder of a row counts as zero, after earlier rows were projected out.

Before that, each row is scaled so that its largest magnitude is 1."""


# ---------------------------------------------------------------------- factors


class Factors:
    """Computes the factors of all matrices of a flat tensor, and the matrices from their factors.

    A matrix of shape (n, m) has a left factor of shape (rank, n) and a right factor of shape (rank, m). The factors of
    all matrices are in one flat tensor for each side.

    This class is the form in PyTorch, which runs on any device and in any dtype.

    Args:
        rank: the number of rows of each factor.
        shapes: n and m of each tensor in the flat tensor. A tensor with n = 0 has m elements, and no factors.
    """

    def __init__(self, rank: int, shapes: Sequence[tuple[int, int]]) -> None:
        self.rank = rank
        self.shapes = tuple(shapes)
        self.left_numel = sum(rank * n for n, _ in shapes)
        """The number of elements of all left factors."""
        self.right_numel = sum(rank * m for n, m in shapes if n)
        self.rest_numel = sum(m for n, m in shapes if not n)
        """The number of elements of the tensors that have no factors."""

    def left(self, values: Tensor, starts: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Tensor:
        """Return the left factors `start @ (residual + values).T`, and then the elements that have no factors.

        Args:
            values: the flat tensor.
            starts: a matrix of the shape of the right factor for each matrix.
            residual: a flat tensor that is added to the values, or None.
            lost: memory for the sums, which may be `residual`. Elements without factors become zero in it. None if
                there is no residual.
        """
        total = total_of(values, residual, lost)
        lefts = [
            start @ matrix.t()
            for start, matrix in zip(self._rights(starts), self._matrices(total), strict=True)
        ]
        message = torch.cat([*(left.view(-1) for left in lefts), *self.rest(total)])
        if lost is not None and self.rest_numel:
            foreach_zero_(self.rest(lost))
        return message

    def right(self, total: Tensor, means: Tensor, out: Tensor) -> Tensor:
        """Return the right factors `left @ total`.

        Args:
            total: the flat tensor.
            means: the mean over ranks of what `left` has returned. The rows of its factors become orthonormal.
            out: a flat tensor, into which the elements that have no factors are written. It may be `total`.
        """
        lefts, rest = means.split([self.left_numel, self.rest_numel])
        if self.rest_numel:
            targets = self.rest(out)
            foreach_copy_(targets, list(rest.split([target.numel() for target in targets])))
        factors = orthonormal_rows(self._lefts(lefts))
        if not factors:
            return total.new_empty(0)
        lefts.copy_(torch.cat([factor.reshape(-1) for factor in factors]))
        return torch.cat(
            [(left @ matrix).view(-1) for left, matrix in zip(factors, self._matrices(total), strict=True)]
        )

    def subtract(self, total: Tensor, lefts: Tensor, rights: Tensor) -> None:
        """Subtract `left.T @ right` from each matrix in place. Elements that are not finite then become zero."""
        for matrix, left, right in zip(
            self._matrices(total), self._lefts(lefts), self._rights(rights), strict=True
        ):
            matrix.addmm_(left.t(), right, alpha=-1)
            set_lost(matrix, matrix)

    def mean(self, lefts: Tensor, right_means: Tensor, starts: Tensor, out: Tensor) -> None:
        """Write `left.T @ right` into the place of each matrix in `out`, and scaled right factors into `starts`.

        Only the directions of the rows matter, so the largest element of each row of `starts` is scaled to 1. If a row
        of a factor is zero or not finite, the old row stays.
        """
        rights, old = self._rights(right_means), self._rights(starts)
        for matrix, left, right, start in zip(
            self._matrices(out), self._lefts(lefts), rights, old, strict=True
        ):
            sum_of_outer_products(left, right, out=matrix)
            largest = right.abs().amax(1, keepdim=True)
            is_usable = (largest > 0) & (largest < float("inf"))
            start.copy_(torch.where(is_usable, right / largest, start))

    def _pieces(self, flat: Tensor) -> Iterable[tuple[tuple[int, int], Tensor]]:
        """Return the shape and the elements of each tensor."""
        return zip(self.shapes, flat.split([(n or 1) * m for n, m in self.shapes]), strict=True)

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        return [piece.view(shape) for shape, piece in self._pieces(flat) if shape[0]]

    def rest(self, flat: Tensor) -> list[Tensor]:
        """Return the views of the tensors that have no factors."""
        return [piece for shape, piece in self._pieces(flat) if not shape[0]]

    def _lefts(self, flat: Tensor) -> list[Tensor]:
        return self._views(flat, [n for n, _ in self.shapes if n])

    def _rights(self, flat: Tensor) -> list[Tensor]:
        return self._views(flat, [m for n, m in self.shapes if n])

    def _views(self, flat: Tensor, widths: Sequence[int]) -> list[Tensor]:
        sizes = [self.rank * width for width in widths]
        return [piece.view(self.rank, -1) for piece in flat.split(sizes)] if sizes else []


class NativeFactors(Factors):
    """The native form of the factors of matrices."""

    def __init__(self, rank: int, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__(rank, shapes)
        self._shapes = torch.tensor(self.shapes, dtype=torch.int64, device="cpu")

    def left(self, values: Tensor, starts: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Tensor:
        message = torch.empty(self.left_numel + self.rest_numel, dtype=torch.float32, device="cpu")
        rest = address(message, self.left_numel)
        self._call(library().left_factors, values, residual, lost, starts, message, rest)
        return message

    def right(self, total: Tensor, means: Tensor, out: Tensor) -> Tensor:
        rights = torch.empty(self.right_numel, dtype=torch.float32, device="cpu")
        rest = address(means, self.left_numel)
        self._call(library().right_factors, total, out, means, rest, rights)
        return rights

    def subtract(self, total: Tensor, lefts: Tensor, rights: Tensor) -> None:
        self._call(library().lost_of_factors, total, lefts, rights)

    def mean(self, lefts: Tensor, right_means: Tensor, starts: Tensor, out: Tensor) -> None:
        self._call(library().mean_of_factors, out, lefts, right_means, starts)

    def _call(self, function: Callable[..., int], flat: Tensor, *others: Tensor | int | None) -> None:
        addresses = [address(one) if isinstance(one, Tensor) else one for one in (flat, *others)]
        run(function, self.rank, self._shapes.data_ptr(), len(self.shapes), flat.numel(), *addresses)


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
            products = pairwise_sums(batch[:, k:] * row)  # (num_matrices, num_rows - k, 1)
            squared = products[:, :1]
            rest -= torch.where(squared <= _ZERO, 0, products[:, 1:] / squared) * row
    squared = pairwise_sums(batch * batch)
    batch.copy_(torch.where(squared <= _ZERO, 0, batch / squared.sqrt()))


# ---------------------------------------------------------------------- the compression


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
        factors = self._native if library_for(values, residual, lost) else self._factors
        first = yield Mean(factors.left(values, self._starts, residual=residual, lost=lost))
        total, means = values if lost is None else lost, first.mean.contiguous()
        if lost is not None and first.lost is not None:
            places = factors.rest(lost)
            errors = first.lost[factors.left_numel :].split([place.numel() for place in places])
            for place, error in zip(places, errors, strict=True):
                set_lost(place, error)
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
