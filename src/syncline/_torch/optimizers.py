"""Optimizers: hooks of their state dicts, optimizers that step inside backward, and GradScalers in use.

A scaler expects infinite gradients at times, because it then lowers its scale. torch keeps no list of scalers. So
methods of torch's class are replaced, once per process, when the first finder is created.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from syncline._torch.lookup import attribute, lookup

_lock = threading.Lock()  # ranks may be threads

_seen: weakref.WeakSet[GradScaler] = weakref.WeakSet()
"""Scalers that have scaled a loss since the first finder was created."""

_SCALING = ("scale", "_lazy_init_scale_growth_tracker")
"""Every loss goes through the first method. A subclass with its own `scale` calls the second at its first loss. If
torch has no such method, that scaler is found only by a search among all objects."""

_scale_of = attribute("_scale", "see whether a GradScaler is in use")
"""Return the scale of a GradScaler; None until it has scaled a loss."""


class ScalerFinder:
    """A search for a `torch.amp.GradScaler` that is in use: alive, enabled, and with at least one scaled loss.

    Scalers are not registered. After the first finder is created, `GradScaler.scale` records each scaler that scales a
    loss, by a weak reference. Recorded scalers are found even after `gc.freeze()`, which hides all present objects from
    searches. Scalers that scaled a loss earlier are searched among all objects. This takes milliseconds, in the rare
    steps with a gradient that is not finite.

    Example:
        >>> import torch
        >>> finder = ScalerFinder()
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> _ = scaler.scale(torch.ones(()))
        >>> finder.is_any_in_use()
        True
    """

    def __init__(self) -> None:
        _note_those_that_scale()

    def is_any_in_use(self) -> bool:
        """Return whether a scaler is in use."""
        with _lock:
            seen = list(_seen)
        if any(_is_in_use(scaler) for scaler in seen):
            return True
        for scaler in _living():
            if _is_in_use(scaler):
                _remember(scaler)
                return True
        return False


def _is_in_use(scaler: GradScaler) -> bool:
    return scaler.is_enabled() and _scale_of(scaler) is not None


def _living() -> Iterator[GradScaler]:
    kinds = [GradScaler]
    for kind in kinds:  # the list grows by the subclasses of its entries
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    # An object refers to its class. `type` instead of isinstance, which may run code of unrelated objects.
    return (found for found in gc.get_referrers(*kinds) if type(found) in kinds)


def _remember(scaler: GradScaler) -> None:
    with _lock:
        _seen.add(scaler)


def _note_those_that_scale() -> None:
    """Record scalers that scale a loss from now on; `torch.cuda.amp.GradScaler` and other subclasses inherit this."""
    with _lock:
        for name in _SCALING:
            method = getattr(GradScaler, name, None)
            if method is not None and not hasattr(method, "_is_noting"):
                setattr(GradScaler, name, _noting(method))


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # compiled code stays unchanged
            _remember(self)
        return method(self, *args, **kwargs)

    noting._is_noting = True  # type: ignore[attr-defined]
    return noting


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
    """Mark an optimizer as stepped, so that its scheduler does not warn about a step that Syncline has discarded.

    The mark has no effect if torch no longer reads it.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def as_overlapped(kind: type, options: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch's version of an optimizer class that steps in a communication hook.

    Raises:
        NotImplementedError: torch supports no such optimizer for this class.
    """
    # The name is looked up here, because the lookup imports much that few programs need.
    make = lookup(
        "torch.distributed.algorithms._optimizer_overlap:_as_overlapped_optim",
        "step optimizers in a communication hook",
    )
    return make(kind, options, *args, **kwargs)


# ---------------------------------------------------------------------- steps inside backward

# torch's `_apply_optimizer_in_backward` lets each parameter's optimizer step as soon as its local gradient is ready. On
# several ranks that would be a step with an unreduced gradient. So its hooks are removed, as torch's DDP does, and the
# optimizers step when `.grad` holds the mean. Then the gradient is freed, as users of this helper expect.
_STEPS_HERE = "_in_backward_optimizers"
"""The attribute that the helper sets on a parameter."""


def steps_in_backward(parameter: Tensor) -> bool:
    """Return whether an optimizer of this parameter steps inside backward."""
    return hasattr(parameter, _STEPS_HERE)


def optimizers_in_backward(parameters: Sequence[Tensor]) -> Callable[[], None] | None:
    """Remove the hooks that step optimizers inside backward.

    Returns:
        A function that steps those optimizers; None if no parameter has such an optimizer.
    """
    with_optimizers: list[tuple[Tensor, list[Any]]] = [
        (parameter, getattr(parameter, _STEPS_HERE))
        for parameter in parameters
        if steps_in_backward(parameter)
    ]
    if not with_optimizers:
        return None
    # The name is looked up here, because the lookup imports much that few programs need.
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
