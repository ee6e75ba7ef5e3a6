"""Checkpointer: a state of all ranks, on disk and back."""

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
    """Saves a `TrainState` into a directory and loads it: what was saved is there, all of it, or is said not to be.

    What is the same on all ranks is written once, by rank 0; what is not (random numbers, residuals, replicas that have
    drifted apart, the shares of a sharded optimizer) by each rank. A save counts once it bears its name, after all of
    it was synced to the disk; loading checks every byte, and takes the newest save that is sound. Nothing is pickled:
    tensors are in safetensors files, the rest is JSON.

    A collective call: each rank makes one, and makes the same calls. Ranks of several hosts need a directory that all
    see, which is tried here. It has a connection and a thread of its own until `close`, the end of its `with` block,
    or until nobody refers to it any more.

    Args:
        directory: where saves stand beside each other; of one training run.
        keep: how many stay, at least 1.
        group: see `broadcast_`.
        files: the file system; None for that of this host.
        stop_signals: what asks this process to stop, see `stop_if_asked`; names, the same on all ranks. Nobody listens
            before that is called; () for never.
        stop_every: where `stop_if_asked` needs a collective of its own, one in so many calls makes it.
        read_only: load alone, from a directory that need not be writable, and in which another run may save.

    Raises:
        TypeError, ValueError: an argument makes no sense: `keep` or `stop_every` is below 1, there is no such signal;
            on every rank.
        SynclineError: the directory cannot be written (`read_only`: read, or nothing is there), or is not the same one
            on all ranks.

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
        """On rank 0, the number of the newest save known here: there from the start, or made or loaded since."""
        self._standing: set[str] = set()
        """The names of streams of which it was said that they do not move."""
        self._has_looked = False
        """Whether DataLoaders were looked at."""
        self._writer = ThreadPoolExecutor(1, "syncline checkpoints")
        self._warn_where_saved: Callable[[str], None] = warn_user
        """At the line that asked for the save under way; a thread that writes has none of its own."""
        self._under_way: Future[str | None] | None = None
        self._newest: tuple[int, str] | None = None
        """Step and directory of what was saved or loaded last."""
        self._copies: dict[str, Tensor] = {}
        """What saves that do not block write from; kept for the next one."""
        own_lane = None if self._lane is self._transport else self._lane
        self._end = weakref.finalize(self, _end, self._writer, own_lane)
        # At the end of the program saves are waited for first (`before_shutdown`), and then all lanes are closed.
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

    # ------------------------------------------------------------------ closed when it is done

    def close(self) -> None:
        """Wait for the save that is under way, and give back the thread, its connection and the memory of copies.

        Afterwards it neither saves nor loads, and listens to no signal. A second time does nothing.
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
        # What ends the block matters more than a save that fails with it, which was said where it happened.
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self.close()

    def _check(self, state: object, *, saves: bool = False) -> None:
        """Raise unless something can be done with `state` here: loaded, or saved."""
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
        """Save `state`; a collective call, between two steps.

        Args:
            state: what.
            step: sets `state.step` before; None leaves it as it is.
            blocking: wait until it is on the disk. Otherwise a thread writes a copy in this process's memory (which it
                keeps for the next save), and training goes on; a save that comes before the last one is done waits for
                it, so that they do not pile up.

        Returns:
            The directory of the save; None if it could not be written (a full disk): then a warning says why, what was
            saved before is there as it was, and training may go on. Without `blocking` the future of that, whose
            `result()` waits.

        Raises:
            ContractMismatch: ranks save different things, modules of different shapes or types among them, or at
                different steps. Nothing was written.
            TypeError, ValueError: `state` is none, or `step` no number of steps; something in the state cannot be
                stored, its place is named; it was closed; on every rank.
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
        """Wait for the save that is under way, if any; what it returns."""
        under_way, self._under_way = self._under_way, None
        with self._board.called("sl.Checkpointer.save"):
            return under_way.result() if under_way else None

    def _say_what_resumes_otherwise(self, state: TrainState) -> None:
        """Once each; loaders are looked at when the first save is made."""
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
            # Nobody may ever ask for the future's result.
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
        """What is the same on all ranks."""
        told = self._everywhere(lambda: parts.digests)
        return {
            name for name, digest in parts.digests.items() if all(one.get(name) == digest for one in told)
        }

    def _write_files(self, path: str, parts: Parts, shared: set[str]) -> dict[str, Any]:
        """Write this rank's files, and tell what they are; and what else this rank has of its own."""
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
        with contextlib.suppress(OSError):  # it is saved; what could not be removed goes next time
            self._shelf.prune(self._damaged)

    # ------------------------------------------------------------------ stopping

    def stop_if_asked(self, state: TrainState) -> None:
        """End all ranks here if any was asked to stop; a collective call, after each step (`state.commit`).

        A rank is asked by a signal or by `ask_to_stop`. It tells the others with the control data of its next backward,
        which costs nothing; where none was reduced since the last call, or replicas drift, by a small collective here.
        Then all ranks, after the same step, wait for the save under way, save `state` (unless this step was saved
        already), say so on stderr, and exit with `sl.EXIT_STOPPED`.

        It listens from its first call on: call it once before the first step as well. A second signal, more than two
        seconds after the first, does what it would do without: SIGTERM ends the process at once.

        Args:
            state: to be saved.

        Raises:
            SystemExit: of `sl.EXIT_STOPPED`: all ranks stop here, and `state` is saved.
            TypeError, ValueError: `state` is none, or it was closed; on this rank, for others may be told by their
                backwards and wait for nobody here.
            SynclineError: all ranks stop here, but `state` could not be saved; or ranks must not wait for each other
                here (`ParameterServer`: between two meetings).

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
            # What fails was said where it happened; other ranks may have another error.
            with contextlib.suppress(Exception):
                self.wait()
            is_saved = self._newest is not None and self._newest[0] == state.step
            last = self._newest and self._newest[1]
            self._stop.end(self._lane, state.step, last if is_saved else self.save(state), last)

    def ask_to_stop(self, why: str = "asked to stop") -> None:
        """As a signal does: this rank asks all to stop. From any thread, also on one rank only.

        Args:
            why: what this rank did or met, which follows its name in what is printed.

        Raises:
            TypeError: `why` is no text.
        """
        if not isinstance(why, str):
            raise TypeError(f"expected why to be a text, what this rank did or met, got {why!r}")
        self._stop.request.ask(why)

    # ------------------------------------------------------------------ loading

    def load(self, state: TrainState, *, strict: bool = True) -> int | None:
        """Load the newest save that is sound into `state`; a collective call.

        Every byte is checked before anything is changed. What is damaged is named in a warning.

        Args:
            state: of the same names as the one that was saved.
            strict: whether the names have to be the same. Otherwise what is in both is loaded, to evaluate a model
                alone, say, and what was not saved stays as it is; a warning names it.

        Returns:
            The step at which it was saved; None if nothing was saved yet.

        Raises:
            CheckpointCorrupt: there are saves, but none that is sound; on every rank.
            TypeError, ValueError: `state` is none, or that of something else; it was closed; on every rank.
            SynclineError: the directory cannot be read; on every rank.
            ReplicaDivergence: what was saved as the same on all ranks is not the same in their modules and optimizers
                now; on every rank.
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
        """The newest save that is sound, checked on all ranks, and what is wrong with those after it.

        Raises:
            CheckpointCorrupt: there are saves, but none that is sound.
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
        """What this rank needs of a save, checked on all ranks, and how things are here before it is loaded.

        Raises:
            Refused: it is damaged, on any rank.
        """
        path = self._shelf.path_of(save)
        sound: list[_Sound] = []

        def read() -> None:
            manifest = read_manifest(self._files, path)
            rank, size = self._transport.rank, self._transport.size
            found = Found(self._files, path, manifest, rank=rank, num_ranks=size)
            states = found.decoded_for(state.named, strict=strict)
            # No rank has begun to load yet: they may have one copy of a module.
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

    # ------------------------------------------------------------------ together

    def _everywhere(self, fn: Callable[[], T]) -> list[T]:
        return everywhere(self._lane, fn)

    def _on_rank_0(self, fn: Callable[[], T]) -> T:
        return on_rank_0(self._lane, fn)


class _Sound(NamedTuple):
    """A save that was read and checked, and how things were before it is loaded."""

    save: Save
    found: Found
    states: dict[str, Any]
    before: Before


def _end(writer: ThreadPoolExecutor, lane: Transport | None) -> None:
    """Nothing is under way any more: whoever still refers to a save refers to its Checkpointer."""
    writer.shutdown(wait=False)
    if lane is not None:
        lane.close()
