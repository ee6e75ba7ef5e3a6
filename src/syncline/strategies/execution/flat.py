"""Tensors joined to flat ones, one per dtype and device, which can be sent and added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_
from syncline.tensors.targets import as_real


class FlatGroup:
    """A group of tensors of one dtype and device, read and written as one flat tensor of at least 32 bits per value.

    Args:
        tensors: tensors of one dtype and device; complex ones count as pairs of real numbers.
        indices: the positions of these tensors among all tensors.

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
        real = [as_real(tensor) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in real]
        self.numels = [tensor.numel() for tensor in real]
        self.numel = sum(self.numels)
        self.device = tensors[0].device
        self.dtype = torch.promote_types(real[0].dtype, torch.float32)
        """The type of the flat tensor. Values of 16 bits are added in 32 bits."""
        self.wire_dtype = real[0].dtype
        """The type of the tensors themselves."""

    def read(self) -> Tensor:
        """Return the values of all tensors as a new flat tensor of shape (numel,)."""
        return torch.cat([as_real(tensor).reshape(-1).to(self.dtype) for tensor in self._tensors])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split a flat tensor into parts of the tensors' shapes, as real numbers."""
        parts = flat.split(self.numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def write(self, flat: Tensor) -> None:
        """Write the values of a flat tensor into the tensors. Autograd detects the in-place change."""
        foreach_copy_([as_real(tensor) for tensor in self._tensors], self.views(flat))
        torch.autograd.graph.increment_version(self._tensors)


def flat_groups(tensors: Sequence[Tensor]) -> list[FlatGroup]:
    """Divide tensors into one group per dtype and device, in the order in which each pair first occurs."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return [FlatGroup([tensors[i] for i in indices], tuple(indices)) for indices in kinds.values()]
