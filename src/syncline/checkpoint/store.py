"""The saves that all ranks make together in one directory: write a save, and read the newest save that is intact.

Every file operation has the same outcome on all ranks: the same results, or the same error.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar, cast

import torch

from syncline import environment
from syncline.checkpoint.contents import Parts, SaveContent, entry_of
from syncline.checkpoint.directory import SHARED_FILE, Manifest, Save, SaveDirectory, own_file
from syncline.checkpoint.files import Files, StoredFile, write_tensors
from syncline.checkpoint.rollback import Before
from syncline.checkpoint.train_state import TrainState
from syncline.errors import CheckpointCorrupt, SynclineError
from syncline.transport.base import Transport
from syncline.user_code import warn_user
from syncline.words import describe_ranks, printable, ranks_with

T = TypeVar("T")

_TITLE = "sl.Checkpointer"

_MAX_LISTINGS = 20
"""The number of times that `read_newest` lists the saves, if another run removes them while they are read."""


# ---------------------------------------------------------------------- the same outcome on all ranks


class Refused(Exception):
    """Raised on every rank if a file operation failed on any rank, for example because the disk is full."""


def everywhere(lane: Transport, fn: Callable[[], T]) -> list[T]:
    """Call `fn` on each rank, and return the results of all ranks in rank order. A collective call.

    The results are sent as JSON, so tuples become lists.

    Args:
        lane: the transport between the ranks.
        fn: the file operation of this rank.

    Raises:
        Refused: a file operation failed on any rank. Raised on every rank.
        SynclineError: on a rank other than this one, `fn` raised an error that is not from a file operation.
        Exception: on this rank, `fn` raised an error that is not from a file operation. It is raised unchanged.

    Examples:
        >>> from syncline.transport.threads import run_ranks
        >>> run_ranks(2, lambda transport: everywhere(transport, lambda: transport.rank * 10))
        [[0, 10], [0, 10]]
    """
    outcome: dict[str, Any] = {}
    fault = None
    try:
        outcome["found"] = fn()
    except (OSError, CheckpointCorrupt) as error:
        outcome["refused"] = printable(str(error))
    except Exception as error:
        fault = error
        outcome["failed"] = printable(f"{type(error).__name__}: {error}")
    outcomes = [json.loads(one) for one in lane.all_gather_bytes(json.dumps(outcome).encode())]
    if fault is not None:
        raise fault
    for kind, error_class in (("failed", SynclineError), ("refused", Refused)):
        texts = {rank: one[kind] for rank, one in enumerate(outcomes) if kind in one}
        if len(texts) == lane.size and len(set(texts.values())) == 1:
            raise error_class(texts[0])
        if texts:
            raise error_class(_by_ranks(texts, "{ranks}: {text}"))
    return [one["found"] for one in outcomes]


def _by_ranks(texts: Mapping[int, str], form: str) -> str:
    """Join the texts of the ranks into one text, with each distinct text once.

    Args:
        texts: the text of each rank, by rank.
        form: the format of each distinct text, with the fields {text} and {ranks} (the ranks that have this text).
    """
    return "; ".join(
        form.format(ranks=describe_ranks(ranks), text=text) for text, ranks in ranks_with(texts).items()
    )


# ---------------------------------------------------------------------- the saves


class IntactSave(NamedTuple):
    """A save that was read and verified on all ranks, with a backup of the state that loading will change."""

    name: str
    path: str
    """The directory of the save."""
    found: SaveContent
    states: dict[str, Any]
    """The saved states, by the name of the object."""
    before: Before
    """The backup, made before anything was loaded."""


class SaveStore:
    """The saves that all ranks make in one directory. Construction and every method are collective calls.

    Args:
        lane: the transport between the ranks.
        files: the file system.
        path: the directory.
        keep: the number of saves to keep.
        read_only: whether writing is refused. If so, the directory need not be writable.

    Raises:
        SynclineError: the directory cannot be written, or the ranks see different directories. With `read_only`: the
            directory cannot be read, or it has no saves. Raised on every rank.
    """

    def __init__(self, lane: Transport, files: Files, path: str, keep: int, *, read_only: bool) -> None:
        self.path = path
        self.is_read_only = read_only
        self._lane = lane
        self._files = files
        self._directory = SaveDirectory(files, path, keep)
        self._damaged: set[Save] = set()
        self._last_number = 0
        """The number of the newest save that this object has found or made. Only rank 0 keeps it up to date."""
        if read_only:
            self._check_readable()
        else:
            if not environment.is_explained():
                self._check_writable()
            self._look_around()

    def use_lane(self, lane: Transport) -> None:
        """Make saves with the ranks of another lane from now on. These ranks must see the directory, too."""
        self._lane = lane
        self._look_around()

    def _look_around(self) -> None:
        """Find the number of the newest save, and the leftovers of crashes, on rank 0."""
        if self._lane.rank == 0:
            with contextlib.suppress(OSError):
                self._known_saves()
                self._directory.look_for_leftovers()

    def _on_rank_0(self, fn: Callable[[], T]) -> T:
        """Call `fn` on rank 0 only, and return its result on all ranks; see `everywhere`."""
        return cast(T, everywhere(self._lane, lambda: fn() if self._lane.rank == 0 else None)[0])

    def _check_writable(self) -> None:
        """Create the directory. Raise a SynclineError if rank 0 cannot write to it, or if a rank does not see it."""

        def write() -> str:
            self._files.make_directory(self.path)
            probe = self._directory.new_path("probe")
            self._files.write(probe, [b"seen by all ranks?"])
            return probe

        try:
            probe = self._on_rank_0(write)
        except Refused as refused:
            raise SynclineError(f"{_TITLE}: the directory {self.path} cannot be written: {refused}") from None
        name = probe.rpartition("/")[2]
        seen = everywhere(
            self._lane, lambda: (socket.gethostname(), self.path, name in self._files.names(self.path))
        )
        if self._lane.rank == 0:
            with contextlib.suppress(OSError):
                self._files.remove(probe)
        blind = {rank: f"{path} on {host}" for rank, (host, path, is_seen) in enumerate(seen) if not is_seen}
        if blind:
            host, path, _ = seen[0]
            raise SynclineError(
                f"{_TITLE}: expected all ranks to see the file that rank 0 wrote into {path} on {host}, but it is not "
                f"in {_by_ranks(blind, '{text} ({ranks})')}. Give the same directory on all ranks, on a file system "
                "that all hosts have mounted at the same path"
            )

    def _check_readable(self) -> None:
        """Raise a SynclineError if a rank sees no save in the directory. A reader does not wait for a first save."""
        try:
            seen = everywhere(self._lane, lambda: (socket.gethostname(), bool(self._directory.saves())))
        except Refused as refused:
            raise SynclineError(f"{_TITLE}: the directory {self.path} cannot be read: {refused}") from None
        blind = {rank: host for rank, (host, has_saves) in enumerate(seen) if not has_saves}
        if blind:
            raise SynclineError(
                f"{_TITLE}: expected saves to load in {self.path}, found none on "
                f"{_by_ranks(blind, '{text} ({ranks})')}. Check that all ranks give the same path, and that this "
                "path is mounted on their hosts"
            )

    def _known_saves(self) -> list[tuple[Save, Save]]:
        """Return each save with its identity (see `SaveDirectory.identified`), and update `_last_number`."""
        saves = self._directory.identified()
        self._last_number = max((save.number for both in saves for save in both), default=0)
        return saves

    # ------------------------------------------------------------------ writing

    def write(self, step: int, parts: Parts, warn: Callable[[str], None]) -> str:
        """Write one save, and return the path of its directory.

        Args:
            step: the step of the state.
            parts: the state of this rank.
            warn: a function that is called on rank 0 with the text of a warning.

        Raises:
            Refused: the save could not be written.
        """
        if environment.is_explained():
            return self._on_rank_0(lambda: self._directory.path_of(Save(self._last_number + 1, step)))

        def commit() -> str:
            manifest = Manifest(
                step=step,
                num_ranks=self._lane.size,
                shared={name: tree for name, tree in parts.trees.items() if entry_of(name) in shared},
                ranks=[one["trees"] for one in written],
                files={name: StoredFile(**file) for one in written for name, file in one["files"].items()},
                classes=parts.classes,
                sharded=parts.sharded,
                about={
                    "torch": torch.__version__,
                    "host": socket.gethostname(),
                    "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
                },
            )
            before, save = self._last_number, self._directory.commit(path, manifest, self._last_number)
            self._last_number = save.number
            if save.number > before + 1:
                warn(
                    f"another process saves into {self.path}: the newest save there was number {save.number - 1}, but "
                    f"the newest save that this run had made or found was number {before}. Two runs in one directory "
                    "remove each other's saves, and would resume from each other's state: give each run its own "
                    "directory"
                )
            with contextlib.suppress(OSError):  # the save is complete, and the next save prunes again
                self._directory.prune(self._damaged)
            return self._directory.path_of(save)

        path = self._on_rank_0(lambda: self._directory.begin(step))
        try:
            digests = everywhere(self._lane, lambda: parts.digests)
            shared = {
                name
                for name, digest in parts.digests.items()
                if all(one.get(name) == digest for one in digests)
            }
            written = everywhere(self._lane, lambda: self._write_files(path, parts, shared))
            return self._on_rank_0(commit)
        except Refused:
            if self._lane.rank == 0:
                with contextlib.suppress(OSError):
                    self._files.remove(path)
            raise

    def _write_files(self, path: str, parts: Parts, shared: set[str]) -> dict[str, Any]:
        """Write this rank's files. Return their expected contents, and the JSON values that are not in `shared`."""
        wanted = {
            own_file(self._lane.rank): {key: one for key, one in parts.tensors.items() if key not in shared}
        }
        if self._lane.rank == 0:
            wanted[SHARED_FILE] = {key: one for key, one in parts.tensors.items() if key in shared}
        written = {
            name: vars(write_tensors(self._files, f"{path}/{name}", tensors, parts.checksums))
            for name, tensors in wanted.items()
            if tensors
        }
        own = {name: tree for name, tree in parts.trees.items() if entry_of(name) not in shared}
        return {"files": written, "trees": own}

    # ------------------------------------------------------------------ reading

    def read_newest(self, state: TrainState, *, strict: bool) -> IntactSave | None:
        """Read the newest save that is intact on all ranks, and warn of damaged saves.

        Returns None if there are no saves.

        Args:
            state: the state into which the save will be loaded.
            strict: whether all saved objects are needed, not only those whose names are in `state`.

        Raises:
            CheckpointCorrupt: there are saves, but none of them is intact.
            SynclineError: the directory cannot be read, or all saves that were tried were removed meanwhile.
        """
        for _ in range(_MAX_LISTINGS):
            damaged: list[str] = []
            for save in self._listed():
                try:
                    found = self._read(save, state, strict=strict)
                except Refused as refused:
                    if self._is_gone(save):
                        break  # the run that saves here has newer saves now
                    self._damaged.add(save)
                    damaged.append(f"{save.name}: {refused}")
                    continue
                if damaged:
                    text = "\n  ".join(["damaged saves were skipped:", *damaged])
                    self._warn(f"{text}\nLoaded instead: {save.name}")
                return found
            else:
                if not damaged:
                    return None
                text = "\n  ".join(
                    [f"expected an intact save in {self.path}, but all are damaged:", *damaged]
                )
                raise CheckpointCorrupt(
                    f"{text}\nNothing was loaded. Restore a save from a copy, or start again with another directory"
                )
        raise SynclineError(
            f"{_TITLE}.load: another run saves into {self.path} so often that it removed {_MAX_LISTINGS} saves while "
            "they were read: let it keep more saves, sl.Checkpointer(..., keep=3), or load again later"
        )

    def _listed(self) -> list[Save]:
        """Return the saves, the newest first, and warn of saves whose directories were renamed."""
        try:
            known = [(Save(*one), Save(*other)) for one, other in self._on_rank_0(self._known_saves)]
        except Refused as refused:
            raise SynclineError(
                f"{_TITLE}.load: the directory {self.path} cannot be read: {refused}"
            ) from None
        for save, identity in known:
            if save != identity:
                self._warn(
                    f"the directory of the save {save.name} in {self.path} was renamed: by its manifest, its name was "
                    f"{identity.name}. The newest save is the one with the highest number in its manifest"
                )
        return [save for save, _ in known]

    def _is_gone(self, save: Save) -> bool:
        """Return whether the directory of a save was removed since the saves were listed."""
        return self._on_rank_0(lambda: save not in self._directory.saves())

    def _warn(self, text: str) -> None:
        if self._lane.rank == 0:
            warn_user(text)

    def _read(self, save: Save, state: TrainState, *, strict: bool) -> IntactSave:
        """Read and verify the part of a save that this rank needs, and back up the current state. A collective call.

        Raises:
            Refused: the save is damaged on any rank.
        """
        path = self._directory.path_of(save)
        intact: list[IntactSave] = []

        def read() -> None:
            found = SaveContent(self._files, path, rank=self._lane.rank, num_ranks=self._lane.size)
            states = found.decoded_for(state.named, strict=strict)
            # Back up now: no rank has begun to load yet, and ranks may share one copy of a module.
            intact.append(IntactSave(save.name, path, found, states, Before(state)))

        everywhere(self._lane, read)
        return intact[0]
