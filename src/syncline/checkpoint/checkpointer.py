"""Checkpointer: save the state of all ranks to disk, and load it again."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from syncline.checkpoint.capture import Parts, entry_of
from syncline.checkpoint.dataloaders import remarks_on_loaders, remarks_on_places
from syncline.checkpoint.directory import Save, Shelf, check_readable, check_writable, checked_path
from syncline.checkpoint.files import Files, LocalFiles
from syncline.checkpoint.on_all_ranks import Refused, everywhere, on_rank_0
from syncline.checkpoint.restore import Found, remarks
from syncline.checkpoint.rollback import Before
from syncline.checkpoint.snapshot import SHARED_FILE, Manifest, own_file, read_manifest, write_manifest
from syncline.checkpoint.stop import JointStop
from syncline.checkpoint.tensor_file import StoredFile, write_tensors
from syncline.checkpoint.train_state import TrainState, load_all
from syncline.checkpoint.verify import agree_on_loaded
from syncline.checks import checked_count, checked_flag, what_it_is
from syncline.errors import CheckpointCorrupt, SynclineError
from syncline.session.stop_request import STOP_SIGNALS
from syncline.session.world import before_shutdown, transport_of
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.user_code import warn_user, warning_here

__all__ = ["Checkpointer"]


T = TypeVar("T")

_FILE_METHODS = tuple(name for name in vars(Files) if not name.startswith("_"))


class Checkpointer:
    """Saves and loads of a `TrainState` in a directory; a save is either complete and verified, or an error.

    Rank 0 writes everything that is equal on all ranks, once. Each rank writes what differs: random numbers,
    residuals, replicas that have drifted apart, and its shard of a sharded optimizer. A save becomes valid when its
    directory is renamed, after all of its files were synced to the disk. Loading verifies every byte and uses the
    newest save that is intact. Nothing is pickled: tensors are safetensors files, everything else is JSON.

    Construction, `save`, `load` and `stop_if_asked` are collective calls: every rank must make the same calls. Ranks
    on several hosts need a directory that all of them see; the constructor checks this. The object owns a connection
    and a thread until `close`, the end of its `with` block, or its garbage collection.

    Args:
        directory: the directory that holds all saves of one training run.
        keep: how many saves to keep, at least 1.
        group: see `broadcast_`.
        files: the file system; None means that of this host.
        stop_signals: names of the signals that ask this process to stop, the same on all ranks; see `stop_if_asked`.
            Signal handlers are installed by the first call of `stop_if_asked`; () means never.
        stop_every: if `stop_if_asked` needs a collective of its own, only one in `stop_every` calls runs it.
        read_only: only load. The directory need not be writable, and another run may save into it.

    Raises:
        TypeError, ValueError: an argument is invalid: `keep` or `stop_every` is below 1, or a signal is unknown; on
            every rank.
        SynclineError: the directory cannot be written (with `read_only`: cannot be read, or has no saves), or the
            ranks see different directories.

    Example:
        >>> import tempfile, torch, syncline as sl
        >>> model = torch.nn.Linear(2, 1)
        >>> state = sl.TrainState(model=model)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     checkpointer = sl.Checkpointer(directory, keep=2)
        ...     saved = checkpointer.save(state, step=10)
        ...     checkpointer.load(state)
        10
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        group: Any = None,
        files: Files | None = None,
        stop_signals: Sequence[str | int] = STOP_SIGNALS,
        stop_every: int = 1,
        read_only: bool = False,
    ) -> None:
        self._transport = transport_of(group)
        self._files = files or LocalFiles()
        self._path = ""
        fault: Exception | None = None
        lines = [f"keep  {keep}", f"read_only  {read_only}"]
        try:
            self._path = checked_path(directory)
            self._is_read_only = checked_flag("read_only", read_only)
            checked_count("keep", keep, at_least=1)
            if not all(callable(getattr(self._files, name, None)) for name in _FILE_METHODS):
                raise TypeError(
                    f"expected files to be a file system ({', '.join(_FILE_METHODS)}), got {files!r}"
                )
            self._stop = JointStop(self._transport, stop_signals, stop_every)
            lines += self._stop.describe()
        except (TypeError, ValueError) as error:
            fault = error
        exchange(self._transport, "sl.Checkpointer", lines, fault=fault)
        self._board = self._transport.board
        with self._board.called("sl.Checkpointer"):
            self._lane = self._transport.lane("checkpoints")
        self._shelf = Shelf(self._files, self._path, keep)
        self._damaged: set[Save] = set()
        self._last_number = 0
        """On rank 0: the number of the newest save that this object has found, made or loaded."""
        self._standing: set[str] = set()
        """The names of streams for which the warning about an unchanged position was already given."""
        self._has_looked = False
        """Whether the DataLoaders of this process were inspected."""
        self._writer = ThreadPoolExecutor(1, "syncline checkpoints")
        self._warn_where_saved: Callable[[str], None] = warn_user
        """Warns at the user's line that started the save; the writer thread has no such line on its stack."""
        self._under_way: Future[str | None] | None = None
        self._newest: tuple[int, str] | None = None
        """Step and directory of the last save that was made or loaded."""
        self._copies: dict[str, Tensor] = {}
        """The copies that non-blocking saves write from; kept for the next save."""
        own_lane = None if self._lane is self._transport else self._lane
        self._end = weakref.finalize(self, _end, self._writer, own_lane)
        # At exit, `before_shutdown` waits for pending saves first; all lanes are closed after that.
        self._end.atexit = False
        with self._board.called("sl.Checkpointer"):
            if read_only:
                check_readable(self._lane, self._shelf, self._path)
            else:
                check_writable(self._lane, self._files, self._shelf, self._path)
                if self._lane.rank == 0:
                    with contextlib.suppress(OSError):
                        self._known_saves()
        before_shutdown(self.wait)

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Wait for the pending save, then release the thread, its connection and the memory of the copies.

        A closed Checkpointer cannot save or load, and handles no signals. Closing it again does nothing.
        """
        try:
            self.wait()
        finally:
            if self._end.alive:
                self._stop.close()
            self._end()
            self._copies.clear()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The exception that ends the block matters more. A failed save was already reported by a warning.
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self.close()

    def _check(self, state: object, *, saves: bool = False) -> None:
        """Raise unless `state` can be loaded here, or saved if `saves` is set."""
        if not self._end.alive:
            raise ValueError("it was closed: make another sl.Checkpointer")
        if saves and self._is_read_only:
            raise ValueError(f"expected to load only from {self._path}: it was made with read_only=True")
        if not isinstance(state, TrainState):
            raise TypeError(
                f"expected state to be a TrainState, got {what_it_is(state)}: name what belongs to the run, "
                "sl.TrainState(model=..., optimizer=...)"
            )

    # ------------------------------------------------------------------ saving

    @overload
    def save(
        self, state: TrainState, step: int | None = None, blocking: Literal[True] = True
    ) -> str | None: ...
    @overload
    def save(
        self, state: TrainState, step: int | None = None, *, blocking: Literal[False]
    ) -> Future[str | None]: ...
    @overload
    def save(
        self, state: TrainState, step: int | None = None, blocking: bool = True
    ) -> str | Future[str | None] | None: ...
    def save(self, state: TrainState, step: int | None = None, blocking: bool = True) -> Any:
        """Save `state`; a collective call, to be made between two steps.

        Args:
            state: the state to save.
            step: assigned to `state.step` first; None keeps `state.step`.
            blocking: wait until the save is on the disk. Otherwise a thread writes from a copy in this process's
                memory (kept for the next save), and training continues. A new save waits for the previous one, so
                saves do not pile up.

        Returns:
            The directory of the save, or None if it could not be written (for example because the disk is full). In
            that case a warning gives the reason, earlier saves are unchanged, and training may continue. With
            `blocking=False`: a future of this value, whose `result()` waits.

        Raises:
            ContractMismatch: the ranks save different things, such as modules of different shapes or types, or are at
                different steps. Nothing was written.
            TypeError, ValueError: `state` is not a TrainState; `step` is not a number of steps; a value in the state
                cannot be stored (the message names it); or the Checkpointer was closed. On every rank.
        """
        self.wait()
        parts: Parts | None = None
        lines: list[str] = []
        fault: Exception | None = None
        try:
            self._check(state, saves=True)
            checked_flag("blocking", blocking)
            checked_count(
                "state.step" if step is None else "step", state.step if step is None else step, at_least=0
            )
            if step is not None:
                state.step = step
            lines = [
                f"step  {state.step}",
                f"blocking  {blocking}",
                *(f"named  {name}" for name in state.named),
            ]
            parts = Parts(state, None if blocking else self._copies)
            lines += parts.forms_of_modules
        except Exception as error:
            fault = error
        exchange(self._transport, "sl.Checkpointer.save", lines, fault=fault)
        assert parts is not None
        if self._transport.rank == 0:
            self._say_what_resumes_otherwise(state)
        self._warn_where_saved = warning_here()
        self._under_way = self._writer.submit(self._saved, state.step, parts)
        return self.wait() if blocking else self._under_way

    def wait(self) -> str | None:
        """Wait for the pending save, if any, and return its result."""
        under_way, self._under_way = self._under_way, None
        with self._board.called("sl.Checkpointer.save"):
            return under_way.result() if under_way else None

    def _say_what_resumes_otherwise(self, state: TrainState) -> None:
        """Warn once about each stream and DataLoader that would differ after resuming; inspects loaders once."""
        standing = [name for name in state._places.standing if name not in self._standing]
        self._standing |= {*standing}
        for remark in remarks_on_places(state.named, standing):
            warn_user(remark)
        if not self._has_looked:
            self._has_looked = True
            for remark in remarks_on_loaders(state.named):
                warn_user(remark)

    def _saved(self, step: int, parts: Parts) -> str | None:
        try:
            path = self._write(step, parts)
        except Refused as refused:
            self._warn(step, f"{refused}. What was saved before is as it was, and training goes on")
            return None
        except Exception as error:
            # Warn as well, because the caller may never ask for the future's result.
            self._warn(step, f"{type(error).__name__}: {error}")
            raise
        self._newest = (step, path)
        return path

    def _warn(self, step: int, why: str) -> None:
        if self._lane.rank == 0:
            self._warn_where_saved(f"the state at step {step} could not be saved: {why}")

    def _write(self, step: int, parts: Parts) -> str:
        number, path = self._on_rank_0(lambda: self._begin(step))
        save = Save(number, step)
        try:
            shared = self._shared(parts)
            told = self._everywhere(lambda: self._write_files(path, parts, shared))
            self._on_rank_0(lambda: self._commit(save, path, parts, shared, told))
        except Refused:
            if self._lane.rank == 0:
                with contextlib.suppress(OSError):
                    self._shelf.abandon(save)
            raise
        return self._shelf.path_of(save)

    def _begin(self, step: int) -> tuple[int, str]:
        save, path = self._shelf.begin(step, self._last_number)
        before = self._last_number
        if save.number > before + 1:
            self._warn_where_saved(
                f"somebody else saves into {self._path}, too: what was saved last is number {save.number - 1}, and "
                f"this run knows of none after {before}. Does another run use this directory? They remove each other's "
                "saves, and one that goes on would load the other's state: give each a directory of its own"
            )
        return save.number, path

    def _shared(self, parts: Parts) -> set[str]:
        """Return the names of the tensors and JSON values that are equal on all ranks."""
        told = self._everywhere(lambda: parts.digests)
        return {
            name for name, digest in parts.digests.items() if all(one.get(name) == digest for one in told)
        }

    def _write_files(self, path: str, parts: Parts, shared: set[str]) -> dict[str, Any]:
        """Write this rank's files; return their descriptions and the JSON values that only this rank has."""
        rank = self._lane.rank
        wanted = {own_file(rank): parts.tensors.keys() - shared}
        if rank == 0:
            wanted[SHARED_FILE] = parts.tensors.keys() & shared
        written = {
            name: asdict(write_tensors(self._files, f"{path}/{name}", parts.chosen(keys), parts.checksums))
            for name, keys in wanted.items()
            if keys
        }
        own = {name: tree for name, tree in parts.trees.items() if entry_of(name) not in shared}
        return {"files": written, "trees": own}

    def _commit(
        self, save: Save, path: str, parts: Parts, shared: set[str], told: Sequence[Mapping[str, Any]]
    ) -> None:
        manifest = Manifest(
            step=save.step,
            number=save.number,
            num_ranks=self._lane.size,
            shared={name: tree for name, tree in parts.trees.items() if entry_of(name) in shared},
            ranks=[one["trees"] for one in told],
            files={name: StoredFile(**file) for one in told for name, file in one["files"].items()},
            classes=parts.classes,
            sharded=parts.sharded,
            about={
                "torch": torch.__version__,
                "host": socket.gethostname(),
                "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        write_manifest(self._files, path, manifest)
        self._shelf.commit(save)
        self._last_number = save.number
        with contextlib.suppress(OSError):  # the save is complete; the next save prunes what is left
            self._shelf.prune(self._damaged)

    # ------------------------------------------------------------------ stopping

    def stop_if_asked(self, state: TrainState) -> None:
        """End all ranks here if any of them was asked to stop; a collective call after each step (`state.commit`).

        A rank is asked to stop by a signal or by `ask_to_stop`. The request travels with the control data of the next
        backward, at no cost. If no gradients were reduced since the last call, or replicas drift, a small collective
        in this call carries it instead. All ranks then stop after the same step: they wait for the pending save, save
        `state` (unless this step was already saved), print a message to stderr, and exit with `sl.EXIT_STOPPED`.

        Signals are handled from the first call on, so call it once before the first step as well. A second signal that
        arrives more than two seconds after the first has its usual effect: SIGTERM ends the process at once.

        Args:
            state: the state to save before stopping.

        Raises:
            SystemExit: with code `sl.EXIT_STOPPED`: all ranks stop here, and `state` is saved.
            TypeError, ValueError: `state` is not a TrainState, or the Checkpointer was closed. Raised on this rank
                only, because other ranks may learn of a stop from their backwards and need no collective here.
            SynclineError: all ranks stop here, but `state` could not be saved; or the ranks must not wait for each
                other here (`ParameterServer`, between two parameter syncs).

        Example:
            >>> import tempfile, torch, syncline as sl
            >>> state = sl.TrainState(model=torch.nn.Linear(2, 1))
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     checkpointer = sl.Checkpointer(directory, stop_signals=())
            ...     state.commit()
            ...     checkpointer.stop_if_asked(state)  # nobody has asked
            ...     checkpointer.ask_to_stop("met its deadline")
            ...     try:
            ...         checkpointer.stop_if_asked(state)
            ...     except SystemExit as stopped:
            ...         print(stopped.code == sl.EXIT_STOPPED)
            True
        """
        self._check(state, saves=True)
        with self._board.called("sl.Checkpointer.stop_if_asked"):
            if not self._stop.is_agreed(state):
                return
            # A failed save was already reported by a warning; other ranks may have failed differently.
            with contextlib.suppress(Exception):
                self.wait()
            is_saved = self._newest is not None and self._newest[0] == state.step
            last = self._newest and self._newest[1]
            self._stop.end(self._lane, state.step, last if is_saved else self.save(state), last)

    def ask_to_stop(self, why: str = "asked to stop") -> None:
        """Ask all ranks to stop, as a signal does; from any thread, and on one rank or several.

        Args:
            why: what this rank did or encountered; printed after the rank's name.

        Raises:
            TypeError: `why` is not a string.
        """
        if not isinstance(why, str):
            raise TypeError(f"expected why to be a text, what this rank did or met, got {why!r}")
        self._stop.request.ask(why)

    # ------------------------------------------------------------------ loading

    def load(self, state: TrainState, *, strict: bool = True) -> int | None:
        """Load the newest intact save into `state`; a collective call.

        Every byte is verified before anything is changed. A warning names the saves that are damaged.

        Args:
            state: a state with the same names as the saved one.
            strict: require the same names. Otherwise only names that are in both are loaded (for example to evaluate
                a model alone); what was not saved stays unchanged, and a warning names it.

        Returns:
            The step of the save, or None if there are no saves yet.

        Raises:
            CheckpointCorrupt: there are saves, but none of them is intact; on every rank.
            TypeError, ValueError: `state` is not a TrainState or does not match the save; or the Checkpointer was
                closed. On every rank.
            SynclineError: the directory cannot be read; on every rank.
            ReplicaDivergence: modules or optimizers that were saved as equal on all ranks differ between ranks after
                loading; on every rank.
        """
        self.wait()
        lines: list[str] = []
        fault: Exception | None = None
        try:
            self._check(state)
            checked_flag("strict", strict)
            lines = [f"strict  {strict}", *(f"named  {name}" for name in state.named)]
        except (TypeError, ValueError) as error:
            fault = error
        exchange(self._transport, "sl.Checkpointer.load", lines, fault=fault)
        with self._board.called("sl.Checkpointer.load"):
            newest, damaged = self._newest_sound(state, strict=strict)
            if newest is None:
                return None
            save, found = newest.save, newest.found
            if damaged and self._transport.rank == 0:
                warn_user(
                    "\n  ".join(["of what was saved, this cannot be loaded:", *damaged])
                    + f"\nLoaded instead: {save.name}"
                )
            self._apply(state, newest, strict=strict)
            if self._transport.rank == 0:
                for remark in remarks(save.name, found, state, self._transport.size):
                    warn_user(remark)
            self._newest = (found.manifest.step, self._shelf.path_of(save))
            return found.manifest.step

    def _newest_sound(self, state: TrainState, *, strict: bool) -> tuple[_Sound | None, list[str]]:
        """Find the newest intact save, verified on all ranks, and describe the damage of newer ones.

        Raises:
            CheckpointCorrupt: there are saves, but none of them is intact.
            SynclineError: the directory cannot be read.
        """
        try:
            known = [(Save(*one), Save(*other)) for one, other in self._on_rank_0(self._known_saves)]
        except Refused as refused:
            raise SynclineError(f"sl.Checkpointer.load: {self._path} cannot be read: {refused}") from None
        if self._transport.rank == 0:
            for save, identity in known:
                if save != identity:
                    warn_user(
                        f"{save.name} in {self._path} was renamed: its manifest says that it was {identity.name}, and "
                        "that counts, whatever it is called"
                    )
        damaged: list[str] = []
        for save, _ in known:
            try:
                return self._read(save, state, strict=strict), damaged
            except Refused as refused:
                self._damaged.add(save)
                damaged.append(f"{save.name}: {refused}")
        if damaged:
            raise CheckpointCorrupt(
                "\n  ".join([f"no save in {self._path} is sound:", *damaged])
                + "\nNothing was loaded. Begin anew with another directory, or bring a sound copy back"
            )
        return None, damaged

    def _known_saves(self) -> list[tuple[Save, Save]]:
        saves = self._shelf.identified()
        self._last_number = max((save.number for both in saves for save in both), default=0)
        return saves

    def _read(self, save: Save, state: TrainState, *, strict: bool) -> _Sound:
        """Read and verify, on all ranks, what this rank needs of a save, and back up the current state.

        Raises:
            Refused: the save is damaged, on any rank.
        """
        path = self._shelf.path_of(save)
        sound: list[_Sound] = []

        def read() -> None:
            manifest = read_manifest(self._files, path)
            rank, size = self._transport.rank, self._transport.size
            found = Found(self._files, path, manifest, rank=rank, num_ranks=size)
            states = found.decoded_for(state.named, strict=strict)
            # Back up now: no rank has begun to load yet, and ranks may share one copy of a module.
            sound.append(_Sound(save, found, states, Before(state.named, state.step)))

        self._everywhere(read)
        return sound[0]

    def _apply(self, state: TrainState, sound: _Sound, *, strict: bool) -> None:
        fault = None
        same: dict[str, Any] = {}
        title = f"sl.Checkpointer.load of {sound.save.name}"
        try:
            try:
                load_all(state, sound.states, strict=strict)
                same = sound.found.same_on_all(state)
            except Exception as error:
                fault = error
            agree_on_loaded(self._transport, title, same, fault=fault)
        except BaseException:
            sound.before.restore(together=True)
            state._resume_from_step(sound.before.step)
            raise
        if strict:
            state._mark_replicas_equal()

    # ------------------------------------------------------------------ collectives

    def _everywhere(self, fn: Callable[[], T]) -> list[T]:
        return everywhere(self._lane, fn)

    def _on_rank_0(self, fn: Callable[[], T]) -> T:
        return on_rank_0(self._lane, fn)


class _Sound(NamedTuple):
    """A save that was read and verified, and a backup of the state from before it is loaded."""

    save: Save
    found: Found
    states: dict[str, Any]
    before: Before


def _end(writer: ThreadPoolExecutor, lane: Transport | None) -> None:
    """Shut down the writer and its lane; no save is pending, because a pending save refers to its Checkpointer."""
    writer.shutdown(wait=False)
    if lane is not None:
        lane.close()
