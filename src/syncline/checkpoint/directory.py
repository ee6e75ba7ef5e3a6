"""The saves in a directory: a directory each, with a manifest, and tensors in safetensors files.

    save-000007-step-1200/
        manifest.json            the list of contents, their checksums, and all JSON values; written last
        shared.safetensors       the tensors that are equal on all ranks, written by rank 0
        rank-0.safetensors       the tensors that differ per rank, including each rank's shard
        rank-1.safetensors

A directory is written under a temporary name and renamed when it is complete. Checksums cover everything in it: the
manifest ends with its own, and it lists one for each file's header and one for each tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from syncline.checkpoint.files import (
    Files,
    StoredFile,
    check,
    checksum,
    is_count,
    json_object,
    malformed_is_corrupt,
)
from syncline.errors import CheckpointCorrupt

FORMAT = "syncline checkpoint"

VERSION = 3
"""The format version that is written. Earlier versions can be read; later ones are refused.

1: the first. 2: tensors of which each rank has a part ("$part"), and "sharded". 3: Counters ("$counter"), "classes".
"""

SHARED_FILE = "shared.safetensors"
"""The name of the file of tensors that are equal on all ranks."""

MANIFEST = "manifest.json"

_NAME = re.compile(r"save-(?P<save>\d{6,})-step-(?P<step>\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of one save: everything except its tensors.

    Attributes:
        step: the step at which it was saved.
        number: the number of the save; 1 for the first in its directory, 0 for early formats that do not record it.
        num_ranks: the number of ranks that saved it.
        shared: the JSON values that are equal on all ranks, as returned by `encode`, by name.
        ranks: the JSON values that differ, by name, for each rank.
        files: the tensor files, by name.
        classes: the class names of the saved objects except modules, by name.
        sharded: the names of objects of which each rank saved a shard.
        about: versions and other information for people.
    """

    step: int
    number: int = 0
    num_ranks: int
    shared: Any
    ranks: Sequence[Any]
    files: Mapping[str, StoredFile]
    classes: Mapping[str, str] = field(default_factory=dict)
    sharded: Sequence[str] = ()
    about: Mapping[str, str] = field(default_factory=dict)


def own_file(rank: int) -> str:
    """Return the name of the file of the tensors that only this rank has."""
    return f"rank-{rank}.safetensors"


def directory_name(save: int, step: int) -> str:
    """Return the directory name of save number `save` of the state at `step`; numbers follow the order of saving."""
    return f"save-{save:06d}-step-{step}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return the save number and step of a directory name; None if it is not the name of a save.

    Example:
        >>> parse_name(directory_name(7, 1200)), parse_name("notes")
        ((7, 1200), None)
    """
    found = _NAME.fullmatch(name)
    return (int(found["save"]), int(found["step"])) if found else None


def write_manifest(files: Files, directory: str, manifest: Manifest) -> None:
    """Write the manifest into a directory that has all other files."""
    files.write(f"{directory}/{MANIFEST}", [_text(manifest)])


def _text(manifest: Manifest) -> bytes:
    body = {
        "format": FORMAT,
        "version": VERSION,
        "about": dict(manifest.about),
        "number": manifest.number,
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "classes": dict(manifest.classes),
        "sharded": list(manifest.sharded),
        "files": {
            name: {"num_bytes": file.num_bytes, "header": file.header, "tensors": dict(file.tensors)}
            for name, file in manifest.files.items()
        },
        "shared": manifest.shared,
        "ranks": list(manifest.ranks),
    }
    text = json.dumps(body, indent=1, allow_nan=False)
    # The checksum is the last line, so the text before it can be read and verified unchanged.
    return f"{text}\n{checksum(text.encode())}\n".encode()


def read_manifest(files: Files, directory: str) -> Manifest:
    """Read and verify the manifest of a directory.

    Raises:
        CheckpointCorrupt: it is missing, damaged, or of an unknown version.
        OSError: it could not be read.
    """
    path = f"{directory}/{MANIFEST}"
    try:
        content = files.read(path)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing: the directory is not complete") from None
    text, _, found = content.removesuffix(b"\n").rpartition(b"\n")
    if content[-1:] != b"\n" or found != checksum(text).encode():
        raise CheckpointCorrupt(f"{path} is damaged: its checksum, the last line, does not match the rest")
    with malformed_is_corrupt(path):
        body = json_object(text)
        form, version = body["format"], body["version"]
        if form == FORMAT and is_count(version) and version > VERSION:
            raise CheckpointCorrupt(
                f"{path} is of {form!r}, version {version}: this version of Syncline reads up to version {VERSION}"
            )
        check(form == FORMAT and is_count(version), f"expected {FORMAT!r} and its version", (form, version))
        return _manifest(body)


def _manifest(body: Mapping[str, Any]) -> Manifest:
    """Build a manifest from its JSON object.

    Raises:
        ValueError, TypeError, LookupError: no version of `write_manifest` writes such an object.
    """
    shared, ranks, files = body["shared"], body["ranks"], body["files"]
    step, number, num_ranks = body["step"], body.get("number", 0), body["num_ranks"]
    for name, count in (("step", step), ("number", number), ("num_ranks", num_ranks)):
        check(is_count(count), f"expected {name} to be a count", count)
    check(isinstance(ranks, list) and 0 < len(ranks) == num_ranks, f"expected {num_ranks} ranks", ranks)
    for tree in (shared, *ranks):
        check(isinstance(tree, dict), "expected values by name", tree)
    for tree in ranks:
        check(tree.keys() == ranks[0].keys(), "expected the same names of each rank", [*tree])
        check(shared.keys().isdisjoint(tree), "expected no name to be both shared and per rank", [*tree])
    classes, sharded, about = body.get("classes", {}), body.get("sharded", []), body["about"]
    check(_are_strings(classes) and isinstance(about, dict), "expected strings by name", (classes, about))
    names = shared.keys() | ranks[0].keys()
    check(isinstance(sharded, list) and names >= set(sharded), f"expected names of {sorted(names)}", sharded)
    check(shared.get("step", step) == step, f"expected the state of step {step}", shared.get("step"))
    check(isinstance(files, dict), "expected files by name", files)
    known = {SHARED_FILE, *map(own_file, range(num_ranks))}
    return Manifest(
        step=step,
        number=number,
        num_ranks=num_ranks,
        shared=shared,
        ranks=ranks,
        files={name: _stored_file(name, stored, known) for name, stored in files.items()},
        classes=classes,
        sharded=sharded,
        about=about,
    )


def _stored_file(name: str, stored: Any, known: Collection[str]) -> StoredFile:
    check(name in known, f"expected one of {sorted(known)}", name)
    check(isinstance(stored, dict), f"expected an entry of {name}", stored)
    file = StoredFile(**stored)
    check(is_count(file.num_bytes), f"expected the number of bytes of {name}", file.num_bytes)
    check(isinstance(file.header, str), f"expected a checksum of {name}", file.header)
    check(_are_strings(file.tensors), f"expected a checksum of each tensor of {name}", file.tensors)
    return file


def _are_strings(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(one, str) for one in found.values())


# ---------------------------------------------------------------------- all saves


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
