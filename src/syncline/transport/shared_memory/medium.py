"""Notices of the ranks in shared memory: no connection to a store, and no requests to it.

Each rank has a slot for each kind of its notices. Only this rank writes to it. A reader compares a checksum, because
the writer may write at the same time, or may have been killed while it wrote.

The failure of the group is the text with which the native core aborts the group. The core keeps the first one.
"""

from __future__ import annotations

import struct
import zlib

from syncline.transport.shared_memory.engine import Engine

_SLOT_BYTES = {"process": 512, "place": 15 * 512}

_RANK_BYTES = sum(_SLOT_BYTES.values())

_HEADER = struct.Struct("<II")
"""The layout of the beginning of a slot: the length of the text in bytes, and its checksum."""

_COMPRESSED = b"\x78"
"""The first byte of what zlib compresses. The texts are JSON objects, which begin with another byte."""

_MAX_READS = 5
"""The number of times that a reader reads a slot that is being written."""


class MemoryMedium:
    """A medium of notices (see `liveness/notices.py`) in memory that all ranks of a group have mapped.

    Args:
        engine: this rank's handle of the group.
        begin: where the slots begin in the memory of the group. They are zeros at first.
    """

    def __init__(self, engine: Engine, begin: int) -> None:
        self._engine = engine
        self._memory = engine.memory
        self._begin = begin

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the size of the slots of a group of `size` ranks."""
        return size * _RANK_BYTES

    def write(self, name: str, text: str) -> None:
        """Replace the text of this rank. Compress the text if it is too long. If that is not enough, keep no text."""
        kind = name.partition("/")[0]
        data = text.encode()
        room = _SLOT_BYTES[kind] - _HEADER.size
        if len(data) > room:  # the place of a rank that has hundreds of lanes
            data = zlib.compress(data, 1)
        if len(data) > room:
            data = b""
        begin = self._begin_of(kind, self._engine.rank)
        written = _HEADER.pack(len(data), zlib.crc32(data)) + data
        self._memory.map[begin : begin + len(written)] = written

    def write_first(self, name: str, text: str) -> str | None:
        """Abort the group by a text, unless it has been aborted before. Return the text by which it was aborted."""
        self._engine.abort(text)
        return self._engine.abort_text()

    def read(self, name: str) -> str | None:
        """Return the text by which the group was aborted; None if it was not."""
        return self._engine.abort_text()

    def read_all(self, kind: str) -> dict[int, str]:
        """Return the texts of all ranks of this kind, by rank. Missing and unreadable texts are left out."""
        found = {}
        for rank in range(self._engine.size):
            text = self._read(kind, rank)
            if text:
                found[rank] = text
        return found

    def _read(self, kind: str, rank: int) -> str:
        begin = self._begin_of(kind, rank)
        for _ in range(_MAX_READS):
            length, checksum = _HEADER.unpack(self._memory.map[begin : begin + _HEADER.size])
            if length > _SLOT_BYTES[kind] - _HEADER.size:
                break
            data: bytes = self._memory.map[begin + _HEADER.size : begin + _HEADER.size + length]
            if zlib.crc32(data) == checksum:
                whole = zlib.decompress(data) if data.startswith(_COMPRESSED) else data
                return whole.decode(errors="replace")
        return ""

    def _begin_of(self, kind: str, rank: int) -> int:
        return self._begin + rank * _RANK_BYTES + (0 if kind == "process" else _SLOT_BYTES["process"])
