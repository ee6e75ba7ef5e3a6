"""The tail of the last bucket: elements behind the gradients that carry the words of all riders from every rank.

The bucket is reduced by SUM in the gradients' own dtype. Each rank writes digits only into its own slots and zeros into
the slots of other ranks, so the sum is a gather. Each slot holds one base-256 digit, which every floating-point dtype
down to bfloat16 represents exactly (bf16 rounds 4097 to 4096, but represents all integers up to 256). So the words need
no separate collective, and the reduction does not change a bit of them. `riders/` defines the riders.

The elements of the tail are the digits of rank 0, those of rank 1, and so on. If unused parameters are detected, one
element per parameter follows, into which each rank that used the parameter writes 1. The digits of a rank form one
number, with the most significant digit first. The bit fields of this number are the words of the riders, in their
order, and one last bit, which is 1 if the rank has no inputs left.

The last elements are the digits of a note from each rank. No rank acts on a note in the step, so notes are decoded only
when someone reads the record of the step. In almost every step all words are 0, and only notes are sent.

In bfloat16 the sum of the ones may stop growing at 256. This does no harm, because the sum is compared only with zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.transport.base import Transport
from syncline.transport.work import Work


@dataclass(frozen=True, kw_only=True)
class TailForm:
    """The layout of the tail, which is the same on all ranks.

    Attributes:
        num_ranks: the number of ranks that report.
        widths: the number of bits of each rider's word.
        num_tracked: the number of parameters whose use each rank reports; 0 if unused parameters are not detected.
        num_noted: the number of digits of a rank's note.

    Examples:
        >>> form = TailForm(num_ranks=2, widths=(1, 14))
        >>> form.encode((1, 4097), rank=1)
        [0, 0, 160, 2]
        >>> form.decode([0, 0, 160, 2])
        (((0, 0), (1, 4097)), ())
    """

    num_ranks: int
    widths: tuple[int, ...]
    num_tracked: int = 0
    num_noted: int = 0

    @cached_property
    def num_digits(self) -> int:
        """Number of base-256 digits that each rank sends."""
        return -(-(sum(self.widths) + 1) // 8)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the tail."""
        return self.notes_at + self.num_ranks * self.num_noted

    @cached_property
    def notes_at(self) -> int:
        """The index of the first element of the notes."""
        return self.num_ranks * self.num_digits + self.num_tracked

    def encode(self, words: Sequence[int] | None, *, rank: int, used: Sequence[int] = ()) -> list[int]:
        """Return the tail that this rank sends, without notes: its digits, zeros for other ranks, and the flags `used`.

        Args:
            words: one word per rider; None if this rank has no inputs left.
            rank: the number of this rank.
            used: one flag per tracked parameter: 1 if this rank used the parameter, 0 if not.

        Raises:
            OverflowError: a word does not fit into its bits.
        """
        number = 0
        for word, width in zip(words or (0,) * len(self.widths), self.widths, strict=True):
            if word >> width:
                raise OverflowError(
                    f"rank {rank}: expected a rider's word of {width} bits, got the word {word}, which needs more "
                    "bits. Increase num_bits of the rider"
                )
            number = number << width | word
        number = number << 1 | (words is None)
        tail = [0] * (self.num_ranks * self.num_digits)
        tail[rank * self.num_digits : (rank + 1) * self.num_digits] = number.to_bytes(self.num_digits, "big")
        return [*tail, *used]

    def decode(self, tail: Sequence[float]) -> tuple[tuple[tuple[int, ...] | None, ...], tuple[int, ...]]:
        """Return the words of each rank, and the number of ranks that used each parameter.

        For a rank that has no inputs left, the result contains None instead of words. In bfloat16, the number 256 can
        also stand for more than 256 ranks.
        """
        ranks = []
        for at in range(0, self.num_ranks * self.num_digits, self.num_digits):
            number = int.from_bytes(bytes(int(digit) for digit in tail[at : at + self.num_digits]), "big")
            has_joined, number = number & 1, number >> 1
            words = []
            for width in reversed(self.widths):
                words.append(number & ((1 << width) - 1))
                number >>= width
            ranks.append(None if has_joined else tuple(reversed(words)))
        return tuple(ranks), tuple(int(x) for x in tail[self.num_ranks * self.num_digits : self.notes_at])


class Tail(NamedTuple):
    """The elements that this rank writes into the tail. All other elements are 0."""

    words: Sequence[int]
    """The first elements; see `TailForm.encode`. They are empty if this rank has nothing to report."""
    note: bytes = b""
    """The digits of this rank's note."""
    note_at: int = 0
    """The index of the first of these digits."""

    def write(self, target: Tensor) -> None:
        """Write the tail into a tensor of shape (numel,)."""
        target.zero_()
        if any(self.words):
            target[: len(self.words)] = torch.tensor(self.words, dtype=target.dtype, device=target.device)
        if self.note:
            # Much faster than torch.tensor of a list. The bytearray is there because torch warns of memory that it
            # must not write.
            digits = torch.frombuffer(bytearray(self.note), dtype=torch.uint8)
            target[self.note_at : self.note_at + len(self.note)].copy_(digits)


class TailMessage:
    """A separate message for a tail that no bucket can carry. It is one small asynchronous collective per step.

    It is used with a communication hook, with sparse gradients (because missing gradients are known only at the end of
    backward), with `skip_unused`, and with `sharded=True`.

    Args:
        transport: the transport between the ranks.
        numel: the number of elements of the tail (see `TailForm.numel`).
    """

    def __init__(self, transport: Transport, numel: int) -> None:
        self._transport = transport
        self._tensor = torch.zeros(numel, dtype=torch.int32, device=transport.control_device)
        self._work: Work | None = None

    def launch(self, tail: Tail, *, in_read: bool = False) -> None:
        """Start to send this rank's tail.

        Args:
            tail: the elements to send.
            in_read: whether `read` sends the tail, instead of this method.
        """
        tail.write(self._tensor)
        self._work = None if in_read else self._transport.all_reduce(self._tensor, "sum")

    def read(self) -> list[float]:
        """Wait for the tails of all ranks, and return their sum."""
        work = self._work or self._transport.all_reduce(self._tensor, "sum")
        work.wait()
        self._work = None
        summed: list[float] = self._tensor.tolist()
        return summed
