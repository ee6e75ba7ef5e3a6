"""The saves in a directory. Each save is a directory of its own, with a manifest and with safetensors files.

    save-000007-step-1200/
        manifest.json            the list of contents, their checksums, and all JSON values; written last
        shared.safetensors       the tensors that are equal on all ranks, written by rank 0
        rank-0.safetensors       the tensors that differ per rank, including each rank's shard
        rank-1.safetensors

The directory of a save has a temporary name until it is complete, and is then renamed. Checksums cover everything in
it: the manifest ends with its own checksum, and lists the checksums of each file's header and of each tensor.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from syncline.checkpoint.files import Files, StoredFile, checksum, malformed_is_corrupt, map_stored
from syncline.errors import CheckpointCorrupt

FORMAT = "syncline checkpoint"

VERSION = 3
"""The version of the format in which saves are written. Earlier versions can be read; later versions are refused.

Version 2 added parts of tensors ("$part"), and the entry "sharded". Version 3 added Counters ("$counter"), and the
entry "classes".
"""

SHARED_FILE = "shared.safetensors"
"""The name of the file with the tensors that are equal on all ranks."""

MANIFEST = "manifest.json"

_NAME = re.compile(r"save-(?P<save>\d{6,})-step-(?P<step>\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of one save. It holds everything except the tensors.

    Attributes:
        about: information for people, such as the version of torch and the time of the save.
        number: the number of the save in its directory, from 1; 0 if an early format did not record the number.
        step: the step of the saved state.
        num_ranks: the number of ranks that made the save.
        classes: the class name of each saved object that is not a module, by name of the object.
        sharded: the names of the objects of which each rank saved a shard.
        files: the expected contents of the tensor files, by file name.
        shared: the JSON values (from `encode`) that are equal on all ranks, by name of the object.
        ranks: for each rank, its JSON values that are not equal on all ranks, by name of the object.
    """

    about: Mapping[str, str] = field(default_factory=dict)
    number: int = 0
    step: int
    num_ranks: int
    classes: Mapping[str, str] = field(default_factory=dict)
    sharded: Sequence[str] = ()
    files: Mapping[str, StoredFile]
    shared: Any
    ranks: Sequence[Any]


def own_file(rank: int) -> str:
    """Return the name of the file with the tensors of this rank that are not equal on all ranks."""
    return f"rank-{rank}.safetensors"


def write_manifest(files: Files, directory: str, manifest: Manifest) -> None:
    """Write the manifest into a directory that already has all other files of the save."""
    body = {"format": FORMAT, "version": VERSION, **vars(manifest)}
    text = json.dumps(body, indent=1, allow_nan=False, default=vars)
    # The checksum is the last line, so the text before it can be read and verified unchanged.
    content = f"{text}\n{checksum(text.encode())}\n".encode()
    files.write(f"{directory}/{MANIFEST}", [content])


def read_manifest(files: Files, directory: str) -> Manifest:
    """Read and verify the manifest of a save.

    Raises:
        CheckpointCorrupt: the manifest is missing, damaged, or of an unknown version.
        OSError: the manifest could not be read.
    """
    path = f"{directory}/{MANIFEST}"
    try:
        content = files.read(path)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing, so the save is not complete") from None
    text, _, found = content.removesuffix(b"\n").rpartition(b"\n")
    if content[-1:] != b"\n" or found != checksum(text).encode():
        raise CheckpointCorrupt(
            f"{path} is damaged: the checksum in its last line does not match the lines before"
        )
    with malformed_is_corrupt(path):
        body = json.loads(text)
        found, version = body.pop("format"), body.pop("version")
        if found != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}, found {found!r}")
        if version > VERSION:
            raise CheckpointCorrupt(
                f"{path} has format version {version} of {FORMAT!r}, but this version of Syncline reads only "
                f"versions up to {VERSION}: load it with a newer Syncline"
            )
        body["files"] = {name: StoredFile(**stored) for name, stored in body["files"].items()}
        # Ignore further fields: a later version of Syncline may have added optional ones.
        return Manifest(**{one.name: body[one.name] for one in fields(Manifest) if one.name in body})


def check_complete(files: Files, directory: str) -> None:
    """Read the manifest of a save, and check that all files of the save are there and have their sizes.

    Raises:
        CheckpointCorrupt: the manifest is damaged, or a file is missing or has another size.
        OSError: a file could not be read.
    """
    for name, stored in read_manifest(files, directory).files.items():
        map_stored(files, f"{directory}/{name}", stored)


# ---------------------------------------------------------------------- all saves


_UNFINISHED = "unfinished-"


class Save(NamedTuple):
    """The number and the step of a committed save. Its content can still be damaged."""

    number: int
    step: int

    @property
    def name(self) -> str:
        """The name of the directory of this save."""
        return f"save-{self.number:06d}-step-{self.step}"


