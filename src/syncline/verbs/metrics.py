"""The verbs `mean` and `barrier`, which do not change their arguments.

`mean` returns the same bits on every rank. Small tensors and numbers are gathered as float64, and every rank sums them
in rank order. Up to eight values are sent in one collective with the weight and the fingerprint of the structure, so
the usual `mean(loss, weight=len(batch))` is one collective. Large tensors are multiplied by the weight and then reduced
by all_reduce.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from syncline.checks import checked_number, suggests_arguments, what_it_is
from syncline.session.world import transport_of
from syncline.tensors.reduction import TensorReducer
from syncline.tensors.targets import check_dense
from syncline.transport.agreement import PAYLOAD_BYTES, exchange, gather_rows
from syncline.transport.base import Transport
from syncline.trees import leaves, map_leaves
from syncline.verbs.common import Group, Prepared, agree_on_call, checked_total, verb

_LARGE_NUMEL = 4096
"""The minimum number of elements of a large tensor. Large tensors are reduced, all others are gathered."""

_REMEDY = "Pass the same keys, shapes and dtypes on every rank."

_HEAD = struct.Struct(f"<{PAYLOAD_BYTES // 8}d")  # the weight, then the first values

_NUM_INLINE = PAYLOAD_BYTES // 8 - 1


# ---------------------------------------------------------------------- input


def _described(values: Any) -> tuple[list[str], list[Any]]:
    """Return the lines that describe the leaves of `values`, and the leaves. The lines must be equal on all ranks."""
    lines, found = [], []
    for path, leaf in leaves(values, "values"):
        if isinstance(leaf, Tensor):
            check_dense(path, leaf)
            lines.append(f"{path}  {leaf.dtype} {tuple(leaf.shape)}")
        elif isinstance(leaf, Real):
            lines.append(f"{path}  a number")
        else:
            raise TypeError(
                f"expected values to be numbers or tensors, or dicts, lists, tuples and dataclasses of numbers and "
                f"tensors, got {what_it_is(leaf)} at {path}: leave it out, or convert it to a number"
            )
        found.append(leaf)
    return lines, found


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() >= _LARGE_NUMEL


def _as_row(leaf: Any) -> Tensor:
    """Return the numbers of a leaf as a flat float64 tensor on the CPU. A complex number becomes two numbers."""
    if not isinstance(leaf, Tensor):
        return torch.tensor([float(leaf)], dtype=torch.float64, device="cpu")
    if leaf.is_complex():
        return torch.view_as_real(leaf.detach().to("cpu", torch.complex128).resolve_conj()).reshape(-1)
    return leaf.detach().to("cpu", torch.float64).reshape(-1)


# ---------------------------------------------------------------------- exchange


def _mean_of_rows(rows: Sequence[Tensor], weights: Sequence[float], total: float) -> Tensor:
    # A rank of weight 0 is left out instead of multiplied by 0, because its values may be NaN.
    parts = [(row, weight) for row, weight in zip(rows, weights, strict=True) if weight > 0]
    if len(parts) == 1:
        return parts[0][0]
    # Multiply and add separately: an add with a factor may be fused on some ranks only, and round differently there.
    products = [row * weight for row, weight in parts]
    sums = products[0]
    for product in products[1:]:
        sums += product
    return sums / total


def _reduced(tensors: Sequence[Tensor], fraction: float, transport: Transport) -> list[Tensor]:
    """Return the weighted means of large tensors over the ranks.

    Args:
        tensors: the large tensors of this rank.
        fraction: this rank's weight, divided by the sum of all weights.
        transport: the transport between the ranks.
    """
    means = []
    for tensor in tensors:
        # Sum 16-bit values and integers in fp32 at least.
        dtype = torch.promote_types(_result_dtype(tensor), torch.float32)
        mean = torch.empty(tensor.shape, dtype=dtype, device=transport.sending_device(tensor.device))
        means.append(mean.copy_(tensor.detach()))
    TensorReducer(means, transport, "sum", fraction=fraction).run()
    return means


# ---------------------------------------------------------------------- output


def _result_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float32


def _results(found: Sequence[Any], mean: Tensor, large: Iterator[Tensor]) -> Iterator[Any]:
    """Yield the mean of each leaf: a float, or a tensor with the shape and device of the leaf.

    Args:
        found: the leaves.
        mean: the means of all small leaves, as one flat tensor.
        large: the means of the large leaves.
    """
    position = 0
    for leaf in found:
        if not isinstance(leaf, Tensor):
            yield mean[position].item()
            position += 1
            continue
        dtype = _result_dtype(leaf)
        if _is_large(leaf):
            yield next(large).to(leaf.device, dtype)
            continue
        width = leaf.numel() * (2 if leaf.is_complex() else 1)
        numbers = mean[position : position + width]
        position += width
        if leaf.is_complex():
            numbers = torch.view_as_complex(numbers.view(leaf.numel(), 2))
        yield numbers.reshape(leaf.shape).to(leaf.device, dtype)


T = TypeVar("T")


@suggests_arguments
def barrier(group: Group = None) -> None:
    """Wait until every rank of the group has called this function.

    Args:
        group: see `broadcast_`.

    Raises:
        CollectiveTimeout: some ranks did not call this function before the deadline.
        CollectiveMismatch: some ranks called another function of Syncline instead.
    """
    transport = transport_of(group)
    with verb(transport, "barrier"):
        exchange(transport, "sl.barrier", [])


@overload
def mean(values: float, weight: float | Tensor = 1.0, *, group: Group = None) -> float: ...


@overload
def mean(values: T, weight: float | Tensor = 1.0, *, group: Group = None) -> T: ...


@suggests_arguments
def mean(values: Any, weight: float | Tensor = 1.0, *, group: Group = None) -> Any:
    """Return the weighted mean of `values` over the ranks. The result has the same bits on every rank.

    Up to eight numbers take one collective, and more numbers take two. Tensors of 4,096 elements or more take
    additional collectives, which are few even for many tensors.

    Args:
        values: a number, a tensor, or nested dicts, lists, tuples and dataclasses of numbers and tensors. Names, shapes
            and dtypes must be the same on all ranks. `mean` does not change `values`.
        weight: the weight of this rank, finite and at least 0. If the values are means over some items, pass the number
            of items. If the weight of a rank is 0, its values are not used, even if they are NaN.
        group: see `broadcast_`.

    Returns:
        The means in the same containers. The mean of numbers (also of int and bool) is a float. The mean of tensors has
        the same shape, dtype and device; for integer and bool tensors, the dtype is float32. The results are detached
        from autograd.

    Raises:
        ContractMismatch: the values of the ranks have different structures. The text is the same on every rank.
        ValueError: a weight is negative, infinite or NaN, or all weights are 0; or a tensor is sparse, nested or
            quantized. Every rank raises the error.
        TypeError: `values` contains something that is neither a number nor a tensor. Every rank raises the error.

    Examples:
        >>> import syncline as sl
        >>> loss, num_correct, num_samples = 0.25, 60, 64
        >>> sl.mean({"loss": loss, "accuracy": num_correct / num_samples}, weight=num_samples)
        {'loss': 0.25, 'accuracy': 0.9375}
    """
    transport = transport_of(group)
    with verb(transport, "mean"):

        def prepare() -> Prepared[tuple[list[Any], Tensor]]:
            scale = checked_number("weight", weight, at_least=0)
            lines, found = _described(values)
            small = [_as_row(leaf) for leaf in found if not _is_large(leaf)]
            row = torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *small])
            inline = row[:_NUM_INLINE].tolist()
            head = _HEAD.pack(scale, *inline, *([0.0] * (_NUM_INLINE - len(inline))))
            return Prepared((found, row), lines, head)

        (found, row), heads = agree_on_call(transport, "sl.mean", prepare, remedy=_REMEDY)
        weights, rows = [], []
        for head in heads:
            weight_there, *inline = _HEAD.unpack(head)
            weights.append(weight_there)
            rows.append(torch.tensor(inline[: row.numel()], dtype=torch.float64, device="cpu"))
        total = checked_total("sl.mean", weights)
        if row.numel() > _NUM_INLINE:
            rows = gather_rows(transport, row)
        large = [leaf for leaf in found if _is_large(leaf)]
        means = _reduced(large, weights[transport.rank] / total, transport)
        results = _results(found, _mean_of_rows(rows, weights, total), iter(means))
        return map_leaves(values, lambda path, leaf: next(results))
