"""The arguments that each operation of the backend accepts, in one table.

Each operation checks its arguments before it sends or copies anything. So a call with a wrong argument raises on the
rank that makes it, and the tensors and the group remain as they were. Errors that need the arguments of other ranks,
such as tensors of different sizes, come from the transport, which compares the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncline.transport.base import Transport

T = TypeVar("T")


@dataclass(frozen=True)
class _Rule:
    """What one operation accepts. Its tensors always have one device."""

    has_root: bool = False
    """Whether the call names a root."""
    parts_have_one_shape: bool = False
    """Whether all tensors of a list have the shape of this rank's own tensor. If not, this rank's entry has it."""
    whole: str | None = None
    """The one of the tensors "output" and "input" that is as large as the other ones of all ranks together."""
    takes_sparse: bool = False
    """Whether sparse tensors (torch.sparse_coo) are accepted."""
    takes_mixed_dtypes: bool = False
    """Whether the tensors can have different dtypes."""


_RULES = {
    "all_reduce": _Rule(takes_sparse=True),
    "all_reduce_coalesced": _Rule(takes_mixed_dtypes=True),
    "broadcast": _Rule(has_root=True),
    "reduce": _Rule(has_root=True),
    "reduce_scatter": _Rule(),
    "reduce_scatter_tensor": _Rule(whole="input"),
    "all_gather": _Rule(),
    "all_gather_into_tensor": _Rule(whole="output"),
    "gather": _Rule(has_root=True, parts_have_one_shape=True),
    "scatter": _Rule(has_root=True, parts_have_one_shape=True),
    "all_to_all": _Rule(),
    "all_to_all_single": _Rule(),
    "send": _Rule(),
    "recv": _Rule(),
}


def check(
    operation: str,
    transport: Transport,
    tensors: Sequence[Tensor],
    *lists: Sequence[Tensor],
    opts: Any = None,
) -> None:
    """Raise an error if the arguments of a call are wrong.

    Args:
        operation: the name of the operation.
        transport: the transport of the group.
        tensors: the tensors of this rank. If there are an output and an input, the output is the first one.
        lists: the lists with one tensor for each rank.
        opts: the options of the call. They name the root.

    Raises:
        ValueError: an argument is wrong.
    """
    rule = _RULES[operation]
    where = f"torch.distributed.{operation} on rank {transport.rank} of {transport.size}"
    if rule.has_root:
        _check_root(where, transport.size, opts)
    for entries in lists:
        if len(entries) != transport.size:
            raise ValueError(
                f"{where}: expected a list with one tensor for each of {transport.size} ranks, got {len(entries)} "
                "tensors"
            )
    every = [*tensors, *(tensor for entries in lists for tensor in entries)]
    if not every:
        raise ValueError(f"{where}: expected at least one tensor, got an empty list")
    for tensor in every:
        _check_memory(where, tensor, rule)
        if tensor.device != every[0].device:
            raise ValueError(
                f"{where}: expected all tensors on one device, got tensors on {every[0].device} and {tensor.device}"
            )
        if tensor.dtype != every[0].dtype and not rule.takes_mixed_dtypes:
            raise ValueError(
                f"{where}: expected all tensors to have the same dtype, got {every[0].dtype} and {tensor.dtype}"
            )
    if rule.whole is not None:
        _check_whole(where, transport.size, rule.whole, *tensors)
    for entries in lists:
        _check_shapes(where, transport.rank, entries, (tensors or lists[0][transport.rank :])[0], rule)


def _check_root(where: str, size: int, opts: Any) -> None:
    if not 0 <= opts.rootRank < size:
        raise ValueError(f"{where}: expected the root to be a rank from 0 to {size - 1}, got {opts.rootRank}")
    if getattr(opts, "rootTensor", 0) != 0:
        raise ValueError(
            f"{where}: expected rootTensor=0, the only tensor of the call, got {opts.rootTensor}"
        )


def _check_memory(where: str, tensor: Tensor, rule: _Rule) -> None:
    """Raise an error if the elements of a tensor are not in memory, one beside the other or in strides."""
    if tensor.layout is torch.sparse_coo and rule.takes_sparse:
        return
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        raise ValueError(
            f"{where}: expected a dense tensor, got {kind}. Pass the tensors that it consists of (of a sparse tensor, "
            "its indices() and values() after coalesce()), or a dense copy. Only all_reduce takes sparse tensors, "
            "of layout torch.sparse_coo"
        )
    if tensor.is_quantized:
        raise ValueError(
            f"{where}: expected a tensor that is not quantized, got {tensor.dtype}, whose scale would not be sent. "
            "Pass tensor.int_repr(), or tensor.dequantize()"
        )
    if tensor.is_cpu and not is_in_memory(tensor):
        raise ValueError(
            f"{where}: expected a tensor with data of its own, got a {type(tensor).__name__} without. Of a "
            "DTensor, pass tensor.to_local(). Do not call torch.distributed inside of a transform such as vmap"
        )


def is_in_memory(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor on the CPU are at its address. A DTensor, for instance, has none."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    try:
        return bool(tensor.data_ptr()) or not tensor.numel()
    except RuntimeError:  # a tensor of a transform such as vmap
        return False


def _check_whole(where: str, size: int, whole_name: str, output: Tensor, input: Tensor) -> None:
    whole, part = (output, input) if whole_name == "output" else (input, output)
    if whole.numel() != size * part.numel():
        part_name = "input" if whole_name == "output" else "output"
        raise ValueError(
            f"{where}: expected the {whole_name} to have {size} times as many elements as the {part_name}, got "
            f"{whole.numel()} and {part.numel()} elements"
        )


def _check_shapes(where: str, rank: int, entries: Sequence[Tensor], own: Tensor, rule: _Rule) -> None:
    for index, entry in enumerate(entries):
        if entry.shape != own.shape and (index == rank or rule.parts_have_one_shape):
            raise ValueError(
                f"{where}: expected the tensor at index {index} of the list to have the shape of this rank's own "
                f"tensor, {tuple(own.shape)}, got {tuple(entry.shape)}"
            )


def only(operation: str, items: Sequence[T]) -> T:
    """Return the only item of a list.

    Raises:
        ValueError: the list does not have exactly one item.
    """
    if len(items) != 1:
        raise ValueError(
            f"torch.distributed.{operation}: expected a list with one item, got {len(items)} items"
        )
    return items[0]


def check_none(operation: str, items: Sequence[object], root: int) -> None:
    """Raise an error if a rank that is not the root has passed a list that only the root has."""
    if items:
        raise ValueError(
            f"torch.distributed.{operation}: expected no list of tensors on a rank that is not the root, rank {root}. "
            "Pass None"
        )


def check_tag(operation: str, tag: int) -> None:
    """Raise an error if a message has a tag."""
    if tag:
        raise ValueError(
            f"torch.distributed.{operation}: the syncline backend does not support message tags, got tag={tag}: leave "
            "out the tag, and call send and recv in the same order on both ranks. Messages from one rank to another "
            "keep their order"
        )


def check_pairs(operation: str, outputs: Sequence[object], inputs: Sequence[object]) -> None:
    """Raise an error if a call of several operations has not one output for each input, or none at all."""
    if len(outputs) != len(inputs) or not outputs:
        raise ValueError(
            f"torch.distributed.{operation}: expected as many outputs as inputs, and at least one, got {len(outputs)} "
            f"outputs and {len(inputs)} inputs"
        )


def split_sizes(operation: str, tensor: Tensor, sizes: Sequence[int], size: int) -> list[int]:
    """Return the number of rows of `tensor` for each rank. An empty `sizes` means equally many rows."""
    num_rows = tensor.shape[0] if tensor.dim() else -1
    if not sizes and num_rows >= 0 and num_rows % size == 0:
        return [num_rows // size] * size
    if len(sizes) != size or sum(sizes) != num_rows or min(sizes) < 0:
        got = f"split sizes {list(sizes)}" if sizes else "no split sizes"
        raise ValueError(
            f"torch.distributed.{operation}: expected {size} split sizes, one for each rank, that add up to the first "
            f"dimension of the tensor, or no split sizes and a multiple of {size} as its first dimension; got {got} "
            f"and a tensor of shape {tuple(tensor.shape)}"
        )
    return list(sizes)
