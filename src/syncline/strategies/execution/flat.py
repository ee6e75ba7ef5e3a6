"""Parameters as flat tensors, one for each type and device, in which they can be compared, sent and added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_

__all__ = ["FlatGroup", "flat_groups"]


class FlatGroup:
    """Tensors of one type and device as one flat tensor, in a type that adds up well.

    Args:
        tensors: of one dtype and device; complex ones count as pairs of real numbers.
        indices: which they are, of all tensors.

    Example:
        >>> x, y = torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)
        >>> group = FlatGroup([x, y], (0, 1))
        >>> flat = group.read()
        >>> group.write(flat * 2)
        >>> flat.tolist(), x.tolist(), y.item()
        ([1.0, 2.0, 3.0], [[2.0, 4.0]], 6.0)
    """

    def __init__(self, tensors: Sequence[Tensor], indices: tuple[int, ...]) -> None:
        self.indices = indices
        self._tensors = list(tensors)
        real = [_real(tensor) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in real]
        self.numels = [tensor.numel() for tensor in real]
        self.numel = sum(self.numels)
        self.device = tensors[0].device
        self.dtype = torch.promote_types(real[0].dtype, torch.float32)
        """Of the flat tensor: 16-bit values are added up in 32."""
        self.wire_dtype = real[0].dtype
        """Of the tensors themselves."""

    def read(self) -> Tensor:
        """A new flat tensor of the values, of shape (numel,)."""
        return torch.cat([_real(tensor).reshape(-1).to(self.dtype) for tensor in self._tensors])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor, in the tensors' shapes (of real numbers)."""
        parts = flat.split(self.numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def write(self, flat: Tensor) -> None:
        """Make a flat tensor's values those of the tensors; counts as an in-place change for autograd."""
        foreach_copy_([_real(tensor) for tensor in self._tensors], self.views(flat))
        torch.autograd.graph.increment_version(self._tensors)


def flat_groups(tensors: Sequence[Tensor]) -> list[FlatGroup]:
    """All tensors, those of one dtype and device together, in the order in which each kind first occurs."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return [FlatGroup([tensors[i] for i in indices], tuple(indices)) for indices in kinds.values()]


def _real(tensor: Tensor) -> Tensor:
    """The same memory outside of autograd, as real numbers."""
    data = tensor.data
    return torch.view_as_real(data) if data.is_complex() else data
