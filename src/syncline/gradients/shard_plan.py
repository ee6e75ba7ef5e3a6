"""The plan of the shards: which rank owns which part of which bucket, and the pieces that an optimizer steps.

All functions are pure. A bucket's flat tensor is cut into one span per rank. Each rank reduces its span and steps the
parameters in the span. If an optimizer treats all elements alike, the spans have equal sizes and may cut parameters. If
an optimizer uses a parameter as a whole, spans begin and end between parameters. A span is stepped in pieces. A piece
is a contiguous run of elements of one parameter group, as one tensor.

Method: optimizer state sharding (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 5.1), applied to buckets as in Megatron-LM's distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from syncline.gradients.bucket_plan import BucketPlan

ALIGNMENT_NUMEL = 32
"""Spans and parameters begin at multiples of this number of elements. 32 elements of bfloat16 fill a cache line.

Memory that torch allocates has the same alignment of 64 bytes. So matrix products have the same speed, and give the
same bits, whether parameters are sharded or not. Elements between two parameters belong to neither of them. The
gradient of such elements is zero, and their value is never read.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A range of one bucket that an optimizer steps as one tensor."""

    bucket: int
    """Index of the bucket."""
    start: int
    """The offset, in the bucket's flat tensor, of the first element of the piece."""
    stop: int
    """The offset, in the bucket's flat tensor, behind the last element of the piece."""
    group: int
    """Index of the optimizer's parameter group that contains the piece."""
    parameter: int | None = None
    """Index of the only parameter in the piece; None if the piece is not limited to one parameter."""
    is_whole: bool = False
    """Whether the piece is one whole parameter. The optimizer steps such a piece in the parameter's shape."""


