"""Tensors in memory that all ranks of a host map: one per rank, which the core reduces in place, or one for all."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.transport.shared_memory.hub import Hub

IN_PLACE_BYTES = 64 * 1024
"""Size from which tensors are reduced in place; smaller ones are faster with copies through a lane's memory."""

_MIN_STRIDE_BYTES = 4096


class Region(NamedTuple):
    """Memory in which each rank has its own tensor, in the form in which the core takes it."""

    address: int
    """Address of rank 0's tensor."""
    stride_bytes: int
    """Distance from one rank's tensor to the next."""
    token: int
    """A number that identifies the region, the same on all ranks."""


class Regions:
    """The shared tensors of a group, all of whose lanes use the same object.

    Args:
        hub: the connections between the ranks.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.of: dict[int, Region] = {}
        """The region of each tensor that is reduced in place, by the `id` of the tensor."""

    def allocate(self, numel: int, dtype: torch.dtype, token: bytes) -> Tensor:
        """Return this rank's tensor of zeros, which is reduced in place if it is large; a collective call.

        Args:
            numel: number of elements.
            dtype: dtype of the tensor.
            token: a random number, the same on all ranks.
        """
        if numel * dtype.itemsize < IN_PLACE_BYTES:
            return torch.zeros(numel, dtype=dtype)
        stride = -(-numel * dtype.itemsize // _MIN_STRIDE_BYTES) * _MIN_STRIDE_BYTES
        memory = self._hub.allocate(self._hub.size * stride, f"{numel} elements of {dtype}")
        # Only the tensor keeps the mapping alive.
        tensor = torch.frombuffer(memory.map, dtype=dtype, count=numel, offset=self._hub.rank * stride)
        self._add(tensor, Region(memory.address, stride, int.from_bytes(token[:8], "little")))
        return tensor

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        """Return the first elements of a tensor, which are reduced in place if the tensor is."""
        part = tensor[:numel]
        region = self.of.get(id(tensor))
        if region is not None:
            self._add(part, region)
        return part

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return one tensor of zeros for all ranks; a collective call."""
        what = f"{numel} elements of {dtype}, one copy for all ranks"
        memory = self._hub.allocate(max(1, numel) * dtype.itemsize, what)
        # Only the tensor keeps the mapping alive.
        return torch.frombuffer(memory.map, dtype=dtype, count=max(1, numel))[:numel]

    def _add(self, tensor: Tensor, region: Region) -> None:
        """Reduce `tensor` in place from now on, for as long as it is alive."""
        self.of[id(tensor)] = region
        weakref.finalize(tensor, self.of.pop, id(tensor), None).atexit = False
