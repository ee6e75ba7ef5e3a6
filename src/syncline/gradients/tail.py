"""The tail of the last bucket: elements behind the gradients that carry the words of all riders from every rank.

The bucket is reduced by SUM in the gradients' own dtype. Each rank writes digits only into its own slots and zeros into
the slots of other ranks, so the sum is a gather. Each slot holds one base-256 digit, which every floating-point dtype
down to bfloat16 represents exactly (bf16 rounds 4097 to 4096, but represents all integers up to 256). So the words need
no separate collective, and the reduction does not change a bit of them. `riders/` defines the riders.

The elements of the tail are the digits of rank 0, those of rank 1, and so on. If unused parameters are detected, one
element per parameter follows, into which each rank that used the parameter writes 1. The digits of a rank form one
number, with the most significant digit first. The bit fields of this number are the words of the riders, in their
order, and one last bit, which is 1 if the rank has no inputs left.

In bfloat16 the sum of the ones may stop growing at 256. This does no harm, because the sum is compared only with zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.transport.base import Transport
from syncline.transport.work import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class TailForm:
    """The layout of the tail, which is the same on all ranks.

    Attributes:
        num_ranks: the number of ranks that report.
        widths: the number of bits of each rider's word.
        num_tracked: the number of parameters whose use each rank reports; 0 if unused parameters are not detected.

    Example:
        >>> form = TailForm(num_ranks=2, widths=(1, 14))
        >>> form.encode((1, 4097), rank=1)
        [0, 0, 160, 2]
        >>> form.decode([0, 0, 160, 2])
        (((0, 0), (1, 4097)), ())
    """

    num_ranks: int
    widths: tuple[int, ...]
    num_tracked: int = 0

    @property
    def num_digits(self) -> int:
        """Number of base-256 digits that each rank sends."""
        return -(-(sum(self.widths) + 1) // 8)

    @property
    def numel(self) -> int:
        """Number of elements of the tail."""
        return self.num_ranks * self.num_digits + self.num_tracked

    def encode(self, words: Sequence[int] | None, *, rank: int, used: Sequence[int] = ()) -> list[int]:
        """Return the tail that this rank sends: its digits, zeros in the slots of other ranks, and the flags `used`.

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
        return tuple(ranks), tuple(int(x) for x in tail[self.num_ranks * self.num_digits :])


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

    def launch(self, tail: Sequence[int], *, in_read: bool = False) -> None:
        """Start to send this rank's tail.

        Args:
            tail: the elements to send. An empty tail stands for zeros.
            in_read: whether `read` sends the tail, instead of this method.
        """
        if any(tail):
            self._tensor.copy_(torch.tensor(tail, dtype=torch.int32))
        else:
            self._tensor.zero_()
        self._work = None if in_read else self._transport.all_reduce(self._tensor, "sum")

    def read(self) -> list[float]:
        """Wait for the tails of all ranks, and return their sum."""
        work = self._work or self._transport.all_reduce(self._tensor, "sum")
        work.wait()
        self._work = None
        summed: list[float] = self._tensor.tolist()
        return summed
