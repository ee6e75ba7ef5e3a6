"""The directory in which saves stand beside each other: what is committed, what may go.

Whether the directory of saves is what it has to be: one that all ranks see, and that can be written.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Collection
from typing import NamedTuple

from syncline.checkpoint.files import Files
from syncline.checkpoint.on_all_ranks import Refused, everywhere, on_rank_0
from syncline.checkpoint.snapshot import directory_name, parse_name, read_manifest
from syncline.differences import describe_ranks, ranks_with
from syncline.errors import CheckpointCorrupt, SynclineError
from syncline.transport.base import Transport

__all__ = ["Save", "Shelf", "check_readable", "check_writable", "checked_path"]


_UNFINISHED = "unfinished-"


class Save(NamedTuple):
    """A save that bears its name; what is in it may be damaged all the same."""

    number: int
    step: int

    @property
    def name(self) -> str:
        return directory_name(self.number, self.step)


class Shelf:
    """Saves in one directory, of which the newest stay.

    A save is written into the directory that `begin` gives, and counts from `commit` on: it gets its name by one
    rename, after everything in it was synced. So at any moment, and after a crash at any moment, what bears a name is
    complete.
    What is to go loses its name first.

    Args:
        files: the file system.
        path: the directory; made when something is saved.
        keep: how many saves stay.
    """

    def __init__(self, files: Files, path: str, keep: int) -> None:
        self._files = files
        self._path = path
        self._keep = keep

    def saves(self) -> list[Save]:
        """The committed ones, newest first: in the order of saving, whatever their steps are."""
        found = [Save(*parsed) for name in self._files.names(self._path) if (parsed := parse_name(name))]
        return sorted(found, reverse=True)

    def identified(self) -> list[tuple[Save, Save]]:
        """The committed ones, each with what its manifest says it is, which counts: newest first by that.

        A directory may have been given another name since. What is damaged is what its name says.
        """
        found = [(save, self._identity(save)) for save in self.saves()]
        return sorted(found, key=lambda one: (one[1].number, one[0]), reverse=True)

    def _identity(self, save: Save) -> Save:
        try:
            manifest = read_manifest(self._files, self.path_of(save))
        except (OSError, CheckpointCorrupt):
            return save
        return Save(manifest.number or save.number, manifest.step)

    def path_of(self, save: Save) -> str:
        """The directory of a save."""
        return f"{self._path}/{save.name}"

    def begin(self, step: int, after: int = 0) -> tuple[Save, str]:
        """The next save, and a new, empty directory for it. What crashes have left unfinished is removed.

        Args:
            step: of the state.
            after: the number of a save that is known to have been made, whatever its directory is called now.
        """
        self._files.make_directory(self._path)
        for name in self._files.names(self._path):
            if name.startswith(_UNFINISHED):
                self._files.remove(f"{self._path}/{name}")
        save = Save(max([after, *(save.number for save in self.saves())]) + 1, step)
        path = self._unfinished(save)
        self._files.make_directory(path)
        return save, path

    def commit(self, save: Save) -> None:
        """Give a save its name; everything in its directory was written and synced."""
        self._files.sync_directory(self._unfinished(save))
        self._files.rename(self._unfinished(save), self.path_of(save))
        self._files.sync_directory(self._path)

    def probe_path(self, token: str) -> str:
        """Of a file that says whether all see the same directory; removed by the next save, if not before."""
        return f"{self._path}/{_UNFINISHED}probe-{token}"

    def abandon(self, save: Save) -> None:
        """Remove what was written of a save that is not to be."""
        self._files.remove(self._unfinished(save))

    def prune(self, damaged: Collection[Save] = ()) -> list[Save]:
        """Remove what is older than the newest saves that stay, by their manifests, and return what was removed.

        Args:
            damaged: those known to be of no use: they do not count as saves that stay.
        """
        saves = [save for save, _ in self.identified()]
        sound = [save for save in saves if save not in damaged]
        gone = saves[saves.index(sound[self._keep - 1]) + 1 :] if len(sound) > self._keep else []
        for save in gone:
            self._files.rename(self.path_of(save), self._unfinished(save))
        if gone:
            self._files.sync_directory(self._path)
        for save in gone:
            self._files.remove(self._unfinished(save))
        return gone

    def _unfinished(self, save: Save) -> str:
        return f"{self._path}/{_UNFINISHED}{save.name}"


_TITLE = "sl.Checkpointer"


def checked_path(directory: object) -> str:
    """The absolute path of a directory.

    Raises:
        TypeError, ValueError: it is no path.
    """
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str):
        raise TypeError(f"expected directory to be a path, a str or an os.PathLike of one, got {directory!r}")
    if not path:
        raise ValueError("expected directory to be a path, got '' ('.' is where the program was started)")
    return os.path.abspath(path)


def check_writable(lane: Transport, files: Files, shelf: Shelf, path: str) -> None:
    """Raise unless all ranks see the same directory, and rank 0 can write there; it is made. A collective call.

    Raises:
        SynclineError: the same on every rank.
    """

    def write() -> str:
        files.make_directory(path)
        probe = shelf.probe_path(uuid.uuid4().hex)
        files.write(probe, [b"seen by all ranks?"])
        return probe

    try:
        probe = on_rank_0(lane, write)
    except Refused as refused:
        raise SynclineError(f"{_TITLE}: {path} cannot be written: {refused}") from None
    name = probe.rpartition("/")[2]
    seen = everywhere(lane, lambda: (socket.gethostname(), path, name in files.names(path)))
    if lane.rank == 0:
        with contextlib.suppress(OSError):
            files.remove(probe)
    blind = {rank: f"{where} on {host}" for rank, (host, where, is_seen) in enumerate(seen) if not is_seen}
    if blind:
        host, where, _ = seen[0]
        raise SynclineError(
            f"{_TITLE}: what rank 0 wrote into {where} on {host} is not in {_by_place(blind)}. Give the same directory "
            "on all ranks, on a file system that all hosts have mounted at the same place"
        )


def check_readable(lane: Transport, shelf: Shelf, path: str) -> None:
    """Raise unless all ranks see saves there: who only reads waits for nothing to be saved. A collective call.

    Raises:
        SynclineError: the same on every rank.
    """
    try:
        seen = everywhere(lane, lambda: (socket.gethostname(), bool(shelf.saves())))
    except Refused as refused:
        raise SynclineError(f"{_TITLE}: {path} cannot be read: {refused}") from None
    blind = {rank: host for rank, (host, has_saves) in enumerate(seen) if not has_saves}
    if blind:
        raise SynclineError(
            f"{_TITLE}: expected saves to load in {path}, found none on {_by_place(blind)}. Is it another directory, "
            "or not mounted there?"
        )


def _by_place(places: dict[int, str]) -> str:
    return "; ".join(f"{place} ({describe_ranks(ranks)})" for place, ranks in ranks_with(places).items())
