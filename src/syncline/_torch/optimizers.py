"""Optimizers: hooks of their state dicts, optimizers that step inside backward, and GradScalers in use.

A program with a GradScaler has infinite gradients at times, which are no fault: the scaler then lowers its scale. torch
keeps no list of scalers. So `note_scalers` replaces methods of torch's class, which then report the scalers.
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
from torch.optim import Optimizer, lr_scheduler

from syncline._torch.lookup import attribute, lookup

_lock = threading.Lock()  # ranks may be threads

_scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
"""The scalers that `note_scalers` has found in this process, and the scalers that were created or used since."""

_NOTING = ("__init__", "scale", "_lazy_init_scale_growth_tracker")
"""The methods of a GradScaler that `note_scalers` replaces, so that they also record the scaler.

The constructor records new scalers. `scale`, through which every loss goes, records scalers that no search can find.
A subclass with its own `scale` calls the last of these methods at its first loss, if torch has that method.
"""

_scale_of = attribute("_scale", "see whether a GradScaler is in use")
"""Return the scale of a GradScaler. Return None if the scaler has not scaled a loss yet."""


_schedulers_of = attribute("_schedulers", "see the schedulers inside of a scheduler")


def schedulers_inside(scheduler: object) -> list[Any]:
    """Return the schedulers that a learning rate scheduler, such as SequentialLR, calls in turn."""
    has_schedulers = isinstance(scheduler, lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler)
    return list(_schedulers_of(scheduler)) if has_schedulers else []


def note_scalers() -> None:
    """Record all scalers of this process for `is_scaler_in_use`: existing scalers, and those created later.

    The first call searches all objects of the process for scalers, which takes tens of milliseconds. It also replaces
    methods of `torch.amp.GradScaler`, so that a scaler is recorded when it is created and when it scales a loss. A
    scaler that was unpickled, or that `gc.freeze()` had hidden from the search, is thus recorded at its next loss. The
    record does not keep scalers alive.
    """
    with _lock:
        if hasattr(GradScaler.__init__, "_notes_scaler"):
            return
        for name in _NOTING:
            if hasattr(GradScaler, name):
                setattr(GradScaler, name, _noting(getattr(GradScaler, name)))
        _scalers.update(_living())


def is_scaler_in_use() -> bool:
    """Return whether this process has an enabled `torch.amp.GradScaler` that has scaled a loss.

    Call `note_scalers` before, because this function knows only the recorded scalers.

    Examples:
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
    """Search all objects of this process for scalers, and return the scalers."""
    kinds = [GradScaler]
    for kind in kinds:  # the list grows by the subclasses of its entries
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    # An object refers to its class. `type` instead of isinstance, which may run code of unrelated objects.
    return (found for found in gc.get_referrers(*kinds) if type(found) in kinds)


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of a scaler's method. It calls the method, and then records the scaler."""

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
    """Return the hooks of an optimizer that `register_state_dict_pre_hook` has registered."""
    return list(_pre_hooks(optimizer).values())


def state_dict_post_hooks(optimizer: Optimizer) -> list[Callable[[Optimizer, dict[str, Any]], Any]]:
    """Return the hooks of an optimizer that `register_state_dict_post_hook` has registered."""
    return list(_post_hooks(optimizer).values())


# ---------------------------------------------------------------------- steps


def mark_step_as_made(optimizer: Optimizer) -> None:
    """Mark an optimizer as stepped after Syncline has discarded a step, so that its scheduler does not warn.

    If the installed torch does not read the mark, the mark has no effect.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def as_overlapped(kind: type, options: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch's overlapped version of an optimizer, which steps inside a communication hook.

    Raises:
        NotImplementedError: torch has no overlapped version of the optimizer class `kind`.
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
"""The attribute of a parameter in which `_apply_optimizer_in_backward` stores the parameter's optimizers."""


def steps_in_backward(parameter: Tensor) -> bool:
    """Return whether the program has given this parameter an optimizer that steps inside backward."""
    return hasattr(parameter, _STEPS_HERE)


def optimizers_in_backward(parameters: Sequence[Tensor]) -> Callable[[], None] | None:
    """Remove the hooks by which torch steps the optimizers of these parameters inside backward.

    Returns:
        A function that steps these optimizers, and then frees the gradients. None if no parameter has such an
        optimizer.
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
