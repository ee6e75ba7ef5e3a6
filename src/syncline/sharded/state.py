"""Conversion of an optimizer's state between torch's ordinary format (by parameter) and this rank's shards.

A tensor in the state that has its parameter's shape is cut in the same way as the parameter. A number (or a tensor
without dimensions, such as a step count) belongs to the whole parameter. A tensor of another shape is possible only if
the parameter is not cut.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from syncline.gradients.shard import BucketShard, Shard, order_of, view_like
from syncline.gradients.shard_plan import spans_in
from syncline.sharded.part import PartedTensor, TensorPart
from syncline.transport.base import Transport

ParameterState = dict[str, Any]
"""The state that an optimizer keeps for one parameter or one shard: tensors and numbers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModule:
    """A description of the trained parameters of a module, and of this rank's shards of them."""

    names: Sequence[str]
    """Names of the parameters, by index."""
    index_of: Mapping[int, int]
    """The index of each parameter, by its `id`."""
    bucket_shards: Sequence[BucketShard]
    """The `BucketShard` of each bucket, by the index of the bucket."""
    lane: Transport
    """The transport between the ranks. No other code uses it."""
    by_parameter: bool
    """Whether each flat span ends where its parameter ends, so that it never covers two parameters."""


# ---------------------------------------------------------------------- from the ordinary format


def slice_state(
    shard: Shard, module: ShardedModule, state_of: Mapping[int, ParameterState]
) -> ParameterState:
    """Cut the state of one shard out of the state of the parameters.

    Args:
        shard: the shard.
        module: the module's parameters and shards.
        state_of: the state in torch's ordinary format, by parameter index. Tensors may be in parts (`PartedTensor`).
            The function does not change it, and copies what it needs.

    Raises:
        ValueError: a tensor of the state cannot be cut, or the states of two parameters in the same span have
            different entries, or different values of a number (a step count, for example).
    """
    bucket_shard, names = module.bucket_shards[shard.piece.bucket], module.names
    spans = spans_in(bucket_shard.plan, shard.piece.start, shard.piece.stop)
    indices = [bucket_shard.plan.parameters[position] for position, _, _ in spans]
    present = [index for index in indices if state_of.get(index)]
    if not present:
        return {}
    for index in indices:
        if set(state_of.get(index, ())) != set(state_of[present[0]]):
            raise _differ(
                names[present[0]],
                names[index],
                "the state of one parameter has entries that the other does not have",
            )
    sliced: ParameterState = {}
    for key, first in state_of[present[0]].items():
        values = [state_of[index][key] for index in indices]
        if shard.piece.is_whole:
            sliced[key] = _own(first)
        elif _is_cut(first, bucket_shard.members[spans[0][0]], key):
            piece = shard.piece
            tensors = (value for value in values if isinstance(value, Tensor | PartedTensor))
            dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
            cut = sliced[key] = torch.zeros(
                piece.stop - piece.start, dtype=dtype, device=first.device
            )  # gaps between parameters stay zero
            for value, index, (position, from_, to) in zip(values, indices, spans, strict=True):
                at = bucket_shard.plan.offsets[position] - piece.start
                cut[at + from_ : at + to] = _flat(value, bucket_shard.members[position], names[index], key)[
                    from_:to
                ]
        else:
            for index, value in zip(indices, values, strict=True):
                if isinstance(value, Tensor | PartedTensor) and value.dim():
                    raise _uncuttable(names[index], key, value)
                if not _equal(value, first):
                    raise _differ(names[indices[0]], names[index], f"{key} is {first} and {value}")
            sliced[key] = _own(first)
    return sliced


def _own(value: Any) -> Any:
    """Return a copy of a tensor, or the whole tensor if it is in parts. Return any other value as it is."""
    if isinstance(value, PartedTensor):
        return value.whole()
    return value.clone() if isinstance(value, Tensor) else value


def _is_cut(value: Any, member: Tensor, key: str) -> bool:
    return isinstance(value, Tensor | PartedTensor) and value.shape == member.shape and key != "step"


def _flat(value: Any, member: Tensor, name: str, key: str) -> Tensor:
    """Return the elements of a tensor of the state in the order that its parameter has in the bucket."""
    if not isinstance(value, Tensor | PartedTensor) or value.shape != member.shape:
        raise _uncuttable(name, key, value)
    if isinstance(value, PartedTensor):
        value = value.whole()
    flat = torch.empty(member.numel(), dtype=value.dtype, device=value.device)
    view_like(flat, 0, member).copy_(value)
    return flat


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(torch.equal(a, b))
    return bool(a == b)


