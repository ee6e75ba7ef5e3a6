"""This rank's shard of one bucket, and the replacement for `.grad` if no rank has whole gradients.

`BucketShard` holds the part of a bucket that this rank reduces, cut into the pieces that an optimizer steps. The bucket
has a flat tensor of gradients and a flat tensor of parameters with the same layout. The module's parameters are views
of the tensor of parameters. If the transport can share memory, all ranks of a host use the same tensor of parameters.
If it cannot, each rank has its own tensor of parameters.

Each rank has only its shard of the reduced gradients. Code that uses `.grad` of a parameter would see this rank's local
values, or None, and would compute wrong results without an error. `StandIn` therefore replaces `.grad` by a tensor of
the right shape without memory. Every use of a stand-in, except to zero it, raises an error that names the call to use
instead. `ShardGradient` is the gradient of one piece.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
from syncline.gradients.bucket_plan import BucketPlan
from syncline.gradients.shard_plan import Piece, bounds_of, gaps_in, spans_in
from syncline.tensors.targets import is_dense
from syncline.transport.base import Transport


class StandIn(Tensor):
    """A replacement for `.grad` of a parameter whose reduced gradient is divided into shards, one on each rank.

    If a stand-in is zeroed, as by `zero_grad`, `.grad` of its parameter becomes None. Every other operation raises an
    error.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> weight.grad = StandIn.of(weight, "weight")
        >>> weight.grad.shape, weight.grad
        (torch.Size([2, 3]), StandIn(weight: the reduced gradient is in shards, one on each rank))
        >>> torch.nn.utils.clip_grad_norm_([weight], 1.0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        syncline.errors.SynclineError: parameter weight belongs to no attached optimizer, ...
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
        """Create the stand-in for `.grad` of one parameter."""
        stand_in: StandIn = make_without_memory(StandIn, parameter)
        stand_in._name = name
        stand_in._owner = weakref.ref(parameter)
        stand_in.is_stepped = False
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stand_ins = [item for item in _flat(args) if isinstance(item, StandIn)]
        if func in (torch.ops.aten.zero_.default, FOREACH_ZERO):
            for stand_in in stand_ins:
                parameter = stand_in._owner()
                if parameter is not None and parameter.grad is stand_in:
                    parameter.grad = None
            return None
        name, is_stepped = stand_ins[0]._name, stand_ins[0].is_stepped
        operation = func.__name__.partition(".")[0].strip("_")
        if operation == "to_copy":
            raise SynclineError(
                f"parameter {name} cannot be moved or converted, because with sharded=True it is a part of a larger "
                "tensor. Move or convert the module before you wrap it"
            )
        if not is_stepped:
            raise SynclineError(
                f"parameter {name} belongs to no attached optimizer, and {operation} cannot be called on its .grad, "
                "because with sharded=True each rank has only its shard of the reduced gradient. If an optimizer has "
                "this parameter, call optimizer = ddp.attach(optimizer), and step that optimizer. To clip gradients, "
                "call ddp.clip_grad_norm_(max_norm)"
            )
        raise SynclineError(
            f".grad of parameter {name} cannot be read or changed, but {operation} was called on it. With "
            "sharded=True each rank has only its shard of the reduced gradient. To clip gradients, call "
            "ddp.clip_grad_norm_(max_norm). To step, use the optimizer that was given to ddp.attach(optimizer). Before "
            "the next backward, call optimizer.zero_grad(). To accumulate gradients, run every backward except the "
            "last under ddp.no_sync()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn({self._name}: the reduced gradient is in shards, one on each rank)"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None, because a copied module has no gradients."""
        return

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """Return None. Unpickling a stand-in calls this function, so the result is None."""


def _flat(args: tuple[Any, ...]) -> list[Any]:
    """Return the arguments as one list, in which each list or tuple is replaced by its items."""
    found: list[Any] = []
    for item in args:
        found.extend(item) if isinstance(item, list | tuple) else found.append(item)
    return found


class ShardGradient(Tensor):
    """The gradient of one piece that this rank steps. It is in `.grad` from the end of backward until the step.

    It differs from a plain tensor in two ways. To compute its norm is an error, because the result would be only a part
    of the norm of all gradients. When a GradScaler looks for infinities in it, all ranks combine their results, so that
    an infinity found on one rank counts on all.
    """

    plain: Tensor
    """A plain tensor that has the same memory as this gradient."""
    _find_together: Callable[[Tensor], None]

    @staticmethod
    def of(plain: Tensor, find_together: Callable[[Tensor], None]) -> ShardGradient:
        """Create the gradient of one piece.

        Args:
            plain: the gradient as a plain tensor.
            find_together: a function whose argument is a tensor with one value. The function sets the value to the
                maximum over all ranks, by a collective call.
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
                "a norm of .grad was computed, but with sharded=True .grad is a shard, and the norm of a shard is not "
                "the norm of the gradients. To clip gradients or to get their norm, call "
                "ddp.clip_grad_norm_(max_norm), which combines the shards of all ranks"
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


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """A piece of this rank's span, as a parameter that the optimizer can step. Its tensors are views of the span."""

    piece: Piece
    parameter: nn.Parameter
    """The values of the piece, a view of the flat tensor of parameters."""
    gradient: Tensor
    """The reduced gradients of the piece, a view of `BucketShard.gradient`."""
    guarded: ShardGradient
    """A `ShardGradient` over the memory of `gradient`. It is `.grad` of `parameter` until the optimizer steps."""


class BucketShard:
    """This rank's shard of one bucket: a span of parameters and of reduced gradients, cut into pieces.

    The constructor is a collective call.

    Args:
        plan: the plan of the bucket.
        members: the parameters of the bucket, in the plan's order.
        names: names of the members.
        gradients: the bucket's flat tensor of gradients.
        transport: the transport between the ranks.
        outlives_bucket: whether another bucket uses the same memory before the optimizer steps. If so, the reduced
            values of this rank are copied to memory of their own.
    """

    def __init__(
        self,
        plan: BucketPlan,
        members: Sequence[Tensor],
        names: Sequence[str],
        gradients: Tensor,
        transport: Transport,
        *,
        outlives_bucket: bool = False,
    ) -> None:
        self._outlives_bucket = outlives_bucket
        self.plan = plan
        self.members = list(members)
        self.dtype, device = members[0].dtype, members[0].device
        self.team = transport.team(device)
        """The ranks that together hold all shards of this bucket, and the position of this rank among them."""
        common = transport.allocate_shared(gradients.numel(), self.dtype, device)
        self.is_common = common is not None
        """Whether all ranks of a host use the same flat tensor of parameters, in shared memory."""
        self.values = (
            torch.zeros(gradients.numel(), dtype=self.dtype, device=device) if common is None else common
        )
        self._gradients = gradients
        self.views = [
            view_like(self.values, offset, member)
            for offset, member in zip(plan.offsets, members, strict=True)
        ]
        self.stand_ins = [StandIn.of(member, name) for member, name in zip(members, names, strict=True)]
        gaps = gaps_in(plan)
        self._gaps = torch.tensor(gaps, device=device) if gaps else None
        self.shards: list[Shard] = []
        self.set_bounds(bounds_of([plan], self.team.size)[0])

    def set_bounds(self, bounds: Sequence[int]) -> None:
        """Cut the bucket into spans at these offsets, which come from `bounds_of`, and remove the present shards."""
        self.bounds = tuple(bounds)
        position = self.team.position
        self.start = bounds[position]
        self.stop = max(self.start, min(bounds[position + 1], self.plan.numel))
        in_bucket = self._gradients[self.start : self.stop]
        # Not zeros, which would take memory now, while the module still has the parameters that the program made.
        self._reduced = torch.empty_like(in_bucket) if self._outlives_bucket else in_bucket
        self.gradient = self._reduced
        """The reduced gradients of this rank's span, in the dtype of the parameters."""
        if self._gradients.dtype is not self.dtype:
            self.gradient = torch.empty(
                self.stop - self.start, dtype=self.dtype, device=self._gradients.device
            )
        self.shards = []

    def make_shard(self, piece: Piece, find_together: Callable[[Tensor], None]) -> Shard:
        """Return a new shard for one piece of this rank's span. `hand_out` sets the gradient of the shard.

        Args:
            piece: a range of the bucket within this rank's span.
            find_together: see `ShardGradient.of`.
        """
        at = piece.start - self.start
        if piece.is_whole:
            assert piece.parameter is not None
            position = self.plan.parameters.index(piece.parameter)
            values, gradient = self.views[position], view_like(self.gradient, at, self.members[position])
        else:
            values = self.values[piece.start : piece.stop]
            gradient = self.gradient[at : at + piece.stop - piece.start]
        shard = Shard(piece, nn.Parameter(values), gradient, ShardGradient.of(gradient, find_together))
        self.shards.append(shard)
        return shard

    # ------------------------------------------------------------------ during backward

    def take_over(self) -> None:
        """Replace each `.grad` by its stand-in, to free memory. The bucket already holds a copy of the gradient."""
        if self._gaps is not None:  # clipping by a non-finite norm may have made the gaps NaN
            self._gradients.index_fill_(0, self._gaps, 0)
        for member, stand_in in zip(self.members, self.stand_ins, strict=True):
            if member.grad is not None:
                member.grad = stand_in

    def collect(self) -> None:
        """Copy the reduced gradients out of the bucket, if another bucket will use the same memory."""
        if self._outlives_bucket:
            self._reduced.copy_(self._gradients[self.start : self.stop])

    def divide(self, divisor: float) -> None:
        """Divide the reduced gradients of this rank's span by `divisor`."""
        self._reduced.div_(divisor)

    def hand_out(self, skip: frozenset[int], *, any_missing: bool) -> None:
        """Set `.grad` of the parameter of each shard to the reduced gradient.

        Args:
            skip: indices of the parameters that no rank used. For pieces of these parameters, `.grad` is set to None.
            any_missing: whether some parameters got no gradient on this rank, and may therefore have no stand-in yet.
        """
        if any_missing:
            triples = zip(self.plan.parameters, self.members, self.stand_ins, strict=True)
            for index, member, stand_in in triples:
                if index not in skip:
                    member.grad = stand_in
        if self.gradient is not self._reduced:
            self.gradient.copy_(self._reduced)
        for shard in self.shards:
            shard.parameter.grad = None if shard.piece.parameter in skip else shard.guarded

    def parts(self) -> list[tuple[int, Tensor]]:
        """Return the reduced gradients of this rank's span as pairs (parameter index, part of its gradient)."""
        plan, start = self.plan, self.start
        return [
            (
                plan.parameters[at],
                self.gradient[plan.offsets[at] + first - start : plan.offsets[at] + stop - start],
            )
            for at, first, stop in spans_in(plan, start, self.stop)
        ]

    @property
    def has_gradients(self) -> bool:
        """Whether the bucket holds reduced gradients that were not cleared by `zero_grad`."""
        return any(type(member.grad) is StandIn for member in self.members)

    # ------------------------------------------------------------------ the parameters

    def take_values(self) -> None:
        """Copy the values of the module's parameters into the flat tensor of parameters."""
        with torch.no_grad():
            for member, view in zip(self.members, self.views, strict=True):
                view.copy_(member)

    def adopt(self) -> None:
        """Turn the module's parameters into views of the flat tensor of parameters."""
        for member, view in zip(self.members, self.views, strict=True):
            member.data = view

    def check_adopted(self) -> None:
        """Check that the module's parameters are still views of the flat tensor of parameters.

        Raises:
            SynclineError: a parameter has been given other memory.
        """
        for member, view, stand_in in zip(self.members, self.views, self.stand_ins, strict=True):
            if member.data_ptr() != view.data_ptr():
                raise SynclineError(
                    f"parameter {stand_in._name} has other memory than it was given by DistributedDataParallel. With "
                    "sharded=True each parameter must remain a part of a larger tensor, which the optimizer steps. To "
                    "change values, write in place, inside of sl.write_shared(module). Move or convert the module "
                    "before you wrap it"
                )


def view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """Return the part of the tensor `flat` that begins at `offset`, with the shape and strides of a parameter.

    If the gradient and the parameter have the same strides, the optimizer's fused kernels and autograd's accumulation
    can use both tensors as plain memory, for example for channels_last weights. If the parameter's elements have gaps
    or overlap in memory, the result is contiguous.
    """
    if parameter.is_contiguous() or is_dense(parameter):  # the first takes a tenth of the second
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def order_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a parameter in the memory order of `view_like`, the largest stride first.

    Examples:
        >>> weight = torch.zeros(2, 3, 4, 5)
        >>> order_of(weight), order_of(weight.contiguous(memory_format=torch.channels_last))
        ((0, 1, 2, 3), (0, 2, 3, 1))
    """
    dims = range(parameter.dim())
    if not is_dense(parameter):
        return tuple(dims)
    strides: tuple[int, ...] = parameter.stride()
    return tuple(sorted(dims, key=lambda dim: -strides[dim]))
