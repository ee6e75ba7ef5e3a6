"""What stands in for gradients that are not all here: those of a module's parameters, and this rank's shards of them.

Reduced gradients are in pieces, one on each rank. What torch does with `.grad` of a parameter would see this rank's
local values, or nothing; both are silently wrong. So `.grad` is a tensor of the right shape, without memory, of which
every use is an error that says what to call instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncline._torch.tensors import (
    FOREACH_NORM,
    FOREACH_ZERO,
    UNSCALE,
    check_that_infinities_are_seen,
    make_without_memory,
    no_torch_function,
    plain_torch_functions,
)
from syncline.errors import SynclineError

__all__ = ["ShardGradient", "StandIn"]


class StandIn(Tensor):
    """`.grad` of a parameter whose reduced gradient lies in shards.

    Zeroing it drops it, as `zero_grad` wants; everything else raises.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> weight.grad = StandIn.of(weight, "weight")
        >>> weight.grad.shape, weight.grad
        (torch.Size([2, 3]), StandIn(weight: the reduced gradient lies in shards, one on each rank))
        >>> torch.nn.utils.clip_grad_norm_([weight], 1.0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        syncline.errors.SynclineError: weight belongs to no attached optimizer, ...
        >>> _ = weight.grad.zero_()
        >>> weight.grad is None
        True
    """

    __torch_function__ = no_torch_function
    _name: str
    _owner: weakref.ref[Tensor]
    is_stepped: bool
    """Whether the parameter belongs to an attached optimizer."""

    @staticmethod
    def of(parameter: Tensor, name: str) -> StandIn:
        """For one parameter."""
        made = make_without_memory(StandIn, parameter)
        stand_in: StandIn = made
        stand_in._name = name
        stand_in._owner = weakref.ref(parameter)
        stand_in.is_stepped = False
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        mine = next(item for item in _flat(args) if isinstance(item, StandIn))
        if func in (torch.ops.aten.zero_.default, FOREACH_ZERO):
            for stand_in in [item for item in _flat(args) if isinstance(item, StandIn)]:
                parameter = stand_in._owner()
                if parameter is not None and parameter.grad is stand_in:
                    parameter.grad = None
            return None
        name = func.__name__.partition(".")[0].strip("_")
        if name == "to_copy":
            raise SynclineError(
                f"{mine._name} cannot be moved or converted: with sharded=True the parameters are parts of one tensor, "
                "and .grad is in shards. Move or convert a module before it is wrapped"
            )
        if not mine.is_stepped:
            raise SynclineError(
                f"{mine._name} belongs to no attached optimizer, and {name} was tried on its .grad, which with "
                "sharded=True is in shards, one on each rank. optimizer = ddp.attach(optimizer) lets an optimizer with "
                "these parameters step them; to clip: ddp.clip_grad_norm_(max_norm)"
            )
        raise SynclineError(
            f".grad of {mine._name} cannot be read or added to ({name} tried): with sharded=True each rank has reduced "
            "its share of the gradients, and no rank has all of this one. To clip: ddp.clip_grad_norm_(max_norm). To "
            "step: the optimizer that went through ddp.attach(optimizer). Before the next backward: "
            "optimizer.zero_grad(); to accumulate, run all backwards but the last under ddp.no_sync()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn({self._name}: the reduced gradient lies in shards, one on each rank)"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied module has no gradients."""
        return

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """What a pickled stand-in becomes."""


def _flat(args: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for item in args:
        found.extend(item) if isinstance(item, list | tuple) else found.append(item)
    return found


class ShardGradient(Tensor):
    """`.grad` of one piece that this rank steps, until it does: a plain tensor but in two things.

    A norm of it is an error, because it is only a part of the norm. Where a GradScaler looks for infinities, all ranks
    look together: one that is found on one rank is found on all.
    """

    plain: Tensor
    """The same memory."""
    _find_together: Callable[[Tensor], None]

    @staticmethod
    def of(plain: Tensor, find_together: Callable[[Tensor], None]) -> ShardGradient:
        """For one piece.

        Args:
            plain: its gradient.
            find_together: makes a number the largest over all ranks; a collective call.
        """
        check_that_infinities_are_seen()
        made = plain.as_subclass(ShardGradient)
        made.plain = plain
        made._find_together = find_together
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            raise SynclineError(
                "the norm of a shard is not the norm of the gradients: with sharded=True call "
                "ddp.clip_grad_norm_(max_norm), which adds up the shards of all ranks"
            )
        with plain_torch_functions():
            result = func(*args, **(kwargs or {}))
            if func is UNSCALE:
                gradients, found, *_ = args
                gradients[0]._find_together(found)
        return result


_NORMS = {
    FOREACH_NORM,
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
    torch.nn.functional.normalize,
}
