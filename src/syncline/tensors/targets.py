"""Functions that find the tensors of a target by name, and functions that return views of a tensor's memory.

A target is a module, an optimizer, a tensor, or dicts, lists and tuples of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from syncline._torch.tensors import belongs_to_transform
from syncline.checks import what_it_is
from syncline.optimizers.contents import optimizer_leaves
from syncline.trees import leaves

_OWN_MEMORY = (Tensor, nn.Parameter)
"""Types whose tensors are never lazy and never wrap other tensors."""


# ---------------------------------------------------------------------- tensors of a target


def named_tensors(target: Any, *, for_writing: bool = True) -> list[tuple[str, Tensor]]:
    """Return the tensors of a target with their names. The order is the same on every rank.

    If a tensor occurs more than once (tied weights, or another view of exactly the same memory), only its first
    occurrence is returned.

    Args:
        target: a Module (its parameters, then its buffers, including non-persistent buffers), an Optimizer (tensors of
            its state and of its parameter groups, but not the parameters), a Tensor, or dicts, lists and tuples of
            tensors. The items of a dict are sorted by the text of their keys.
        for_writing: whether to raise an error for a tensor that cannot be written in place.

    Raises:
        TypeError: the target has another type, or contains a leaf that is not a tensor. The message contains the path.
        ValueError: `check_dense` rejects a tensor; or a tensor is expanded, so it cannot be written in place.

    Examples:
        >>> [name for name, _ in named_tensors(nn.BatchNorm1d(4))]
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    return distinct_tensors(walk(target), for_writing=for_writing)


def distinct_tensors(
    walked: Iterable[tuple[str, Tensor]], *, for_writing: bool = True
) -> list[tuple[str, Tensor]]:
    """Check tensors, and return each of them once, with its first name.

    Args:
        walked: the names and tensors that `walk` has returned.
        for_writing: whether to raise an error for a tensor that cannot be written in place.

    Raises:
        ValueError: see `named_tensors`.
    """
    seen: dict[int, list[Tensor]] = {}
    named: list[tuple[str, Tensor]] = []
    for name, tensor in walked:
        check_dense(name, tensor)
        if for_writing:
            check_writable(name, tensor)
        others = seen.setdefault(tensor.data_ptr() or id(tensor), [])
        if not others or not any(_identity(tensor) == _identity(other) for other in others):
            others.append(tensor)
            named.append((name, tensor))
    return named


def walk(target: Any) -> list[tuple[str, Tensor]]:
    """Return all tensors of a target with their names, as `named_tensors` does. A tensor may occur more than once.

    Raises:
        TypeError: the target has another type, or contains a leaf that is not a tensor.
    """
    if isinstance(target, nn.Module):
        kind = type(target)
        if kind.named_parameters is not nn.Module.named_parameters or (
            kind.named_buffers is not nn.Module.named_buffers
        ):
            return [*target.named_parameters(), *target.named_buffers()]
        parameters: list[tuple[str, Tensor]] = []
        buffers: list[tuple[str, Tensor]] = []
        _collect(target, "", set(), parameters, buffers)  # in one walk
        return parameters + buffers
    is_optimizer = isinstance(target, Optimizer)
    found: list[tuple[str, Tensor]] = []
    for path, leaf in optimizer_leaves(target) if is_optimizer else leaves(target):
        if isinstance(leaf, Tensor):
            found.append((path or "tensor", leaf))
        elif not is_optimizer:
            where = f" at {path}" if path else ""
            raise TypeError(
                f"expected the target to be a Module, an Optimizer, a Tensor, or dicts, lists and tuples of tensors, "
                f"got {what_it_is(leaf)}{where}: remove this value, or convert it to a tensor"
            )
    return found


