"""A file system in memory whose machine may crash: what was not synced may then be lost, torn, or there."""

from __future__ import annotations

import copy
import errno
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syncline.checkpoint.files import Files


class Crash(BaseException):
    """The machine is gone; nobody catches that."""


@dataclass
class _File:
    content: bytes = b""
    synced: bytes | None = None


@dataclass
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    changes: list[dict[str, _File | _Directory | None]] = field(default_factory=list)
    """Since it was synced, in order; each is carried out as a whole or not at all."""
    synced: dict[str, _File | _Directory] = field(default_factory=dict)

    def change_all(self, what: dict[str, _File | _Directory | None]) -> None:
        self.changes.append(what)
        _apply(self.entries, what)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.entries), []


def _apply(entries: dict[str, _File | _Directory], what: dict[str, _File | _Directory | None]) -> None:
    for name, node in what.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class FaultyFiles(Files):
    """`Files` that crash before the `crash_at`-th thing that is done to them, and run full at `full_at`."""

    def __init__(self, *, crash_at: int | None = None, full_at: int | None = None) -> None:
        self._root = _Directory()
        self.crash_at = crash_at
        self.full_at = full_at
        self.num_done = 0

    # ------------------------------------------------------------------ Files

    def names(self, directory: str) -> list[str]:
        node = self._find(directory)
        return sorted(node.entries) if isinstance(node, _Directory) else []

    def make_directory(self, path: str) -> None:
        at = self._root
        for name in path.strip("/").split("/"):
            if name not in at.entries:
                self._do()
                at.change_all({name: _Directory()})
                self._do()
                at.sync()
            at = self._directory(at.entries[name])

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        parent, name = self._parent(path)
        if name in parent.entries:
            raise FileExistsError(path)
        self._do()
        file = _File()
        parent.change_all({name: file})
        for part in parts:
            self._do(writes=True)
            file.content += bytes(part)
        self._do()
        file.synced = file.content

    def read(self, path: str) -> bytes:
        return self._file(path).content

    def map(self, path: str) -> memoryview:
        return memoryview(bytearray(self._file(path).content))

    def rename(self, source: str, target: str) -> None:
        (here, old), (there, new) = self._parent(source), self._parent(target)
        assert here is there, "one directory is enough for us"
        if old not in here.entries:
            raise FileNotFoundError(source)
        if new in here.entries:
            raise FileExistsError(target)
        self._do()
        here.change_all({old: None, new: here.entries[old]})

    def sync_directory(self, path: str) -> None:
        self._do()
        self._directory(self._find(path)).sync()

    def remove(self, path: str) -> None:
        node = self._find(path)
        if node is None:
            return
        if isinstance(node, _Directory):
            for name in list(node.entries):
                self.remove(f"{path}/{name}")
        self._do()
        parent, name = self._parent(path)
        parent.change_all({name: None})

    # ------------------------------------------------------------------ what befalls them

    def after_crash(self, seed: int) -> FaultyFiles:
        """What the machine finds when it is up again."""
        rng = random.Random(seed)
        after = FaultyFiles()
        after._root = _as_found(self._root, rng, {})
        return after

    def paths(self, directory: str = "") -> list[str]:
        """All files."""
        found = []
        for name in self.names(directory):
            path = f"{directory}/{name}".lstrip("/")
            found += self.paths(path) if isinstance(self._find(path), _Directory) else [path]
        return found

    def damage(self, path: str, at: int, mask: int) -> None:
        """Flip bits of one byte."""
        file = self._file(path)
        content = bytearray(file.content)
        content[at] ^= mask
        file.content = file.synced = bytes(content)

    def cut(self, path: str, length: int) -> None:
        """Keep the beginning alone."""
        file = self._file(path)
        file.content = file.synced = file.content[:length]

    def copy(self) -> FaultyFiles:
        return copy.deepcopy(self)

    # ------------------------------------------------------------------ inside

    def _do(self, *, writes: bool = False) -> None:
        if self.num_done == self.crash_at:
            raise Crash
        self.num_done += 1
        if writes and self.full_at is not None and self.num_done > self.full_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _find(self, path: str) -> _File | _Directory | None:
        at: _File | _Directory = self._root
        for name in filter(None, path.split("/")):
            if not isinstance(at, _Directory) or name not in at.entries:
                return None
            at = at.entries[name]
        return at

    def _parent(self, path: str) -> tuple[_Directory, str]:
        folder, _, name = path.rpartition("/")
        return self._directory(self._find(folder)), name

    def _file(self, path: str) -> _File:
        found = self._find(path)
        if not isinstance(found, _File):
            raise FileNotFoundError(path)
        return found

    @staticmethod
    def _directory(node: _File | _Directory | None) -> _Directory:
        if not isinstance(node, _Directory):
            raise FileNotFoundError("not a directory")
        return node


class Meanwhile:
    """`Files` beside whose `at`-th operation, counted from 0, another program does something to the same files."""

    def __init__(self, files: Files, at: int, happens: Callable[[], object]) -> None:
        self._files, self._left, self._happens = files, at, happens

    @property
    def has_happened(self) -> bool:
        return self._left < 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self._left == 0:
                self._happens()
            self._left -= 1
            return getattr(self._files, name)(*args)

        return call


class WrittenBefore(FaultyFiles):
    """In memory, beside what lies in a folder as the only save."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.make_directory("/runs/one/save-000001-step-12")
        for path in sorted(folder.iterdir()):
            self.write(f"/runs/one/save-000001-step-12/{path.name}", [path.read_bytes()])


def _as_found(directory: _Directory, rng: random.Random, seen: dict[int, _File | _Directory]) -> _Directory:
    entries = dict(directory.synced)
    for what in directory.changes:
        if rng.random() < 0.5:
            _apply(entries, what)
    found = _Directory()
    seen[id(directory)] = found
    for name, node in entries.items():
        if id(node) not in seen:
            if isinstance(node, _Directory):
                _as_found(node, rng, seen)
            else:
                content = _content_as_found(node, rng)
                seen[id(node)] = _File(content, content)
        found.entries[name] = seen[id(node)]
    found.sync()
    return found


def _content_as_found(file: _File, rng: random.Random) -> bytes:
    if file.synced is not None:
        return file.synced
    written = file.content[: rng.randint(0, len(file.content))]
    how = rng.random()
    if how < 0.3:  # the length is known, the content is not
        return written + bytes(len(file.content) - len(written))
    if how < 0.5:
        return written + rng.randbytes(len(file.content) - len(written))
    return written
