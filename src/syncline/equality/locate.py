"""Locate differences between replicas: the tensors, the elements, and the ranks that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from syncline.differences import describe_ranks
from syncline.equality.fingerprint import (
    Difference,
    differences,
    fingerprint_of_number,
    fingerprints,
    first_of,
    minority_of,
)
from syncline.errors import ReplicaDivergence
from syncline.transport.agreement import gather_rows
from syncline.transport.base import Transport
from syncline.words import format_count

__all__ = ["LocatedDifference", "differing", "divergence_error", "locate", "values_fingerprints"]


_MAX_LOCATED = 5
"""Number of tensors whose elements are located, and number of differences shown."""

_NUM_BLOCKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatedDifference:
    """A tensor or number that is not equal on all ranks.

    Attributes:
        difference: its name, and the groups of ranks with equal values.
        index: its position among the compared values.
        elements: the first and the last element that differ, counted along the flattened tensor; None for a number, or
            if they were not located.
        shape: shape of the tensor; None for a number.
    """

    difference: Difference
    index: int
    elements: tuple[int, int] | None
    shape: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """The name of the tensor or number."""
        return self.difference.name

    def among(self, ranks: Sequence[int]) -> LocatedDifference:
        """Return the same difference with each rank r replaced by `ranks[r]`."""
        groups = tuple(tuple(ranks[at] for at in group) for group in self.difference.groups)
        return replace(self, difference=self.difference._replace(groups=groups))

    def __str__(self) -> str:
        where = ""
        if self.elements is not None and self.shape:
            first, last = self.elements
            where = f", element {_at(first, self.shape)}"
            if last != first:
                where = f", elements {_at(first, self.shape)} to {_at(last, self.shape)}"
            where += f" of {torch.Size(self.shape).numel():,}"
        groups = " | ".join(map(describe_ranks, self.difference.groups))
        return f"{self.name}{where}  {groups}"


def _at(element: int, shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return f"{element:,}"
    place = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        place.append(index)
    return f"[{', '.join(map(str, reversed(place)))}]"


def values_fingerprints(values: Sequence[Any]) -> list[int]:
    """Return a fingerprint of each tensor or number; see `fingerprint.py`."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    found = iter(fingerprints(tensors))
    return [next(found) if isinstance(value, Tensor) else fingerprint_of_number(value) for value in values]


def locate(
    names: Sequence[str],
    values: Sequence[Any],
    transport: Transport,
    *,
    mine: Sequence[int] | None = None,
) -> list[LocatedDifference]:
    """Return the values that differ between ranks, in order, and the elements that differ. A blocking collective call.

    Args:
        names: names of tensors and numbers, the same on all ranks.
        values: the tensors and numbers; tensors have the same shapes on all ranks.
        transport: connects the ranks.
        mine: their fingerprints on this rank, if known.
    """
    mine = values_fingerprints(values) if mine is None else mine
    located = []
    for number, (index, difference) in enumerate(differing(names, mine, transport)):
        value = values[index]
        is_tensor = isinstance(value, Tensor)
        located.append(
            LocatedDifference(
                difference=difference,
                index=index,
                elements=_elements(value, transport) if is_tensor and number < _MAX_LOCATED else None,
                shape=tuple(value.shape) if is_tensor else None,
            )
        )
    return located


def differing(
    names: Sequence[str], mine: Sequence[int], transport: Transport
) -> list[tuple[int, Difference]]:
    """Return the fingerprints that differ between ranks, with their positions. A collective call.

    Args:
        names: names of the values, the same on all ranks.
        mine: the fingerprints of this rank.
        transport: connects the ranks.
    """
    # Compare by index, because names may occur twice (keys of an optimizer's state with the same text).
    found = differences([str(index) for index in range(len(names))], _gathered(mine, transport))
    return [(int(one.name), one._replace(name=names[int(one.name)])) for one in found]


def _gathered(mine: Sequence[int], transport: Transport) -> list[list[int]]:
    signed = torch.tensor([one - (1 << 63) for one in mine], dtype=torch.int64)
    return [row.tolist() for row in gather_rows(transport, signed)]


def _elements(tensor: Tensor, transport: Transport) -> tuple[int, int] | None:
    """Return the first and the last element that differ.

    Blocks are compared, then the blocks of the first and of the last block that differ, and so on.
    """
    flat = tensor.detach().reshape(-1)
    first, last = (0, flat.numel()), (0, flat.numel())
    while first[1] - first[0] > 1 or last[1] - last[0] > 1:
        blocks = [*_blocks(*first), *_blocks(*last)]
        rows = _gathered(fingerprints([flat[start:stop] for start, stop in blocks]), transport)
        differing = [block for at, block in enumerate(blocks) if len({row[at] for row in rows}) > 1]
        if not differing:
            return None  # the tensor changed during the search
        first, last = min(differing), max(differing)
    return first[0], last[0]


def _blocks(start: int, stop: int) -> list[tuple[int, int]]:
    size = max(1, -(-(stop - start) // _NUM_BLOCKS))
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]


def divergence_error(
    title: str,
    found: Sequence[LocatedDifference],
    *,
    num_compared: int,
    num_ranks: int,
    remedy: str,
    agreed_at: int | None = None,
    step: int | None = None,
    where: str = "",
) -> ReplicaDivergence:
    """Return the error that names the differences.

    Args:
        title: the check that found them.
        found: the differences, at least one.
        num_compared: number of compared tensors and numbers.
        num_ranks: number of compared ranks.
        remedy: advice for the user.
        agreed_at: the step at which all ranks last agreed on the first difference, if known.
        step: the step at which it differed.
        where: the compared ranks in words, if not all ranks were compared.
    """
    minority = minority_of(one.difference for one in found)
    if minority:
        who = f"In the minority: {describe_ranks(minority)}."
    elif num_ranks == 2:
        who = "With two ranks nobody can tell which one is right."
    else:
        who = "No more than half of the ranks agree, so nobody can tell which are right."
    problem = (
        f"{title}: expected the same bits on {where or f'all {num_ranks} ranks'}, but {len(found)} of {num_compared} "
        f"tensors and numbers differ, the first of them {found[0].name}. Who is equal with whom:"
    )
    window = ""
    if agreed_at is not None:
        when = "when the module was wrapped" if not agreed_at else f"at step {agreed_at}"
        if agreed_at and step is not None:
            when += f", {format_count(step - agreed_at, 'step')} before"
        window = f"All ranks agreed on {found[0].name} last {when}. "
    return ReplicaDivergence(
        "\n".join([problem, *first_of(found, _MAX_LOCATED), f"{window}{who} {remedy}"]),
        tensor=found[0].name,
        num_differing=len(found),
        minority_ranks=minority,
        elements=found[0].elements,
        agreed_at_step=agreed_at,
        found_at_step=step,
    )
