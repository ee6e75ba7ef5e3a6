"""`Checkpointer`: save the state of all ranks to disk, load it again, and stop all ranks after the same step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, overload

from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from syncline._torch.autograd import profiled
from syncline._torch.modules import is_in_join
from syncline.checkpoint.contents import Parts, remarks
from syncline.checkpoint.files import Files
from syncline.checkpoint.rollback import failing_together, load_together
from syncline.checkpoint.store import IntactSave, Refused, SaveStore
from syncline.checkpoint.train_state import TrainState, load_all, remarks_on_loaders
from syncline.checks import checked_count, checked_flag, checked_path, suggests_arguments, what_it_is
from syncline.errors import SynclineError
from syncline.events import called
from syncline.gradients.riders.requests import StopVote
from syncline.gradients.wrapper_protocol import replica_of
from syncline.session.stop_request import EXIT_STOPPED, STOP_SIGNALS, Stopped, StopRequest, checked_signals
from syncline.session.world import before_shutdown, transport_of
from syncline.transport.base import Transport
from syncline.user_code import warn_user, warning_here
from syncline.words import describe_ranks, one_line, ranks_with

_FILE_METHODS = tuple(name for name in vars(Files) if not name.startswith("_"))


@suggests_arguments
class Checkpointer:
    """A writer and reader of a training run's saves, which are all in one directory.

    Rank 0 writes the state that is equal on all ranks. Each rank writes the rest of its state: its random number
    generators, its residuals, its replica if replicas have drifted apart, and its shard of a sharded optimizer. A save
    becomes valid only when its directory gets its final name, after all files of the save were synced to the disk.
    `load` uses the newest intact save, and verifies every byte that it loads. Nothing is pickled: tensors are in
    safetensors files, and everything else is JSON.

    Construction, `save`, `load` and `stop_if_asked` are collective calls: every rank must make the same calls. If the
    ranks run on several hosts, all hosts must see the directory; the constructor checks this. The object owns a
    connection and a thread until `close` is called, its `with` block ends, or the object is garbage-collected. If ranks
    are lost or join in `sl.steps`, the object follows the change in its next call.

    Args:
        directory: the directory that holds all saves of one training run.
        keep: the number of saves to keep, at least 1. Older saves are removed.
        group: the group of ranks that save and load together; see `broadcast_`.
        files: the file system that holds the directory. None means the file system of this host.
        stop_signals: the signals (names or numbers) that ask this process to stop; see `stop_if_asked`. They must be
            the same on all ranks. The first call of `stop_if_asked` installs handlers for them. Pass () to install
            none.
        stop_every: run a separate collective only in every `stop_every`-th call of `stop_if_asked`. Calls that need
            no separate collective do not count.
        read_only: whether saving is refused. If so, the directory need not be writable, and another run can save into
            it.

    Raises:
        TypeError, ValueError: an argument is invalid; for example, `keep` is below 1 or a signal is unknown. Raised
            on every rank.
        ContractMismatch: the arguments differ between the ranks.
        SynclineError: the directory cannot be written, or the ranks see different directories. With `read_only`: the
            directory cannot be read, or it has no saves.

    Examples:
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
        self._follows_default = group is None
        files = files or Files()
        with failing_together(self._transport, "sl.Checkpointer") as lines:
            path = checked_path("directory", directory)
            if not path:
                raise ValueError(
                    "expected directory to be a path, got ''. For the current directory, give '.'"
                )
            path = os.path.abspath(path)
            checked_flag("read_only", read_only)
            checked_count("keep", keep, at_least=1)
            if not all(callable(getattr(files, name, None)) for name in _FILE_METHODS):
                raise TypeError(
                    f"expected files to be a file system with the methods {', '.join(_FILE_METHODS)}, got {files!r}"
                )
            checked_count("stop_every", stop_every, at_least=1)
            signals = checked_signals(stop_signals)
            lines += [f"keep  {keep}", f"read_only  {read_only}", f"stop_every  {stop_every}"]
            lines += [f"stop_signals  {', '.join(number.name for number in signals) or 'none'}"]
        self._stop = JointStop(self._transport, signals, stop_every)
        self._has_searched = False
        """Whether this process was searched for DataLoaders that a resumed run would read differently."""
        self._writer = ThreadPoolExecutor(1, "syncline checkpoints")
        self._under_way: Future[str | None] | None = None
        self._newest: tuple[int, str] | None = None
        """The step and the directory of the save that was made or loaded last; None before the first one."""
        self._copies: dict[str, Tensor] = {}
        """Copies of tensors, by name. Non-blocking saves are written from them. The next save reuses their memory."""
        self._open_lane()
        with self._called():
            self._store = SaveStore(self._lane, files, path, keep, read_only=read_only)
        before_shutdown(self.wait)

    def _open_lane(self) -> None:
        with self._called():
            self._lane = self._transport.lane("checkpoints")
        own_lane = None if self._lane is self._transport else self._lane
        if own_lane is not None:
            own_lane.counts = own_lane.counts.in_background()
        self._end = weakref.finalize(self, _end, self._writer, own_lane)
        # At exit, `before_shutdown` waits for pending saves first; all lanes are closed after that.
        self._end.atexit = False

    def _follow(self) -> None:
        """Use the new default group if the ranks have changed (`sl.steps`). A collective call of that group."""
        if not self._follows_default or not self._end.alive:
            return
        transport = transport_of(None)
        if transport is self._transport:
            return
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            wait([under_way])  # its connection is closed. A failed save was already reported by a warning
        self._end.detach()
        self._transport, self._newest = transport, None
        self._open_lane()
        self._stop.use_transport(transport)
        self._store.use_lane(self._lane)

    def __repr__(self) -> str:
        newest = "no save" if self._newest is None else f"newest save at step {self._newest[0]}"
        return one_line(self, f"{newest if self._end.alive else 'closed'}, {self._store.path}")

    @contextlib.contextmanager
    def _called(self, method: str = "") -> Iterator[None]:
        """Record the present call in the status of this rank, during the `with` block.

        Args:
            method: the name of the called method, with a dot before it; "" for the constructor.
        """
        transport, name = self._transport, f"Checkpointer{method}"
        with transport.board.called(f"sl.{name}"), profiled(name), called(name, transport.rank):
            yield

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Wait for the pending save, then release the thread, the connection, and the memory of the copies.

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
        """Raise an error if this Checkpointer is closed, or if `state` is not a TrainState.

        Args:
            state: the argument to check.
            saves: whether the caller will save. If so, a read-only Checkpointer is an error, too.
        """
        if not self._end.alive:
            raise ValueError("this sl.Checkpointer is closed: create another one to save or load")
        if saves and self._store.is_read_only:
            raise ValueError(
                f"cannot save into {self._store.path}, because this sl.Checkpointer was created with read_only=True: "
                "to save, create an sl.Checkpointer without read_only"
            )
        if not isinstance(state, TrainState):
            raise TypeError(
                f"expected state to be a TrainState, got {what_it_is(state)}: put the objects of the run into a "
                "TrainState, sl.TrainState(model=..., optimizer=...)"
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
        """Save `state`. A collective call; make it between two steps.

        Args:
            state: the state to save.
            step: the number of steps that the run has made. It is assigned to `state.step` before the state is saved.
                Pass None to keep `state.step`.
            blocking: whether to wait until the save is on the disk. If False, the state is copied within the memory of
                this process, a thread writes the copy, and training continues. The memory of the copy is kept for the
                next save. A save waits for the previous save, so at most one save is pending.

        Returns:
            The directory of the save, or None if the save could not be written (for example because the disk is full).
            If it could not be written, a warning gives the reason, earlier saves are unchanged, and training can
            continue. With `blocking=False`, `save` returns a future of this value; the future's `result()` waits.

        Raises:
            ContractMismatch: the ranks save different objects, or modules whose tensors differ in shape or dtype, or
                they are at different steps. Nothing was written.
            TypeError, ValueError: `state` is not a TrainState; `step` is not an integer of at least 0; a value in the
                state cannot be stored (the message names the value); or the Checkpointer is closed or read-only. Raised
                on every rank.
        """
        self._follow()
        self.wait()
        with (
            profiled("Checkpointer.save"),
            failing_together(self._transport, "sl.Checkpointer.save") as lines,
        ):
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
            for remark in state._streams.remarks():
                warn_user(remark)
            for remark in () if self._has_searched else remarks_on_loaders(state.named):
                warn_user(remark)
            self._has_searched = True
        # The thread of the writer has no line of the user's code on its stack.
        self._under_way = self._writer.submit(self._saved, state.step, parts, warning_here())
        return self.wait() if blocking else self._under_way

    def wait(self) -> str | None:
        """Wait for the pending save, and return the directory of that save.

        Returns None if no save is pending, or if the save could not be written.
        """
        under_way, self._under_way = self._under_way, None
        with self._called(".save") if under_way else contextlib.nullcontext():
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
        """End all ranks after the same step if any of them was asked to stop. A collective call.

        Make this call after each step, after `state.commit`. A rank is asked to stop by a signal or by `ask_to_stop`.
        The control data of the next synchronized backward carry the request to all ranks, at no cost. If no gradients
        were reduced since the last call, or if replicas drift, this call runs a small collective instead. All ranks
        then stop: they wait for the pending save, save `state` unless this step is already saved, and exit with
        `sl.EXIT_STOPPED`. Rank 0 prints a message to stderr.

        The first call installs the signal handlers, so also call this method once before the first step. If SIGTERM
        arrives again two seconds or more after the first SIGTERM, it has its usual effect: it ends the process.

        Args:
            state: the state to save before the ranks stop.

        Raises:
            SystemExit: all ranks stop here, and `state` is saved. The exit code is `sl.EXIT_STOPPED`.
            TypeError, ValueError: `state` is not a TrainState, or the Checkpointer is closed or read-only. Raised on
                this rank only, because most calls exchange nothing that could carry the error to the other ranks.
            SynclineError: all ranks stop here, but `state` could not be saved; or the strategy does not let the ranks
                wait for each other here (`ParameterServer`, between two parameter syncs).

        Examples:
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
        self._follow()
        with self._transport.board.called("sl.Checkpointer.stop_if_asked"):  # nearly always, nothing happens
            if not self._stop.is_agreed(state):
                return
        with self._called(".stop_if_asked"):
            # A failed save was already reported by a warning; other ranks may have failed differently.
            with contextlib.suppress(Exception):
                self.wait()
            is_saved = self._newest is not None and self._newest[0] == state.step
            last = self._newest and self._newest[1]
            self._stop.end(self._lane, state.step, last if is_saved else self.save(state), last)

    def ask_to_stop(self, why: str = "asked to stop") -> None:
        """Ask all ranks to stop, as a signal does; the ranks stop in `stop_if_asked`.

        Any thread can call this method, on one rank or on several.

        Args:
            why: the reason, as the end of a sentence about this rank. With "reached its deadline", the message says
                "rank 0 reached its deadline".

        Raises:
            TypeError: `why` is not a string.
        """
        if not isinstance(why, str):
            raise TypeError(f"expected why to be a str with the reason in words, got {what_it_is(why)}")
        self._stop.request.ask(why)

    # ------------------------------------------------------------------ loading

    def load(self, state: TrainState, *, strict: bool = True) -> int | None:
        """Load the newest intact save into `state`. A collective call.

        Every byte that is loaded is verified before `state` is changed. If newer saves are damaged, a warning names
        them.

        Args:
            state: a state with the same names as the saved state.
            strict: whether `state` and the save must have the same names. If False, only the objects whose names are in
                both are loaded, for example only the model, to evaluate it. Objects in `state` that were not saved
                stay unchanged, and a warning names them.

        Returns:
            The step of the save, or None if there are no saves yet.

        Raises:
            CheckpointCorrupt: there are saves, but none of them is intact.
            TypeError, ValueError: `state` is not a TrainState or does not match the save; or the Checkpointer is
                closed.
            ContractMismatch: `strict`, or the names in `state`, differ between the ranks.
            SynclineError: the directory cannot be read.
            ReplicaDivergence: modules or optimizers differ between the ranks after loading, although they were equal
                when they were saved.

        All of these errors are raised on every rank.
        """
        self._follow()
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
    """Load the save into `state`, and return the state of the objects that must now be equal on all ranks."""
    load_all(state, save.states, strict=strict)
    return save.found.same_on_all(state)


def _end(writer: ThreadPoolExecutor, lane: Transport | None) -> None:
    """Shut down the writer thread, and close its lane.

    No save is pending here, because a Checkpointer with a pending save is not garbage-collected. `lane` is None if the
    Checkpointer has no lane of its own.
    """
    writer.shutdown(wait=False)
    if lane is not None:
        lane.close()


# ---------------------------------------------------------------------- stopping


class JointStop:
    """An agreement of all ranks on whether to stop. After they have agreed to stop, `end` ends the process.

    Each rank votes on whether to stop. The votes travel with the control data of a backward, or in a separate
    collective (see `gradients/riders/requests.py`). The choice between these two ways depends only on calls that all
    ranks have made, never on the state of one rank.

    Args:
        transport: the transport between the ranks.
        signals: the signals that ask this process to stop. The first call of `is_agreed` installs their handlers.
        every: run a separate collective only in every `every`-th call of `is_agreed`. Calls that need no separate
            collective do not count.
    """

    def __init__(self, transport: Transport, signals: Sequence[signal.Signals], every: int) -> None:
        self.request = StopRequest()
        self._signals = signals
        self._every = every
        self._is_listening = False
        self.use_transport(transport)

    def use_transport(self, transport: Transport) -> None:
        """Vote with the ranks of this transport from now on. All of them make this call.

        Some ranks of a former group may have received votes that others have not. So the next call of `is_agreed`
        gathers all votes anew.
        """
        self._transport = transport
        self._vote = StopVote(self.request)
        self._num_received = 0
        self._num_without_backward = 0
        """The number of calls of `is_agreed` that could not use votes from a backward."""
        self._lane: Transport | None = None

    def is_agreed(self, state: TrainState) -> bool:
        """Return whether all ranks stop now. A collective call; it sends nothing if a backward carried the votes."""
        if not self._is_listening:
            self._listen()
        if self._transport.size == 1:
            if self.request.is_asked:
                self._vote.asked_ranks = (0,)
            return self.request.is_asked
        is_in_any_join = False
        for one in state.named.values():
            replica = replica_of(one)
            if replica is not None and replica.send_stop_vote(self._vote, self._transport):
                is_in_any_join |= isinstance(one, Joinable) and is_in_join(one)
        has_received = self._vote.num_received != self._num_received
        self._num_received = self._vote.num_received
        # Ranks without inputs (inside of `join`) would not enter a separate collective.
        if not has_received and not is_in_any_join:
            if self._lane is None:
                self._lane = self._transport.lane("stopping")
            if self._num_without_backward % self._every == 0:
                self._vote.gather(self._lane)
            self._num_without_backward += 1
        return bool(self._vote.asked_ranks)

    def _listen(self) -> None:
        self._is_listening = True
        if self.request.listen(self._signals):
            # Not at exit: until the process has ended, the signals must not regain their usual effect.
            weakref.finalize(self, self.request.forget).atexit = False
        elif self._signals:
            warn_user(
                "sl.Checkpointer.stop_if_asked: only the main thread can handle signals, and this is another thread, "
                "so signals will not stop this rank. Call stop_if_asked in the main thread. Otherwise, create the "
                "sl.Checkpointer with stop_signals=(), and ask for a stop with checkpointer.ask_to_stop()"
            )

    def close(self) -> None:
        """Remove the signal handlers, unless the ranks have agreed to stop.

        After such an agreement, the handlers stay until the process ends.
        """
        if self._vote.asked_ranks:
            return
        self.request.forget()
        if self._lane is not None and self._lane is not self._transport:
            self._lane.close()

    def end(self, lane: Transport, step: int, saved: str | None, last: Any) -> None:
        """Raise the exception that ends this process. A collective call, after which all ranks end.

        Args:
            lane: a transport on which no collective is in progress.
            step: the step after which all ranks stop.
            saved: the directory of the save of this step; None if the state could not be saved.
            last: the directory of the last save, for the message; None if there is no save.

        Raises:
            Stopped: the state is saved, and the ranks stop.
            SynclineError: the state could not be saved.
        """
        reasons = [json.loads(row) for row in lane.all_gather_bytes(json.dumps(self.request.why).encode())]
        whys = {rank: why for rank, why in enumerate(reasons) if why is not None}
        if lane.size == 1:
            reason = f"this process {whys[0]}"
        else:
            reason = ", ".join(f"{describe_ranks(ranks)} {why}" for why, ranks in ranks_with(whys).items())
        if saved is None:
            raise SynclineError(
                f"{reason}: all ranks stopped after step {step}, but the state could not be saved (a warning has the "
                f"reason). The last save is {last or 'none'}"
            )
        if lane.rank == 0:
            print(
                f"syncline: {reason}: stopped after step {step}, saved in {saved} (exit code {EXIT_STOPPED}: start "
                "again to resume)",
                file=sys.stderr,
                flush=True,
            )
        # This process ends soon. A launcher that sees one rank end may signal the others to end, and such a signal
        # must not change this rank's exit code.
        self.request.rearm()
        raise Stopped
