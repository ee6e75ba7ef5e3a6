"""Safetensors files, with checksums that cover every byte.

Tensors are written directly from their memory, and read as mapped memory, so nothing is copied.
The checksum is XXH3 with 128 bits. Its cost is negligible beside that of a disk, and it is long enough to distinguish
tensors.
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

from syncline.checkpoint.files import (
    Files,
    LocalFiles,
    check,
    is_count,
    json_object,
    malformed_is_corrupt,
)
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
"""The dtypes that can be stored, and their names in safetensors."""

_BY_NAME = {name: dtype for dtype, name in STORABLE.items()}

_ENTRY = {"dtype", "shape", "data_offsets"}
"""The keys of a tensor's entry in a header."""


@dataclass(frozen=True)
class StoredFile:
    """The expected content of a tensor file.

    Attributes:
        num_bytes: the size of the file.
        header: the checksum of everything before the tensors.
        tensors: the checksum of each tensor, by name.
    """

    num_bytes: int
    header: str
    tensors: Mapping[str, str]


def write_tensors(
    files: Files, path: str, tensors: Mapping[str, Tensor], checksums: Mapping[str, str] | None = None
) -> StoredFile:
    """Write tensors as a safetensors file.

    Args:
        files: the file system.
        path: the path of a new file.
        tensors: contiguous tensors on the CPU, of dtypes that can be stored.
        checksums: the checksums of the tensors, if they are known.

    Raises:
        OSError: the file could not be written.
    """
    # Larger item sizes first, so that each tensor begins at a multiple of its item size.
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
    """Read and verify the tensors of a file.

    Args:
        files: the file system.
        directory: the directory of the file.
        name: the name of the file.
        stored: the expected content.
        wanted: the names of the tensors to verify and return; None means all.

    Raises:
        CheckpointCorrupt: the content is not what was written.
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
    """Return the dtype, shape, start and end of each tensor.

    Raises:
        ValueError, TypeError, LookupError: `write_tensors` does not write such a header for `num_bytes` bytes.
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
    """Return the bytes of a contiguous CPU tensor without a copy; they keep the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # an address keeps no tensor alive, and this may be the only reference to a copy
    return memoryview(memory)


def checksum_of_file(path: str) -> str:
    """Return the checksum of a whole file of this host.

    Raises:
        OSError: it could not be read.
    """
    return checksum(LocalFiles().map(path))


def checksum(memory: bytes | memoryview) -> str:
    """Return the checksum of some bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(memory)
