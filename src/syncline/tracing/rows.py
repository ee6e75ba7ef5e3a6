"""The rows of a trace file. A line is a JSON list of rows. A row is a list of its kind, and its fields in order.

Times are whole microseconds of the clock of the process that wrote the file (`time.perf_counter`). The first row of
each file says which process that is. A reader skips rows of kinds that it does not know, and a last line that was cut
off when the process was killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

FORMAT = 1
"""The number of the format. A reader refuses files with a higher number."""


class ProcessRow(NamedTuple):
    """The process that wrote the file. Always the first row."""

    format: int
    rank: int
    num_ranks: int
    host: str
    """The name of the host."""
    clock: str
    """A key of the clock. Processes with the same key read the same clock."""
    pid: int
    at: int
    unix_seconds: float
    """The time of the system at `at`."""
    command: str
    versions: Mapping[str, str]
    num_cores: int = 0
    """The cores on which the process may run; 0 if they are unknown."""
    num_threads: int = 1
    """The threads with which it computes."""


class ModuleRow(NamedTuple):
    """A wrapped module: its contract and its buckets. It is written again when the buckets hold other parameters."""

    module: str
    layout: int
    contract: Mapping[str, Any]
    looks_for_unused: bool
    buckets: Sequence[tuple[int, int, Sequence[str]]]
    """For each bucket its index, its bytes, and the names of its parameters, in the order in which they were ready."""


class ForwardRow(NamedTuple):
    module: str
    step: int
    began: int
    computed_from: int
    ended: int
    is_training: bool
    buffer_bytes: int
    """The bytes of the buffers that were synchronized before the forward; 0 if none were."""


class BackwardRow(NamedTuple):
    module: str
    step: int
    began: int
    ended: int
    layout: int
    is_synchronized: bool
    buckets: Sequence[tuple[int, int, int, int]]
    """For each bucket its index, when it was sent, when this rank began to wait for it, and when the wait ended."""
    metrics: Mapping[str, float]
    unused: Sequence[str]
    """Names of parameters that got no gradient on this rank."""


class OptimizerRow(NamedTuple):
    module: str
    optimizer: str
    step: int
    began: int
    ended: int
    is_discarded: bool


class SyncRow(NamedTuple):
    module: str
    step: int
    began: int
    ended: int
    what: Sequence[str]
    payload_bytes: int


class CallRow(NamedTuple):
    name: str
    began: int
    ended: int


class RanksRow(NamedTuple):
    rank: int
    num_ranks: int
    step: int
    reason: str
    began: int
    ended: int


class SlowRow(NamedTuple):
    module: str
    step: int
    rank: int
    words: str


class DivergenceRow(NamedTuple):
    """Values that differ between ranks although they must be equal, as in `ReplicasDiverged`."""

    check: str
    step: int | None
    tensor: str
    num_differing: int
    minority_ranks: Sequence[int]
    agreed_at_step: int | None
    outcome: str
    at: int


class PlaceRow(NamedTuple):
    """Where the rank was."""

    at: int
    step: int | None
    words: str


class EndRow(NamedTuple):
    """The end of the trace. A file without this row belongs to a process that was killed, or still runs."""

    at: int
    error: str
    """The first line of the error that ended the program; empty if it ended without one."""


Row = (
    ProcessRow
    | ModuleRow
    | ForwardRow
    | BackwardRow
    | OptimizerRow
    | SyncRow
    | CallRow
    | RanksRow
    | SlowRow
    | DivergenceRow
    | PlaceRow
    | EndRow
)
"""A row of any kind."""

_KINDS: dict[str, Any] = {
    "process": ProcessRow,
    "module": ModuleRow,
    "forward": ForwardRow,
    "backward": BackwardRow,
    "optimizer": OptimizerRow,
    "sync": SyncRow,
    "call": CallRow,
    "ranks": RanksRow,
    "slow": SlowRow,
    "divergence": DivergenceRow,
    "place": PlaceRow,
    "end": EndRow,
}

_NAMES = {kind: name for name, kind in _KINDS.items()}


def time_of(row: Row) -> int | None:
    """Return when a row was written; None if it has no time.

    Examples:
        >>> time_of(CallRow("mean", 5, 9))
        9
    """
    return getattr(row, "ended", getattr(row, "at", None))


_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def encode(*found: Row) -> bytes:
    r"""Return rows as one line.

    Examples:
        >>> encode(CallRow("mean", 5, 9), CallRow("gather", 10, 11))
        b'[["call","mean",5,9],["call","gather",10,11]]\n'
    """
    return (_ENCODER.encode([(_NAMES[type(row)], *row) for row in found]) + "\n").encode()


def decode(lines: Iterable[bytes]) -> Iterator[Row]:
    r"""Yield the rows of a file. Lines that are no rows, and rows of unknown kinds, are left out.

    Examples:
        >>> list(decode([b'[["call","mean",5,9]]\n', b'[["call","mea']))
        [CallRow(name='mean', began=5, ended=9)]
    """
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        for one in found if isinstance(found, list) else ():
            try:
                name, *fields = one
                kind = _KINDS[name]
                yield kind(*fields[: len(kind._fields)])
            except (ValueError, KeyError, TypeError):
                continue
