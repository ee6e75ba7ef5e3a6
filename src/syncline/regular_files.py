"""The functions that open files which other programs may have written. No such file blocks for ever.

A path can lead to a FIFO, a device, or a file of the kernel without an end. Each of these is an error.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | os.PathLike[str]) -> tuple[BinaryIO, int]:
    """Open a regular file for reading, and return it with its size in bytes. A link to a regular file is followed.

    Other kinds of files are refused, because reading a FIFO may block for ever. Read no more than the size: files of
    the kernel, such as /proc/kmsg, have size 0 and may block as well.

    Raises:
        OSError: the path is not a regular file, or the file cannot be opened.
    """
    # First, because opening a device may change the state of the device.
    _check_is_regular(os.stat(path), path)
    flags = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
    fd = os.open(path, os.O_RDONLY | sum(flags))  # those that this system has
    try:
        found = os.fstat(fd)
        _check_is_regular(found, path)
    except OSError:
        os.close(fd)
        raise
    return open(fd, "rb"), found.st_size


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the path is not a regular file, or the file cannot be read.
    """
    file, size = open_regular(path)
    with file:
        return file.read(size) if size else b""


def _check_is_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "another kind of file")
        raise OSError(errno.EINVAL, f"expected a regular file, found {kind}", os.fspath(path))
