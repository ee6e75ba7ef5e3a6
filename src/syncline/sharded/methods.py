"""The methods of an optimizer that are replaced while its parameters are shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer

from syncline.errors import SynclineError
from syncline.optimizers.attached import unbound, weakly_bound

_NAMES = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")


class ReplacedMethods:
    """The former methods of one optimizer, and the ones that replace them.

    Args:
        optimizer: the optimizer. This object does not keep it alive.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.former = {name: unbound(optimizer, getattr(optimizer, name)) for name in _NAMES}
        """The optimizer's former methods, as functions of the optimizer, by name."""
        self._are_back = False

    def replace(self, optimizer: Any, *functions: Callable[..., Any]) -> None:
        """Replace each method that has the name of one of these functions by this function."""
        for function in functions:
            function.__dict__.pop("__wrapped__", None)
            setattr(optimizer, function.__name__, weakly_bound(optimizer, self._unless_back(function)))

    def put_back(self) -> None:
        """Let the optimizer's methods be the former ones again."""
        self._are_back = True

    def _unless_back(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function`, or after `put_back` the optimizer's former method."""

        @functools.wraps(function)
        def chosen(self_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            found = self.former[function.__name__] if self._are_back else function
            return found(self_, *args, **kwargs)

        chosen.__dict__.pop("__wrapped__", None)
        return chosen


def refuse_methods(optimizer: Any, successor: str) -> Callable[..., NoReturn]:
    """Replace the methods of an optimizer by a function that raises an error, and return this function.

    Args:
        optimizer: the optimizer, whose parameters belong to another optimizer now.
        successor: the class name of the optimizer that replaces it, for the message.
    """
    kind = type(optimizer).__name__

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise SynclineError(
            f"this {kind} was replaced and has lost its state, because a {successor} of the same parameters was "
            f"attached later: use the {successor} instead"
        )

    for name in _NAMES:
        setattr(optimizer, name, refuse)
    return refuse
