"""The file system operations that checkpoints need, durable, and checks that a file's content is well formed.

A matching checksum only proves that a file is unchanged, not that it is well formed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from syncline.errors import CheckpointCorrupt

__all__ = ["Files", "LocalFiles", "check", "is_count", "json_object", "malformed_is_corrupt"]


class Files(Protocol):
    """A file system. Paths are absolute or relative strings with "/"; failures raise OSError.

    A written file is certain to survive a crash of the machine only after both the file and its directory were synced.
    A rename is certain only after its directory was synced.
    """

    def names(self, directory: str) -> list[str]:
        """Return the names of the entries of a directory; none if it does not exist."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents; it may exist already."""

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file, part by part, and sync it."""

    def read(self, path: str) -> bytes:
        """Return the content of a file."""

    def map(self, path: str) -> memoryview:
        """Map a file into memory and return its content; writes to this memory do not change the file."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a directory atomically; the new name must not exist yet."""

    def sync_directory(self, path: str) -> None:
        """Sync a directory, so that its entries are durable."""

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with its content; it may be gone already."""


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def _opened(path: str) -> int:
    """Open a regular file for reading; refuse anything else, because opening or reading a FIFO may block forever.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    _check_is_regular(os.stat(path), path)  # before opening it, because opening a device may change its state
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_is_regular(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_is_regular(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"expected a regular file, found {kind}", path)


class LocalFiles:
    """The file system of this host, including mounted remote ones."""

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
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
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
"""torch's largest size plus one; steps are stored in as many bits."""


@contextlib.contextmanager
def malformed_is_corrupt(path: str) -> Iterator[None]:
    """Turn errors about malformed content into a `CheckpointCorrupt` that names the file.

    Use it only around code that interprets the content of the file. A MemoryError is passed on.

    Example:
        >>> with malformed_is_corrupt("manifest.json"):
        ...     {}["step"]
        Traceback (most recent call last):
        syncline.errors.CheckpointCorrupt: manifest.json is malformed: KeyError: 'step'
    """
    try:
        yield
    except RecursionError:
        raise CheckpointCorrupt(f"{path} is malformed: it is nested too deep") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointCorrupt(f"{path} is malformed: {type(error).__name__}: {error}") from error


def json_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8, with unique names and finite numbers only.

    Raises:
        ValueError: it is not such an object.
        RecursionError: it is nested too deep.

    Example:
        >>> json_object(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
        >>> json_object(b'{"a": NaN}')
        Traceback (most recent call last):
        ValueError: expected a finite number, found NaN
    """
    found = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    check(isinstance(found, dict), "expected an object", found)
    return found  # type: ignore[no-any-return]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"expected a finite number, found {text}")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def check(holds: bool, expected: str, found: object) -> None:
    """Raise a ValueError that names the expected and the found value, unless `holds` is true."""
    if not holds:
        shown = repr(found)
        raise ValueError(f"{expected}, found {shown[:80]}{'...' if len(shown) > 80 else ''}")


def is_count(value: object) -> bool:
    """Return whether `value` is an integer from 0 to torch's largest size; True and False are not.

    Example:
        >>> [is_count(value) for value in (3, -1, True, 1.0, 2**63)]
        [True, False, False, False, False]
    """
    return type(value) is int and 0 <= value < _MAX_COUNT
