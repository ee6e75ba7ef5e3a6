"""Access to torch's private operations on tensors, on lists and subclasses of them, and inside of torch.func."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from syncline._torch.lookup import attribute, is_there, lookup

_Tensors = Sequence[Tensor]

# ---------------------------------------------------------------------- lists of tensors, in one call

_TOGETHER = "compute with many tensors in one call"


foreach_copy_: Callable[..., Any] = lookup("torch:_foreach_copy_", _TOGETHER)

foreach_div_: Callable[..., Any] = lookup("torch:_foreach_div_", _TOGETHER)

foreach_mul_: Callable[..., Any] = lookup("torch:_foreach_mul_", _TOGETHER)

foreach_zero_: Callable[..., Any] = lookup("torch:_foreach_zero_", _TOGETHER)

foreach_norm: Callable[..., Any] = lookup("torch:_foreach_norm", _TOGETHER)

split_like: Callable[[Tensor, _Tensors], tuple[Tensor, ...]] = lookup(
    "torch._C:_nn.unflatten_dense_tensors", "view a flat tensor as tensors of given shapes"
)
"""Split a flat tensor into views that have the shapes of given tensors."""

_ScriptList = lookup("torch._C:ScriptList", "hold tensors in C++ code")


def owner_of_all_tensors() -> object:
    """Return an object of C++ code that owns all tensors on the CPU, together with Python.

    While it exists, other C++ code can drop a tensor without the interpreter's lock. (A C++ object needs the lock when
    only Python still owns the tensor.)
    """
    kinds = Tensor, torch.nn.Parameter
    tensors = [one for one in gc.get_objects() if type(one) in kinds and one.device.type == "cpu"]
    return _ScriptList(tensors) if is_there(_ScriptList) else tensors


# ---------------------------------------------------------------------- one tensor

version_of: Callable[[Tensor], int] = attribute("_version", "detect writes to a tensor")
"""Return the version counter of a tensor. Each in-place write to the tensor increases the counter."""


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of the gradients of a parameter, which is the parameter's own unless `grad_dtype` is set."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if dtype is None else dtype


# The public methods reject a sparse tensor that is not coalesced, as gradients of embeddings are.
num_entries: Callable[[Tensor], int] = lookup("torch:Tensor._nnz", "reduce sparse gradients")
"""Return the number of entries that a sparse tensor stores. In a gradient of an embedding, an entry is a row."""

stored_indices: Callable[[Tensor], Tensor] = lookup("torch:Tensor._indices", "reduce sparse gradients")
"""Return the indices of the entries that a sparse tensor stores."""

stored_values: Callable[[Tensor], Tensor] = lookup("torch:Tensor._values", "reduce sparse gradients")
"""Return the values of the entries that a sparse tensor stores. A write to the values changes the sparse tensor."""

_make_sparse = lookup("torch:ops.aten._sparse_coo_tensor_with_dims_and_tensors", "reduce sparse gradients")


def sparse_tensor(
    indices: Tensor, values: Tensor, shape: Sequence[int], *, is_coalesced: bool | None = None
) -> Tensor:
    """Create a sparse tensor from indices and values. The indices and values are not checked.

    torch's public function warns of that in torch 2.11 and 2.12, even with `check_invariants=False`.
    """
    num_sparse = len(indices)
    made: Tensor = _make_sparse(
        num_sparse,
        len(shape) - num_sparse,
        shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=is_coalesced,
    )
    return made


TorchFuture: Any = lookup("torch._C:Future", "check what a communication hook returns")
"""The base class of torch.futures.Future. Some functions of torch return direct instances of this class."""

tree_map_only: Callable[..., Any] = lookup("torch.utils._pytree:tree_map_only", "move or cast inputs")
"""Apply a function to all objects of one type in nested lists, tuples and dicts, and return the new containers."""

# ---------------------------------------------------------------------- subclasses of Tensor

_make_wrapper_subclass = lookup("torch:Tensor._make_wrapper_subclass", "shard gradients")

no_torch_function: Any = lookup("torch._C:_disabled_torch_function_impl", "shard gradients")
"""The `__torch_function__` for a subclass of Tensor that overrides only `__torch_dispatch__`."""

plain_torch_functions: Any = lookup("torch._C:DisableTorchFunctionSubclass", "shard gradients")
"""A context manager that disables the `__torch_function__` of all subclasses of Tensor."""

UNSCALE = lookup(
    "torch:_amp_foreach_non_finite_check_and_unscale_", "use a GradScaler with sharded gradients"
)
"""The function by which a GradScaler finds infinities. A `__torch_function__` recognizes the call by this object."""

FOREACH_NORM = lookup("torch:_foreach_norm", _TOGETHER)
"""The function that clip_grad_norm_ calls. A `__torch_function__` recognizes the call by this object."""

FOREACH_ZERO = lookup("torch:ops.aten._foreach_zero_.default", _TOGETHER)
"""The function that zero_grad calls. A `__torch_dispatch__` recognizes the call by this object."""


def make_without_memory(kind: type[Tensor], like: Tensor) -> Any:
    """Create a tensor of the class `kind` that has no memory, with the shape, dtype and device of `like`."""
    return _make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)


def check_that_infinities_are_seen() -> None:
    """Raise an error if torch lacks the function by which a GradScaler finds infinities.

    Sharded gradients intercept this function.

    Raises:
        SynclineError: torch lacks the function.
    """
    if not is_there(UNSCALE):
        UNSCALE()


_USE = "send data inside of a transform of torch.func"

_present_level = lookup("torch._C:_functorch.peek_interpreter_stack", _USE)

_is_wrapped = lookup("torch._C:_functorch.is_functorch_wrapped_tensor", _USE)

belongs_to_transform: Callable[[Tensor], bool] = (
    _is_wrapped if is_there(_is_wrapped) else lambda tensor: False
)
"""Return whether a tensor stands for several values, or is tracked, inside of a transform that runs now."""

_contents = lookup("torch._C:_functorch.get_unwrapped", _USE)


def without_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that stands for this one outside of all transforms: the one that a backward can reach."""
    while belongs_to_transform(tensor):
        tensor = _contents(tensor)
    return tensor


_NOTHING: AbstractContextManager[Any] = nullcontext()


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Return a context in which operations on tensors are ordinary ones, whatever transforms the caller is inside of.

    Inside of a transform, each new tensor belongs to the transform, and has no memory that could be sent.
    """
    if not is_there(_present_level) or _present_level() is None:
        return _NOTHING
    # The name is looked up here, because few programs use transforms.
    leave = lookup("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", _USE)
    context: AbstractContextManager[Any] = leave()
    return context
