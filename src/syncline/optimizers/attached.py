"""An optimizer that was attached: its settings are compared with its peers', and its steps are counted."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline._torch.optimizers import mark_step_as_made
from syncline.errors import SynclineError
from syncline.optimizers.contents import parameters_of
from syncline.optimizers.weak_methods import unbound, weakly_bound
from syncline.words import format_count

__all__ = ["AttachedOptimizer", "settings_of", "to_replace"]


_Setting = float | int | str | None

_LINK = "_syncline_link"
"""The attribute of a step by which its link is found."""


class AttachedOptimizer:
    """Watches one optimizer, whose `step` becomes a function that asks first, for as long as this object is alive.

    The optimizer stays the same object. Its new `step` has a `__func__`, as a bound method has: learning rate
    schedulers want it. A scheduler may have wrapped the old one, or may wrap the new one.

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
        >>> attached.num_steps, hasattr(optimizer.step, "__func__")
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
        self._before_step = before_step
        self._after_step = after_step
        self._discards = discards
        self._link = _link_of(optimizer)
        self._link.attached = weakref.ref(self)
        self._link.replaced_by = ""

    def step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one step of the optimizer by `inner`, with all that belongs to it."""
        if not self.counts:
            return inner(*args, **kwargs)
        self._before_step(self)
        if self._discards is not None:
            evaluated, args, kwargs = _evaluated(self._discards, args, kwargs)
            if self._discards():
                mark_step_as_made(self.optimizer)
                return None if evaluated is None else evaluated.loss
        result = inner(*args, **kwargs)
        self.num_steps += 1
        if self._after_step is not None:
            self._after_step(self)
        return result

    def replace_by(self, successor: str) -> None:
        """Let go of the optimizer; a step of it raises from now on, unless it is attached again.

        Args:
            successor: the class of the optimizer that takes its place.
        """
        self._link.replaced_by = successor

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


class _Link:
    """What stands before an optimizer's own step. It keeps neither the optimizer nor who watches it alive."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        """The step that was there before, called with the optimizer."""
        self.attached: Callable[[], AttachedOptimizer | None] = lambda: None
        self.replaced_by = ""
        """The class of the optimizer that was attached in the place of this one."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step from now on."""
        if self.replaced_by:
            raise SynclineError(
                f"this {type(optimizer).__name__} was replaced: an optimizer of its parameters, of class "
                f"{self.replaced_by}, was attached after it. Step that one; or, if both are to step, attach it by "
                "ddp.attach(optimizer, replace=False)"
            )
        attached, inner = self.attached(), functools.partial(self.inner, optimizer)
        return inner(*args, **kwargs) if attached is None else attached.step(inner, args, kwargs)


def _link_of(optimizer: Optimizer) -> _Link:
    """A link that nobody uses any more, or a new one."""
    inner = optimizer.step
    link = getattr(inner, _LINK, None)
    while isinstance(link, _Link):
        if link.replaced_by or link.attached() is None:
            return link
        link = getattr(link.inner, _LINK, None)
    link = _Link(unbound(optimizer, inner))
    optimizer.step = _bound(optimizer, link, inner)  # type: ignore[method-assign]
    return link


def _bound(optimizer: Optimizer, link: _Link, inner: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of `optimizer.step`."""

    @functools.wraps(inner)
    def step(self_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return link.step(self_, *args, **kwargs)

    del step.__wrapped__
    bound: Any = weakly_bound(optimizer, step)
    for function in (step, bound):
        setattr(function, _LINK, link)
    bound.__signature__ = inspect.signature(inner)  # a GradScaler looks for a parameter
    own: Callable[..., Any] = bound
    return own


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


def to_replace(
    optimizer: Optimizer,
    attached: Sequence[tuple[Optimizer, Sequence[Tensor]]],
    own: Collection[int],
    replace: bool | None,
) -> list[Optimizer]:
    """Say which attached optimizers a new one takes the place of.

    Args:
        optimizer: the new one.
        attached: the others, each with its parameters.
        own: by `id`, the parameters that count.
        replace: those that have parameters of the new one (True) or none (False). None: those that have no others.

    Raises:
        ValueError: `replace` is None, and one has parameters of the new one and others.

    Example:
        >>> weight, bias = (torch.zeros(1, requires_grad=True) for _ in range(2))
        >>> one, both = torch.optim.SGD([weight]), torch.optim.SGD([weight, bias])
        >>> own = {id(weight), id(bias)}
        >>> to_replace(both, [(one, [weight])], own, None) == [one]
        True
        >>> to_replace(one, [(both, [weight, bias])], own, False)
        []
    """
    new = {id(parameter) for parameter in parameters_of(optimizer)}.intersection(own)
    found = []
    for other, parameters in attached:
        its = {id(parameter) for parameter in parameters}.intersection(own)
        common = its & new
        if replace is False or not common:
            continue
        if replace is None and common != its:
            kinds = type(optimizer).__name__, type(other).__name__
            raise ValueError(
                f"this {kinds[0]} has {len(common)} of the {format_count(len(its), 'parameter')} of the {kinds[1]} "
                "that was attached before, and it is not clear whether that one is to step any more: "
                f"ddp.attach(optimizer, replace=True) if not (nobody steps its other parameters then), replace=False "
                "if both are to step"
            )
        found.append(other)
    return found


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
