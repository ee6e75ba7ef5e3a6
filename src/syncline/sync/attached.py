"""An optimizer that was attached: its settings are compared with its peers', and its steps are counted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.errors import SynclineError

__all__ = ["AttachedOptimizer", "settings_of"]

_Setting = float | int | str | None


class AttachedOptimizer:
    """Watches one optimizer, whose `step` becomes a method that asks first.

    The optimizer stays the same object. Its new `step` is a bound method, as learning rate schedulers want it, which
    look at `step.__func__`; a scheduler may have wrapped the old one, or may wrap the new one.

    Args:
        optimizer: which.
        before_step: called with this object before each step; what it raises, the step raises.
        after_step: called with it after each step.
        discards: asked, once the gradients of a step are there, whether it is to be left undone; such a step counts as
            none. A closure, which makes the gradients inside of the step, is run before. None: no step is.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> attached = AttachedOptimizer(optimizer, before_step=lambda attached: None)
        >>> optimizer.step()
        >>> attached.num_steps, optimizer.step.__self__ is optimizer
        (1, True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before_step: Callable[[AttachedOptimizer], None],
        after_step: Callable[[AttachedOptimizer], None] | None = None,
        discards: Callable[[], bool] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.counts = True
        """Whether steps count, and are followed by what is due; switched off while replicas drift on purpose."""
        self.told_settings: object = None
        """The settings at the last reduction, which did not go on unless all ranks shared them."""
        inner = optimizer.step

        @functools.wraps(inner)
        def step(self_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self.counts:
                return inner(*args, **kwargs)
            before_step(self)
            if discards is not None:
                evaluated, args, kwargs = _evaluated(discards, args, kwargs)
                if discards():
                    optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler would complain
                    return None if evaluated is None else evaluated.loss
            result = inner(*args, **kwargs)
            self.num_steps += 1
            if after_step is not None:
                after_step(self)
            return result

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def settings(self) -> tuple[Any, ...]:
        """The numbers that decide what a step does, and how many steps there were; cheap."""
        return (self.num_steps, *settings_of(self.optimizer))

    def describe(self, number: int) -> list[str]:
        """The same in words, a line for each setting."""
        kind = type(self.optimizer).__name__
        return [f"steps of optimizer {number} ({kind})  {self.num_steps}", *self.describe_settings(number)]

    def describe_settings(self, number: int) -> list[str]:
        """The settings alone."""
        kind = type(self.optimizer).__name__
        return [
            f"{key} of optimizer {number} ({kind}), param_groups[{index}]  {value}"
            for index, group in enumerate(settings_of(self.optimizer))
            for key, value in group
        ]


class _Evaluated:
    """A closure that was called once: it gives that result first, and afterwards what further calls give."""

    def __init__(self, closure: Callable[[], Any], discards: Callable[[], bool]) -> None:
        self._closure = closure
        self._discards = discards
        with torch.enable_grad():
            self.loss = closure()
        self._is_told = False

    def __call__(self) -> Any:
        if not self._is_told:
            self._is_told = True
            return self.loss
        loss = self._closure()
        if self._discards():
            raise SynclineError(
                "the closure of optimizer.step() has made gradients that are not finite, in a later call than the "
                "first, where the step can no longer be left undone. Attach an optimizer that calls its closure once, "
                'or use on_nonfinite="raise"'
            )
        return loss


def _evaluated(
    discards: Callable[[], bool], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Evaluated | None, tuple[Any, ...], dict[str, Any]]:
    """The closure among the arguments of a step, called once; and the arguments with it in its place."""
    if args and callable(args[0]):
        evaluated = _Evaluated(args[0], discards)
        return evaluated, (evaluated, *args[1:]), kwargs
    if callable(kwargs.get("closure")):
        evaluated = _Evaluated(kwargs["closure"], discards)
        return evaluated, args, {**kwargs, "closure": evaluated}
    return None, args, kwargs


def settings_of(optimizer: Optimizer) -> list[tuple[tuple[str, Any], ...]]:
    """Of each parameter group its settings, by name, as values that ranks can compare."""
    return [
        tuple((key, _plain(value)) for key, value in group.items() if key != "params")
        for group in optimizer.param_groups
    ]


def _plain(value: object) -> _Setting | tuple[_Setting, ...]:
    """A setting as a value that is equal on two ranks if the setting is; None for what cannot be compared cheaply."""
    if isinstance(value, Tensor):
        # On an accelerator, reading it would wait for all that runs there.
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return tuple(_scalar(item) for item in value)
    return _scalar(value)


def _scalar(value: object) -> _Setting:
    if isinstance(value, float):
        return float(value)  # numpy's are written differently
    return value if isinstance(value, int | str) else None