def _differ(first: str, second: str, how: str) -> ValueError:
    return ValueError(
        f"the optimizer's state cannot be divided into flat spans: {first} and {second} are in the same span, so "
        f"their states must have the same entries and the same numbers, but {how}. Wrap the module with "
        "find_unused_parameters=True, so that each span ends where a parameter ends, or call "
        "ddp.attach(optimizer, elementwise=False)"
    )


def _uncuttable(name: str, key: str, value: Any) -> ValueError:
    form = tuple(value.shape) if isinstance(value, Tensor | PartedTensor) else type(value).__name__
    return ValueError(
        f"expected the optimizer's state {key!r} of {name} to have the shape of the parameter, so that it can be cut "
        f"into flat spans, got {form}: call ddp.attach(optimizer, elementwise=False), which shards by whole parameters"
    )


def kinds_of(state_of: Mapping[int, ParameterState]) -> dict[int, int]:
    """Return a number for each parameter. States with different entries or step counts have different numbers.

    Only parameters with the same number can be in one piece. If all states are alike, all numbers are 0.
    """
    kinds = {
        index: (*sorted(state), float(state.get("step", 0))) if state else ()
        for index, state in state_of.items()
    }
    known = sorted(set(kinds.values()), key=str)
    return {index: known.index(kind) for index, kind in kinds.items()}


def lost_parameters(bucket_shards: Sequence[BucketShard], owners: Sequence[int | None]) -> set[int]:
    """Return the indices of the parameters of which a part has no owner; see `gather_state`."""
    found = set()
    for bucket_shard in bucket_shards:
        for owner, (start, stop) in zip(owners, pairwise(bucket_shard.bounds), strict=True):
            if owner is None:
                spans = spans_in(bucket_shard.plan, start, stop)
                found |= {bucket_shard.plan.parameters[position] for position, _, _ in spans}
    return found


# ---------------------------------------------------------------------- this rank's shard, without communication


def shard_state(
    shards: Sequence[Shard], states: Sequence[ParameterState], module: ShardedModule
) -> dict[int, ParameterState]:
    """Return the state of this rank's shards in torch's ordinary format, by parameter index. Nothing is sent.

    Each tensor that is cut is given by a `TensorPart`. A tensor is copied only if its memory order differs from that of
    its parameter.

    Args:
        shards: this rank's shards, of one optimizer.
        states: the optimizer's state of each shard.
        module: the module's parameters and shards.
    """
    found: dict[int, ParameterState] = {}
    for shard, state in zip(shards, states, strict=True):
        bucket_shard, piece = module.bucket_shards[shard.piece.bucket], shard.piece
        for position, from_, to in spans_in(bucket_shard.plan, piece.start, piece.stop) if state else ():
            member = bucket_shard.members[position]
            at = bucket_shard.plan.offsets[position] + from_ - piece.start
            order = order_of(member)
            found[bucket_shard.plan.parameters[position]] = {
                key: TensorPart(
                    values=value.permute(order).reshape(-1)
                    if piece.is_whole
                    else value[at : at + to - from_],
                    start=from_,
                    shape=tuple(member.shape),
                    order=order,
                )
                if _is_like_shard(value, shard, key)
                else value
                for key, value in state.items()
            }
    return found


def _is_like_shard(value: Any, shard: Shard, key: str) -> bool:
    """Return whether a value of the state is a tensor with the shard's shape, and is thus cut as the shard is.

    The result for a step count is False, even if the parameter itself has no dimensions.
    """
    return (
        isinstance(value, Tensor)
        and value.shape == shard.parameter.shape
        and not (value.dim() == 0 and key == "step")
    )


# ---------------------------------------------------------------------- to the ordinary format


