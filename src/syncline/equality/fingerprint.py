"""Are tensors equal on all ranks, bit for bit? A number of 64 bits a tensor tells.

A tensor is read as words of 64 bits, in the order of its elements. Each word, offset by its place, goes through the
mixing function of SplitMix64 (Steele, Lea and Flood 2014), and the results are added up modulo 2**64. That is integer
arithmetic, exact on every device and independent of how the sum is split up. One changed word always changes the sum,
for the mixing is one to one; any other difference is missed with a probability of about 2**-64.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from syncline.differences import describe_ranks, groups_of
from syncline.tensors.targets import as_bytes, as_flat, is_dense, is_plain, parts_of

__all__ = [
    "Difference",
    "SliceHash",
    "differences",
    "digest_of",
    "fingerprint_of_number",
    "fingerprints",
    "first_of",
    "minority_of",
    "mixed",
]


_CPU_CHUNK_BYTES = 1 << 18
"""So that what is computed with stays in a core's cache."""

_DEVICE_CHUNK_BYTES = 1 << 25

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 and the others as signed integers

_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9

_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB

_WORD = 1 << 64


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor 64 bits that tell its values apart: its bytes in the order of its elements; not shape or dtype.

    Strides and pending conjugations do not matter. 0.0 and -0.0 are different values, and so are NaNs with different
    payloads. Memory for copies is bounded: below 1 MiB on the CPU, 130 MiB elsewhere.

    Example:
        >>> x = torch.arange(6.0).view(2, 3)
        >>> same, other = x.t().contiguous().t(), x.flip(0)
        >>> one, two, three = fingerprints([x, same, other])
        >>> one == two, one == three
        (True, False)
    """
    sums: dict[torch.device, list[Tensor]] = {}
    scratches: dict[torch.device, _Scratch] = {}
    for tensor in tensors:
        device = tensor.device
        if device not in scratches:
            largest_bytes = max(other.nbytes for other in tensors if other.device == device)
            scratches[device] = _Scratch(device, largest_bytes)
        sums.setdefault(device, []).append(scratches[device].sum_of(tensor))
    # One transfer a device: each would wait for all that runs there.
    found = {device: iter(torch.stack(here).tolist()) for device, here in sums.items()}
    return [next(found[tensor.device]) % _WORD for tensor in tensors]


class _Scratch:
    """What fingerprints are computed with, for one chunk after the other."""

    def __init__(self, device: torch.device, largest_bytes: int) -> None:
        self._chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _DEVICE_CHUNK_BYTES
        num_words = min(largest_bytes, self._chunk_bytes) // 8 + 2
        self._places = torch.arange(num_words, dtype=torch.int64, device=device).add_(1).mul_(_GOLDEN)
        self._mixed = torch.empty_like(self._places)
        self._shifted = torch.empty_like(self._places)

    def sum_of(self, tensor: Tensor) -> Tensor:
        """The sum of the mixed words of a tensor, () int64."""
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        num_words = 0
        for part in parts_of(tensor.detach(), self._chunk_bytes) if tensor.numel() else ():
            words = self._words_of(part)
            total += self._mixed_sum(words, first=num_words)
            num_words += words.numel()
        return total

    def _words_of(self, part: Tensor) -> Tensor:
        """The bytes of a chunk as words, (num_words,) int64; the last one is filled up with zeros."""
        if not is_plain(part):
            part = part.resolve_conj().resolve_neg().contiguous()
        flat = as_bytes(part)
        num_bytes = flat.numel()
        if num_bytes % 8 == 0 and flat.storage_offset() % 8 == 0:
            return flat.view(torch.int64)
        padded = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8, device=part.device)
        padded[:num_bytes] = flat
        return padded.view(torch.int64)

    def _mixed_sum(self, words: Tensor, *, first: int) -> Tensor:
        """The sum of the mixed words, (); `first` is the place of the first of them."""
        num_words = words.numel()
        mixed, shifted = self._mixed[:num_words], self._shifted[:num_words]
        torch.add(words, self._places[:num_words], out=mixed)
        mixed.add_(_signed(first * _GOLDEN))
        for num_bits, factor in ((30, _FIRST), (27, _SECOND)):
            _xor_shifted(mixed, shifted, num_bits)
            mixed.mul_(factor)
        _xor_shifted(mixed, shifted, 31)
        return mixed.sum()


def _xor_shifted(words: Tensor, scratch: Tensor, num_bits: int) -> None:
    """`words ^= words >> num_bits`, shifting zeros in."""
    torch.bitwise_right_shift(words, num_bits, out=scratch)
    scratch.bitwise_and_((1 << (64 - num_bits)) - 1)
    words.bitwise_xor_(scratch)


def _signed(number: int) -> int:
    """Modulo 2**64, as a signed integer."""
    return (number + (1 << 63)) % _WORD - (1 << 63)


def fingerprint_of_number(number: object) -> int:
    """The same for a Python number; 1 and 1.0 differ, and so do 0.0 and -0.0."""
    return int.from_bytes(hashlib.blake2b(repr(number).encode(), digest_size=8).digest(), "little")


def digest_of(numbers: Sequence[int]) -> bytes:
    """32 bytes that are equal on two ranks if all these fingerprints are."""
    return hashlib.sha256(b"".join(one.to_bytes(8, "little") for one in numbers)).digest()


# ---------------------------------------------------------------------- slices


class SliceHash:
    """A number of 64 bits that tells some pieces of tensors apart, read in the order of their memory.

    On the CPU by XXH3, as fast as memory is read; on other devices by the sums above, which wait for nothing until the
    number is asked for. Ranks can compare theirs if their tensors have the same strides and types of devices.

    Example:
        >>> one, same, other = SliceHash(), SliceHash(), SliceHash()
        >>> x = torch.arange(6.0)
        >>> one.add(0, x, 2, 4), same.add(0, x.clone(), 2, 4), other.add(0, x, 3, 5)
        (None, None, None)
        >>> one.value() == same.value(), one.value() == other.value()
        (True, False)
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, int | Tensor]] = []

    def add(self, leaf: int, value: Any, start: int, stop: int, *, in_memory_order: bool = True) -> None:
        """Elements `start` to `stop` of a tensor, or a number; None stands for nothing.

        Args:
            leaf: which tensor or number it is.
            value: the tensor or number.
            start: a multiple of 64.
            stop: one too, or the end.
            in_memory_order: count elements as they lie in memory, which takes no copy; where strides may differ between
                ranks, along the flattened tensor.
        """
        if not isinstance(value, Tensor):
            self._parts.append((leaf, 0 if value is None else fingerprint_of_number(value)))
        elif (stop := min(stop, value.numel())) <= start:
            self._parts.append((leaf, 1))
        elif _is_in_host_memory(value):
            # Making a view costs as much as hashing some kilobytes.
            flat = value if is_plain(value) else _flat(value.detach(), in_memory_order=in_memory_order)
            itemsize = value.element_size()
            address = flat.data_ptr() + start * itemsize
            memory = (ctypes.c_ubyte * ((stop - start) * itemsize)).from_address(address)
            self._parts.append((leaf, xxhash.xxh3_64_intdigest(memory)))
        else:
            part = _flat(value.detach(), in_memory_order=in_memory_order)[start:stop]
            self._parts.append((leaf, _Scratch(value.device, part.nbytes).sum_of(part)))

    def _resolved(self) -> list[tuple[int, int]]:
        waiting = [(at, part) for at, (_, part) in enumerate(self._parts) if isinstance(part, Tensor)]
        for device in {part.device for _, part in waiting}:
            here = [(at, part) for at, part in waiting if part.device == device]
            for (at, _), number in zip(here, torch.stack([part for _, part in here]).tolist(), strict=True):
                self._parts[at] = (self._parts[at][0], number % _WORD)
        return self._parts  # type: ignore[return-value]

    def value(self) -> int:
        """Of all pieces, in order."""
        total = 0
        for leaf, number in self._resolved():
            total = mixed(total ^ leaf, number)
        return total

    def by_leaf(self) -> dict[int, int]:
        """Of the pieces of each tensor or number."""
        found: dict[int, int] = {}
        for leaf, number in self._resolved():
            found[leaf] = mixed(found.get(leaf, 0), number)
        return found


