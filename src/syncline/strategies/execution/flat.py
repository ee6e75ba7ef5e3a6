"""Flat tensors: tensors of one dtype on one device are joined to one vector, which can be sent and added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_
from syncline.tensors.targets import as_real


class FlatGroup:
    """A group of tensors of one dtype on one device, which are read and written as one flat tensor.

    The flat tensor has at least 32 bits per value.

    Args:
        tensors: the tensors. Complex tensors count as pairs of real numbers.
        indices: the indices of these tensors in the list that `flat_groups` divides into groups.

    Examples:
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
        """The dtype of the flat tensor: float32, or a wider dtype if the tensors have one."""
        self.wire_dtype = real[0].dtype
        """The dtype of the tensors of the group, or of their real parts if they are complex."""

    def read(self) -> Tensor:
        """Return the values of all tensors as a new flat tensor of shape (numel,)."""
        return torch.cat([as_real(tensor).reshape(-1).to(self.dtype) for tensor in self._tensors])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split the tensor `flat` into one view per tensor of the group, in the shape of that tensor.

        The view for a complex tensor has one more dimension, for the real and the imaginary part.
        """
        parts = flat.split(self.numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def write(self, flat: Tensor) -> None:
        """Write the values of the tensor `flat` into the tensors of the group. Autograd detects the in-place change."""
        foreach_copy_([as_real(tensor) for tensor in self._tensors], self.views(flat))
        torch.autograd.graph.increment_version(self._tensors)


def flat_groups(tensors: Sequence[Tensor]) -> list[FlatGroup]:
    """Divide tensors into one group per combination of dtype and device.

    The groups are in the order of their first tensors.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return [FlatGroup([tensors[i] for i in indices], tuple(indices)) for indices in kinds.values()]
