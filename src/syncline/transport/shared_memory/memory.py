"""Shared memory that several processes map, and a check of how much memory is available.

The shared memory is a memfd, a file without a name. The file exists as long as a process has it open or mapped, so it
never has to be cleaned up. All its pages are allocated before use. So a lack of memory raises an error here, instead of
a SIGBUS later.

The available memory depends on the machine, and on the limits of the control groups (cgroups) of this process. The
kernel kills a process that exceeds a limit, without a message. A scheduler can set a limit on any control group between
this process and the root, so all of these groups are checked.
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

_PROCESS = Path("/proc/self/cgroup")

_MACHINE = Path("/proc/meminfo")

_ROOT = Path("/sys/fs/cgroup")

_PAGES_OF_FILES = ("active_file", "inactive_file")


class _Files(NamedTuple):
    """The names of the files and fields in which one version of Linux control groups reports memory."""

    limit: str
    """The name of the file that contains the memory limit."""
    used: str
    """The name of the file that contains the number of used bytes."""
    prefix: str
    """The prefix of the field names in the file memory.stat."""


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")

_VERSION_2 = _Files("memory.max", "memory.current", "")


def available_bytes() -> int | None:
    """Return the number of bytes that this process can allocate without swapping.

    Returns None if the system does not report this number.

    Examples:
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
    """Yield the directory and file names of every control group that could limit the memory of this process.

    These are the process's own group and all groups above that group, in both versions of Linux control groups.
    """
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
        return None  # there is no such group, or its limit is "max"
    # Pages of files count as used, but the kernel frees them when memory is needed.
    return free + sum(int(parts.get(files.prefix + name, 0)) for name in _PAGES_OF_FILES)


_MADV_POPULATE_WRITE = 23

_MAP_FAILED = ctypes.c_void_p(-1).value

_HUGE_PAGE_BYTES = 2 * 1024 * 1024

_RESERVE_BYTES = 64 * 1024 * 1024
"""The number of available bytes that shared memory must leave free for other uses."""

_UNCHECKED_BYTES = _RESERVE_BYTES // 16
"""Less memory than this is allocated without a look at the available memory, which takes milliseconds."""


@functools.cache
def _libc() -> Any:
    """Load the C library, and declare the types of mmap, munmap and madvise.

    Python's own mmap module is no alternative: before Python 3.13, each mapping keeps a duplicate of the descriptor.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, number, number, number, ctypes.c_int64]
    libc.munmap.restype, libc.munmap.argtypes = number, [pointer, size]
    libc.madvise.restype, libc.madvise.argtypes = number, [pointer, size, number]
    return libc


class SharedMemory:
    """A mapping of a memfd into the memory of this process.

    Args:
        file_descriptor: the descriptor of the memfd. The new object owns the descriptor, and closes it.
        num_bytes: the size of the memfd.

    Attributes:
        map: the mapped bytes, as an object with the buffer protocol. The memory is unmapped when `map` is freed.
        address: the address of the first mapped byte.
    """

    def __init__(self, file_descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.file_descriptor = file_descriptor
        """The descriptor of the memfd, which can be sent to another process. It is -1 once it is closed."""
        self._is_own = False
        """Whether this process has created the memfd, and has checked that there is enough memory."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc().mmap(None, num_bytes, protection, mmap.MAP_SHARED, file_descriptor, 0)
        if address == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            self.release_file()
            raise SynclineError(
                f"this process could not map {num_bytes / 1e6:.1f} MB of shared memory: {reason}"
            )
        self.address: int = address
        self.map: Any = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(self.map, _libc().munmap, address, num_bytes).atexit = False
        if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._advise(mmap.MADV_HUGEPAGE, 0, num_bytes)

    @staticmethod
    def create(num_bytes: int) -> SharedMemory:
        """Create a memfd of zeros, and map it. Its pages are allocated later, by `populate`.

        Raises:
            SynclineError: there is not enough memory.
        """
        _check_room(num_bytes)
        descriptor = None
        try:
            descriptor = os.memfd_create("syncline", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, num_bytes)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            raise SynclineError(
                f"this process could not create {num_bytes / 1e6:.1f} MB of shared memory: {error}"
            ) from error
        memory = SharedMemory(descriptor, num_bytes)
        memory._is_own = True
        return memory

    def populate(self, from_: int, to: int) -> None:
        """Allocate the pages between two offsets in bytes, on the NUMA node of this process.

        Raises:
            SynclineError: there is not enough memory.
        """
        from_ = from_ // mmap.PAGESIZE * mmap.PAGESIZE
        if to <= from_:
            return
        if not self._is_own:  # this rank's limit may differ from rank 0's
            _check_room(to - from_)
        try:
            try:
                self._advise(_MADV_POPULATE_WRITE, from_, to - from_)
            except (
                OSError
            ):  # either Linux is older than 5.14, or memory is short: `posix_fallocate` raises only then
                os.posix_fallocate(self.file_descriptor, from_, to - from_)
        except OSError as error:
            raise SynclineError(
                f"this process could not allocate {(to - from_) / 1e6:.1f} MB of shared memory: {error.strerror}"
            ) from error

    def _advise(self, advice: int, offset: int, num_bytes: int) -> None:
        if _libc().madvise(self.address + offset, num_bytes, advice):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def release_file(self) -> None:
        """Close the descriptor of the memfd. The mapping remains usable."""
        descriptor, self.file_descriptor = self.file_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release_file()


def _check_room(num_bytes: int) -> None:
    if num_bytes < _UNCHECKED_BYTES:
        return
    available = available_bytes()
    if available is not None and num_bytes + _RESERVE_BYTES > available:
        raise SynclineError(
            f"{num_bytes / 1e6:.1f} MB of shared memory are needed, but only {available / 1e6:.1f} MB of memory are "
            f"available to this process, of which {_RESERVE_BYTES / 1e6:.1f} MB must stay free"
        )
