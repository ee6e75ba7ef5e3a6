"""Attached optimizers, whose steps are counted and whose settings can be compared between ranks."""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline._torch.autograd import profiled
from syncline._torch.optimizers import mark_step_as_made
from syncline._torch.tensors import version_of
from syncline.errors import SynclineError
from syncline.optimizers.contents import floating_state, parameters_of
from syncline.words import format_count


def unbound(owner: object, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bound method as a function whose first argument is the owner.

    If the method is an ordinary method, the function holds no reference to the owner.
    """
    if getattr(method, "__self__", None) is owner:
        own: Callable[..., Any] = method.__func__  # type: ignore[attr-defined]
        return own

    @functools.wraps(method)
    def function(owner_: object, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function


def weakly_bound(owner: object, function: Callable[..., Any]) -> Any:
    """Return a function that acts as `MethodType(function, owner)`, but does not keep the owner alive.

    The result has a `__func__` and the signature of a method, but no `__self__`.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer.double_of = weakly_bound(layer, lambda self, x: 2 * x)
        >>> layer.double_of(21)
        42
    """
    reference = weakref.ref(owner)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None, "an object whose method is called is alive"
        return function(found, *args, **kwargs)

    bound: Any = method
    # Otherwise `inspect.signature` would follow this attribute, and include the owner among the parameters.
    del bound.__wrapped__
    signature = inspect.signature(function)
    bound.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    bound.__func__ = function
    return bound


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, but does not keep the object of the method alive.

    When the object has been freed, the function does nothing.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        return None if target is None else target(*args)

    return call


_Setting = float | int | str | None

_LINK = "_syncline_link"
"""The attribute of a step function that holds the `_Link` of this function."""


class Outcome(enum.Enum):
    """The outcome of a step of an attached optimizer."""

    MADE = "made"
    FAILED = "an error was raised after the step had changed the parameters, for example in a hook"
    DISCARDED = "skipped, because `discards` has returned True"


class AttachedOptimizer:
    """An object that counts the steps of one optimizer, and calls functions before and after each step.

    The constructor replaces the optimizer's `step` by a function that calls this object, as long as this object is
    alive. The optimizer stays the same object. Its new `step` has a `__func__`, as a bound method has, because learning
    rate schedulers need it. A scheduler may have wrapped the former step, or may wrap the new one.

    Args:
        optimizer: the optimizer.
        before_step: a function that is called with this object before each step. If it raises an error, the step raises
            this error. It is called when the gradients of the step exist. If the step has a closure, which computes
            gradients inside of the step, this is after the first call of the closure.
        after_step: a function that is called with this object and the outcome after each step that counts, and after
            each step that is skipped.
        discards: a function that returns whether to skip a step. It is called after `before_step`. If the step has a
            closure, the closure is called before the step begins, so that the step can be skipped. A skipped step is
            not counted. Pass None if no step is ever skipped.
        counts_failed: whether to count a step although an error was raised after it had changed the parameters, for
            example in a hook. Shards record such a step themselves (`OpenStep`).

    Examples:
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
        after_step: Callable[[AttachedOptimizer, Outcome], None] | None = None,
        discards: Callable[[], bool] | None = None,
        *,
        counts_failed: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.counts = True
        """Whether to count steps and call the given functions. It is False while replicas drift on purpose."""
        self.num_made_before = 0
        """The number of the next steps to skip, because an earlier attempt of the same body of `sl.steps` has made
        them already."""
        self.compared_settings: object = None
        """The settings of this optimizer that ranks compared in the last synchronized backward."""
        self._before_step = before_step
        self._after_step = after_step
        self._discards = discards
        self._counts_failed = counts_failed
        self._link = _link_of(optimizer)
        self._link.attached = weakref.ref(self)
        self._link.replaced_by = ""

    def step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take one step of the optimizer, unless `discards` skips it.

        Args:
            inner: the optimizer's former step.
            args, kwargs: the arguments of the step.
        """
        if not self.counts:
            return inner(*args, **kwargs)
        with profiled("optimizer.step"):
            return self._counted_step(inner, args, kwargs)

    def _counted_step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = None
        wrap = functools.partial(_Closure, functools.partial(self._before_step, self), self._discards)
        if args and callable(args[0]):
            closure = wrap(args[0])
            args = (closure, *args[1:])
        elif callable(kwargs.get("closure")):
            closure = wrap(kwargs["closure"])
            kwargs = {**kwargs, "closure": closure}
        if closure is None:
            self._before_step(self)
        if self._discards is not None:
            if closure is not None:
                closure.run_early()
            if self._discards():
                mark_step_as_made(self.optimizer)
                self._ended(Outcome.DISCARDED)
                return None if closure is None else closure()
        if self.num_made_before:
            self.num_made_before -= 1
            return None if closure is None else closure()
        version = self._version() if self._counts_failed else 0  # shards record their steps themselves
        try:
            result = inner(*args, **kwargs)
        except BaseException:
            if self._counts_failed and self._version() != version:
                self._ended(Outcome.FAILED)
            raise
        self._ended(Outcome.MADE)
        return result

    def _ended(self, outcome: Outcome) -> None:
        self.num_steps += outcome is not Outcome.DISCARDED
        if self._after_step is not None:
            self._after_step(self, outcome)

    def _version(self) -> int:
        """Return a number that each step changes: torch's version counter of a parameter that has a gradient."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return version_of(parameter)
        return 0

    def replace_by(self, successor: str) -> None:
        """Detach from the optimizer. Its `step` raises an error from now on, unless the optimizer is attached again.

        Args:
            successor: the class name of the optimizer that replaces this optimizer.
        """
        self._link.replaced_by = successor

    def settings(self) -> tuple[Any, ...]:
        """Return the number of steps and the settings of all parameter groups. The call waits for no device."""
        return (self.num_steps, *settings_of(self.optimizer))

    def describe(self, number: int) -> list[str]:
        """Return lines of text that state the number of steps, and each setting.

        Args:
            number: the index of the optimizer among the attached optimizers. The lines contain this index.
        """
        kind = type(self.optimizer).__name__
        return [f"steps of optimizer {number} ({kind})  {self.num_steps}", *self.describe_settings(number)]

    def describe_settings(self, number: int) -> list[str]:
        """Return lines of text that state each setting, without the number of steps. See `describe`."""
        kind = type(self.optimizer).__name__
        return [
            f"{key} of optimizer {number} ({kind}), param_groups[{index}]  {value}"
            for index, group in enumerate(settings_of(self.optimizer))
            for key, value in group
        ]


class Optimizers:
    """The attached optimizers of one module, and a count of the steps of each optimizer.

    A step of the module is complete as soon as each attached optimizer has taken it.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        """The number of steps that every attached optimizer has taken."""
        self._taken: dict[AttachedOptimizer, int] = {}

    @property
    def attached(self) -> list[AttachedOptimizer]:
        """The attached optimizers, in the order in which they were attached."""
        return list(self._taken)

    def watch(self, attached: AttachedOptimizer, replaced: Collection[AttachedOptimizer]) -> None:
        """Count the steps of an attached optimizer from now on.

        The steps of the optimizers in `replaced` are no longer counted.
        """
        self._taken = {known: taken for known, taken in self._taken.items() if known not in replaced}
        self._taken[attached] = self.num_steps

    def add_step(self, attached: AttachedOptimizer) -> bool:
        """Count one step of an optimizer. Return whether every attached optimizer has now taken this step."""
        self._taken[attached] += 1
        if min(self._taken.values()) == self.num_steps:
            return False
        self.num_steps += 1
        return True

    def continue_at(self, step: int, taken: Sequence[int] | None = None) -> None:
        """Set the number of steps that every attached optimizer has taken, for example after a state was loaded.

        Args:
            step: the number of steps that all optimizers have taken.
            taken: the number of steps of each optimizer, if some have taken one more.
        """
        self.num_steps = step
        self._taken = dict(zip(self._taken, taken or [step] * len(self._taken), strict=True))

    @property
    def taken(self) -> list[int]:
        """The number of steps of each optimizer, in the order in which they were attached."""
        return list(self._taken.values())

    def floating_state(self) -> list[tuple[str, Tensor]]:
        """Return the floating-point tensors of the optimizers' states, with names that are the same on all ranks."""
        return [
            (f"optimizer {number}, {name}", tensor)
            for number, attached in enumerate(self._taken)
            for name, tensor in floating_state(attached.optimizer)
        ]


class _Link:
    """A link from an optimizer's step to its `AttachedOptimizer`. It keeps neither of these objects alive."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        """The former step as a function of the optimizer."""
        self.attached: Callable[[], AttachedOptimizer | None] = lambda: None
        self.replaced_by = ""
        """The class name of the optimizer that replaced this optimizer. It is empty if there is none."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take a step of the optimizer, through its `AttachedOptimizer` if there is one."""
        if self.replaced_by:
            raise SynclineError(
                f"this {type(optimizer).__name__} was replaced, because a {self.replaced_by} of the same parameters "
                f"was attached later: step the {self.replaced_by} instead. If both optimizers have to step, attach "
                "the second one by ddp.attach(optimizer, replace=False)"
            )
        attached, inner = self.attached(), functools.partial(self.inner, optimizer)
        return inner(*args, **kwargs) if attached is None else attached.step(inner, args, kwargs)


def _link_of(optimizer: Optimizer) -> _Link:
    """Return a link of the optimizer that no `AttachedOptimizer` uses. Create it if there is none."""
    inner = optimizer.step
    link = getattr(inner, _LINK, None)
    while isinstance(link, _Link):
        if link.replaced_by or link.attached() is None:
            return link
        link = getattr(link.inner, _LINK, None)
    link = _Link(unbound(optimizer, inner))

    @functools.wraps(inner)
    def step(self_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return link.step(self_, *args, **kwargs)

    del step.__wrapped__
    bound: Any = weakly_bound(optimizer, step)
    for function in (step, bound):
        setattr(function, _LINK, link)
    bound.__signature__ = inspect.signature(inner)  # because a GradScaler looks for a parameter by name
    optimizer.step = bound  # type: ignore[method-assign]
    return link


class _Closure:
    """A wrapper of the closure of one step, which calls a function after the first call of the closure.

    Args:
        begin: the function to call as soon as the closure has computed the gradients of the step.
        discards: see `AttachedOptimizer`.
        closure: the closure.
    """

    def __init__(
        self, begin: Callable[[], None], discards: Callable[[], bool] | None, closure: Callable[[], Any]
    ) -> None:
        self._begin = begin
        self._discards = discards
        self._closure = closure
        self._has_run = False
        self._early: list[Any] = []
        """The result of `run_early` until the step asks for it."""

    def run_early(self) -> None:
        """Call the closure before the step begins. The first call inside of the step then returns the same result."""
        with torch.enable_grad():
            self._early = [self()]

    def __call__(self) -> Any:
        if self._early:
            return self._early.pop()
        loss = self._closure()
        if not self._has_run:
            self._has_run = True
            self._begin()
        elif self._discards is not None and self._discards():
            raise SynclineError(
                "optimizer.step() called its closure more than once, and a later call computed gradients that are not "
                "finite. The step had begun by then, so it can no longer be skipped. Attach an optimizer that calls "
                'its closure once per step, or use on_nonfinite="raise"'
            )
        return loss


def to_replace(
    optimizer: Optimizer,
    attached: Sequence[tuple[Optimizer, Sequence[Tensor]]],
    own: Collection[int],
    replace: bool | None,
) -> list[Optimizer]:
    """Return the attached optimizers that a new optimizer replaces.

    Args:
        optimizer: the new optimizer.
        attached: the attached optimizers, each with its parameters.
        own: the `id`s of the parameters to consider.
        replace: if True, each attached optimizer that has any parameter of the new optimizer is replaced. If False,
            none is. If None, each attached optimizer is replaced whose parameters all belong to the new optimizer.

    Raises:
        ValueError: `replace` is None, and some but not all parameters of an attached optimizer belong to the new
            optimizer.

    Examples:
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
                f"that was attached before, so it is not clear whether the {kinds[1]} will still step. If both "
                f"optimizers will step, use ddp.attach(optimizer, replace=False). If the {kinds[1]} will no longer "
                f"step, use replace=True. No optimizer will then step the other parameters of the {kinds[1]}"
            )
        found.append(other)
    return found


def settings_of(optimizer: Optimizer) -> list[tuple[tuple[str, Any], ...]]:
    """Return the settings of each parameter group as pairs of a name and a value that ranks can compare."""
    return [
        tuple((key, _plain(value)) for key, value in group.items() if key != "params")
        for group in optimizer.param_groups
    ]


def _plain(value: object) -> _Setting | tuple[_Setting, ...]:
    """Return a setting as a value that ranks can compare.

    Return None if ranks cannot compare values of the setting's type, or if the setting is a tensor on an accelerator,
    which is slow to read.
    """
    if isinstance(value, Tensor):
        # Reading a tensor on an accelerator would wait for all work there.
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return tuple(_scalar(item) for item in value)
    return _scalar(value)


def _scalar(value: object) -> _Setting:
    if isinstance(value, float):
        return float(value)  # because the repr of numpy's floats differs
    return value if isinstance(value, int | str) else None
