"""The recorder, an observer that writes the events of each rank of this process to the rank's trace file."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from syncline.contract import Contract
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
    Source,
)
from syncline.liveness.processes import clock_key
from syncline.session.world import world
from syncline.tracing import rows
from syncline.tracing.file import TraceFile
from syncline.user_code import warn_user

_SHORTEST_CALL_SECONDS = 0.0001
"""Shorter calls are not recorded: a call that finds nothing to do would fill the trace."""


def micros(seconds: float) -> int:
    """Return a time in whole microseconds."""
    return round(1e6 * seconds)


class Recorder(Observer):
    """An observer that writes trace files.

    If a file cannot be written, for example because the disk is full, the recorder warns once and stops. Training goes
    on.

    Args:
        directory: the directory of the trace.
        max_bytes: the largest size of the trace of one rank.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._lock = threading.Lock()  # ranks can be threads, and each opens its file at its first event
        self._is_one_rank: bool | None = None
        """Whether this process is one rank, whose number can change (`sl.steps`). Otherwise, ranks are threads."""
        self._files: dict[int, TraceFile] = {}
        """The files, by rank; the file of a process that is one rank has the key 0."""
        self._contracts: dict[Source, Callable[[], Contract]] = {}
        self._layouts: dict[Source, int] = {}

    # ------------------------------------------------------------------ events

    def forward_ended(self, event: ForwardEnded) -> None:
        self._contracts[event.source] = event.contract
        buffers = event.buffers
        row = rows.ForwardRow(
            module=event.source.module,
            step=event.step,
            began=micros(event.began_at),
            computed_from=micros(event.computed_from),
            ended=micros(event.ended_at),
            is_training=event.is_training,
            buffer_bytes=buffers.payload_bytes if buffers is not None and buffers.sent else 0,
        )
        self._write(event.source.rank, row)

    def backward_ended(self, event: BackwardEnded) -> None:
        source = event.source
        if self._layouts.get(source) != event.layout:
            self._layouts[source] = event.layout
            self._write(source.rank, self._module_row(event), repeat_as=source.module)
        row = rows.BackwardRow(
            module=source.module,
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
        self._write(source.rank, row)

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
        row = rows.OptimizerRow(
            module=event.source.module,
            optimizer=event.optimizer,
            step=event.step,
            began=micros(event.began_at),
            ended=micros(event.ended_at),
            is_discarded=event.is_discarded,
        )
        self._write(event.source.rank, row)

    def parameters_synced(self, event: ParametersSynced) -> None:
        record = event.record
        row = rows.SyncRow(
            module=event.source.module,
            step=record.step,
            began=micros(event.began_at),
            ended=micros(event.ended_at),
            what=record.what,
            payload_bytes=record.payload_bytes,
            waited=micros(record.waited_seconds),
        )
        self._write(event.source.rank, row)

    def call_ended(self, event: CallEnded) -> None:
        if event.ended_at - event.began_at >= _SHORTEST_CALL_SECONDS:
            row = rows.CallRow(event.name, micros(event.began_at), micros(event.ended_at))
            self._write(event.rank, row)

    def ranks_changed(self, event: RanksChanged) -> None:
        began, ended = micros(event.began_at), micros(event.ended_at)
        row = rows.RanksRow(event.rank, event.num_ranks, event.step, event.reason, began, ended)
        self._write(event.rank, row)

    def rank_found_slow(self, event: RankFoundSlow) -> None:
        record = event.record
        row = rows.SlowRow(event.source.module, record.from_step, record.rank, str(record))
        self._write(event.source.rank, row)

    def place_seen(self, event: PlaceSeen) -> None:
        self._write(event.rank, rows.PlaceRow(micros(event.at), event.step, event.words))

    # ------------------------------------------------------------------ files

    def end(self, error: BaseException | None = None) -> None:
        """Stop, and record in each file that the program has ended.

        Args:
            error: the error that has ended the program; None if there is none.
        """
        self.stop()
        words = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
        for rank in list(self._files):
            self._write(rank, rows.EndRow(micros(time.perf_counter()), words))
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, rank: int, row: rows.Row, *, repeat_as: str = "") -> None:
        try:
            file = self._files.get(0 if self._is_one_rank else rank) or self._open(rank)
            file.write(row, repeat_as=repeat_as)
        except OSError as error:
            self.stop()
            warn_user(
                f"rank {rank}: the trace in {self._directory} ends here, because a row could not be written: {error}. "
                "Training goes on. What was recorded before can be read"
            )

    def _open(self, rank: int) -> TraceFile:
        with self._lock:
            if self._is_one_rank is None:
                self._is_one_rank = world().size > 1
            key = 0 if self._is_one_rank else rank
            if key not in self._files:
                number = world().rank if self._is_one_rank else rank
                host = socket.gethostname()
                file = TraceFile(self._directory, f"rank-{number:05d}.{host}.{os.getpid()}", self._max_bytes)
                file.write(_process_row(number, host), repeat_as="process")
                self._files[key] = file
            return self._files[key]


def _process_row(rank: int, host: str) -> rows.ProcessRow:
    return rows.ProcessRow(
        format=rows.FORMAT,
        rank=rank,
        num_ranks=world().size,
        host=host,
        clock=clock_key(),
        pid=os.getpid(),
        at=micros(time.perf_counter()),
        unix_seconds=time.time(),
        command=shlex.join(sys.argv),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.partition(" ")[0]}
    return {name: str(version) for name, version in found.items()}