def bounds_of(
    plans: Sequence[BucketPlan], num_ranks: int, *, whole: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """Return the bounds of the ranks' spans in each bucket: rank r owns the elements from bounds[r] to bounds[r + 1].

    There are num_ranks + 1 offsets per bucket. A bucket that contains no parameter of `whole` is cut into spans of
    equal size. In the other buckets each rank gets a run of whole parameters. The buckets are cut one after another, so
    that the largest load of a rank is as small as possible. A rank's load is the number of its elements so far.

    Args:
        plans: the buckets, padded to a multiple of the number of ranks.
        num_ranks: the number of ranks.
        whole: indices of the parameters that must not be cut.

    Examples:
        >>> from syncline.gradients.bucket_plan import BucketCaps, ParameterSpec, plan_buckets
        >>> spec = ParameterSpec(name="w", numel=5, itemsize_bytes=4, dtype="float32", device="cpu")
        >>> caps = BucketCaps(cap_bytes=100, first_cap_bytes=100)
        >>> plans = plan_buckets([spec] * 3, [0, 1, 2], caps=caps, tail_numel=0, multiple_of=2)
        >>> bounds_of(plans, 2), bounds_of(plans, 2, whole=[1])
        ([(0, 8, 16)], [(0, 10, 16)])
    """
    loads = [0] * num_ranks
    bounds = []
    for plan in plans:
        total = plan.numel + plan.padding_numel
        if whole and not set(whole).isdisjoint(plan.parameters):
            cuts = _balanced_cuts(plan, loads)
        else:
            each, rest = divmod(total, num_ranks)
            assert not rest, f"bucket {plan.index} of {total} elements is not padded for {num_ranks} ranks"
            cuts = [rank * each for rank in range(num_ranks)]
        bounds.append((*cuts, total))
        for rank in range(num_ranks):
            start, stop = bounds[-1][rank : rank + 2]
            loads[rank] += max(0, min(stop, plan.numel) - start)
    return bounds


def _balanced_cuts(plan: BucketPlan, loads: Sequence[int]) -> list[int]:
    """Return the offset at which each rank's run of whole parameters begins.

    The runs are chosen so that the largest load of a rank is as small as possible.

    Args:
        plan: the bucket to cut.
        loads: the number of elements that each rank owns in earlier buckets.
    """
    sizes = plan.numels
    low, high = max(loads), max(loads) + plan.numel
    while low < high:  # search for the smallest limit under which every parameter fits
        limit = (low + high) // 2
        if _fill(sizes, loads, limit) is None:
            low = limit + 1
        else:
            high = limit
    first_of = _fill(sizes, loads, low)
    assert first_of is not None
    return [plan.offsets[first] if first < len(sizes) else plan.numel for first in first_of]


def _fill(sizes: Sequence[int], loads: Sequence[int], limit: int) -> list[int] | None:
    """Give each rank in turn a run of parameters, until the next parameter would bring its load above `limit`.

    Returns:
        For each rank, the index in `sizes` where its run begins. None if parameters are left over.
    """
    first_of = []
    at = 0
    for load in loads:
        first_of.append(at)
        while at < len(sizes) and load + sizes[at] <= limit:
            load += sizes[at]
            at += 1
    return first_of if at == len(sizes) else None


def pieces_of(
    plans: Sequence[BucketPlan],
    bounds: Sequence[Sequence[int]],
    rank: int,
    group_of: Mapping[int, int],
    *,
    whole: bool = False,
    by_parameter: bool = False,
    apart: Mapping[int, int] = MappingProxyType({}),
) -> list[Piece]:
    """Return the pieces that an optimizer steps on one rank, in the order of the buckets.

    Args:
        plans: the buckets.
        bounds: the result of `bounds_of`.
        rank: the rank whose pieces are returned.
        group_of: a map from the index of a parameter to the index of its parameter group. Parameters without an entry
            belong to another optimizer, or to none.
        whole: whether each piece is a whole parameter.
        by_parameter: whether a piece contains elements of one parameter only.
        apart: a map from the index of a parameter to a number. Parameters with different numbers are in different
            pieces. A parameter without an entry has the number 0.

    Examples:
        >>> from syncline.gradients.bucket_plan import BucketCaps, ParameterSpec, plan_buckets
        >>> spec = ParameterSpec(name="w", numel=5, itemsize_bytes=4, dtype="float32", device="cpu")
        >>> caps = BucketCaps(cap_bytes=100, first_cap_bytes=100)
        >>> plans = plan_buckets([spec] * 3, [0, 1, 2], caps=caps, tail_numel=0, multiple_of=2)
        >>> [(p.start, p.stop, p.group) for p in pieces_of(plans, [(0, 8, 16)], 1, {0: 0, 1: 0, 2: 1})]
        [(8, 10, 0), (10, 15, 1)]
    """
    pieces: list[Piece] = []
    has_own_piece = whole or by_parameter
    for plan, cuts in zip(plans, bounds, strict=True):
        previous: Piece | None = None
        last = 0
        for position, first, stop in spans_in(plan, cuts[rank], cuts[rank + 1]):
            index, offset = plan.parameters[position], plan.offsets[position]
            if index not in group_of:
                previous = None
                continue
            assert not whole or stop - first == plan.numels[position], f"parameter {index} was cut"
            start = offset + first
            is_alike = previous is not None and (previous.group, last) == (
                group_of[index],
                apart.get(index, 0),
            )
            last = apart.get(index, 0)
            if previous is not None and is_alike and not has_own_piece:
                start = previous.start  # the piece grows
                pieces.pop()
            previous = Piece(
                bucket=plan.index,
                start=start,
                stop=offset + stop,
                group=group_of[index],
                parameter=index if has_own_piece else None,
                is_whole=whole,
            )
            pieces.append(previous)
    return pieces


def gaps_in(plan: BucketPlan) -> list[int]:
    """Return the offsets of the elements that lie between parameters and belong to none of them.

    Examples:
        >>> plan = BucketPlan(index=0, dtype="float32", device="cpu", parameters=(4, 2), offsets=(0, 8), num_large=0,
        ...     numel=11, tail_numel=0, itemsize_bytes=4, numels=(6, 3))
        >>> gaps_in(plan)
        [6, 7]
    """
    gaps: list[int] = []
    end = 0
    for offset, numel in zip(plan.offsets, plan.numels, strict=True):
        gaps += range(end, offset)
        end = offset + numel
    return gaps


def spans_in(plan: BucketPlan, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return the parts of parameters that lie between the offsets `start` and `stop` of a bucket.

    Each part is a tuple (position, first, stop). `position` is the parameter's position in the bucket. `first` is the
    offset of the part's first element in the parameter, and `stop` is the offset behind its last element.

    Examples:
        >>> plan = BucketPlan(index=0, dtype="float32", device="cpu", parameters=(4, 2), offsets=(0, 6), num_large=0,
        ...     numel=9, tail_numel=0, itemsize_bytes=4, numels=(6, 3))
        >>> spans_in(plan, 2, 8)
        [(0, 2, 6), (1, 0, 2)]
    """
    return [
        (position, max(start - offset, 0), min(stop - offset, numel))
        for position, (offset, numel) in enumerate(zip(plan.offsets, plan.numels, strict=True))
        if max(start - offset, 0) < min(stop - offset, numel)
    ]
