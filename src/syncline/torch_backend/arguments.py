"""The arguments that the operations of the backend accept.

Each operation checks its arguments before it sends or copies anything. So a call with a wrong argument raises on the
rank that makes it, and the tensors and the group remain as they were. Errors that need the arguments of other ranks,
such as tensors of different sizes, come from the transport, which compares the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncline.transport.base import Transport

T = TypeVar("T")


def check(
    operation: str,
    transport: Transport,
    tensors: Sequence[Tensor],
    *lists: Sequence[Tensor],
    opts: Any = None,
    whole: str | None = None,
    is_of_one_dtype: bool = True,
) -> None:
    """Raise an error if the arguments of a call are wrong.

    Args:
        operation: the name of the operation.
        transport: the transport of the group.
        tensors: the tensors of this rank. If there are an output and an input, the output is the first one.
        lists: the lists with one tensor for each rank. This rank's entry must have the shape of this rank's own tensor,
            and if there is a root, so must all others.
        opts: the options of the call, if they name a root.
        whole: the one of the tensors "output" and "input" that is as large as the other ones of all ranks together.
        is_of_one_dtype: whether all tensors must have the same dtype.

    Raises:
        ValueError: an argument is wrong.
    """
    rank, size = transport.rank, transport.size
    where = f"torch.distributed.{operation} on rank {rank} of {size}"
    if opts is not None and not 0 <= opts.rootRank < size:
        raise ValueError(f"{where}: expected the root to be a rank from 0 to {size - 1}, got {opts.rootRank}")
    if getattr(opts, "rootTensor", 0) != 0:
        raise ValueError(
            f"{where}: expected rootTensor=0, the only tensor of the call, got {opts.rootTensor}"
        )
    for entries in lists:
        if len(entries) != size:
            raise ValueError(
                f"{where}: expected a list with one tensor for each of {size} ranks, got {len(entries)} tensors"
            )
    every = [*tensors, *(tensor for entries in lists for tensor in entries)]
    if not every:
        raise ValueError(f"{where}: expected at least one tensor, got an empty list")
    for tensor in every:
        _check_memory(where, tensor)
        if tensor.device != every[0].device:
            raise ValueError(
                f"{where}: expected all tensors on one device, got tensors on {every[0].device} and {tensor.device}"
            )
        if tensor.dtype != every[0].dtype and is_of_one_dtype:
            raise ValueError(
                f"{where}: expected all tensors to have the same dtype, got {every[0].dtype} and {tensor.dtype}"
            )
    if whole is not None:
        part, (large, small) = "input", tensors
        if whole == "input":
            part, large, small = "output", small, large
        if large.numel() != size * small.numel():
            raise ValueError(
                f"{where}: expected the {whole} to have {size} times as many elements as the {part}, got "
                f"{large.numel()} and {small.numel()} elements"
            )
    for entries in lists:
        own = (tensors or lists[0][rank:])[0]
        for index, entry in enumerate(entries):
            if entry.shape != own.shape and (index == rank or opts is not None):
                raise ValueError(
                    f"{where}: expected the tensor at index {index} of the list to have the shape of this rank's own "
                    f"tensor, {tuple(own.shape)}, got {tuple(entry.shape)}"
                )


def _check_memory(where: str, tensor: Tensor) -> None:
    """Raise an error if the elements of a tensor are not in memory, one beside the other or in strides."""
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


def checked_pairs(
    operation: str,
    transport: Transport,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    whole: str | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs and inputs of a call of several operations as pairs, each of which `check` accepts.

    Raises:
        ValueError: there is not one output for each input, or none at all, or a pair is wrong.
    """
    if len(outputs) != len(inputs) or not outputs:
        raise ValueError(
            f"torch.distributed.{operation}: expected as many outputs as inputs, and at least one, got {len(outputs)} "
            f"outputs and {len(inputs)} inputs"
        )
    check(operation, transport, [*outputs, *inputs], is_of_one_dtype=False)
    pairs = list(zip(outputs, inputs, strict=True))
    for pair in pairs:
        check(operation, transport, pair, whole=whole)
    return pairs


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
