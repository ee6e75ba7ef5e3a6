"""Optimizers: hooks of their state dicts, and optimizers that step inside backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from syncline._torch.lookup import attribute, lookup

__all__ = [
    "as_overlapped",
    "mark_step_as_made",
    "optimizers_in_backward",
    "state_dict_post_hooks",
    "state_dict_pre_hooks",
    "steps_in_backward",
]


# ---------------------------------------------------------------------- state dicts

_pre_hooks = attribute("_optimizer_state_dict_pre_hooks", "save a sharded optimizer")

_post_hooks = attribute("_optimizer_state_dict_post_hooks", "save a sharded optimizer")


def state_dict_pre_hooks(optimizer: Optimizer) -> list[Callable[[Optimizer], None]]:
    """Return the hooks registered by `register_state_dict_pre_hook`."""
    return list(_pre_hooks(optimizer).values())


def state_dict_post_hooks(optimizer: Optimizer) -> list[Callable[[Optimizer, dict[str, Any]], Any]]:
    """Return the hooks registered by `register_state_dict_post_hook`."""
    return list(_post_hooks(optimizer).values())


# ---------------------------------------------------------------------- steps


def mark_step_as_made(optimizer: Optimizer) -> None:
    """Mark an optimizer as stepped, so that its scheduler does not warn about a step left out on purpose.

    Setting the mark is harmless if torch no longer reads it.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def as_overlapped(kind: type, options: Any, *args: Any, **kwargs: Any) -> Any:
    """Return an optimizer that steps in a communication hook, made by torch for an optimizer class.

    Raises:
        NotImplementedError: torch supports no such optimizer for this class.
    """
    # Looked up here, because the lookup imports much, and few programs need it.
    make = lookup(
        "torch.distributed.algorithms._optimizer_overlap:_as_overlapped_optim",
        "step optimizers in a communication hook",
    )
    return make(kind, options, *args, **kwargs)


# ---------------------------------------------------------------------- steps inside backward

# torch's `_apply_optimizer_in_backward` lets each parameter's optimizer step as soon as its local gradient is ready. On
# several ranks that would be a step with an unreduced gradient. So its hooks are removed, as torch's own class does,
# and the optimizers step when `.grad` holds the mean. Then the gradient is freed, as users of the helper expect.
_STEPS_HERE = "_in_backward_optimizers"
"""The attribute that the helper sets on a parameter. A torch without the helper sets it on none."""


def steps_in_backward(parameter: Tensor) -> bool:
    """Return whether an optimizer of this parameter steps inside backward."""
    return hasattr(parameter, _STEPS_HERE)


def optimizers_in_backward(parameters: Sequence[Tensor]) -> Callable[[], None] | None:
    """Remove the hooks that step optimizers inside backward.

    Returns:
        A function that steps those optimizers; None if no parameter has one.
    """
    with_optimizers: list[tuple[Tensor, list[Any]]] = [
        (parameter, getattr(parameter, _STEPS_HERE))
        for parameter in parameters
        if steps_in_backward(parameter)
    ]
    if not with_optimizers:
        return None
    # Looked up here, because the lookup imports much, and few programs need it.
    handles = lookup(
        "torch.distributed.optim:apply_optimizer_in_backward.param_to_optim_hook_handle_map",
        "step optimizers inside backward",
    )
    for parameter, _ in with_optimizers:
        for handle in handles.get(parameter, []):
            handle.remove()

    def step() -> None:
        for parameter, optimizers in with_optimizers:
            if parameter.grad is None:
                continue
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None

    return step
