"""The recorder, an observer that writes the events of each rank of this process to the rank's trace file."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

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
from syncline.user_code import warn_user

_SHORTEST_CALL_SECONDS = 0.0001
"""Shorter calls are not recorded: a call that finds nothing to do would fill the trace."""

_LONGEST_SECONDS = 0.05
"""How long events are kept before they are written."""

_Kept = (
    ForwardEnded
    | BackwardEnded
    | OptimizerStepped
    | ParametersSynced
    | CallEnded
    | RanksChanged
    | RankFoundSlow
    | ReplicasDiverged
    | PlaceSeen
)

_OF_RANK = CallEnded | RanksChanged | ReplicasDiverged | PlaceSeen
"""Events that belong to a rank, and to no wrapped module."""


def micros(seconds: float) -> int:
    """Return a time in whole microseconds."""
    return int(1e6 * seconds)


class Recorder(Observer):
    """An observer that writes trace files.

    Events are kept until 50 ms have passed since the last time, and then written together: to write each on its own
    costs three times as much. So a process that is killed loses the events of at most its last 50 ms, or the last one.
    If a file cannot be written, for example because the disk is full, the recorder warns once and stops. Training goes
    on.

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
        self._kept: list[_Kept] = []
        """Events that are not written yet."""
        self._written_at = 0.0
        self._contracts: dict[Source, Callable[[], Contract]] = {}
        self._layouts: dict[Source, int] = {}
        self._has_ended = False

    # ------------------------------------------------------------------ events

    def forward_ended(self, event: ForwardEnded) -> None:
        self._contracts[event.source] = event.contract
        self._keep(event, event.ended_at)

    def backward_ended(self, event: BackwardEnded) -> None:
        if self._layouts.get(event.source) != event.layout:
            self._layouts[event.source] = event.layout
            row = self._module_row(event)
            with self._lock:
                self._write_kept()
                self._write(event.source.rank, row, repeat_as=row.module)
        self._keep(event, event.ended_at)

    def _module_row(self, event: BackwardEnded) -> rows.ModuleRow:
        contract = self._contracts.get(event.source)
        return rows.ModuleRow(
            module=event.source.module,
            layout=event.layout,
            contract={} if contract is None else asdict(contract()),
            looks_for_unused=event.looks_for_unused,
            buckets=[(one.index, one.payload_bytes, one.parameters) for one in event.record().buckets],
        )

    def optimizer_stepped(self, event: OptimizerStepped) -> None:
        self._keep(event, event.ended_at)

    def parameters_synced(self, event: ParametersSynced) -> None:
        self._keep(event)

    def call_ended(self, event: CallEnded) -> None:
        if event.ended_at - event.began_at >= _SHORTEST_CALL_SECONDS:
            self._keep(event)

    def ranks_changed(self, event: RanksChanged) -> None:
        with self._lock:
            self._keep(event)
            # A part of the file begins with it, so it has to have the new rank.
            self._write(event.rank, _process_row(event.rank), repeat_as="process")

    def rank_found_slow(self, event: RankFoundSlow) -> None:
        self._keep(event)

    def replicas_diverged(self, event: ReplicasDiverged) -> None:
        self._keep(event)

    def place_seen(self, event: PlaceSeen) -> None:
        # Before the first event of the program, `world` may wait for the main thread, which may wait for this one.
        if self._is_one_rank is not None:
            self._keep(event)

    # ------------------------------------------------------------------ files

    def end(self, error: BaseException | None = None) -> None:
        """Stop, and record in each file that the trace has ended.

        Args:
            error: the error that has ended the program; None if there is none.
        """
        self.stop()
        words = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
        with self._lock:
            self._write_kept()
            for rank in list(self._files):
                self._write(rank, rows.EndRow(micros(time.perf_counter()), words))
            self._has_ended = True
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _keep(self, event: _Kept, at: float | None = None) -> None:
        """Keep an event, and write all that are kept if the last time is long ago, or if `at` is None."""
        with self._lock:
            self._kept.append(event)
            if at is None or at - self._written_at > _LONGEST_SECONDS:
                self._write_kept()

    def _write_kept(self) -> None:
        kept, self._kept = self._kept, []
        found: dict[int, list[rows.Row]] = {}
        for event in kept:
            rank = event.rank if isinstance(event, _OF_RANK) else event.source.rank
            found.setdefault(rank, []).append(_row_of(event))
        for rank, of_rank in found.items():
            self._write(rank, *of_rank)
        self._written_at = time.perf_counter()

    def _write(self, rank: int, *found: rows.Row, repeat_as: str = "") -> None:
        if self._has_ended:
            return
        try:
            file = self._files.get(0 if self._is_one_rank else rank) or self._open(rank)
            file.write(*found, repeat_as=repeat_as)
        except OSError as error:
            self._has_ended = True
            self.stop()
            warn_user(
                f"rank {rank}: the trace in {self._directory} ends here, because it could not be written: {error}. "
                "Training goes on. What was recorded before can be read"
            )

    def _open(self, rank: int) -> TraceFile:
        if self._is_one_rank is None:
            self._is_one_rank = is_joined() or world().size > 1
        number = world().rank if self._is_one_rank else rank
        name = f"rank-{number:05d}.{socket.gethostname()}.{os.getpid()}"
        file = self._files[0 if self._is_one_rank else rank] = TraceFile(
            self._directory, name, self._max_bytes
        )
        file.write(_process_row(number), repeat_as="process")
        return file


