"""The tensors of a target, by name, and views of their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from syncline.checks import what_it_is
from syncline.optimizers.contents import optimizer_leaves
from syncline.trees import leaves

_OWN_MEMORY = (Tensor, nn.Parameter)
"""Types that are neither lazy nor wrappers of other tensors; other subclasses may be."""


# ---------------------------------------------------------------------- tensors of a target


def named_tensors(target: Any, *, for_writing: bool = True) -> list[tuple[str, Tensor]]:
    """Return the tensors of a target with their names, in an order that is the same on every rank.

    A tensor that occurs twice (tied weights, or another view of exactly the same memory) is listed once, by its first
    name.

    Args:
        target: a Module (parameters, then buffers, including non-persistent ones), an Optimizer (tensors of its state
            and of its parameter groups, but not the parameters), a Tensor, or dicts, lists and tuples of tensors
            (dicts in the order of their keys' text).
        for_writing: raise for tensors that cannot be written in place.

    Raises:
        TypeError: something else, or a leaf that is not a tensor; the message contains its path.
        ValueError: a tensor that `check_dense` rejects, or one that cannot be written in place (expanded).

    Example:
        >>> [name for name, _ in named_tensors(nn.BatchNorm1d(4))]
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    return distinct_tensors(walk(target), for_writing=for_writing)


def distinct_tensors(
    walked: Iterable[tuple[str, Tensor]], *, for_writing: bool = True
) -> list[tuple[str, Tensor]]:
    """Return the tensors of `walk` that `named_tensors` lists; raise as it does."""
    seen: dict[int, list[Tensor]] = {}
    named: list[tuple[str, Tensor]] = []
    for name, tensor in walked:
        check_dense(name, tensor)
        if for_writing:
            _check_writable(name, tensor)
        others = seen.setdefault(tensor.data_ptr() or id(tensor), [])
        if not others or not any(_identity(tensor) == _identity(other) for other in others):
            others.append(tensor)
            named.append((name, tensor))
    return named


def walk(target: Any) -> list[tuple[str, Tensor]]:
    """Return all tensors of a target with their names; some may occur more than once. See `named_tensors`.

    Raises:
        TypeError: the target is or contains something else.
    """
    if isinstance(target, nn.Module):
        kind = type(target)
        if kind.named_parameters is nn.Module.named_parameters and (
            kind.named_buffers is nn.Module.named_buffers
        ):
            return _walk_module(target)
        return [*target.named_parameters(), *target.named_buffers()]
    return list(_walk_optimizer(target) if isinstance(target, Optimizer) else _walk_tree(target))


def _walk_module(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the same as named_parameters() and named_buffers(), in one walk; tied tensors occur more than once."""
    parameters: list[tuple[str, Tensor]] = []
    buffers: list[tuple[str, Tensor]] = []
    _collect(module, "", set(), parameters, buffers)
    return parameters + buffers


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


def _walk_optimizer(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in optimizer_leaves(optimizer):
        if isinstance(leaf, Tensor):
            yield path, leaf


def _walk_tree(tree: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in leaves(tree):
        if not isinstance(leaf, Tensor):
            where = f" at {path}" if path else ""
            raise TypeError(
                f"expected the target to be a Module, an Optimizer, a Tensor, or dicts, lists and tuples of tensors, "
                f"got {what_it_is(leaf)}{where}: take it out, or make it a tensor"
            )
        yield path or "tensor", leaf


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise if a tensor does not hold its values in its own dense memory.

    Raises:
        ValueError: the tensor is lazy, nested, sparse, quantized, on the meta device, or a subclass that wraps others
            (DTensor).

    Example:
        >>> check_dense("x", torch.eye(2).to_sparse())
        Traceback (most recent call last):
        ValueError: expected x to be a dense tensor, got torch.sparse_coo: pass its values, or to_dense()
    """
    if type(tensor) not in _OWN_MEMORY and is_lazy(tensor):
        raise ValueError(f"{name} is lazy, it has no shape yet: run one forward with a real batch first")
    if tensor.is_nested:
        raise ValueError(f"expected {name} to be a dense tensor, got a nested one: pass its parts (unbind())")
    if type(tensor) not in _OWN_MEMORY and hasattr(tensor, "__tensor_flatten__"):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, which wraps other tensors: pass the wrapped ones "
            "(a DTensor's to_local())"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"expected {name} to be a dense tensor, got {tensor.layout}: pass its values, or to_dense()"
        )
    if tensor.is_quantized:
        raise ValueError(
            f"expected {name} to be a dense tensor, got a quantized one ({tensor.dtype}): pass int_repr(), or "
            "dequantize()"
        )
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device, it has no values: materialize it first (to_empty)")


def _check_writable(name: str, tensor: Tensor) -> None:
    if tensor.is_contiguous():
        return  # includes empty tensors
    repeats = any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if repeats:
        raise ValueError(
            f"{name} is expanded (shape {tuple(tensor.shape)}, strides {tensor.stride()}): several elements "
            "share one place in memory and cannot be written; clone() it first"
        )


def _identity(tensor: Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    # `data_ptr()` includes the storage offset.
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())


# ---------------------------------------------------------------------- views of their memory


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory holds the values in order: no strides, no pending conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def mark_written(tensors: Sequence[Tensor]) -> None:
    """Mark an in-place change for autograd: a later backward through a graph that saved a tensor raises torch's error.

    Inference tensors are in no graph and have no version counter.
    """
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory without holes or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def parts_of(tensor: Tensor, cap_bytes: int) -> list[Tensor]:
    """Return views of at most `cap_bytes` each that make up a tensor, row by row; they depend on its shape only.

    Example:
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
    """Return the memory of a plain tensor, (numel,).

    For a single element `view(-1)` would keep the stride, whatever it is, so it is not used.
    """
    return tensor.as_strided((1,), (1,)) if tensor.numel() == 1 else tensor.view(-1)


def as_real(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor outside of autograd, as real numbers: a complex number is a pair."""
    data = tensor.data
    if not data.is_complex():
        return data
    return torch.view_as_real(data.conj() if data.is_conj() else data)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a plain tensor as bytes, (numel * element_size,)."""
    return as_flat(tensor).view(torch.uint8)
