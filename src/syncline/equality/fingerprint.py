"""Fingerprints of 64 bits, by which ranks compare values bit for bit.

The fingerprint of a tensor is computed from its 64-bit words, in the order of its elements. First an offset that
depends on the position of the word is added to each word. Then the mixing function of SplitMix64 (Steele, Lea and Flood
2014) is applied. Finally the results are added up modulo 2**64. This is integer arithmetic, so it is exact on every
device, and the sum may be computed in any order. If one word changes, the fingerprint always changes, because the
mixing is one to one. If more words change, the fingerprint stays the same with a probability of about 2**-64.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import Parameter

from syncline.tensors.targets import as_bytes, as_flat, is_dense, is_plain, parts_of

_CPU_CHUNK_BYTES = 1 << 18
"""The size of a chunk on the CPU. It is chosen so that temporary values stay in a core's cache."""

_DEVICE_CHUNK_BYTES = 1 << 25

_SMALL_BYTES = 1 << 12
"""The size of the largest tensor that is hashed together with others. A call of torch costs as much."""

_BATCH_BYTES = 1 << 15
"""How many bytes of small tensors are hashed together on the CPU."""

_DEVICE_BATCH_BYTES = 1 << 22

_JOINED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""The dtypes of the small tensors that are hashed together. torch.cat has them on all devices."""

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer, as the two constants below

_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9

_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB

_WORD = 1 << 64

_NUM_SAMPLED = 16
"""The number of tensors of which a sample is taken."""

_SAMPLED_NUMEL = 1024
"""The number of elements of each of these tensors in a sample."""


def fingerprints(values: Sequence[Any]) -> list[int]:
    """Return the 64-bit fingerprint of each value. For values other than tensors, see `fingerprint_of`.

    The fingerprint of a tensor covers its bytes in the order of its elements, but not its shape or dtype. Strides and
    pending conjugations do not matter. 0.0 and -0.0 have different fingerprints, and so have NaNs with different
    payloads. The function needs less than 1 MiB of memory for copies on the CPU, and less than 130 MiB on other
    devices.

    Examples:
        >>> x = torch.arange(6.0).view(2, 3)
        >>> same, other = x.t().contiguous().t(), x.flip(0)
        >>> one, two, three = fingerprints([x, same, other])
        >>> one == two, one == three
        (True, False)
    """
    found = [0 if isinstance(value, Tensor) else fingerprint_of(value) for value in values]
    places: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor) and value.numel():
            places.setdefault(value.device, []).append(place)
    hashed = [_sums_of(device, {place: values[place] for place in here}) for device, here in places.items()]
    for order, sums in hashed:  # one transfer per device, because each waits for all work there
        for place, number in zip(order, sums.tolist(), strict=True):
            found[place] = number % _WORD
    return found


@torch.no_grad()
def _sums_of(device: torch.device, tensors: Mapping[int, Tensor]) -> tuple[list[int], Tensor]:
    """Return the sums of the mixed words of tensors on one device, int64, and the keys of the tensors in their order.

    Args:
        device: the device.
        tensors: tensors with elements, by any keys.
    """
    batch_bytes = _BATCH_BYTES if device.type == "cpu" else _DEVICE_BATCH_BYTES
    scratch = _Scratch(device, max(batch_bytes, *(tensor.nbytes for tensor in tensors.values())))
    order, sums = [], []
    small: dict[torch.dtype, list[int]] = {}
    for key, tensor in tensors.items():
        if tensor.nbytes <= _SMALL_BYTES and tensor.dtype in _JOINED and type(tensor) in (Tensor, Parameter):
            small.setdefault(tensor.dtype, []).append(key)
        else:
            order.append(key)
            sums.append(scratch.sum_of(tensor).view(1))
    for keys in small.values():
        while keys:
            num, total_bytes = 0, 0
            while num < len(keys) and total_bytes + _SMALL_BYTES <= batch_bytes:
                total_bytes += tensors[keys[num]].nbytes + 8
                num += 1
            order += keys[:num]
            sums.append(scratch.sums_of([tensors[key] for key in keys[:num]]))
            del keys[:num]
    return order, torch.cat(sums)


class _Scratch:
    """Temporary memory in which fingerprints are computed, one chunk of a tensor after the other."""

    def __init__(self, device: torch.device, largest_bytes: int) -> None:
        self._chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _DEVICE_CHUNK_BYTES
        num_words = min(largest_bytes, self._chunk_bytes) // 8 + 2
        self._places = torch.arange(num_words, dtype=torch.int64, device=device).add_(1).mul_(_GOLDEN)
        self._mixed = torch.empty_like(self._places)
        self._shifted = torch.empty_like(self._places)

    def sum_of(self, tensor: Tensor) -> Tensor:
        """Return the sum of the mixed words of a tensor, as an int64 tensor of shape ()."""
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        num_words = 0
        for part in parts_of(tensor.detach(), self._chunk_bytes) if tensor.numel() else ():
            words = self._words_of(part)
            total += self._mixed_words(words, first=num_words).sum()
            num_words += words.numel()
        return total

    def sums_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return what `sum_of` returns for each of some small tensors of one dtype, (num_tensors,), in a few calls."""
        itemsize, device = tensors[0].element_size(), tensors[0].device
        padding = torch.zeros(8 // min(8, itemsize), dtype=tensors[0].dtype, device=device)
        parts, num_words = [], []
        for tensor in tensors:
            plain = tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()
            parts.append(as_flat(plain))
            num_words.append(-(-tensor.numel() * itemsize // 8))
            if (num_missing := 8 * num_words[-1] - tensor.numel() * itemsize) > 0:
                parts.append(padding[: num_missing // itemsize])
        words = torch.cat(parts).view(torch.uint8).view(torch.int64)
        counts = torch.tensor(num_words, device=device)
        ends = counts.cumsum(0)
        starts = (ends - counts).mul_(_GOLDEN)  # the places of words are counted in each tensor anew
        words -= starts.repeat_interleave(counts, output_size=words.numel())
        # Differences of a running sum, in which overflows cancel each other.
        totals = self._mixed_words(words, first=0).cumsum(0)[ends - 1]
        totals[1:] -= totals[:-1].clone()
        return totals

    def _words_of(self, part: Tensor) -> Tensor:
        """Return the bytes of a chunk as 64-bit words, (num_words,) int64. The last word is padded with zeros."""
        if not is_plain(part):
            part = part.resolve_conj().resolve_neg().contiguous()
        flat = as_bytes(part)
        num_bytes = flat.numel()
        if num_bytes % 8 == 0 and flat.storage_offset() % 8 == 0:
            return flat.view(torch.int64)
        padded = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8, device=part.device)
        padded[:num_bytes] = flat
        return padded.view(torch.int64)

    def _mixed_words(self, words: Tensor, *, first: int) -> Tensor:
        """Return the mixed words, (num_words,), in temporary memory.

        Args:
            words: the words of a chunk, (num_words,).
            first: the position of the first of these words in the tensor.
        """
        num_words = words.numel()
        mixed, shifted = self._mixed[:num_words], self._shifted[:num_words]
        torch.add(words, self._places[:num_words], out=mixed)
        mixed.add_(_signed(first * _GOLDEN))
        for num_bits, factor in ((30, _FIRST), (27, _SECOND)):
            _xor_shifted(mixed, shifted, num_bits)
            mixed.mul_(factor)
        _xor_shifted(mixed, shifted, 31)
        return mixed


def _xor_shifted(words: Tensor, scratch: Tensor, num_bits: int) -> None:
    """Compute `words ^= words >> num_bits` in place, with a shift that fills in zeros."""
    torch.bitwise_right_shift(words, num_bits, out=scratch)
    scratch.bitwise_and_((1 << (64 - num_bits)) - 1)
    words.bitwise_xor_(scratch)


def _signed(number: int) -> int:
    """Return the signed 64-bit integer that is equal to `number` modulo 2**64."""
    return (number + (1 << 63)) % _WORD - (1 << 63)


def fingerprint_of(value: object) -> int:
    """Return the 64-bit fingerprint of a value's `repr`.

    The values 1 and 1.0 have different fingerprints, and so have 0.0 and -0.0.
    """
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


def digest_of(numbers: Sequence[int]) -> bytes:
    """Return a 32-byte digest of fingerprints. Two ranks get the same digest only if all fingerprints are equal."""
    return hashlib.sha256(b"".join(one.to_bytes(8, "little") for one in numbers)).digest()


# ---------------------------------------------------------------------- slices


class SliceHash:
    """A 64-bit hash of some slices of tensors and of some numbers.

    A slice is a range of a tensor's elements. On the CPU it is hashed by XXH3, which is as fast as reading the memory.
    On other devices the hash is a sum as in `fingerprints`, and the program waits for the device only when it requests
    the value. The hashes of two ranks are comparable if their tensors have the same strides and are on devices of the
    same type.

    Examples:
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
        """Add to the hash a number, or the elements of a tensor from `start` up to `stop`.

        Args:
            leaf: the index of the tensor or number.
            value: the tensor or number. Pass None for a value that does not exist.
            start: the index of the first element, a multiple of 64.
            stop: the index after the last element, a multiple of 64 or the number of elements.
            in_memory_order: whether elements are counted in memory order, which needs no copy. Otherwise they are
                counted along the flattened tensor. Pass False if strides may differ between ranks.
        """
        if not isinstance(value, Tensor):
            self._parts.append((leaf, 0 if value is None else fingerprint_of(value)))
        elif (stop := min(stop, value.numel())) <= start:
            self._parts.append((leaf, 1))
        elif _is_in_host_memory(value):
            # Making a view costs as much as hashing several kilobytes.
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
        """Return the hash of all added slices and numbers. It depends on the order in which they were added."""
        total = 0
        for leaf, number in self._resolved():
            total = mixed(total ^ leaf, number)
        return total

    def by_leaf(self) -> dict[int, int]:
        """Return one hash for each tensor or number, by its index. It covers all added slices of the tensor."""
        found: dict[int, int] = {}
        for leaf, number in self._resolved():
            found[leaf] = mixed(found.get(leaf, 0), number)
        return found


def begin_hashes(tensors: Sequence[Tensor]) -> tuple[dict[int, int], list[tuple[list[int], Tensor]]]:
    """Hash each tensor in host memory, and let other devices begin to hash theirs, without waiting for them.

    Returns:
        The hashes in host memory, by the index of the tensor. For each other device, the indices of its tensors, and
        their hashes, int64, from -2**63. The hashes of two ranks are comparable if their devices are of the same type.
    """
    on_host = SliceHash()
    elsewhere: dict[torch.device, dict[int, Tensor]] = {}
    for index, tensor in enumerate(tensors):
        if _is_in_host_memory(tensor):
            on_host.add(index, tensor, 0, tensor.numel(), in_memory_order=False)
        elif tensor.numel():
            elsewhere.setdefault(tensor.device, {})[index] = tensor
    return on_host.by_leaf(), [_sums_of(device, here) for device, here in elsewhere.items()]


def hash_of(tensors: Sequence[Tensor]) -> bytes:
    """Return an 8-byte hash of all values of some tensors. It does not depend on their strides."""
    found = SliceHash()
    for index, tensor in enumerate(tensors):
        found.add(index, tensor, 0, tensor.numel(), in_memory_order=False)
    return found.value().to_bytes(8, "little")


def hash_of_sample(tensors: Sequence[Tensor]) -> bytes:
    """Return an 8-byte hash of a few values in the middle of a few tensors. It costs next to nothing.

    If tensors have the same strides on all ranks, ranks with different hashes have different values. Replicas that were
    trained apart differ almost everywhere, so this hash nearly always finds that they differ.

    Examples:
        >>> x = torch.zeros(4096)
        >>> before = hash_of_sample([x])
        >>> x[2048] = 1
        >>> hash_of_sample([x]) == before
        False
    """
    found = SliceHash()
    for index in range(0, len(tensors), max(1, len(tensors) // _NUM_SAMPLED)):
        start = tensors[index].numel() // 2 // 64 * 64
        found.add(index, tensors[index], start, start + _SAMPLED_NUMEL)
    return found.value().to_bytes(8, "little")


def _is_in_host_memory(tensor: Tensor) -> bool:
    return tensor.is_cpu


def mixed(total: int, number: int) -> int:
    """Return the running hash `total` after `number` was mixed into it. The order of the numbers matters.

    Args:
        total: the hash of the former numbers, 64 bits.
        number: the next number, 64 bits.
    """
    return (total * (_GOLDEN % _WORD) + number) % _WORD  # odd factor, so that the product is one to one


def _flat(tensor: Tensor, *, in_memory_order: bool) -> Tensor:
    """Return all elements of a tensor, (numel,), as a view if possible.

    Args:
        tensor: the tensor.
        in_memory_order: whether the elements may be in memory order. Otherwise they are in the order of
            the flattened tensor.
    """
    if is_plain(tensor):
        return as_flat(tensor)
    if in_memory_order and is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg():
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)
