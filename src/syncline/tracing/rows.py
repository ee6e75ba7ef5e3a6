"""The rows of a trace file. A line is a JSON list of rows. A row is a list of its kind, and its fields in order.

Times are whole microseconds of the clock of the process that wrote the file (`time.perf_counter`). The rows that every
step has are written in a short form: their kind ends with "#", and their numbers are in the last row of the line, of
kind "numbers", as 64-bit floats in base 64; times are in seconds there. The first row of each file says which process
has written it. A reader skips rows of kinds that it does not know, and a last line that was cut
off when the process was killed.
"""

from __future__ import annotations

import json
import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from syncline.words import printable

FORMAT = 2
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
    num_lost: int = 0
    """The number of ranks that no longer take part. Traces of earlier versions lack it."""


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
    """The place of the rank at a time."""

    at: int
    step: int | None
    words: str


class EndRow(NamedTuple):
    """The end of the trace. A file without this row belongs to a process that was killed, or still runs."""

    at: int
    error: str
    """The first line of the exception that ended the program; empty if it ended without one."""
    kind: str = ""
    """The name of the class of the exception. Traces of earlier versions lack it."""

    @property
    def is_error(self) -> bool:
        """Whether the program failed. Ctrl-C and `sys.exit(0)` are no failures.

        Examples:
            >>> EndRow(0, "KeyboardInterrupt: ", "KeyboardInterrupt").is_error, EndRow(0, "ValueError: no").is_error
            (False, True)
        """
        is_good = self.is_of("KeyboardInterrupt") or self.error.strip() in _GOOD_ENDS
        return bool(self.error) and not is_good

    def is_of(self, kind: str) -> bool:
        """Return whether an exception of this class ended the program."""
        return (self.kind or self.error.partition(":")[0]) == kind  # earlier versions recorded the text only

    @property
    def words(self) -> str:
        """How the process ended."""
        if self.is_of("KeyboardInterrupt"):
            return "stopped by Ctrl-C"
        return f"ended with an error: {self.error}" if self.is_error else "has ended"


_GOOD_ENDS = ("SystemExit:", "SystemExit: None", "SystemExit: 0", "SystemExit: 75")
"""Exits that are no failures. 75 is that of ranks that stopped because they were asked to."""


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


def text_of(row: Row) -> str:
    """Return the text of one row.

    Examples:
        >>> text_of(CallRow("mean", 5, 9))
        '["call","mean",5,9]'
    """
    return _ENCODER.encode((_NAMES[type(row)], *row))


def forward_text(module: str, is_training: bool) -> str:
    """Return the text of a short `ForwardRow`. Its numbers are its other fields, in order."""
    return _ENCODER.encode(("forward#", module, is_training))


def backward_text(
    module: str, layout: int, is_synchronized: bool, indices: Sequence[int], metrics: Sequence[str]
) -> str:
    """Return the text of a short `BackwardRow` without unused parameters.

    Its numbers are the step, when the backward began and ended, three times for each bucket, and the metrics.

    Args:
        module: the module.
        layout: the number of the layout.
        is_synchronized: whether the backward was synchronized.
        indices: the indices of the buckets.
        metrics: the names of the metrics.
    """
    return _ENCODER.encode(("backward#", module, layout, is_synchronized, indices, metrics))


def optimizer_text(module: str, optimizer: str, is_discarded: bool) -> str:
    """Return the text of a short `OptimizerRow`. Its numbers are its other fields, in order."""
    return _ENCODER.encode(("optimizer#", module, optimizer, is_discarded))


def numbers_text(numbers: Sequence[float]) -> str:
    """Return the text of the row of numbers of a line. The line ends with it."""
    packed = b2a_base64(struct.pack(f"<{len(numbers)}d", *numbers), newline=False)
    return f'["numbers","{packed.decode()}"]'


def line_of(texts: Iterable[str]) -> bytes:
    """Return the line that has the rows with these texts."""
    return f"[{','.join(texts)}]\n".encode()


def encode(*found: Row) -> bytes:
    r"""Return rows as one line.

    Examples:
        >>> encode(CallRow("mean", 5, 9), CallRow("gather", 10, 11))
        b'[["call","mean",5,9],["call","gather",10,11]]\n'
    """
    return line_of(map(text_of, found))


def decode(lines: Iterable[bytes]) -> Iterator[Row]:
    r"""Yield the rows of a file. Lines that are no rows, and rows of unknown kinds, are left out.

    Examples:
        >>> list(decode([b'[["call","mean",5,9]]\n', b'[["call","mea']))
        [CallRow(name='mean', began=5, ended=9)]
        >>> list(decode([line_of([optimizer_text("Net", "SGD", False), numbers_text([3, 5e-6, 9e-6])])]))
        [OptimizerRow(module='Net', optimizer='SGD', step=3, began=5, ended=9, is_discarded=False)]
    """
    for line in lines:
        try:
            found = json.loads(line)
            numbers = iter(_numbers_of(found))
        except (ValueError, struct.error, RecursionError):
            continue
        for one in found if isinstance(found, list) else ():
            try:
                name, *fields = one
                if name in _SHORT:
                    yield _SHORT[name](numbers, *_printable(fields))
                elif name != "numbers":
                    kind = _KINDS[name]
                    yield kind(*_printable(fields[: len(kind._fields)]))
            except (ValueError, KeyError, TypeError, StopIteration):
                continue


def _printable(value: Any) -> Any:
    r"""Return a value of JSON with all texts in it made printable, each in one line: another host may have written it.

    Examples:
        >>> _printable([{"a\x1b[2J": "b\nc"}, 3])
        [{'a\\x1b[2J': 'b c'}, 3]
    """
    if isinstance(value, str):
        return " ".join(printable(value).split("\n"))
    if isinstance(value, list):
        return [_printable(one) for one in value]
    if isinstance(value, dict):
        return {_printable(name): _printable(one) for name, one in value.items()}
    return value


def micros(seconds: float) -> int:
    """Return a time in whole microseconds."""
    return int(1e6 * seconds)


def _numbers_of(found: Any) -> Sequence[float]:
    match found:
        case [*_, ["numbers", str(text)]]:
            packed = a2b_base64(text)
            return struct.unpack(f"<{len(packed) // 8}d", packed)
        case _:
            return ()


def _short_forward(numbers: Iterator[float], module: str, is_training: bool) -> ForwardRow:
    step, times = int(next(numbers)), map(micros, numbers)
    began, computed_from, ended = next(times), next(times), next(times)
    return ForwardRow(module, step, began, computed_from, ended, is_training, int(next(numbers)))


def _short_backward(
    numbers: Iterator[float],
    module: str,
    layout: int,
    is_synchronized: bool,
    indices: Sequence[int],
    metrics: Sequence[str],
) -> BackwardRow:
    step, times = int(next(numbers)), map(micros, numbers)
    began, ended = next(times), next(times)
    buckets = [(index, next(times), next(times), next(times)) for index in indices]
    means = {name: next(numbers) for name in metrics}
    return BackwardRow(module, step, began, ended, layout, is_synchronized, buckets, means, ())


def _short_optimizer(
    numbers: Iterator[float], module: str, optimizer: str, is_discarded: bool
) -> OptimizerRow:
    step, times = int(next(numbers)), map(micros, numbers)
    return OptimizerRow(module, optimizer, step, next(times), next(times), is_discarded)


_SHORT: dict[str, Any] = {
    "forward#": _short_forward,
    "backward#": _short_backward,
    "optimizer#": _short_optimizer,
}
