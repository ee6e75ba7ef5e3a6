"""One saved state on disk: a directory with a manifest, and tensors in safetensors files.

    save-000007-step-1200/
        manifest.json            what is there, its checksums, and all that is not a tensor; written last
        shared.safetensors       what is the same on all ranks, written by rank 0
        rank-0.safetensors       what each rank has of its own: its share of what is sharded, too
        rank-1.safetensors

A directory is complete when it bears its name: it is written under another one. Everything in it is covered by a
checksum: the manifest by its own, each file's header and each tensor by one in the manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.errors import CheckpointCorrupt
from syncline.state.files import Files
from syncline.state.tensor_file import StoredFile, checksum

__all__ = [
    "FORMAT",
    "SHARED_FILE",
    "VERSION",
    "Manifest",
    "directory_name",
    "own_file",
    "parse_name",
    "read_manifest",
    "write_manifest",
]

FORMAT = "syncline checkpoint"
VERSION = 3
"""Of what is written. What a later version writes is refused; what an earlier one has written is read.

1: the first. 2: tensors of which each rank has a part ("$part"), and "sharded". 3: Counters ("$counter"), "classes".
"""

SHARED_FILE = "shared.safetensors"
"""Of the tensors that are the same on all ranks."""

_MANIFEST = "manifest.json"
_NAME = re.compile(r"save-(?P<save>\d{6,})-step-(?P<step>\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is known of one saved state but its tensors.

    Attributes:
        step: at which it was saved.
        num_ranks: that saved it.
        shared: what is the same on all ranks, as `encode` gives it.
        ranks: what each rank has of its own.
        files: by name.
        classes: the names of the classes of what was saved, but for modules, by name.
        sharded: by name, that of which each rank has a share: all of them together have it.
        about: versions and the like, for people.
    """

    step: int
    num_ranks: int
    shared: Any
    ranks: Sequence[Any]
    files: Mapping[str, StoredFile]
    classes: Mapping[str, str] = field(default_factory=dict)
    sharded: Sequence[str] = ()
    about: Mapping[str, str] = field(default_factory=dict)


def own_file(rank: int) -> str:
    """The name of the file of the tensors that a rank has of its own."""
    return f"rank-{rank}.safetensors"


def directory_name(save: int, step: int) -> str:
    """The name of the `save`-th save, of the state at `step`; their order is that of saving."""
    return f"save-{save:06d}-step-{step}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Save and step of a directory's name; None if it is not one of ours.

    Example:
        >>> parse_name(directory_name(7, 1200)), parse_name("notes")
        ((7, 1200), None)
    """
    found = _NAME.fullmatch(name)
    return (int(found["save"]), int(found["step"])) if found else None


def write_manifest(files: Files, directory: str, manifest: Manifest) -> None:
    """Write the manifest into a directory in which all else is there."""
    files.write(f"{directory}/{_MANIFEST}", [_text(manifest)])


def _text(manifest: Manifest) -> bytes:
    body = {
        "format": FORMAT,
        "version": VERSION,
        "about": dict(manifest.about),
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
    # The checksum is the last line, so the rest can be read, and checked, as it stands.
    return f"{text}\n{checksum(text.encode())}\n".encode()


def read_manifest(files: Files, directory: str) -> Manifest:
    """The manifest of a directory, checked.

    Raises:
        CheckpointCorrupt: it is missing, damaged, or of a version that is not known.
        OSError: it could not be read.
    """
    path = f"{directory}/{_MANIFEST}"
    try:
        content = files.read(path)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing: the directory is not complete") from None
    text, _, found = content.removesuffix(b"\n").rpartition(b"\n")
    if content[-1:] != b"\n" or found != checksum(text).encode():
        raise CheckpointCorrupt(f"{path} is damaged: its checksum, the last line, does not fit the rest")
    body = json.loads(text)
    if body["format"] != FORMAT or body["version"] > VERSION:
        raise CheckpointCorrupt(
            f"{path} is of {body['format']!r}, version {body['version']}: this version of Syncline reads up to version "
            f"{VERSION}"
        )
    return Manifest(
        step=body["step"],
        num_ranks=body["num_ranks"],
        shared=body["shared"],
        ranks=body["ranks"],
        files={name: StoredFile(**stored) for name, stored in body["files"].items()},
        classes=body.get("classes", {}),
        sharded=body.get("sharded", []),
        about=body["about"],
    )
