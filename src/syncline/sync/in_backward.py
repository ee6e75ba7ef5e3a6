"""Optimizers that step inside backward (torch's `_apply_optimizer_in_backward`): after the reduction, not before.

Torch's helper makes each parameter's optimizer step as soon as its local gradient is there. On several ranks that
would be a step with an unreduced gradient, so its hooks are taken off, as torch's own class does, and the
optimizers step when `.grad` holds the mean; then the gradient is freed, as the helper's users expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["optimizers_in_backward"]


def optimizers_in_backward(parameters: Sequence[Tensor]) -> Callable[[], None] | None:
    """What steps them, once their own hooks are removed; None where no parameter has such an optimizer."""
    with_optimizers: list[tuple[Tensor, list[Any]]] = [
        (parameter, parameter._in_backward_optimizers)
        for parameter in parameters
        if hasattr(parameter, "_in_backward_optimizers")
    ]
    if not with_optimizers:
        return None
    from torch.distributed.optim import apply_optimizer_in_backward  # imports much; few need it

    handles = apply_optimizer_in_backward.param_to_optim_hook_handle_map
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
