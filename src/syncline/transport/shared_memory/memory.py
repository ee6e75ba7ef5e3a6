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
from syncline.transport.shared_memory.room import available_bytes

__all__ = ["SharedMemory"]

_MADV_POPULATE_WRITE = 23
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_RESERVE_BYTES = 64 * 1024 * 1024
"""What is left for others when memory is short."""


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


def _check_room(num_bytes: int) -> None:
    available = available_bytes()
    if available is not None and num_bytes + _RESERVE_BYTES > available:
        raise SynclineError(
            f"{num_bytes / 1e6:.1f} MB of shared memory are needed, but only {available / 1e6:.1f} MB of memory "
            "are free"
        )
