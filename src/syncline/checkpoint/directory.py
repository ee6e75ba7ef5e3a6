"""The directory that holds all saves: list, commit and prune them.

It also has the checks that all ranks see the same directory and that it can be read or written.
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
    """A committed save; its content may still be damaged."""

    number: int
    step: int

    @property
    def name(self) -> str:
        return directory_name(self.number, self.step)


class Shelf:
    """The saves in one directory, of which the newest are kept.

    `begin` creates a directory with a temporary name, and `commit` renames it after everything in it was synced. So
    every directory with a save's name is complete, even after a crash at any moment. `prune` renames a save back to a
    temporary name before it removes it.

    Args:
        files: the file system.
        path: the directory; the first save creates it.
        keep: how many saves to keep.
    """

    def __init__(self, files: Files, path: str, keep: int) -> None:
        self._files = files
        self._path = path
        self._keep = keep

    def saves(self) -> list[Save]:
        """Return the committed saves, newest first, in the order of saving (not of steps)."""
        found = [Save(*parsed) for name in self._files.names(self._path) if (parsed := parse_name(name))]
        return sorted(found, reverse=True)

    def identified(self) -> list[tuple[Save, Save]]:
        """Return each committed save with its identity from the manifest, newest first by that identity.

        The manifest counts, because a directory may have been renamed. If the manifest is damaged, the name counts.
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
        """Return the directory of a save."""
        return f"{self._path}/{save.name}"

    def begin(self, step: int, after: int = 0) -> tuple[Save, str]:
        """Create an empty directory for the next save; remove directories that crashes left unfinished.

        Args:
            step: the step of the state.
            after: the number of the newest save known to exist, whatever its directory is called now.

        Returns:
            The save, and its temporary directory.
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
        """Give a save its name; all its files must be written and synced."""
        self._files.sync_directory(self._unfinished(save))
        self._files.rename(self._unfinished(save), self.path_of(save))
        self._files.sync_directory(self._path)

    def probe_path(self, token: str) -> str:
        """Return the path of a probe file that shows whether all ranks see the directory; `begin` removes leftovers."""
        return f"{self._path}/{_UNFINISHED}probe-{token}"

    def abandon(self, save: Save) -> None:
        """Remove the files of a save that will not be committed."""
        self._files.remove(self._unfinished(save))

    def prune(self, damaged: Collection[Save] = ()) -> list[Save]:
        """Remove the saves that are older than those to keep, by their manifests, and return them.

        Args:
            damaged: saves known to be unusable; they do not count as kept.
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
    """Return the absolute path of a directory.

    Raises:
        TypeError, ValueError: it is not a path.
    """
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str):
        raise TypeError(f"expected directory to be a path, a str or an os.PathLike of one, got {directory!r}")
    if not path:
        raise ValueError("expected directory to be a path, got '' ('.' is where the program was started)")
    return os.path.abspath(path)


def check_writable(lane: Transport, files: Files, shelf: Shelf, path: str) -> None:
    """Create the directory; raise unless all ranks see it and rank 0 can write to it. A collective call.

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
    """Raise unless all ranks see saves there, because a reader does not wait for a first save. A collective call.

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
