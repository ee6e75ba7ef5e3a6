"""The transforms of torch.func (vmap, grad and others), inside of which a tensor may have no memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from syncline._torch.lookup import is_there, lookup

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
