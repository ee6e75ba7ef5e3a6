"""Memory that the ranks of a host use again when more ranks join them.

New pages are the larger part of what it costs to lay out gradients anew: the kernel clears each of them. So when ranks
join, the memory of the former gradients is made larger, instead of being freed and made again.

This is allowed only while every process that has mapped the memory takes part in the new group. A rank that was left
behind may still be writing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial

from syncline.transport.shared_memory.memory import Mapping, SharedMemory


def _max_files() -> int:
    """Return how many files may stay open for this: a quarter of those that this process may open at all."""
    import resource  # Windows has no such module

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 4


class SpareMemory:
    """Memory that this process has mapped and could use again."""

    def __init__(self) -> None:
        self.keeps_files = False
        """Whether files stay open while their memory is in use. Without an open file, no other process can map it."""
        self._is_collecting = False
        self._in_use: set[int] = set()
        """The inode numbers of the files of memory that is in use now, and comes here afterwards."""
        self._mappings: dict[int, Mapping] = {}
        """The mappings that are not in use, by the inode number of their file."""
        self._files: dict[int, int] = {}
        """The descriptors of those of these files that this process has created, by inode number."""

    def keep(self, memory: SharedMemory, *, is_first: bool) -> None:
        """Take over the file of `memory`, and its mapping when nobody uses it any more.

        If there are many of them, close the file instead. This memory is then freed, and made anew when ranks join.

        Args:
            memory: the memory.
            is_first: whether this is the first rank of its host, which creates the memory.
        """
        if not self.keeps_files or len(self._in_use) >= _max_files():
            memory.release_file()
            return
        descriptor = memory.take_file()
        inode = os.fstat(descriptor).st_ino
        self._in_use.add(inode)
        if not is_first:
            os.close(descriptor)
        memory.when_free(partial(self._free, inode, descriptor if is_first else None))

    def _free(self, inode: int, descriptor: int | None, mapping: Mapping) -> None:
        self._in_use.discard(inode)
        if self._is_collecting:
            self._mappings[inode] = mapping
            if descriptor is not None:
                self._files[inode] = descriptor
        else:
            mapping.unmap()
            if descriptor is not None:
                os.close(descriptor)

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Let memory that is freed inside of this block be used again inside of it."""
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False
            while self._mappings:
                self._mappings.popitem()[1].unmap()
            while self._files:
                os.close(self._files.popitem()[1])

    def take(self, num_bytes: int) -> SharedMemory | None:
        """Return memory of this size with old contents. Return None if this process has created none."""
        if not self._files:
            return None
        inode = min(self._files, key=lambda one: abs(self._mappings[one].num_bytes - num_bytes))
        return SharedMemory.resized(self._files.pop(inode), self._mappings.pop(inode), num_bytes)

    def mapping_of(self, descriptor: int) -> Mapping | None:
        """Return the mapping of a file, which is then no longer spare. Return None if there is none."""
        return self._mappings.pop(os.fstat(descriptor).st_ino, None) if self._mappings else None


SPARE_MEMORY = SpareMemory()