def parse_name(name: str) -> Save | None:
    """Return the save whose directory has this name; None if it is not the name of a save.

    Examples:
        >>> parse_name(Save(7, 1200).name), parse_name("notes")
        (Save(number=7, step=1200), None)
    """
    found = _NAME.fullmatch(name)
    return Save(int(found["save"]), int(found["step"])) if found else None


class SaveDirectory:
    """The directory with all saves of a run. Each save is a directory inside it, and only the newest saves are kept.

    `begin` creates the directory of a save under a temporary name, and `commit` renames it after everything in it was
    synced. So every directory with the name of a save is complete, even after a crash. `prune` gives a save a
    temporary name again before its files are removed. Temporary names are random, because another run may save into
    the same directory by mistake.

    Args:
        files: the file system.
        path: the path of the directory; the first save creates it.
        keep: the number of saves to keep.
    """

    def __init__(self, files: Files, path: str, keep: int) -> None:
        self._files = files
        self._path = path
        self._keep = keep
        self._removable: set[str] = set()
        """The names of unfinished directories that no run is writing: leftovers, and those of this object."""

    def saves(self) -> list[Save]:
        """Return the committed saves, the newest first. A save with a higher number is newer, whatever its step is."""
        found = map(parse_name, self._files.names(self._path))
        return sorted((save for save in found if save is not None), reverse=True)

    def identified(self) -> list[tuple[Save, Save]]:
        """Return each committed save with its identity, the newest first.

        The identity is the number and the step in the manifest, because a directory may have been renamed. If the
        manifest cannot be read, the identity is the number and the step in the name of the directory.
        """
        found = [(save, self._identity(save)) for save in self.saves()]
        return sorted(found, key=lambda one: (one[1].number, one[0]), reverse=True)

    def _identity(self, save: Save) -> Save:
        with contextlib.suppress(OSError, CheckpointCorrupt):
            manifest = read_manifest(self._files, self.path_of(save))
            return Save(manifest.number or save.number, manifest.step)
        return save

    def path_of(self, save: Save) -> str:
        """Return the path of a save's directory."""
        return f"{self._path}/{save.name}"

    def look_for_leftovers(self) -> None:
        """Find the unfinished directories that crashes have left, so that `begin` removes them.

        Unfinished directories that appear later belong to another run, which may still write them.
        """
        self._removable |= {name for name in self._files.names(self._path) if name.startswith(_UNFINISHED)}

    def begin(self, step: int) -> str:
        """Create an empty directory for the next save, and return its path. Remove what `look_for_leftovers` has found.

        Args:
            step: the step of the state to save.
        """
        self._files.make_directory(self._path)
        self._removable.intersection_update(self._files.names(self._path))
        for name in list(self._removable):
            self._remove(name)
        path = self.new_path(f"step-{step}")
        self._files.make_directory(path)
        return path

    def commit(self, path: str, manifest: Manifest, after: int = 0) -> Save:
        """Write the manifest into the directory of a save, check the save, and give the directory its final name.

        Args:
            path: the directory, from `begin`. All other files of the save must already be written and synced.
            manifest: the manifest. Its number is replaced by the number of the save.
            after: the number of the newest known save. The new save gets a higher number, even if the directory of
                that save was renamed.

        Raises:
            CheckpointCorrupt: the save is not complete, for example because another program has removed a file.
        """
        while True:
            save = Save(max([after, *(save.number for save in self.saves())]) + 1, manifest.step)
            write_manifest(self._files, path, replace(manifest, number=save.number))
            check_complete(self._files, path)
            self._files.sync_directory(path)
            try:
                self._files.rename(path, self.path_of(save))
            except OSError:
                if save not in self.saves():
                    raise
                self._files.remove(f"{path}/{MANIFEST}")  # another run has used this number meanwhile
                continue
            self._files.sync_directory(self._path)
            return save

    def prune(self, damaged: Collection[Save] = ()) -> list[Save]:
        """Remove all saves that are older than the `keep` newest complete ones, and return the removed saves.

        Args:
            damaged: the saves that are known to be damaged. They do not count as part of the `keep` newest saves.
        """
        gone: list[Save] = []
        num_sound = 0
        for save, _ in self.identified():
            if num_sound == self._keep:
                gone.append(save)
            elif save not in damaged:
                with contextlib.suppress(OSError, CheckpointCorrupt):
                    check_complete(self._files, self.path_of(save))
                    num_sound += 1
        for save in gone:
            self._remove(save.name)
        return gone

    def _remove(self, name: str) -> None:
        """Remove a directory in one step, which either succeeds before another run renames it, or does nothing."""
        path = self.new_path("removed")
        try:
            self._files.rename(f"{self._path}/{name}", path)
        except FileNotFoundError:  # another run has renamed or removed it meanwhile
            return
        self._files.sync_directory(self._path)
        self._files.remove(path)

    def new_path(self, name: str) -> str:
        """Return the path for an unfinished directory or file that no other run uses, and that `begin` may remove."""
        name = f"{_UNFINISHED}{name}-{uuid.uuid4().hex[:12]}"
        self._removable.add(name)
        return f"{self._path}/{name}"
