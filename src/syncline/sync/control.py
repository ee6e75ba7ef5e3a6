"""Small facts that every rank must learn of every other, packed into the tail of the last gradient bucket.

The bucket is reduced by SUM in the gradients' own dtype. Each rank writes only into slots of its own and zeros
elsewhere, so a sum is a gather; and each slot holds one base-256 digit, which every floating point dtype down to
bfloat16 represents exactly (bf16 turns 4097 into 4096, but keeps all integers to 256). So the facts cost no
collective of their own and survive the reduction bit by bit.

Layout of the tail, in elements:

    rank 0: flags, items (6 digits, most significant first), fingerprint (3 digits); rank 1: the same; ...; then,
    where unused parameters are looked for, one element a parameter: 1 from each rank on which it was used.

The sum of ones may stop growing at 256 in bfloat16; it is compared with zero only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MAX_FINGERPRINT", "MAX_ITEMS", "RankControl", "decode", "encode", "tail_numel"]

_NUM_ITEM_DIGITS = 6
_NUM_FINGERPRINT_DIGITS = 3
_FINGERPRINT_AT = 1 + _NUM_ITEM_DIGITS
_SLOTS_PER_RANK = _FINGERPRINT_AT + _NUM_FINGERPRINT_DIGITS
MAX_ITEMS: int = 256**_NUM_ITEM_DIGITS - 1
"""The largest item count that one rank may report for one synchronized backward (about 2.8e14)."""
MAX_FINGERPRINT: int = 256**_NUM_FINGERPRINT_DIGITS - 1
"""The largest fingerprint of what has to be equal on all ranks."""

_FLAG_MISSING = 1
_FLAG_COUNTED = 2
_FLAG_JOINED = 4
_FLAG_CHANGED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RankControl:
    """What one rank tells all others with its gradients."""

    gradients_missing: bool = False
    """Some parameter received no gradient in this backward."""
    graph_changed: bool = False
    """With `static_graph`: some parameter received another number of gradients than was learnt."""
    num_items: int | None = None
    """Items behind these gradients under `normalize_by`; None outside of it."""
    joined: bool = False
    """This rank has no inputs left and takes part with zeros."""
    fingerprint: int = 0
    """Of what has to be equal on all ranks in this step, beside the gradients (see `guard.py`)."""


def tail_numel(num_ranks: int, num_tracked_parameters: int) -> int:
    """Elements of the tail. `num_tracked_parameters` is 0 where unused parameters are not looked for."""
    return num_ranks * _SLOTS_PER_RANK + num_tracked_parameters


def encode(control: RankControl, *, rank: int, num_ranks: int, used: Sequence[int] = ()) -> list[int]:
    """This rank's tail: its own slots filled, zeros elsewhere, then the `used` flags.

    Example:
        >>> mine = encode(RankControl(num_items=4097), rank=1, num_ranks=2)
        >>> mine[10:]
        [2, 0, 0, 0, 0, 16, 1, 0, 0, 0]
    """
    tail = [0] * (num_ranks * _SLOTS_PER_RANK)
    at = rank * _SLOTS_PER_RANK
    flags = _FLAG_MISSING if control.gradients_missing else 0
    if control.joined:
        flags |= _FLAG_JOINED
    if control.graph_changed:
        flags |= _FLAG_CHANGED
    if control.num_items is not None:
        flags |= _FLAG_COUNTED
        tail[at + 1 : at + _FINGERPRINT_AT] = control.num_items.to_bytes(_NUM_ITEM_DIGITS, "big")
    if control.fingerprint:
        digits = control.fingerprint.to_bytes(_NUM_FINGERPRINT_DIGITS, "big")
        tail[at + _FINGERPRINT_AT : at + _SLOTS_PER_RANK] = digits
    tail[at] = flags
    return [*tail, *used]


def decode(tail: Sequence[float], *, num_ranks: int) -> tuple[tuple[RankControl, ...], tuple[int, ...]]:
    """What every rank told, and for each tracked parameter how many ranks used it (256 stands for more)."""
    ranks = []
    for rank in range(num_ranks):
        flags, *digits = (int(x) for x in tail[rank * _SLOTS_PER_RANK : (rank + 1) * _SLOTS_PER_RANK])
        ranks.append(
            RankControl(
                gradients_missing=bool(flags & _FLAG_MISSING),
                graph_changed=bool(flags & _FLAG_CHANGED),
                num_items=_number(digits[:_NUM_ITEM_DIGITS]) if flags & _FLAG_COUNTED else None,
                joined=bool(flags & _FLAG_JOINED),
                fingerprint=_number(digits[_NUM_ITEM_DIGITS:]),
            )
        )
    return tuple(ranks), tuple(int(x) for x in tail[num_ranks * _SLOTS_PER_RANK :])


def _number(digits: Sequence[int]) -> int:
    return int.from_bytes(bytes(digits), "big")
