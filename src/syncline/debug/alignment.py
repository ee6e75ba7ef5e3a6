"""Alignment of ranks: copy rank 0's inputs, random number generators and tensors to all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline.checkpoint.random_state import packed, set_rng_state, unpacked
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.base import Transport
from syncline.trees import leaves, map_leaves

__all__ = ["Aligned", "align_chance", "align_inputs", "align_tensors"]


class Aligned(NamedTuple):
    """The result of `align_inputs`."""

    inputs: Any
    why_not: str
    """The reason why the inputs could not be aligned; "" if they were. The same on all ranks."""


def align_chance(transport: Transport) -> None:
    """Set this rank's random number generators to the state of rank 0's. A collective call."""
    told = transport.all_gather_bytes(packed() if transport.rank == 0 else b"")[0]
    if transport.rank:
        set_rng_state(unpacked(told))


def align_tensors(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Copy rank 0's values into these tensors. A collective call."""
    TensorBroadcaster(tensors, transport).start(0).wait()


def align_inputs(inputs: Any, transport: Transport) -> Aligned:
    """Return rank 0's inputs; shapes of tensors may differ between the ranks. A collective call.

    Args:
        inputs: nested dicts, lists and tuples of tensors and plain values. The plain values must be equal already.
        transport: the transport between the ranks.

    Example:
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     x = torch.full((2 + transport.rank,), 1.0 + transport.rank)
        ...     return align_inputs((x, "mean"), transport)
        >>> run_ranks(2, program)[1]
        Aligned(inputs=(tensor([1., 1.]), 'mean'), why_not='')
    """
    mine = [_described(name, leaf) for name, leaf in leaves(inputs)]
    told = [json.loads(one) for one in transport.all_gather_bytes(json.dumps(mine).encode())]
    why_not = _why_not(told)
    if why_not:
        return Aligned(inputs, why_not)
    shapes = {name: shape for name, _, shape in told[0]}
    aligned = {
        name: _like(leaf, shapes[name], is_source=transport.rank == 0)
        for name, leaf in leaves(inputs)
        if isinstance(leaf, Tensor)
    }
    align_tensors(list(aligned.values()), transport)
    for name, leaf in leaves(inputs):
        if isinstance(leaf, Tensor):
            aligned[name].requires_grad_(leaf.requires_grad)
    return Aligned(map_leaves(inputs, lambda name, leaf: aligned.get(name, leaf)), "")


def _like(tensor: Tensor, shape: Sequence[int], *, is_source: bool) -> Tensor:
    """Return a tensor to receive rank 0's values; on rank 0 it is the tensor itself, without its graph."""
    return tensor.detach() if is_source else torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def _described(name: str, leaf: Any) -> tuple[str, str, list[int]]:
    """Return name, kind (or after "!" the reason why it cannot be sent) and shape."""
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided or leaf.is_meta or leaf.is_nested:
            return name, f"!a tensor that is not an ordinary one ({leaf.layout} on {leaf.device.type})", []
        return name, str(leaf.dtype), list(leaf.shape)
    if isinstance(leaf, bool | int | float | str | bytes | None):
        return name, repr(leaf), []
    return name, f"!a {type(leaf).__name__}", []


def _why_not(told: Sequence[Sequence[tuple[str, str, list[int]]]]) -> str:
    for name, kind, _ in told[0]:
        if kind.startswith("!"):
            return f"{name or 'the input'} is {kind[1:]}, which is not sent to other ranks"
    for rank, rows in enumerate(told):
        if len(rows) != len(told[0]):
            return f"rank 0 has {len(told[0])} inputs, rank {rank} has {len(rows)}"
        for (name, kind, _), (other, other_kind, _) in zip(told[0], rows, strict=True):
            if (name, kind) != (other, other_kind):
                return f"on rank 0 {name or 'the input'} is {kind}, on rank {rank} {other or 'it'} is {other_kind}"
    return ""
