"""Memory that several processes map, and that nobody has to clean up: it has no name.

A memfd lives as long as somebody has it open or mapped. All its pages are there before it is used, so that a lack of
memory is an error here, not a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from syncline.errors import SynclineError

__all__ = ["SharedMemory", "available_bytes"]

_MADV_POPULATE_WRITE = 23
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_RESERVE_BYTES = 64 * 1024 * 1024
"""What is left for others when memory is short."""
_CONTROL_GROUPS = (
    (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory.current",
        "/sys/fs/cgroup/memory.stat",
        "",
    ),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_",
    ),
)
"""Limit, use and its parts, by version of control groups, and how the parts' names begin."""
_PAGES_OF_FILES = ("active_file", "inactive_file")


class SharedMemory:
    """A mapping of a memfd; unmapped when the last who uses it is gone.

    Args:
        file_descriptor: of the memfd; belongs to this object from now on.
        num_bytes: its size.
    """

    def __init__(self, file_descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._file_descriptor = file_descriptor
        try:
            self.map = mmap.mmap(file_descriptor, num_bytes)
        except (OSError, ValueError) as error:
            self.release_file()
            raise SynclineError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
        if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @staticmethod
    def create(num_bytes: int) -> SharedMemory:
        """New memory, all zeros, whose pages are still to be had (see `populate`).

        Raises:
            SynclineError: there is not enough memory.
        """
        available = available_bytes()
        if available is not None and num_bytes + _RESERVE_BYTES > available:
            raise SynclineError(
                f"{num_bytes / 1e6:.1f} MB of shared memory are needed, but only {available / 1e6:.1f} MB of memory "
                "are free"
            )
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
        try:
            try:
                self.map.madvise(_MADV_POPULATE_WRITE, from_, to - from_)
            except (OSError, ValueError):  # before Linux 5.14, or no memory: this says which
                os.posix_fallocate(self._file_descriptor, from_, to - from_)
        except OSError as error:
            raise SynclineError(
                f"cannot get {(to - from_) / 1e6:.1f} MB of shared memory: {error.strerror}"
            ) from error

    def release_file(self) -> None:
        """Close the descriptor; the mapping stays."""
        descriptor, self._file_descriptor = self._file_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release_file()


def available_bytes() -> int | None:
    """Memory that can be had without swapping, of the machine and of this process's control group; None: unknown."""
    found = []
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    for limit, used, statistics, prefix in _CONTROL_GROUPS:
        try:
            with open(limit) as limit_file, open(used) as used_file:
                free = int(limit_file.read()) - int(used_file.read())
            with open(statistics) as file:
                pages = dict(line.split() for line in file)
        except (OSError, ValueError):
            continue  # no such version of control groups, or "max"
        # Pages of files count as used, but are given up when memory is needed.
        found.append(free + sum(int(pages.get(f"{prefix}{name}", 0)) for name in _PAGES_OF_FILES))
    return min(found, default=None)
