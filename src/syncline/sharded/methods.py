"""The methods of an optimizer that are replaced while its parameters are shards, and steps that are in progress."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from syncline._torch.tensors import version_of
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
        """Restore the former methods of the optimizer."""
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


class OpenStep:
    """A step that this rank is about to make, or has made without the shards of all other ranks."""

    def __init__(self) -> None:
        self.is_made = False
        """Whether this rank has stepped its shards, but has not received the shards of all other ranks."""
        self._prepared: Callable[[], Any] | None = None
        self._shards: Sequence[Tensor] = ()

    def prepare(self, step: Callable[[], Any], shards: Sequence[Tensor]) -> None:
        """Announce a step, before the ranks confirm that all of them are about to make it.

        Args:
            step: a function that steps this rank's shards.
            shards: the shards.
        """
        self._prepared, self._shards = step, shards

    def make(self) -> Any:
        """Make the step that was announced."""
        assert self._prepared is not None
        before = [version_of(shard) for shard in self._shards]
        try:
            result = self._prepared()
        finally:
            # A hook of the optimizer may have raised an error before the shards were written, or afterwards.
            if [version_of(shard) for shard in self._shards] != before:
                self._prepared, self.is_made = None, True
        self._prepared, self.is_made = None, True
        return result

    def close(self) -> None:
        """Record that this rank has received the shards of all other ranks."""
        self.is_made = False

    def conclude(self, *, is_made: bool) -> bool:
        """Make or discard the announced step. Return whether this rank has made a step that it has not closed.

        Args:
            is_made: whether another rank has made this step.
        """
        if is_made and self._prepared is not None:
            self.make()
        found, self.is_made, self._prepared = self.is_made, False, None
        return found