def _collect(
    module: nn.Module,
    prefix: str,
    seen: set[nn.Module],
    parameters: list[tuple[str, Tensor]],
    buffers: list[tuple[str, Tensor]],
) -> None:
    seen.add(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            parameters.append((prefix + name, parameter))
    for name, buffer in module._buffers.items():
        if buffer is not None:
            buffers.append((prefix + name, buffer))
    for name, inner in module._modules.items():
        if inner is not None and inner not in seen:
            _collect(inner, f"{prefix}{name}.", seen, parameters, buffers)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise an error unless a tensor has dense memory of its own, which contains its values.

    Raises:
        ValueError: the tensor is lazy, nested, sparse, quantized, on the meta device, or of a subclass that wraps other
            tensors (DTensor).

    Examples:
        >>> check_dense("x", torch.eye(2).to_sparse())
        Traceback (most recent call last):
        ValueError: expected x to be a dense tensor, got torch.sparse_coo: pass x.values() or x.to_dense()
    """
    if type(tensor) not in _OWN_MEMORY and is_lazy(tensor):
        raise ValueError(
            f"expected {name} to have a shape, got a lazy tensor: run one forward with a real batch first"
        )
    if belongs_to_transform(tensor):
        raise ValueError(
            f"expected {name} to be an ordinary tensor, got one inside of a transform of torch.func (vmap, grad, ...), "
            "which has no values that could be sent: make this call outside of the transform, with its result"
        )
    if tensor.is_nested:
        raise ValueError(
            f"expected {name} to be a dense tensor, got a nested tensor: pass its parts, which {name}.unbind() returns"
        )
    if type(tensor) not in _OWN_MEMORY and hasattr(tensor, "__tensor_flatten__"):
        raise ValueError(
            f"expected {name} to be a dense tensor, got a {type(tensor).__name__}, which wraps other tensors: pass the "
            f"wrapped tensors. For a DTensor, this is {name}.to_local()"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"expected {name} to be a dense tensor, got {tensor.layout}: pass {name}.values() or {name}.to_dense()"
        )
    if tensor.is_quantized:
        raise ValueError(
            f"expected {name} to be a dense tensor, got a quantized tensor of type {tensor.dtype}: pass "
            f"{name}.int_repr() or {name}.dequantize()"
        )
    if tensor.is_meta:
        raise ValueError(
            f"expected {name} to have values, got a tensor on the meta device: create its memory first, by to_empty()"
        )


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise an error if a tensor cannot be written in place, because several of its elements use the same memory.

    A rank that sends only reads its tensors, so it would not notice. Call this before the ranks compare their calls.

    Raises:
        ValueError: the tensor is expanded.
    """
    if is_expanded(tensor):
        raise ValueError(
            f"expected {name} to be writable in place, got an expanded tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}), of which several elements use the same memory: pass {name}.clone()"
        )


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor use the same memory, as `expand` makes them."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False  # includes empty tensors
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _identity(tensor: Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    # `data_ptr()` includes the storage offset.
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())


# ---------------------------------------------------------------------- views of their memory


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor's memory contains its values as they are and in their order.

    Such a tensor is contiguous, and has no pending conjugation or negation.
    """
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def mark_written(tensors: Sequence[Tensor]) -> None:
    """Mark tensors as changed in place. If a graph has saved one of them, its backward then raises torch's usual error.

    Inference tensors are left out, because they are in no graph and have no version counter.
    """
    if tensors:
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements fill one block of memory without holes or overlaps.

    The dimensions may be in any order.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def parts_of(tensor: Tensor, cap_bytes: int) -> list[Tensor]:
    """Divide a tensor into views of at most `cap_bytes` each. A view consists of whole rows, if a row is small enough.

    The division depends only on the shape and the dtype.

    Examples:
        >>> [part.shape[0] for part in parts_of(torch.zeros(5, 2), 17)]
        [2, 2, 1]
    """
    if tensor.nbytes <= cap_bytes or tensor.numel() == 1:
        return [tensor]
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    row_bytes = tensor.nbytes // tensor.shape[dim]
    rows = tensor.split(max(1, cap_bytes // row_bytes), dim)
    return [part for row in rows for part in parts_of(row, cap_bytes)]


def as_flat(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's memory with one dimension, (numel,). The tensor must be plain (`is_plain`)."""
    # For a single element or none, `view(-1)` would keep the stride, which may have any value.
    numel = tensor.numel()
    return tensor.as_strided((numel,), (1,)) if numel < 2 else tensor.view(-1)


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's memory as real numbers, outside of autograd. A complex number becomes a pair."""
    data = tensor.data
    if not data.is_complex():
        return data
    return torch.view_as_real(data.conj() if data.is_conj() else data)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's memory as bytes, (numel * element_size,). The tensor must be plain (`is_plain`)."""
    return as_flat(tensor).view(torch.uint8)