def _is_in_host_memory(tensor: Tensor) -> bool:
    return tensor.is_cpu


def mixed(total: int, number: int) -> int:
    """One more number of 64 bits taken into a sum of them in which their order counts."""
    return (total * (_GOLDEN % _WORD) + number) % _WORD  # odd, so that nothing is lost by multiplying


def _flat(tensor: Tensor, *, in_memory_order: bool) -> Tensor:
    """All elements, (numel,): a view where they lie so."""
    if is_plain(tensor):
        return as_flat(tensor)
    if in_memory_order and is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg():
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


# ---------------------------------------------------------------------- who differs (pure)


class Difference(NamedTuple):
    """One tensor that is not equal on all ranks."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    """Ranks with equal values, the largest group first (of several, that with the lowest rank)."""

    @property
    def majority(self) -> tuple[int, ...]:
        """More than half of the ranks, which have the same; empty where there is none."""
        return self.groups[0] if 2 * len(self.groups[0]) > sum(map(len, self.groups)) else ()

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that are not of the majority; empty where no more than half of them agree."""
        if not self.majority:
            return ()
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))

    def __str__(self) -> str:
        return f"{self.name}  {' | '.join(map(describe_ranks, self.groups))}"


def minority_of(found: Iterable[Difference]) -> tuple[int, ...]:
    """The ranks that are in the minority in any of them."""
    return tuple(sorted({rank for difference in found for rank in difference.minority}))


def first_of(found: Sequence[object], num_shown: int = 5) -> list[str]:
    """A line each of the first differences, and how many more there are."""
    more = len(found) - num_shown
    return [f"  {one}" for one in found[:num_shown]] + ([f"  and {more} more"] if more > 0 else [])


def differences(names: Sequence[str], rows: Sequence[Sequence[int]]) -> list[Difference]:
    """What differs, in order.

    Args:
        names: of the tensors.
        rows: their fingerprints on each rank, in rank order.

    Example:
        >>> found = differences(["a", "b"], [[1, 5], [1, 6], [1, 5]])
        >>> str(found[0]), found[0].minority
        ('b  ranks 0, 2 | rank 1', (1,))
    """
    found = []
    for index, name in enumerate(names):
        groups = groups_of([row[index] for row in rows])
        if len(groups) > 1:
            found.append(Difference(name, groups))
    return found
