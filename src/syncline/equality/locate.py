"""Functions that locate differences between replicas: the values, the elements, and the ranks that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from syncline.equality.fingerprint import fingerprints
from syncline.errors import ReplicaDivergence
from syncline.events import OBSERVERS, ReplicasDiverged, emit
from syncline.transport.agreement import gather_rows
from syncline.transport.base import Transport
from syncline.words import describe_groups, describe_ranks, format_count, groups_of, outside_of_largest

_MAX_LOCATED = 5
"""The maximum number of differences that a message shows. Elements are located only for these differences."""

_NUM_BLOCKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A tensor or other value that is not equal on all ranks.

    Attributes:
        name: the name of the value.
        index: the index of the value in the sequence of compared values.
        groups: the ranks, grouped by equal values. The largest group is first. Of equally large groups, the group with
            the lowest rank is first.
        elements: the indices of the first and the last element that differ, in the flattened tensor. It is None if the
            value is not a tensor, or if the elements were not located.
        shape: the shape of the tensor. It is None if the value is not a tensor.
    """

    name: str
    index: int
    groups: tuple[tuple[int, ...], ...]
    elements: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def has_majority(self) -> bool:
        """Whether more than half of all ranks have the same value."""
        return 2 * len(self.groups[0]) > sum(map(len, self.groups))

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that do not belong to the majority. It is empty if there is no majority."""
        return outside_of_largest(self.groups) if self.has_majority else ()

    def among(self, ranks: Sequence[int]) -> Difference:
        """Return the same difference, in which each rank r is replaced by `ranks[r]`."""
        return replace(self, groups=tuple(tuple(ranks[at] for at in group) for group in self.groups))

    def __str__(self) -> str:
        where = ""
        if self.elements is not None and self.shape:
            first, last = self.elements
            where = f", element {_at(first, self.shape)}"
            if last != first:
                where = f", elements {_at(first, self.shape)} to {_at(last, self.shape)}"
            where += f" of {torch.Size(self.shape).numel():,}"
        return f"{self.name}{where}  {describe_groups(self.groups)}"


def _at(element: int, shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return f"{element:,}"
    place = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        place.append(index)
    return f"[{', '.join(map(str, reversed(place)))}]"


def differences(names: Sequence[str], rows: Sequence[Sequence[int]]) -> list[Difference]:
    """Return the values whose fingerprints differ between ranks, in the order of the values.

    Args:
        names: the names of the values. A name may occur more than once.
        rows: the fingerprints of the values on each rank, in rank order.

    Examples:
        >>> found = differences(["a", "b"], [[1, 5], [1, 6], [1, 5]])
        >>> str(found[0]), found[0].minority
        ('b  ranks 0, 2 | rank 1', (1,))
    """
    columns = [groups_of([row[index] for row in rows]) for index in range(len(names))]
    return [
        Difference(name=names[index], index=index, groups=groups)
        for index, groups in enumerate(columns)
        if len(groups) > 1
    ]


def differing(names: Sequence[str], mine: Sequence[int], transport: Transport) -> list[Difference]:
    """Gather the fingerprints of all ranks, and return the values whose fingerprints differ.

    This is a collective call.

    Args:
        names: the names of the values, the same on all ranks.
        mine: the fingerprints of the values on this rank.
        transport: the transport between the ranks.
    """
    return differences(names, _gathered(mine, transport))


def locate(
    names: Sequence[str], values: Sequence[Any], transport: Transport, *, mine: Sequence[int] | None = None
) -> list[Difference]:
    """Return the values that differ between ranks, and locate the elements that differ. This is a collective call.

    Args:
        names: the names of the values, the same on all ranks.
        values: the tensors and other values of this rank. The tensors have the same shapes on all ranks.
        transport: the transport between the ranks.
        mine: the fingerprints of the values on this rank. Pass None if they are not known yet.
    """
    found = differing(names, fingerprints(values) if mine is None else mine, transport)
    for number, one in enumerate(found):
        value = values[one.index]
        if isinstance(value, Tensor):
            elements = _elements(value, transport) if number < _MAX_LOCATED else None
            found[number] = replace(one, elements=elements, shape=tuple(value.shape))
    return found


def _gathered(mine: Sequence[int], transport: Transport) -> list[list[int]]:
    signed = torch.tensor([one - (1 << 63) for one in mine], dtype=torch.int64, device="cpu")
    return [row.tolist() for row in gather_rows(transport, signed)]


def _elements(tensor: Tensor, transport: Transport) -> tuple[int, int] | None:
    """Return the indices of the first and the last element that differ between ranks.

    Return None if no element differs any more. The ranks compare blocks of the tensor. They divide the first and the
    last block that differ into smaller blocks and compare these, until each of these two blocks has one element.
    This is a collective call.
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
    found: Sequence[Difference],
    *,
    num_compared: int,
    num_ranks: int,
    remedy: str,
    agreed_at: int | None = None,
    step: int | None = None,
    where: str = "",
) -> ReplicaDivergence:
    """Return the error that names the values that differ.

    Args:
        title: the name of the check that found the differences.
        found: the differences. There is at least one.
        num_compared: the number of compared tensors and other values.
        num_ranks: the number of compared ranks.
        remedy: advice for the user.
        agreed_at: the step at which all ranks last agreed on the first of these values. Pass None if it is unknown.
        step: the step at which the differences were found. Pass None if there is no step.
        where: the compared ranks as text. Pass "" if all ranks were compared.
    """
    minority = tuple(sorted({rank for one in found for rank in one.minority}))
    if minority:
        verdict = f"In the minority: {describe_ranks(minority)}."
    elif num_ranks == 2:
        verdict = "With two ranks there is no majority, so either rank may have the wrong value."
    else:
        verdict = "No more than half of the ranks agree, so any rank may have the wrong value."
    window = ""
    if agreed_at is not None:
        when = "when the module was wrapped" if not agreed_at else f"at step {agreed_at}"
        if agreed_at and step is not None:
            when += f", {format_count(step - agreed_at, 'step')} before"
        window = f"All ranks last agreed on {found[0].name} {when}. "
    problem = (
        f"{title}: expected the same bits on {where or f'all {num_ranks} ranks'}, but {len(found)} of {num_compared} "
        f"tensors and other values differ. The first of them is {found[0].name}. Groups of ranks with equal values:"
    )
    more = len(found) - _MAX_LOCATED
    shown = [*map(str, found[:_MAX_LOCATED])] + ([f"and {more} more"] if more > 0 else [])
    return ReplicaDivergence(
        "\n  ".join([problem, *shown]) + f"\n{window}{verdict} {remedy}",
        tensor=found[0].name,
        num_differing=len(found),
        minority_ranks=minority,
        elements=found[0].elements,
        agreed_at_step=agreed_at,
        found_at_step=step,
    )


def emit_divergence(
    error: ReplicaDivergence,
    *,
    check: str,
    rank: int,
    outcome: Literal["raised", "repaired", "warned"] = "raised",
) -> None:
    """Emit that replicas differ, if an observer wants it. All ranks of the check call this function.

    Args:
        error: the error that names the values.
        check: the name of the check.
        rank: this rank.
        outcome: the reaction of the check.
    """
    if OBSERVERS.replicas_diverged:
        event = ReplicasDiverged(
            rank=rank,
            check=check,
            step=error.found_at_step,
            tensor=error.tensor,
            num_differing=error.num_differing,
            minority_ranks=error.minority_ranks,
            agreed_at_step=error.agreed_at_step,
            outcome=outcome,
            words=str(error),
            at=perf_counter(),
        )
        emit(OBSERVERS.replicas_diverged, event)
