"""Checkpointer: save the state of all ranks to disk, and load it again."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, overload

from torch import Tensor

from syncline.checkpoint.contents import Parts, remarks
from syncline.checkpoint.dataloaders import ResumeRemarks
from syncline.checkpoint.files import Files, LocalFiles, checked_path
from syncline.checkpoint.rollback import failing_together, load_together
from syncline.checkpoint.stop import JointStop
from syncline.checkpoint.store import IntactSave, Refused, SaveStore
from syncline.checkpoint.train_state import TrainState, load_all
from syncline.checks import checked_count, checked_flag, what_it_is
from syncline.session.stop_request import STOP_SIGNALS
from syncline.session.world import before_shutdown, transport_of
from syncline.transport.base import Transport
from syncline.user_code import warn_user, warning_here

_FILE_METHODS = tuple(name for name in vars(Files) if not name.startswith("_"))


class Checkpointer:
    """A writer and reader of the saves of a training run, all in one directory.

    Rank 0 writes everything that is equal on all ranks, once. Each rank writes its own state that differs: random
    numbers, residuals, replicas that have drifted apart, and its shard of a sharded optimizer. A save becomes valid
    when its directory is renamed, after all of its files were synced to the disk. Loading verifies every byte and uses
    the newest save that is intact. Nothing is pickled: tensors are safetensors files, everything else is JSON.

    Construction, `save`, `load` and `stop_if_asked` are collective calls: every rank must make the same calls. Ranks
    on several hosts need a directory that all of them see; the constructor checks this. The object owns a connection
    and a thread until `close` is called, its `with` block ends, or it is garbage-collected.

    Args:
        directory: the directory that holds all saves of one training run.
        keep: how many saves to keep, at least 1.
        group: see `broadcast_`.
        files: the file system; None means the file system of this host.
        stop_signals: names of the signals that ask this process to stop, the same on all ranks; see `stop_if_asked`.
            Signal handlers are installed by the first call of `stop_if_asked`; () means never.
        stop_every: if `stop_if_asked` needs a separate collective, only one in `stop_every` calls runs it.
        read_only: refuse to save. The directory need not be writable, and another run may save into it.

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
        files = files or LocalFiles()
        with failing_together(self._transport, "sl.Checkpointer") as lines:
            path = checked_path("directory", directory)
            if not path:
                raise ValueError(
                    "expected directory to be a path, got '' (for the current directory, give '.')"
                )
            path = os.path.abspath(path)
            checked_flag("read_only", read_only)
            checked_count("keep", keep, at_least=1)
            if not all(callable(getattr(files, name, None)) for name in _FILE_METHODS):
                raise TypeError(
                    f"expected files to be a file system with the methods {', '.join(_FILE_METHODS)}, got {files!r}"
                )
            self._stop = JointStop(self._transport, stop_signals, stop_every)
            lines += [f"keep  {keep}", f"read_only  {read_only}", *self._stop.describe()]
        with self._called():
            self._lane = self._transport.lane("checkpoints")
        self._remarks = ResumeRemarks()
        self._writer = ThreadPoolExecutor(1, "syncline checkpoints")
        self._under_way: Future[str | None] | None = None
        self._newest: tuple[int, str] | None = None
        """Step and directory of the last save that was made or loaded."""
        self._copies: dict[str, Tensor] = {}
        """The copies that non-blocking saves write from; kept for the next save."""
        own_lane = None if self._lane is self._transport else self._lane
        self._end = weakref.finalize(self, _end, self._writer, own_lane)
        # At exit, `before_shutdown` waits for pending saves first; all lanes are closed after that.
        self._end.atexit = False
        with self._called():
            self._store = SaveStore(self._lane, files, path, keep, read_only=read_only)
        before_shutdown(self.wait)

    def _called(self, method: str = "") -> contextlib.AbstractContextManager[object]:
        """Show the other ranks, during the block, that this rank is in a method."""
        return self._transport.board.called(f"sl.Checkpointer{method}")

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
        """Raise unless this object is open and can load into `state`, or save `state` if `saves` is set."""
        if not self._end.alive:
            raise ValueError("this sl.Checkpointer is closed: create another one")
        if saves and self._store.is_read_only:
            raise ValueError(
                f"cannot save into {self._store.path}: this sl.Checkpointer was created with read_only=True"
            )
        if not isinstance(state, TrainState):
            raise TypeError(
                f"expected state to be a TrainState, got {what_it_is(state)}: put the objects of the run into one, "
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
            blocking: wait until the save is on the disk. Otherwise a thread writes a copy of the state, which is in
                this process's memory (kept for the next save), and training continues. A new save waits for the
                previous one, so saves do not pile up.

        Returns:
            The directory of the save, or None if it could not be written (for example because the disk is full). In
            that case a warning gives the reason, earlier saves are unchanged, and training may continue. With
            `blocking=False`, a future of this value is returned; its `result()` waits.

        Raises:
            ContractMismatch: the ranks save different things, such as modules of different shapes or types, or are at
                different steps. Nothing was written.
            TypeError, ValueError: `state` is not a TrainState; `step` is not a number of steps; a value in the state
                cannot be stored (the message names it); or the Checkpointer was closed. On every rank.
        """
        self.wait()
        with failing_together(self._transport, "sl.Checkpointer.save") as lines:
            self._check(state, saves=True)
            checked_flag("blocking", blocking)
            checked_count(
                "state.step" if step is None else "step", state.step if step is None else step, at_least=0
            )
            if step is not None:
                state.step = step
            lines += [f"step  {state.step}", f"blocking  {blocking}"]
            lines += [f"named  {name}" for name in state.named]
            parts = Parts(state, None if blocking else self._copies)
            lines += parts.forms_of_modules
        if self._transport.rank == 0:
            for remark in self._remarks.on(state.named, state._places.standing):
                warn_user(remark)
        # The thread of the writer has no line of the user's code on its stack.
        self._under_way = self._writer.submit(self._saved, state.step, parts, warning_here())
        return self.wait() if blocking else self._under_way

    def wait(self) -> str | None:
        """Wait for the pending save, if any, and return its result."""
        under_way, self._under_way = self._under_way, None
        with self._called(".save"):
            return under_way.result() if under_way else None

    def _saved(self, step: int, parts: Parts, warn: Callable[[str], None]) -> str | None:
        why = ""
        try:
            path = self._store.write(step, parts, warn)
            self._newest = (step, path)
            return path
        except Refused as refused:
            why = f"{refused}. Earlier saves are unchanged, and training continues"
            return None
        except Exception as error:
            # Warn as well, because the caller may never ask for the future's result.
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            if why and self._lane.rank == 0:
                warn(f"the state at step {step} could not be saved: {why}")

    # ------------------------------------------------------------------ stopping

    def stop_if_asked(self, state: TrainState) -> None:
        """End all ranks here if any of them was asked to stop; a collective call after each step (`state.commit`).

        A rank is asked to stop by a signal or by `ask_to_stop`. The request travels with the control data of the next
        backward, at no cost. If no gradients were reduced since the last call, or replicas drift, a small collective
        in this call carries it instead. All ranks then stop after the same step: they wait for the pending save, save
        `state` (unless this step was already saved), print a message to stderr, and exit with `sl.EXIT_STOPPED`.

        Signals are handled from the first call on, so call it once before the first step as well. A second signal that
        arrives more than two seconds after the first has its usual effect. SIGTERM, for example, ends the process.

        Args:
            state: the state to save before stopping.

        Raises:
            SystemExit: all ranks stop here, and `state` is saved. The exit code is `sl.EXIT_STOPPED`.
            TypeError, ValueError: `state` is not a TrainState, or the Checkpointer was closed. Raised on this rank
                only, because other ranks may receive the request in their backwards and need no collective here.
            SynclineError: all ranks stop here, but `state` could not be saved; or the ranks must not wait for each
                other here (`ParameterServer`, between two parameter syncs).

        Example:
            >>> import tempfile, torch, syncline as sl
            >>> state = sl.TrainState(model=torch.nn.Linear(2, 1))
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     checkpointer = sl.Checkpointer(directory, stop_signals=())
            ...     state.commit()
            ...     checkpointer.stop_if_asked(state)  # returns: no rank was asked
            ...     checkpointer.ask_to_stop("reached its deadline")
            ...     try:
            ...         checkpointer.stop_if_asked(state)
            ...     except SystemExit as stopped:
            ...         print(stopped.code == sl.EXIT_STOPPED)
            True
        """
        self._check(state, saves=True)
        with self._called(".stop_if_asked"):
            if not self._stop.is_agreed(state):
                return
            # A failed save was already reported by a warning; other ranks may have failed differently.
            with contextlib.suppress(Exception):
                self.wait()
            is_saved = self._newest is not None and self._newest[0] == state.step
            last = self._newest and self._newest[1]
            self._stop.end(self._lane, state.step, last if is_saved else self.save(state), last)

    def ask_to_stop(self, why: str = "asked to stop") -> None:
        """Ask all ranks to stop, as a signal does. Any thread may call this, on one rank or on several.

        Args:
            why: the reason, as the end of a sentence that begins with the rank: "reached its deadline".

        Raises:
            TypeError: `why` is not a string.
        """
        if not isinstance(why, str):
            raise TypeError(f"expected why to be a str, the reason in words, got {what_it_is(why)}")
        self._stop.request.ask(why)

    # ------------------------------------------------------------------ loading

    def load(self, state: TrainState, *, strict: bool = True) -> int | None:
        """Load the newest intact save into `state`; a collective call.

        Every byte is verified before anything is changed. A warning names the saves that are damaged.

        Args:
            state: a state with the same names as the saved state.
            strict: require the same names. Otherwise only names that are in both are loaded (for example to evaluate
                a model alone). Objects that were not saved stay unchanged, and a warning names them.

        Returns:
            The step of the save, or None if there are no saves yet.

        Raises:
            CheckpointCorrupt: there are saves, but none of them is intact; on every rank.
            TypeError, ValueError: `state` is not a TrainState or does not match the save; or the Checkpointer was
                closed. On every rank.
            SynclineError: the directory cannot be read; on every rank.
            ReplicaDivergence: modules or optimizers that were equal on all ranks when they were saved differ between
                ranks after loading; on every rank.
        """
        self.wait()
        with failing_together(self._transport, "sl.Checkpointer.load") as lines:
            self._check(state)
            checked_flag("strict", strict)
            lines += [f"strict  {strict}", *(f"named  {name}" for name in state.named)]
        with self._called(".load"):
            save = self._store.read_newest(state, strict=strict)
            if save is None:
                return None
            title = f"sl.Checkpointer.load of {save.name}"
            load_together(self._transport, title, save.before, lambda: _load(state, save, strict=strict))
            if strict:
                state._mark_replicas_equal()
            if self._transport.rank == 0:
                for remark in remarks(save.name, save.found, state, self._transport.size):
                    warn_user(remark)
            self._newest = (save.found.manifest.step, save.path)
            return save.found.manifest.step


def _load(state: TrainState, save: IntactSave, *, strict: bool) -> dict[str, Any]:
    """Load the save, and return the state of the objects that must now be equal on all ranks."""
    load_all(state, save.states, strict=strict)
    return save.found.same_on_all(state)


def _end(writer: ThreadPoolExecutor, lane: Transport | None) -> None:
    """Shut down the writer and its lane; no save is pending, because a pending save refers to its Checkpointer."""
    writer.shutdown(wait=False)
    if lane is not None:
        lane.close()
