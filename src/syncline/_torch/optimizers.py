"""Optimizers: hooks of their state dicts, optimizers that step inside backward, and GradScalers in use.

A scaler expects infinite gradients at times, because it then lowers its scale. torch keeps no list of scalers. So
`note_scalers` makes torch's class report them.
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

_scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
"""The scalers of this process that `note_scalers` has found, and those that were created or used since."""

_NOTING = ("__init__", "scale", "_lazy_init_scale_growth_tracker")
"""The methods that note their scaler: the constructor, and those that use a scaler which no search can find. Every loss
goes through `scale`. A subclass with its own `scale` calls the last one at its first loss, if torch has that method."""

_scale_of = attribute("_scale", "see whether a GradScaler is in use")
"""Return the scale of a GradScaler; None until it has scaled a loss."""


def note_scalers() -> None:
    """Note all scalers of this process, now and from now on, for `is_scaler_in_use`.

    The first call searches all objects for scalers, which takes tens of milliseconds. It also replaces methods of
    `torch.amp.GradScaler`, so that each scaler is noted when it is created, or when it scales a loss. The latter finds
    scalers that `gc.freeze()` had hidden from the search, and unpickled ones. Scalers are not kept alive.
    """
    with _lock:
        if hasattr(GradScaler.__init__, "_notes_scaler"):
            return
        for name in _NOTING:
            if hasattr(GradScaler, name):
                setattr(GradScaler, name, _noting(getattr(GradScaler, name)))
        _scalers.update(_living())


def is_scaler_in_use() -> bool:
    """Return whether a `torch.amp.GradScaler` is alive, enabled, and has scaled a loss. Call `note_scalers` before.

    Example:
        >>> import torch
        >>> note_scalers()
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> _ = scaler.scale(torch.ones(()))
        >>> is_scaler_in_use()
        True
    """
    with _lock:
        scalers = list(_scalers)
    return any(scaler.is_enabled() and _scale_of(scaler) is not None for scaler in scalers)


def _living() -> Iterator[GradScaler]:
    """Search all objects of this process for scalers."""
    kinds = [GradScaler]
    for kind in kinds:  # the list grows by the subclasses of its entries
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    # An object refers to its class. `type` instead of isinstance, which may run code of unrelated objects.
    return (found for found in gc.get_referrers(*kinds) if type(found) in kinds)


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method in a form that also notes its scaler, once the scaler is complete."""

    @functools.wraps(method)
    def noting(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if not torch.compiler.is_compiling():  # compiled code stays unchanged
            with _lock:
                _scalers.add(self)
        return result

    noting._notes_scaler = True  # type: ignore[attr-defined]
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
