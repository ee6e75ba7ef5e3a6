"""Orthonormal rows, the same bits wherever they are computed.

A rank that multiplies matrices with another number of threads, or on another processor, may get other last bits. Here
all is done element by element, and sums are taken by halves in an order that the size alone determines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["orthonormal_rows", "sum_of_outer_products"]

_ZERO = 1e-24
"""Squared length, for rows of largest element 1: what is left of a row that depends on those before it."""


def orthonormal_rows(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Rows of length 1, orthogonal to each other, that span what the given rows span.

    By Gram and Schmidt, twice, in float64. A row of zeros, or one that depends on those before it, becomes zeros; what
    is not finite stays so. Matrices of similar width are computed together.

    Args:
        matrices: each of shape (few, many).

    Returns:
        As many, of the same shapes and types.

    Example:
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
    """`out = left.T @ right`, the same bits everywhere.

    Args:
        left: (few, n)
        right: (few, m)
        out: (n, m)
    """
    torch.mul(left[0][:, None], right[0], out=out)
    for column, row in zip(left[1:], right[1:], strict=True):
        out.add_(column[:, None] * row)


def _orthonormalize(batch: Tensor) -> None:
    """In place; of shape (num_matrices, num_rows, a power of two)."""
    largest = batch.abs().amax(2, keepdim=True)
    batch /= torch.where(largest == 0, 1, largest)  # so that squares neither overflow nor vanish
    for _ in range(2):
        for k in range(batch.shape[1] - 1):
            row, rest = batch[:, k : k + 1], batch[:, k + 1 :]
            products = _sums(batch[:, k:] * row)  # (num_matrices, num_rows - k, 1)
            squared = products[:, :1]
            rest -= torch.where(squared <= _ZERO, 0, products[:, 1:] / squared) * row
    squared = _sums(batch * batch)
    batch.copy_(torch.where(squared <= _ZERO, 0, batch / squared.sqrt()))


def _sums(terms: Tensor) -> Tensor:
    """Over the last dimension, a power of two, which stays with size 1."""
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms
