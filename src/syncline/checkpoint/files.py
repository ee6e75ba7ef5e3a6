"""The files of a checkpoint: durable writes, and safetensors files with checksums that cover every byte.

Tensors are written directly from their memory, and read as mapped memory, so nothing is copied. The checksum is the
128-bit XXH3. It takes little time compared with a disk, and it is long enough to distinguish tensors. Content whose
checksum matches counts as written by Syncline, and its form is not checked again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from syncline.errors import CheckpointCorrupt
from syncline.regular_files import open_regular, read_regular


class Files:
    """The file system of this host, including the remote file systems that are mounted on it.

    An object with the same methods can replace it. A path is an absolute or relative string with "/". A failure raises
    OSError. A written file survives a crash of the machine only if both the file and its directory were synced. A
    rename survives a crash only if the directory was synced.
    """

    def names(self, directory: str) -> list[str]:
        """Return the names of the entries of a directory, or an empty list if the directory does not exist."""
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents. Do nothing if the directory exists."""
        missing = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
        Path(path).mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.sync_directory(str(folder.parent))

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file, part by part, and sync the file."""
        with open(path, "xb", buffering=0) as file:
            for part in parts:
                left = memoryview(part).cast("B")
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return read_regular(path)

    def map(self, path: str) -> memoryview:
        """Map a file into memory, and return its content. Writing to this memory does not change the file."""
        file, size = open_regular(path)
        with file:
            return memoryview(
                mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else bytearray()
            )

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a directory atomically; the new name must not exist yet."""
        os.rename(source, target)

    def sync_directory(self, path: str) -> None:
        """Sync a directory, so that its entries are durable."""
        if sys.platform == "win32":  # no program can open a directory there
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with its content. If the path does not exist, do nothing."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


# ---------------------------------------------------------------------- content


@contextlib.contextmanager
def malformed_is_corrupt(path: str) -> Iterator[None]:
    """Convert the errors that malformed content causes into a `CheckpointCorrupt` that names the file.

    Another version of Syncline may have written such content. Use this only around code that interprets the content.

    Examples:
        >>> with malformed_is_corrupt("manifest.json"):
        ...     {}["step"]
        Traceback (most recent call last):
        syncline.errors.CheckpointCorrupt: manifest.json is malformed: KeyError: 'step'
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} is malformed: {type(error).__name__}: {error}") from error


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


def map_stored(files: Files, path: str, stored: StoredFile) -> memoryview:
    """Map a tensor file into memory, and check its size.

    Raises:
        CheckpointCorrupt: the file is missing, or it has another size than the file that was written.
        OSError: the file could not be read.
    """
    try:
        content = files.map(path)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing, so the save is not complete") from None
    if len(content) != stored.num_bytes:
        raise CheckpointCorrupt(
            f"{path} is damaged: expected {stored.num_bytes} bytes as in the manifest, found {len(content)}"
        )
    return content


def read_files(
    files: Files, directory: str, stored: Mapping[str, StoredFile], wanted: Mapping[str, Collection[str]]
) -> dict[str, dict[str, Tensor]]:
    """Verify and return tensors of several files, by the name of the file. They are mapped into memory.

    Args:
        files: the file system.
        directory: the directory with the files.
        stored: the expected content of each file.
        wanted: the names of the tensors to verify and return, by the name of the file. A file of which no tensor is
            wanted is not read.

    Raises:
        CheckpointCorrupt: the content of a file differs from the content that was written.
        OSError: a file could not be read.
    """
    paths = {name: f"{directory}/{name}" for name, keys in wanted.items() if keys}
    # All files are mapped before any is verified, which can take long: another run may remove the save meanwhile.
    mapped = {name: map_stored(files, path, stored[name]) for name, path in paths.items()}
    return {
        name: read_tensors(mapped[name], path, stored[name], wanted[name]) for name, path in paths.items()
    }


def read_tensors(
    content: memoryview, path: str, stored: StoredFile, wanted: Collection[str]
) -> dict[str, Tensor]:
    """Verify and return the tensors of a file. They are in the memory of `content`.

    Args:
        content: the content of the file, from `map_stored`.
        path: the path of the file, for messages.
        stored: the expected content.
        wanted: the names of the tensors to verify and return. Other names are ignored.

    Raises:
        CheckpointCorrupt: the content differs from the content that was written.
    """
    head_bytes = 8 + int.from_bytes(content[:8], "little")
    if checksum(content[:head_bytes]) != stored.header:
        raise CheckpointCorrupt(f"{path} is damaged: its header does not match the checksum in the manifest")
    with malformed_is_corrupt(path):
        places = {
            name: (_BY_NAME[entry["dtype"]], entry["shape"], *entry["data_offsets"])
            for name, entry in json.loads(bytes(content[8:head_bytes])).items()
        }
    tensors = {}
    for key, expected in stored.tensors.items():
        if key not in wanted:
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
