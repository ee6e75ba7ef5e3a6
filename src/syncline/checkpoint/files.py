"""The files of a checkpoint: durable writes, and safetensors files with checksums that cover every byte.

Tensors are written directly from their memory, and read as mapped memory, so nothing is copied. The checksum is the
128-bit XXH3. It takes little time compared with a disk, and it is long enough to distinguish tensors. A matching
checksum proves only that a file is unchanged. The form of the content is therefore checked as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from syncline.errors import CheckpointCorrupt


class Files(Protocol):
    """The interface of a file system. A path is an absolute or relative string with "/". A failure raises OSError.

    A written file survives a crash of the machine only if both the file and its directory were synced. A rename
    survives a crash only if the directory was synced.
    """

    def names(self, directory: str) -> list[str]:
        """Return the names of the entries of a directory, or an empty list if the directory does not exist."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents. Do nothing if the directory exists."""

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file, part by part, and sync the file."""

    def read(self, path: str) -> bytes:
        """Return the content of a file."""

    def map(self, path: str) -> memoryview:
        """Map a file into memory, and return its content. Writing to this memory does not change the file."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a directory atomically; the new name must not exist yet."""

    def sync_directory(self, path: str) -> None:
        """Sync a directory, so that its entries are durable."""

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with its content. If the path does not exist, do nothing."""


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def _opened(path: str) -> int:
    """Open a regular file for reading. Refuse other kinds of files, because reading a FIFO may block forever.

    Raises:
        OSError: the path is not a regular file, or the file cannot be opened.
    """
    _check_is_regular(
        os.stat(path), path
    )  # first, because opening a device may change the state of the device
    fd = os.open(path, os.O_RDONLY | _flags("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
    try:
        _check_is_regular(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _flags(*names: str) -> int:
    """Return these flags of `os.open`. A flag that this system does not have counts as 0."""
    found = 0
    for name in names:
        found |= getattr(os, name, 0)
    return found


def _check_is_regular(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "another kind of file")
        raise OSError(errno.EINVAL, f"expected a regular file, found {kind}", path)


class LocalFiles:
    """The file system of this host, including the remote file systems that are mounted on it."""

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def make_directory(self, path: str) -> None:
        missing = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
        Path(path).mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.sync_directory(str(folder.parent))

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _flags("O_CLOEXEC", "O_BINARY")
        fd = os.open(path, flags, 0o666)
        try:
            for part in parts:
                left = memoryview(part).cast("B")
                while left:
                    left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: str) -> bytes:
        with open(_opened(path), "rb") as file:
            return file.read()

    def map(self, path: str) -> memoryview:
        with open(_opened(path), "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(bytearray())
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def sync_directory(self, path: str) -> None:
        if sys.platform == "win32":  # no program can open a directory there
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


# ---------------------------------------------------------------------- content


_MAX_COUNT = 2**63
"""One more than the largest size that torch can represent. Counts and sizes in a save are below it."""


@contextlib.contextmanager
def malformed_is_corrupt(path: str) -> Iterator[None]:
    """Convert the errors that malformed content causes into a `CheckpointCorrupt` that names the file.

    Use this only around code that interprets the content of the file. A MemoryError is raised unchanged.

    Examples:
        >>> with malformed_is_corrupt("manifest.json"):
        ...     {}["step"]
        Traceback (most recent call last):
        syncline.errors.CheckpointCorrupt: manifest.json is malformed: KeyError: 'step'
    """
    try:
        yield
    except RecursionError:
        raise CheckpointCorrupt(f"{path} is malformed: its values are nested too deep") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointCorrupt(f"{path} is malformed: {type(error).__name__}: {error}") from error


def json_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. The names in an object must be unique, and all numbers must be finite.

    Raises:
        ValueError: the text is not such an object.
        RecursionError: the object is nested too deep.

    Examples:
        >>> json_object(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
        >>> json_object(b'{"a": NaN}')
        Traceback (most recent call last):
        ValueError: expected a finite number, found NaN
    """
    found = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    check(isinstance(found, dict), "a JSON object", found)
    return found  # type: ignore[no-any-return]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            "expected the names in a JSON object to be unique, found "
            f"{next(name for name in names if names.count(name) > 1)!r} twice"
        )
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"expected a finite number, found {text}")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def check(holds: bool, expected: str, found: object) -> None:
    """Raise a ValueError with the text "expected ..., found ..." if `holds` is false."""
    if not holds:
        shown = repr(found)
        raise ValueError(f"expected {expected}, found {shown[:80]}{'...' if len(shown) > 80 else ''}")


def is_count(value: object) -> bool:
    """Return whether `value` is an integer from 0 to 2**63 - 1. True and False do not count as integers.

    Examples:
        >>> [is_count(value) for value in (3, -1, True, 1.0, 2**63)]
        [True, False, False, False, False]
    """
    return type(value) is int and 0 <= value < _MAX_COUNT


def are_counts(value: object) -> bool:
    """Return whether `value` is a list of integers from 0 to 2**63 - 1."""
    return isinstance(value, list) and all(map(is_count, value))


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
"""The keys of the entry that a tensor has in the header of a safetensors file."""


@dataclass(frozen=True)
class StoredFile:
    """The expected content of a tensor file.

    Attributes:
        num_bytes: the size of the file.
        header: the checksum of all bytes before the first tensor.
        tensors: the checksum of each tensor, by name.
    """

    num_bytes: int
    header: str
    tensors: Mapping[str, str]


def write_tensors(
    files: Files, path: str, tensors: Mapping[str, Tensor], checksums: Mapping[str, str] | None = None
) -> StoredFile:
    """Write tensors into a new safetensors file, and return the size and the checksums of the file.

    Args:
        files: the file system.
        path: the path of a new file.
        tensors: contiguous tensors on the CPU, of dtypes that can be stored.
        checksums: the checksums of the tensors, by name. Pass None to compute them here.

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
        wanted: the names of the tensors to verify and return; None means all tensors.

    Raises:
        CheckpointCorrupt: the content differs from the content that was written.
        OSError: the file could not be read.
    """
    path = f"{directory}/{name}"
    content = files.map(path)
    if len(content) != stored.num_bytes:
        raise CheckpointCorrupt(
            f"{path} is damaged: expected {stored.num_bytes} bytes as in the manifest, found {len(content)}"
        )
    head_bytes = 8 + int.from_bytes(content[:8], "little")
    if head_bytes > len(content) or checksum(content[:head_bytes]) != stored.header:
        raise CheckpointCorrupt(f"{path} is damaged: its header does not match the checksum in the manifest")
    with malformed_is_corrupt(path):
        places = _places(bytes(content[8:head_bytes]), len(content) - head_bytes)
        check(places.keys() == stored.tensors.keys(), "the tensors that the manifest lists", [*places])
    tensors = {}
    for key, expected in stored.tensors.items():
        if wanted is not None and key not in wanted:
            continue
        dtype, shape, start, end = places[key]
        memory = content[head_bytes + start : head_bytes + end]
        if checksum(memory) != expected:
            raise CheckpointCorrupt(
                f"{path}: {key} is damaged: its bytes do not match the checksum in the manifest"
            )
        tensors[key] = (
            torch.frombuffer(memory, dtype=dtype).view(shape)
            if end > start
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
    return tensors


def _places(header: bytes, num_bytes: int) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    """Return the dtype, shape, start and end of each tensor, by name, from the header of a file.

    Args:
        header: the header, a JSON object.
        num_bytes: the size of all tensors together.

    Raises:
        ValueError, TypeError, LookupError: `write_tensors` does not write such a header for tensors of this size.
    """
    found = {}
    end = 0
    for name, entry in json_object(header).items():
        is_entry = isinstance(entry, dict) and entry.keys() == _ENTRY
        check(is_entry, f"the entry of {name} to have the keys {sorted(_ENTRY)}", entry)
        dtype, shape, offsets = _BY_NAME[entry["dtype"]], entry["shape"], entry["data_offsets"]
        for numbers in (shape, offsets):
            check(
                are_counts(numbers),
                f"shape and data_offsets of {name} to be lists of integers of at least 0",
                numbers,
            )
        start, end_before = offsets[0], end
        end = start + math.prod(shape) * dtype.itemsize
        is_next = offsets == [end_before, end] and is_count(math.prod(max(1, size) for size in shape))
        check(is_next, f"{name} of shape {shape} to have data_offsets {[end_before, end]}", offsets)
        check(start % dtype.itemsize == 0, f"{name} to begin at a multiple of {dtype.itemsize} bytes", start)
        found[name] = (dtype, shape, start, end)
    check(end == num_bytes, f"the tensors to take {num_bytes} bytes", end)
    return found


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy. The result keeps the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # an address alone does not keep the tensor alive
    return memoryview(memory)


def checksum(memory: bytes | memoryview) -> str:
    """Return the checksum of `memory` as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(memory)
