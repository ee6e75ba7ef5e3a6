"""A store in a folder of this host, without a server process.

A TCPStore answers only while the process that opened it runs. The processes of a job on one host can agree with each
other without such a process: each key is a file. No operation holds a lock, so a suspended process does not delay the
others.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from syncline._torch.process_groups import Store

_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.001, 0.02


class FolderStore(Store):
    """A store of torch.distributed whose values are files, for processes of one host.

    It has the operations that Syncline needs, and not `add`. torch holds no reference to the Python part of a store, so
    this object must live as long as a `PrefixStore` around it is used.

    Args:
        folder: the folder, which is created if it does not exist.

    Raises:
        OSError: the folder cannot be written, or its file system has no links.
    """

    timeout: timedelta  # a property of the C++ class

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._count = itertools.count()
        self.set("", b"")
        self.compare_set("", b"", b"")

    def set(self, key: str, value: str | bytes) -> None:
        """Write the value of a key."""
        os.replace(self._written(value), self._path(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write the value of a key if it has none; `expected` must be empty. Return the value that it has then."""
        if expected:
            raise NotImplementedError(f"expected an empty value to compare with, got {expected!r}")
        draft = self._written(desired)
        try:
            os.link(draft, self._path(key))
        except FileExistsError:
            return self._path(key).read_bytes()
        finally:
            os.unlink(draft)
        return self._path(key).read_bytes()

    def get(self, key: str) -> bytes:
        """Return the value of a key. Wait for it, at most for the timeout of the store."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys. Wait for them, at most for the timeout of the store."""
        self.wait(keys)
        try:
            return [self._path(key).read_bytes() for key in keys]
        except FileNotFoundError as error:  # it was deleted just now
            raise dist.DistStoreError(f"a key was deleted: {error}") from None

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys have values."""
        return all(map(os.path.exists, map(self._path, keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys have values, at most for `timeout`, or for the timeout of the store."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        pause_seconds = _MIN_PAUSE_SECONDS
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no process has written {', '.join(keys)} in time")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    def deleteKey(self, key: str) -> bool:  # noqa: N802  (the name by which torch calls it)
        """Delete the value of a key. Return whether it had one."""
        with contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()
            return True
        return False

    delete_key = deleteKey

    def clone(self) -> FolderStore:
        """Return this store: it has no connection."""
        return self

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def _written(self, value: str | bytes) -> Path:
        """Write a value to a file of its own, and return the path."""
        draft = self._folder / f"{os.getpid()}-{threading.get_ident()}-{next(self._count)}"
        draft.write_bytes(value.encode() if isinstance(value, str) else value)
        return draft
