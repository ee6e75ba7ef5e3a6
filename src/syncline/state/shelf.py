"""The directory in which saves stand beside each other: what is committed, what may go."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from syncline.errors import CheckpointCorrupt
from syncline.state.files import Files
from syncline.state.snapshot import directory_name, parse_name, read_manifest

__all__ = ["Save", "Shelf"]

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
