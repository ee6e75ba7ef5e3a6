"""The file system operations that checkpoints need, and a durable implementation of them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

__all__ = ["Files", "LocalFiles"]


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