def gather_state(
    shards: Sequence[Shard],
    states: Sequence[ParameterState],
    bucket_shards: Sequence[BucketShard],
    lane: Transport,
    owners: Sequence[int | None] = (),
) -> dict[int, ParameterState]:
    """Gather the state of all ranks' shards, and return it in torch's ordinary format, by parameter index.

    This is a collective call.

    Args:
        shards: this rank's shards, of one optimizer.
        states: the optimizer's state of each shard.
        bucket_shards: the `BucketShard` of each bucket that contains parameters of the optimizer.
        lane: the transport between the ranks.
        owners: for each position in a team, a rank that has this shard; None if no rank has it. Give it if `lane` is
            not the transport over which the parameters were sharded. Elements without an owner are zero.
    """
    mine = [_described(shard, state) for shard, state in zip(shards, states, strict=True)]
    rows = [json.loads(row) for row in lane.all_gather_bytes(json.dumps(mine).encode())]
    gathered: dict[int, ParameterState] = {}
    own = {
        (shard.piece.bucket, shard.piece.start): state for shard, state in zip(shards, states, strict=True)
    }
    for bucket_shard in bucket_shards:
        members, device = owners or bucket_shard.team.members, bucket_shard.values.device
        pieces = [
            (rank, start, stop, values)
            for rank in members
            if rank is not None
            for bucket, start, stop, values in rows[rank]
            if bucket == bucket_shard.plan.index and values
        ]
        dtypes = {
            key: dtype
            for _, _, _, values in pieces
            for key, (kind, dtype, _) in values.items()
            if kind == "cut"
        }
        flats = {}
        for key, dtype in dtypes.items():
            flat = torch.zeros(bucket_shard.values.numel(), dtype=getattr(torch, dtype), device=device)
            for shard, state in zip(shards, states, strict=True):
                if shard.piece.bucket == bucket_shard.plan.index and key in state:
                    _place(flat, shard, bucket_shard, state[key])
            spread(flat, bucket_shard.bounds, members, lane)
            flats[key] = flat
        for rank, start, stop, values in pieces:
            own_state = own.get((bucket_shard.plan.index, start), {}) if rank == lane.rank else {}
            ready = dict(_values(values, own_state, rank, lane, device))
            _assemble(gathered, bucket_shard, start, stop, values, ready, flats)
    return gathered


def _described(shard: Shard, state: ParameterState) -> list[Any]:
    """Return the bucket and bounds of a shard, and each value of its state as (kind, dtype, content), for JSON."""
    values: dict[str, tuple[str, str | None, Any]] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            values[key] = ("number", None, value)
        elif _is_like_shard(value, shard, key):
            values[key] = ("cut", _dtype_name(value), None)
        elif value.dim() == 0:
            values[key] = ("scalar", _dtype_name(value), (value.item(), value.is_cpu))
        else:
            values[key] = ("tensor", _dtype_name(value), list(value.shape))
    return [shard.piece.bucket, shard.piece.start, shard.piece.stop, values]


def _dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _place(flat: Tensor, shard: Shard, bucket_shard: BucketShard, value: Tensor) -> None:
    if shard.piece.is_whole:
        assert shard.piece.parameter is not None
        member = bucket_shard.members[bucket_shard.plan.parameters.index(shard.piece.parameter)]
        view_like(flat, shard.piece.start, member).copy_(value)
    else:
        flat[shard.piece.start : shard.piece.stop].copy_(value)


def spread(flat: Tensor, bounds: Sequence[int], members: Sequence[int | None], lane: Transport) -> None:
    """Broadcast the span of each rank in `members`, so that all ranks have the whole tensor `flat`."""
    works = [
        lane.broadcast(flat[start:stop], rank)
        for rank, (start, stop) in zip(members, pairwise(bounds), strict=True)
        if start < stop and rank is not None
    ]
    for work in works:
        work.wait()


def _values(
    described: Mapping[str, Any], state: ParameterState, rank: int, lane: Transport, device: torch.device
) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each entry of one shard's state whose value is not cut.

    Numbers are part of the description. Tensors of other shapes are broadcast from `rank`, which has the shard.
    """
    for key, (kind, dtype, content) in described.items():
        if kind == "number":
            yield key, content
        elif kind == "scalar":  # a step count may be on the CPU while its parameter is not
            number, is_on_cpu = content
            where = "cpu" if is_on_cpu else device
            yield key, torch.tensor(number, dtype=getattr(torch, dtype), device=where)
        elif kind == "tensor":
            value = torch.zeros(content, dtype=getattr(torch, dtype), device=lane.sending_device(device))
            if rank == lane.rank:
                value.copy_(state[key])
            lane.broadcast(value, rank).wait()
            yield key, value


def _assemble(
    gathered: dict[int, ParameterState],
    bucket_shard: BucketShard,
    start: int,
    stop: int,
    described: Mapping[str, Any],
    ready: Mapping[str, Any],
    flats: Mapping[str, Tensor],
) -> None:
    """Add the gathered values of one piece to `gathered`, the state by parameter index."""
    for position, _, _ in spans_in(bucket_shard.plan, start, stop):
        index = bucket_shard.plan.parameters[position]
        if index in gathered:
            continue  # set by its first piece, which is on an earlier rank
        state = gathered[index] = {}
        for key in described:
            if key in flats:
                view = view_like(
                    flats[key], bucket_shard.plan.offsets[position], bucket_shard.members[position]
                )
                state[key] = view.clone(memory_format=torch.preserve_format)
            else:
                state[key] = ready[key].clone() if isinstance(ready[key], Tensor) else ready[key]
