"""Small facts that every rank must learn of every other, packed into the tail of the last gradient bucket.

The bucket is reduced by SUM in the gradients' own dtype. Each rank writes only into slots of its own and zeros
elsewhere, so a sum is a gather; and each slot holds one base-256 digit, which every floating point dtype down to
bfloat16 represents exactly (bf16 turns 4097 into 4096, but keeps all integers to 256). So the facts cost no
collective of their own and survive the reduction bit by bit.

Layout of the tail, in elements:

    rank 0: flags, forwards without a backward (1 digit), in the first steps gradients (1 digit), items (6 digits, most
    significant first), fingerprint (3 digits) and, where replicas are compared, the fingerprint of this step's slice of
    them (6 digits); rank 1: the same;
    ...; then, where unused parameters are looked for, one element per parameter: 1 from each rank on which it was used.

The sum of ones may stop growing at 256 in bfloat16; it is compared with zero only.

Control data that travels by itself, where no bucket can carry it: under a communication hook, or beside sparse
gradients, of which nobody knows before the end what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.transport.base import Transport, Work

__all__ = [
    "MAX_FINGERPRINT",
    "MAX_ITEMS",
    "MAX_REPLICA_FINGERPRINT",
    "MAX_WAITING",
    "ControlForm",
    "ControlMessage",
    "RankControl",
]


_NUM_ITEM_DIGITS = 6

_NUM_FINGERPRINT_DIGITS = 3

_NUM_REPLICA_DIGITS = 6

_GRADIENTS_AT = 2

_ITEMS_AT = 3

_FINGERPRINT_AT = _ITEMS_AT + _NUM_ITEM_DIGITS

_REPLICA_AT = _FINGERPRINT_AT + _NUM_FINGERPRINT_DIGITS

MAX_ITEMS: int = 256**_NUM_ITEM_DIGITS - 1
"""The largest item count that one rank may report for one synchronized backward (about 2.8e14)."""

MAX_FINGERPRINT: int = 256**_NUM_FINGERPRINT_DIGITS - 1
"""The largest fingerprint of what has to be equal on all ranks."""

MAX_WAITING: int = 255
"""The largest number of forwards without a backward that a rank reports; it stands for more."""

MAX_REPLICA_FINGERPRINT: int = 256**_NUM_REPLICA_DIGITS - 1
"""The largest fingerprint of a slice of the replica."""

_FLAG_MISSING = 1

_FLAG_COUNTED = 2

_FLAG_JOINED = 4

_FLAG_CHANGED = 8

_FLAG_NONFINITE = 16

_FLAG_STOP = 32


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
    nonfinite: bool = False
    """This rank's own gradients hold NaN or infinity, and somebody has to do something about it."""
    stop: bool = False
    """This rank was asked to stop."""
    num_waiting: int = 0
    """Forwards since the last reduction that no backward has reached, up to `MAX_WAITING` (see `guard.py`)."""
    gradients: int = 0
    """Of some elements of this rank's own gradients, up to 255 (see `same_data.py`); 0 where nothing is known."""
    fingerprint: int = 0
    """Of what has to be equal on all ranks in this step, beside the gradients (see `guard.py`)."""
    replica: int = 0
    """Fingerprint of the slice of the replica whose turn it is (see `replica_watch.py`); 0 where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlForm:
    """How the tail is laid out; the same on all ranks.

    Attributes:
        num_ranks: that tell something.
        num_tracked: parameters of which is told whether they were used; 0 where unused ones are not looked for.
        has_replicas: whether slices of replicas are compared.

    Example:
        >>> form = ControlForm(num_ranks=2)
        >>> form.encode(RankControl(num_items=4097), rank=1)[13:]
        [0, 0, 0, 0, 0, 0, 16, 1, 0, 0, 0]
    """

    num_ranks: int
    num_tracked: int = 0
    has_replicas: bool = False

    @property
    def _num_slots(self) -> int:
        return _REPLICA_AT + (_NUM_REPLICA_DIGITS if self.has_replicas else 0)

    @property
    def numel(self) -> int:
        """Elements of the tail."""
        return self.num_ranks * self._num_slots + self.num_tracked

    def encode(self, control: RankControl, *, rank: int, used: Sequence[int] = ()) -> list[int]:
        """This rank's tail: its own slots filled, zeros elsewhere, then the `used` flags."""
        tail = [0] * (self.num_ranks * self._num_slots)
        at = rank * self._num_slots
        flags = _FLAG_MISSING if control.gradients_missing else 0
        if control.joined:
            flags |= _FLAG_JOINED
        if control.graph_changed:
            flags |= _FLAG_CHANGED
        if control.nonfinite:
            flags |= _FLAG_NONFINITE
        if control.stop:
            flags |= _FLAG_STOP
        if control.num_items is not None:
            flags |= _FLAG_COUNTED
            tail[at + _ITEMS_AT : at + _FINGERPRINT_AT] = control.num_items.to_bytes(_NUM_ITEM_DIGITS, "big")
        if control.fingerprint:
            digits = control.fingerprint.to_bytes(_NUM_FINGERPRINT_DIGITS, "big")
            tail[at + _FINGERPRINT_AT : at + _REPLICA_AT] = digits
        if control.replica and self.has_replicas:
            tail[at + _REPLICA_AT : at + self._num_slots] = control.replica.to_bytes(
                _NUM_REPLICA_DIGITS, "big"
            )
        tail[at : at + _ITEMS_AT] = flags, control.num_waiting, control.gradients
        return [*tail, *used]

    def decode(self, tail: Sequence[float]) -> tuple[tuple[RankControl, ...], tuple[int, ...]]:
        """What every rank told, and for each tracked parameter how many ranks used it (256 stands for more)."""
        num_slots = self._num_slots
        ranks = []
        for rank in range(self.num_ranks):
            flags, num_waiting, gradients, *digits = (
                int(x) for x in tail[rank * num_slots : (rank + 1) * num_slots]
            )
            ranks.append(
                RankControl(
                    gradients_missing=bool(flags & _FLAG_MISSING),
                    graph_changed=bool(flags & _FLAG_CHANGED),
                    num_items=_number(digits[:_NUM_ITEM_DIGITS]) if flags & _FLAG_COUNTED else None,
                    joined=bool(flags & _FLAG_JOINED),
                    nonfinite=bool(flags & _FLAG_NONFINITE),
                    stop=bool(flags & _FLAG_STOP),
                    num_waiting=num_waiting,
                    gradients=gradients,
                    fingerprint=_number(digits[_NUM_ITEM_DIGITS : _REPLICA_AT - _ITEMS_AT]),
                    replica=_number(digits[_REPLICA_AT - _ITEMS_AT :]),
                )
            )
        return tuple(ranks), tuple(int(x) for x in tail[self.num_ranks * num_slots :])


def _number(digits: Sequence[int]) -> int:
    return int.from_bytes(bytes(digits), "big")


class ControlMessage:
    """One small asynchronous collective a step.

    Args:
        transport: what it travels by.
        numel: elements, see `ControlForm.numel`.
    """

    def __init__(self, transport: Transport, numel: int) -> None:
        self._transport = transport
        self._tensor = torch.zeros(numel, dtype=torch.int32, device=transport.control_device)
        self._work: Work | None = None

    def launch(self, tail: Sequence[int]) -> None:
        """Send this rank's tail; an empty one is all zeros."""
        if any(tail):
            self._tensor.copy_(torch.tensor(tail, dtype=torch.int32))
        else:
            self._tensor.zero_()
        self._work = self._transport.all_reduce(self._tensor, "sum")

    def read(self) -> list[float]:
        """Wait, then the control data of all ranks, summed."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        summed: list[float] = self._tensor.tolist()
        return summed
