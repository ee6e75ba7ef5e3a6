"""The few things that a checkpoint asks of a file system, and how they are made durable."""

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
    """Paths are absolute or relative texts with "/"; errors are OSError's.

    What was written is certain to be there after a crash of the machine only if it was synced, and so was the directory
    that names it; a rename, too, counts from the sync of its directory on.
    """

    def names(self, directory: str) -> list[str]:
        """What is in a directory; nothing where there is none."""

    def make_directory(self, path: str) -> None:
        """Make one, and those that it is in; it may be there already."""

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file, part by part, and sync it."""

    def read(self, path: str) -> bytes:
        """All of a file."""

    def map(self, path: str) -> memoryview:
        """All of a file, read where it is used; writing to it does not change the file."""

    def rename(self, source: str, target: str) -> None:
        """Give a file or a directory another name, in one stroke; nothing has that name yet."""

    def sync_directory(self, path: str) -> None:
        """Make sure of the names in a directory."""

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; it may be gone already."""


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def _opened(path: str) -> int:
    """Open a regular file to read it; anything else is refused, for whoever opens or reads a FIFO may wait for ever.

    Raises:
        OSError: it is none, or cannot be opened.
    """
    _check_is_regular(os.stat(path), path)  # to open a device may be to change it
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
    """Those of this host, or of a file system that is mounted here."""

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
