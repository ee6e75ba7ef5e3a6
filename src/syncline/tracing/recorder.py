"""The recorder, an observer that writes the events of each rank of this process to the rank's trace file."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from syncline.contract import Contract
from syncline.environment import num_cores
from syncline.events import (
    BackwardEnded,
    CallEnded,
    ForwardEnded,
    Observer,
    OptimizerStepped,
    ParametersSynced,
    PlaceSeen,
    RankFoundSlow,
    RanksChanged,
    ReplicasDiverged,
    Source,
)
from syncline.liveness.processes import clock_key
from syncline.session.world import is_joined, world
from syncline.tracing import rows
from syncline.tracing.file import TraceFile
from syncline.tracing.lines import Event, Lines
from syncline.user_code import warn_user

_SHORTEST_CALL_SECONDS = 0.0001
"""Shorter calls are not recorded: a call that finds nothing to do would fill the trace."""

_LONGEST_SECONDS = 0.05
"""How long events are kept before they are written."""


_WITH_RANK = (CallEnded, RanksChanged, ReplicasDiverged, PlaceSeen)


class Recorder(Observer):
    """An observer that writes trace files.

    Events are kept until 50 ms have passed since the last time, and then written together: to write each on its own
    costs several times as much. So a process that is killed loses the events of at most its last 50 ms, or the last
    one. If a file cannot be written, for example because the disk is full, the recorder warns once and stops. Training
    continues.

    Args:
        directory: the directory of the trace.
        max_bytes: the largest size of the trace of one rank.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._lock = threading.RLock()
        """Ranks can be threads, and places are seen on another thread."""
        self._is_one_rank: bool | None = None
        """Whether this process is one rank, whose number can change (`sl.steps`). Otherwise, ranks are threads."""
        self._files: dict[int, TraceFile] = {}
        """The files, by rank; the file of a process that is one rank has the key 0."""
        self._kept: list[Event] = []
        """Events that are not written yet."""
        self._due_at = 0.0
        """The time at which they have to be written."""
        self._lines = Lines()
        self._contracts: dict[Source, Callable[[], Contract]] = {}
        self._layouts: dict[Source, int] = {}
        """The layouts of which the files have a row."""
        self._forward_of: Source | None = None
        """The source of the last forward."""
        self._backward_of: tuple[Source | None, int] = None, 0
        """The source and the layout of the last backward."""
        self._has_ended = False
        self._hooks: list[Any] = []
        """The handles of the hooks by which the steps of all optimizers are seen."""
        self._steps_begun: dict[int, float] = {}
        """The begin of each optimizer step that has not ended, by the id of the optimizer."""

    # ------------------------------------------------------------------ events

    # The first methods run in every step, when the caches are cold: each call and each lookup that they save counts.

    def forward_ended(self, event: ForwardEnded) -> None:
        if event.source is not self._forward_of:
            self._forward_of = event.source
            self._contracts[event.source] = event.contract
        self._kept.append(event)
        if event.ended_at > self._due_at:
            self._write_kept()

    def backward_ended(self, event: BackwardEnded) -> None:
        source, layout = self._backward_of
        if event.layout != layout or event.source is not source:
            self._backward_of = event.source, event.layout
            self._see_layout(event)
        self._kept.append(event)
        if event.ended_at > self._due_at:
            self._write_kept()

    def optimizer_stepped(self, event: OptimizerStepped) -> None:
        last = self._kept[-1] if self._kept else None
        if isinstance(last, OptimizerStepped) and last.step == 0 and last.source is event.source:
            self._kept.pop()  # `_step_ended` has seen the inner part of this step
        self._kept.append(event)
        if event.ended_at > self._due_at:
            self._write_kept()

    def start(self) -> Recorder:
        if not self._hooks:
            self._hooks = [
                register_optimizer_step_pre_hook(self._step_begins),
                register_optimizer_step_post_hook(self._step_ended),
            ]
        return super().start()

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        super().stop()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps_begun[id(optimizer)] = time.perf_counter()

    def _step_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record a step of an optimizer that is not attached. Torch calls this for every optimizer."""
        began_at, source = self._steps_begun.pop(id(optimizer), None), self._backward_of[0]
        # Ranks may be other threads. For those, it is not known whose step this is.
        is_rank = threading.current_thread() is threading.main_thread()
        if began_at is None or source is None or not is_rank:
            return
        name = type(optimizer).__name__
        self._kept.append(OptimizerStepped(source, name, 0, began_at, time.perf_counter(), False))

    def _see_layout(self, event: BackwardEnded) -> None:
        if self._layouts.get(event.source) != event.layout:
            self._layouts[event.source] = event.layout
            with self._lock:
                self._write_kept()
                row = self._module_row(event)
                self._write(event.source.rank, rows.encode(row), repeat_as=row.module)

    def _module_row(self, event: BackwardEnded) -> rows.ModuleRow:
        contract = self._contracts.get(event.source)
        return rows.ModuleRow(
            module=event.source.module,
            layout=event.layout,
            contract={} if contract is None else asdict(contract()),
            looks_for_unused=event.looks_for_unused,
            buckets=[(one.index, one.payload_bytes, one.parameters) for one in event.record().buckets],
        )

    def parameters_synced(self, event: ParametersSynced) -> None:
        self._keep(event)

    def call_ended(self, event: CallEnded) -> None:
        if event.ended_at - event.began_at >= _SHORTEST_CALL_SECONDS:
            self._keep(event)

    def ranks_changed(self, event: RanksChanged) -> None:
        with self._lock:
            self._keep(event)
            # A part of the file begins with it, so it has to have the new rank.
            self._write(
                event.rank, rows.encode(_process_row(event.rank, event.num_ranks)), repeat_as="process"
            )

    def rank_found_slow(self, event: RankFoundSlow) -> None:
        self._keep(event)

    def replicas_diverged(self, event: ReplicasDiverged) -> None:
        self._keep(event)

    def place_seen(self, event: PlaceSeen) -> None:
        # Before the first event of the program, `world` may wait for the main thread, which may wait for this one.
        if self._is_one_rank is not None:
            self._keep(event)

    # ------------------------------------------------------------------ files

    def begin(self, rank: int, num_ranks: int) -> None:
        """Open the file of this process now, and not at its first event. The process is one rank of several.

        So it is recorded where a rank is that hangs before its first step.
        """
        with self._lock:
            self._is_one_rank = True
            try:
                self._files[0] = self._new_file(rank, num_ranks)
            except OSError as error:
                self._fail(rank, error)

    def end(self, error: BaseException | None = None) -> None:
        """Stop, and record in each file that the trace has ended.

        Args:
            error: the error that has ended the program; None if there is none.
        """
        self.stop()
        kind = "" if error is None else type(error).__name__
        words = kind and f"{kind}: {error}".partition("\n")[0]
        with self._lock:
            self._write_kept()
            for rank in list(self._files):
                self._write(rank, rows.encode(rows.EndRow(rows.micros(time.perf_counter()), words, kind)))
            self._has_ended = True
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _keep(self, event: Event) -> None:
        """Keep an event, and write it together with all that were kept."""
        self._kept.append(event)
        self._write_kept()

    def _write_kept(self) -> None:
        with self._lock:
            kept = self._kept[:]
            del self._kept[: len(kept)]  # in place, because another thread may append meanwhile
            for rank, of_rank in self._by_rank(kept):
                self._write(rank, self._lines.of(of_rank))
            self._due_at = time.perf_counter() + _LONGEST_SECONDS

    def _by_rank(self, kept: list[Event]) -> Iterable[tuple[int, list[Event]]]:
        if self._is_one_rank and kept:
            return ((_rank_of(kept[-1]), kept),)
        found: dict[int, list[Event]] = {}
        for event in kept:
            found.setdefault(_rank_of(event), []).append(event)
        return found.items()

    def _write(self, rank: int, line: bytes, repeat_as: str = "") -> None:
        if self._has_ended:
            return
        try:
            file = self._files.get(0 if self._is_one_rank else rank) or self._open(rank)
            file.write_line(line, repeat_as)
        except OSError as error:
            self._fail(rank, error)

    def _fail(self, rank: int, error: OSError) -> None:
        self._has_ended = True
        self.stop()
        warn_user(
            f"rank {rank}: the trace in {self._directory} ends here, because it could not be written: {error}. "
            "Training continues. The events before this can be read"
        )

    def _open(self, rank: int) -> TraceFile:
        if self._is_one_rank is None:
            self._is_one_rank = is_joined() or world().size > 1
        number = world().rank if self._is_one_rank else rank
        file = self._files[0 if self._is_one_rank else rank] = self._new_file(number, world().size)
        return file

    def _new_file(self, rank: int, num_ranks: int) -> TraceFile:
        name = f"rank-{rank:05d}.{socket.gethostname()}.{os.getpid()}"
        file = TraceFile(self._directory, name, self._max_bytes)
        file.write(_process_row(rank, num_ranks), repeat_as="process")
        return file


def _rank_of(event: Event) -> int:
    return event.rank if isinstance(event, _WITH_RANK) else event.source.rank


def _process_row(rank: int, num_ranks: int) -> rows.ProcessRow:
    return rows.ProcessRow(
        format=rows.FORMAT,
        rank=rank,
        num_ranks=num_ranks,
        host=socket.gethostname(),
        clock=clock_key(),
        pid=os.getpid(),
        at=rows.micros(time.perf_counter()),
        unix_seconds=time.time(),
        command=shlex.join(sys.argv),
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
        num_cores=num_cores(),
        num_threads=torch.get_num_threads(),
    )