def _row_of(event: _Kept) -> rows.Row:
    """Return the row of an event."""
    match event:
        case ForwardEnded():
            return rows.ForwardRow(
                module=event.source.module,
                step=event.step,
                began=micros(event.began_at),
                computed_from=micros(event.computed_from),
                ended=micros(event.ended_at),
                is_training=event.is_training,
                buffer_bytes=0 if event.buffers is None else event.buffers.payload_bytes,
            )
        case BackwardEnded():
            return rows.BackwardRow(
                module=event.source.module,
                step=event.step,
                began=micros(event.began_at),
                ended=micros(event.ended_at),
                layout=event.layout,
                is_synchronized=event.is_synchronized,
                buckets=[
                    (index, micros(sent), micros(began), micros(ended))
                    for index, sent, began, ended in event.buckets
                ],
                metrics=event.metrics,
                unused=event.unused,
            )
        case OptimizerStepped():
            return rows.OptimizerRow(
                module=event.source.module,
                optimizer=event.optimizer,
                step=event.step,
                began=micros(event.began_at),
                ended=micros(event.ended_at),
                is_discarded=event.is_discarded,
            )
        case ParametersSynced(source, began_at, ended_at, record):
            return rows.SyncRow(
                module=source.module,
                step=record.step,
                began=micros(began_at),
                ended=micros(ended_at),
                what=record.what,
                payload_bytes=record.payload_bytes,
            )
        case CallEnded():
            return rows.CallRow(event.name, micros(event.began_at), micros(event.ended_at))
        case RanksChanged(rank, num_ranks, step, reason, began_at, ended_at):
            return rows.RanksRow(rank, num_ranks, step, reason, micros(began_at), micros(ended_at))
        case RankFoundSlow(source, record):
            return rows.SlowRow(source.module, record.from_step, record.rank, str(record))
        case ReplicasDiverged():
            return rows.DivergenceRow(
                check=event.check,
                step=event.step,
                tensor=event.tensor,
                num_differing=event.num_differing,
                minority_ranks=event.minority_ranks,
                agreed_at_step=event.agreed_at_step,
                outcome=event.outcome,
                at=micros(event.at),
            )
        case PlaceSeen():
            return rows.PlaceRow(micros(event.at), event.step, event.words)


def _process_row(rank: int) -> rows.ProcessRow:
    return rows.ProcessRow(
        format=rows.FORMAT,
        rank=rank,
        num_ranks=world().size,
        host=socket.gethostname(),
        clock=clock_key(),
        pid=os.getpid(),
        at=micros(time.perf_counter()),
        unix_seconds=time.time(),
        command=shlex.join(sys.argv),
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
        num_cores=num_cores(),
        num_threads=torch.get_num_threads(),
    )
