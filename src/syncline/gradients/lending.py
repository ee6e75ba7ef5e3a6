"""The memory of a bucket in which `.grad` lies after a backward, so that the means need not be copied.

A lent gradient is an ordinary tensor, and no view: it has a storage of its own, which has the size of the gradient.
Each such storage refers to one object, through which it reaches the bucket's memory. So the number of references to
this object shows whether the memory is still in use, by `.grad` or by anything else. If it is when a backward begins,
the bucket leaves it to its holders, and gets other memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor

from syncline._torch.tensors import can_count_holders, num_holders, num_holders_of_a_gradient


class LentMemory:
    """The memory of a bucket that is lent to `.grad` of its first members.

    Only large gradients are lent. Copying a small one costs less than lending it.

    Args:
        flat: the bucket's flat tensor, on the CPU.
        members: the parameters whose gradients are lent, in the order of the bucket.
        views: the place of each gradient in `flat`. Nobody else may have these tensors.
    """

    def __init__(self, flat: Tensor, members: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        self._members = members
        self._views = views
        memory: Any = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
        memory.owner = flat
        self._memory = memory
        del memory  # it would be counted below
        self._num_own_references = getrefcount(self._memory)

    @property
    def is_in_use(self) -> bool:
        """Whether any lent gradient is alive, in `.grad` or elsewhere."""
        return getrefcount(self._memory) > self._num_own_references

    def hand_out(self, skip: Sequence[bool], existing: Sequence[bool]) -> list[int]:
        """Set `.grad` of the members to tensors in this memory, where no one can notice that the tensor is another one.

        Args:
            skip: for each member, whether its `.grad` stays as it is.
            existing: for each member, whether its `.grad` existed before the backward.

        Returns:
            The positions of the members into whose `.grad` the values must be copied.
        """
        left = []
        alone = num_holders_of_a_gradient()
        for at, holders in enumerate(num_holders(self._members)):
            if skip[at]:
                continue
            if holders is None or (holders == alone and not existing[at] and self._is_alike(at)):
                self._members[at].grad = self._lend(self._views[at])
            else:
                left.append(at)
        return left

    def _lend(self, view: Tensor) -> Tensor:
        return torch.frombuffer(
            self._memory,
            dtype=view.dtype,
            count=view.numel(),
            offset=int(view.storage_offset()) * view.element_size(),
        ).as_strided_(view.shape, view.stride())

    def _is_alike(self, at: int) -> bool:
        """Return whether `.grad` is a plain tensor that differs from its place in the memory by its values at most."""
        gradient, view = self._members[at].grad, self._views[at]
        return (
            type(gradient) is Tensor
            and not gradient.__dict__
            and not getweakrefcount(gradient)
            and not gradient.requires_grad
            and not gradient.is_conj()
            and not gradient.is_neg()
            and gradient.dtype is view.dtype
            and gradient.stride() == view.stride()
        )


def can_lend(flat: Tensor) -> bool:
    """Return whether parts of this tensor can be lent.

    On an accelerator, other streams can use a gradient after the program has dropped it (`record_stream`), and no
    number of references shows that.
    """
    return flat.is_cpu and can_count_holders()
