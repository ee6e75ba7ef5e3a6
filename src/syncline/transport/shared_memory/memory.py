"""Memory that several processes map, and that nobody has to clean up: it has no name.

A memfd lives as long as somebody has it open or mapped. All its pages are there before it is used, so that a lack of
memory is an error here, not a SIGBUS later.

How much memory there still is: of the machine, and under the limits of the control groups this process is in.

Who goes beyond a control group's limit is killed, without a word. A scheduler's limit may be on any group between this
process and the root: all of them are looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from syncline.errors import SynclineError

__all__ = ["SharedMemory", "available_bytes"]


_PROCESS = Path("/proc/self/cgroup")

_MACHINE = Path("/proc/meminfo")

_ROOT = Path("/sys/fs/cgroup")

_PAGES_OF_FILES = ("active_file", "inactive_file")


class _Files(NamedTuple):
    """What one version of control groups calls limit and use, and how the parts of the use begin."""

    limit: str
    used: str
    prefix: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")

_VERSION_2 = _Files("memory.max", "memory.current", "")


def available_bytes() -> int | None:
    """Memory that this process can get without swapping; None where the system does not say.

    Example:
        >>> available_bytes() != 0
        True
    """
    found = [_free_bytes(directory, files) for directory, files in _control_groups()]
    found.append(_free_bytes_of_machine())
    return min((num_bytes for num_bytes in found if num_bytes is not None), default=None)


def _free_bytes_of_machine() -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in _MACHINE.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _control_groups() -> Iterator[tuple[Path, _Files]]:
    """The groups that limit this process's memory, from its own to the root."""
    try:
        lines = _PROCESS.read_text().splitlines()
    except OSError:
        lines = []
    found = {_VERSION_1: "/", _VERSION_2: "/"}  # in a container, the root is its own group
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found[_VERSION_2] = path
        elif "memory" in controllers.split(","):
            found[_VERSION_1] = path
    for files, path in found.items():
        for root in (_ROOT / "memory",) if files is _VERSION_1 else (_ROOT, _ROOT / "unified"):
            own = root / path.lstrip("/")
            for directory in (own, *own.parents):
                yield directory, files
                if directory == root:
                    break


def _free_bytes(directory: Path, files: _Files) -> int | None:
    try:
        free = int((directory / files.limit).read_text()) - int((directory / files.used).read_text())
        parts = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such group here, or "max"
    # Pages of files count as used, but are given up when memory is needed.
    return free + sum(int(parts.get(files.prefix + name, 0)) for name in _PAGES_OF_FILES)


_MADV_POPULATE_WRITE = 23

_MAP_FAILED = ctypes.c_void_p(-1).value

_HUGE_PAGE_BYTES = 2 * 1024 * 1024

_RESERVE_BYTES = 64 * 1024 * 1024
"""What is left for others when memory is short."""


@functools.cache
def _libc() -> Any:
    """Python's own mmap keeps a duplicate of the descriptor open (until 3.13), one for each mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, number, number, number, ctypes.c_int64]
    libc.munmap.restype, libc.munmap.argtypes = number, [pointer, size]
    libc.madvise.restype, libc.madvise.argtypes = number, [pointer, size, number]
    return libc


class SharedMemory:
    """A mapping of a memfd.

    Args:
        file_descriptor: of the memfd; belongs to this object from now on.
        num_bytes: its size.

    Attributes:
        map: the mapped bytes, as an object with the buffer protocol. The memory is unmapped when it is freed.
        address: of the first byte.
    """

    def __init__(self, file_descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._file_descriptor = file_descriptor
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc().mmap(None, num_bytes, protection, mmap.MAP_SHARED, file_descriptor, 0)
        if address == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            self.release_file()
            raise SynclineError(f"cannot map {num_bytes} bytes of shared memory: {reason}")
        self.address: int = address
        self.map: Any = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(self.map, _libc().munmap, address, num_bytes).atexit = False
        if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._advise(mmap.MADV_HUGEPAGE, 0, num_bytes)

    @staticmethod
    def create(num_bytes: int) -> SharedMemory:
        """New memory, all zeros, whose pages are still to be had (see `populate`).

        Raises:
            SynclineError: there is not enough memory.
        """
        _check_room(num_bytes)
        descriptor = os.memfd_create("syncline", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise SynclineError(f"cannot get {num_bytes} bytes of shared memory: {error}") from error
        return SharedMemory(descriptor, num_bytes)

    @property
    def file_descriptor(self) -> int:
        """To be handed to another process."""
        return self._file_descriptor

    def populate(self, from_: int, to: int) -> None:
        """Get the pages between two offsets, on this process's NUMA node.

        Raises:
            SynclineError: there is not enough memory.
        """
        from_ = from_ // mmap.PAGESIZE * mmap.PAGESIZE
        if to <= from_:
            return
        _check_room(to - from_)  # this rank's limit may be another one than rank 0's
        try:
            try:
                self._advise(_MADV_POPULATE_WRITE, from_, to - from_)
            except OSError:  # before Linux 5.14, or no memory: this says which
                os.posix_fallocate(self._file_descriptor, from_, to - from_)
        except OSError as error:
            raise SynclineError(
                f"cannot get {(to - from_) / 1e6:.1f} MB of shared memory: {error.strerror}"
            ) from error

    def _advise(self, advice: int, offset: int, num_bytes: int) -> None:
        if _libc().madvise(self.address + offset, num_bytes, advice):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def release_file(self) -> None:
        """Close the descriptor; the mapping stays."""
        descriptor, self._file_descriptor = self._file_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release_file()


def _check_room(num_bytes: int) -> None:
    available = available_bytes()
    if available is not None and num_bytes + _RESERVE_BYTES > available:
        raise SynclineError(
            f"{num_bytes / 1e6:.1f} MB of shared memory are needed, but only {available / 1e6:.1f} MB of memory "
            "are free"
        )
