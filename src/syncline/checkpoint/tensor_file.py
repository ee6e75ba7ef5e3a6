"""Files of tensors, as safetensors has them, every byte of which is covered by a checksum.

They are written from where the tensors are, and read where they are mapped, so that nothing is copied on the way.
The checksum is XXH3 with 128 bits: fast enough not to be noticed beside a disk, and long enough to tell tensors apart.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from syncline.checkpoint.files import Files, LocalFiles
from syncline.checkpoint.validation import check, is_count, json_object, malformed_is_corrupt
from syncline.errors import CheckpointCorrupt

__all__ = [
    "STORABLE",
    "StoredFile",
    "checksum",
    "checksum_of_file",
    "memory_of",
    "read_tensors",
    "write_tensors",
]


STORABLE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types that can be stored, as safetensors calls them."""

_BY_NAME = {name: dtype for dtype, name in STORABLE.items()}

_ENTRY = {"dtype", "shape", "data_offsets"}
"""What a header says of each tensor."""


@dataclass(frozen=True)
class StoredFile:
    """What has to be in a file of tensors.

    Attributes:
        num_bytes: of the file.
        header: checksum of everything before the tensors.
        tensors: that of each tensor.
    """

    num_bytes: int
    header: str
    tensors: Mapping[str, str]


def write_tensors(
    files: Files, path: str, tensors: Mapping[str, Tensor], checksums: Mapping[str, str] | None = None
) -> StoredFile:
    """Write tensors as a safetensors file.

    Args:
        files: where.
        path: a new file.
        tensors: on the CPU, contiguous, of types that can be stored.
        checksums: theirs, where they are known.

    Raises:
        OSError: it could not be written.
    """
    # Types of more bytes first, so that each value lies at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": STORABLE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of eight
    head = len(text).to_bytes(8, "little") + text
    found = {name: checksums[name] if checksums else checksum(memory_of(tensor)) for name, tensor in ordered}
    files.write(path, [head, *(memory_of(tensor) for _, tensor in ordered)])
    return StoredFile(len(head) + end, checksum(head), found)


def read_tensors(
    files: Files, directory: str, name: str, stored: StoredFile, wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """The tensors of a file, checked.

    Args:
        files: where.
        directory: the file's.
        name: of the file.
        stored: what has to be in it.
        wanted: which of them, others are not looked at; None: all.

    Raises:
        CheckpointCorrupt: they are not what was written.
        OSError: the file could not be read.
    """
    path = f"{directory}/{name}"
    content = files.map(path)
    if len(content) != stored.num_bytes:
        raise CheckpointCorrupt(f"{path} has {len(content)} bytes: expected {stored.num_bytes}")
    head_bytes = 8 + int.from_bytes(content[:8], "little")
    if head_bytes > len(content) or checksum(content[:head_bytes]) != stored.header:
        raise CheckpointCorrupt(f"{path}: the checksum of its header is not the one in the manifest")
    with malformed_is_corrupt(path):
        places = _places(bytes(content[8:head_bytes]), len(content) - head_bytes)
        check(places.keys() == stored.tensors.keys(), "expected the tensors of the manifest", [*places])
    tensors = {}
    for key, expected in stored.tensors.items():
        if wanted is not None and key not in wanted:
            continue
        dtype, shape, start, end = places[key]
        memory = content[head_bytes + start : head_bytes + end]
        if checksum(memory) != expected:
            raise CheckpointCorrupt(f"{path}: {key} is damaged, its checksum is not the one in the manifest")
        tensors[key] = (
            torch.frombuffer(memory, dtype=dtype).view(shape)
            if end > start
            else torch.empty(shape, dtype=dtype)
        )
    return tensors


def _places(header: bytes, num_bytes: int) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    """Of each tensor its type, its shape, and where it begins and ends.

    Raises:
        ValueError, TypeError, LookupError: it is not a header that `write_tensors` gives for so many bytes.
    """
    found = {}
    end = 0
    for name, entry in json_object(header).items():
        check(
            isinstance(entry, dict) and entry.keys() == _ENTRY, f"expected {sorted(_ENTRY)} of {name}", entry
        )
        dtype, shape, offsets = _BY_NAME[entry["dtype"]], entry["shape"], entry["data_offsets"]
        for numbers in (shape, offsets):
            check(
                isinstance(numbers, list) and all(map(is_count, numbers)),
                f"expected counts of {name}",
                numbers,
            )
        start, end_before = offsets[0], end
        end = start + math.prod(shape) * dtype.itemsize
        check(
            offsets == [end_before, end] and is_count(math.prod(max(1, size) for size in shape)),
            f"expected {name} of shape {shape} to begin at {end_before}",
            offsets,
        )
        check(start % dtype.itemsize == 0, f"expected {name} at a multiple of {dtype.itemsize} bytes", start)
        found[name] = (dtype, shape, start, end)
    check(end == num_bytes, f"expected tensors of {num_bytes} bytes", end)
    return found


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU; it is there for as long as they are."""
    if not tensor.numel():
        return memoryview(b"")
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # an address keeps nothing alive, and `tensor` may be a copy that nobody else has
    return memoryview(memory)


def checksum_of_file(path: str) -> str:
    """Of all of a file of this host.

    Raises:
        OSError: it could not be read.
    """
    return checksum(LocalFiles().map(path))


def checksum(memory: bytes | memoryview) -> str:
    """Of some bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(memory)
