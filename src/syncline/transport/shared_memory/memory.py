"""Memory that several processes map, and that nobody has to clean up: it has no name.

A memfd lives as long as somebody has it open or mapped. All its pages are there before it is used, so that a lack of
memory is an error here, not a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

from syncline.errors import SynclineError
from syncline.transport.shared_memory.room import available_bytes

__all__ = ["SharedMemory"]

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
