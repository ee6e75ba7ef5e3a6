"""The calls in which ranks wait: Syncline's own calls, and the program's calls of torch.distributed.

torch counts the calls that each rank starts on a process group. So Syncline treats a wait in torch.distributed like a
wait of its own: the group is the lane, and a rank that has started fewer calls on the group is absent. `deadlock.py`
detects waits of both kinds that can never end. To end a wait in torch.distributed, Syncline raises an error inside the
call.

Syncline reads the frame of the main thread only after `faulthandler` has shown that the thread is in such a call. The
thread sleeps during the call, so the frame does not change meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from syncline._torch.process_groups import PrefixStore, living_groups, num_calls_started
from syncline.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailed,
    PeerLost,
    SynclineError,
    UnevenInputs,
)
from syncline.liveness.board import Place, StepPhase, Wait
from syncline.liveness.connection import ANSWER_SECONDS, StoreSilent, interruptibly, open_sockets
from syncline.liveness.store import decode
from syncline.user_code import frames_of_threads, innermost_in_dump, is_users

SAME_CALLS = (
    "every rank must make the same calls in the same order, with equal sizes and dtypes: "
    "look for a branch that depends on the rank, or for unequal numbers of batches"
)
"""The last lines of an error about ranks that made different calls: how to prevent the error."""

ENDLESS_WAIT = "the ranks wait for each other in different calls, and none of them can ever continue:"
"""The first line of an error about ranks that can never continue. The places of the ranks come below it."""

ONE_RANK_EVALUATES = (
    "a forward of the wrapper sends the module's buffers (BatchNorm's statistics), so all ranks must run it. To "
    "evaluate on one rank only:\n"
    "  - call ddp.module(x) on that rank\n"
    "  - or call ddp.sync_buffers_() on all ranks, and then the wrapper under torch.no_grad() on one rank"
)
"""The last lines of an error about a forward that only some ranks run: how to prevent the error."""

LATE = "A rank that did not make this call is slow (then raise the timeout), stuck, or has fewer batches"
"""The possible causes if ranks are late."""

_UNEVEN = (
    "the rank that shut down made fewer steps than this rank:\n"
    "  - give every rank as many batches (sl.DistributedSampler does; drop_last=True repeats none), and let no `break` "
    "or `return` depend on the rank\n"
    "  - or run the loop inside of `with ddp.join():`, so that ranks may end one by one; not with sharded=True"
)

_OR_EVALUATES = (
    "\n  - or, if one rank evaluates: call ddp.module(x) there, because ddp(x) sends the module's buffers"
)

_LEFT_OUT = (
    "all ranks must call {call} equally often, but the rank that shut down made fewer of these calls. Move the call "
    "out of any branch that depends on the rank (if rank == 0), and let no rank return before the call"
)

FAILURES = (CollectiveMismatch, CollectiveTimeout, PeerFailed, PeerLost, UnevenInputs)
"""The errors that a `Failure` of a group can be."""

_KINDS: dict[str, type[SynclineError]] = {kind.__name__: kind for kind in FAILURES}

_MAX_TEXT_BYTES = 12 * 1024
"""The limit for each text of a failure, in UTF-8. Line ends take two bytes in JSON, and shared memory has 64 KiB."""


@dataclass(frozen=True)
class Call:
    """A description of one rank's call of a collective, or of a message between two ranks.

    In a collective, all ranks must make the same call. In a message, one rank sends and the other receives.
    """

    operation: str
    detail: str = ""
    numel: int | None = None
    dtype: torch.dtype | None = None
    terms: int = 0
    """A number, such as a hash of the shape, that must also be equal on all ranks; 0 if there is no such number."""

    def agrees_with(self, other: Call) -> bool:
        """Return whether this call and `other`, made by two ranks, fit together in one collective or message."""
        if {self.operation, other.operation} == {"send", "recv"}:
            return (self.numel, self.dtype) == (other.numel, other.dtype)
        return self == other

    def __str__(self) -> str:
        size = "" if self.numel is None else f" of {self.numel} elements, {self.dtype}"
        return f"{self.operation}{f'({self.detail})' if self.detail else ''}{size}"


@dataclass(frozen=True)
class Failure:
    """The reason why a group can no longer be used. Each rank creates its own exception from the failure."""

    kind: type[SynclineError]
    text: str
    aborted_by: int | None = None
    """The rank that aborted the group. The error names this rank. If None, the error names no such rank."""
    is_common: bool = False
    """Whether the text describes all ranks, so that every rank raises the same text."""
    stuck_ranks: Sequence[int] = ()
    """The ranks that are proved to wait forever, in calls of Syncline or of torch.distributed."""
    traceback: str = ""
    """The traceback of the exception that ended `aborted_by`; empty if no exception did. It is a note of the error."""

    def on_rank(self, rank: int | None) -> SynclineError:
        """Return the error to raise on `rank`. A process that is not in the group passes None."""
        if self.aborted_by is None:
            return self.kind(self.text)
        if rank == self.aborted_by:
            return SynclineError(f"this transport was aborted on rank {rank}: {self.text}")
        if not self.traceback:
            return self.kind(f"rank {self.aborted_by} aborted the group: {self.text}")
        error = self.kind(f"rank {self.aborted_by} failed: {self.text}")
        error.add_note(f"The traceback of rank {self.aborted_by}:\n{self.traceback}")
        return error

    def to_json(self, rank: int) -> str:
        """Return the failure as JSON, in the form in which the rank `rank` publishes it.

        If a text of the failure is long, keep only its end, because a traceback names the error at its end.
        """
        rank_of_text = None if self.is_common else rank
        text, trace = (
            one.encode(errors="replace")[-_MAX_TEXT_BYTES:].decode(errors="ignore")
            for one in (self.text, self.traceback)
        )
        record = _Record(self.kind.__name__, text, rank_of_text, list(self.stuck_ranks), trace)
        return json.dumps(vars(record), ensure_ascii=False)

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        """Return the failure that another rank has published as `text`.

        Raises:
            SynclineError: `text` is not the JSON of a failure.
        """
        record = decode(_Record, text, "the published failure of the group")
        kind = _KINDS.get(record.kind, PeerFailed)
        return Failure(
            kind,
            record.text,
            aborted_by=record.rank,
            is_common=record.rank is None,
            stuck_ranks=tuple(record.stuck_ranks),
            traceback=record.traceback,
        )


@dataclass(frozen=True)
class _Record:
    """The published form of a failure. JSON can represent all of its fields."""

    kind: str
    text: str
    rank: int | None
    stuck_ranks: list[int] = field(default_factory=list)
    traceback: str = ""


def remedy_for_left(here: Place, left: Iterable[Place]) -> str:
    """Return the advice for an error about ranks that have shut down normally while this rank waits for them.

    Args:
        here: the place of this rank.
        left: the last places of the ranks that have shut down.

    Examples:
        >>> remedy_for_left(Place(step=4, phase=StepPhase.BACKWARD), [Place(step=3)])[:40]
        'the rank that shut down made fewer steps'
        >>> remedy_for_left(Place(step=3, opening="sl.Checkpointer.save"), [Place(step=3)])[:40]
        'all ranks must call sl.Checkpointer.save'
    """
    if here.phase is StepPhase.EVAL_FORWARD:
        return ONE_RANK_EVALUATES
    if here.sends_buffers:
        return _UNEVEN + _OR_EVALUATES
    if here.opening is None or any((place.step or 0) < (here.step or 0) for place in left):
        return _UNEVEN
    return _LEFT_OUT.format(call=here.opening)


_FILE = distributed_c10d.__file__

_NEEDS_ALL = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
}
"""Calls of torch.distributed that return only after every rank of the group has made the call."""

_NEEDS_THE_OTHER = _NEEDS_ALL | {"broadcast", "gather", "recv", "reduce", "scatter", "send"}
"""Calls of torch.distributed that, in a group of two ranks, may wait for the other rank."""

_LANE = "torch group "


@dataclass(frozen=True)
class TorchCall:
    """A call of torch.distributed in which the main thread of this rank waits."""

    group: dist.ProcessGroup
    name: str
    number: int
    """The index of the call among this rank's calls on the group, as torch counts them."""

    @classmethod
    def latest(cls, group: dist.ProcessGroup, name: str) -> TorchCall | None:
        """Return the last call of this rank on `group`. None if the backend of the group does not count calls.

        Args:
            group: the process group.
            name: the name of the function of torch.distributed that was called.
        """
        number = num_calls_started(group)
        return None if number is None else cls(group, name, number)

    def as_wait(self, *, blocks_rank: bool) -> Wait:
        """Return this call as a wait, for the peers to read."""
        words = f"torch.distributed.{self.name}"
        lane = _LANE + self.group.group_name
        return Wait(lane=lane, call=self.number, words=words, blocks_rank=blocks_rank, is_torchs=True)

    def end(self, error: SynclineError) -> None:
        """End this call by raising `error` in the main thread. Do nothing if the call has already returned."""
        main = threading.main_thread().ident or 0
        if _call_of_frame(frames_of_threads().get(main)) != self:
            return

        class Raised(type(error)):  # type: ignore[misc]  # CPython needs a class that it calls without arguments
            def __new__(cls, *_: object) -> Any:
                return error

        # CPython raises it at the next Python instruction: torch's functions have an exception handler in Python.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Raised))
        _close_connections(self.group)


def call_in_dump(dump: str) -> TorchCall | None:
    """Return the call of torch.distributed in which the main thread waits.

    Return None if there is no such call, or if the main thread was not in it when `dump` was written.

    Args:
        dump: the stacks of all threads, as `faulthandler` writes them.
    """
    main = threading.main_thread().ident or 0
    path, name = innermost_in_dump(dump, main)
    if path != _FILE or name not in _NEEDS_THE_OTHER:
        return None
    return _call_of_frame(frames_of_threads().get(main))


def num_started(lanes: set[str]) -> dict[str, int]:
    """Return the number of calls that this rank has started on torch's process groups, by lane.

    The result is empty if another thread runs the user's code or torch.distributed, because that thread may start such
    a call at any moment.

    Args:
        lanes: the names of the lanes to count. Lanes that are not process groups of torch are ignored.
    """
    if any(
        _may_call(frame) for ident, frame in frames_of_threads().items() if ident != threading.get_ident()
    ):
        return {}
    found = {}
    for group in list(living_groups()):
        lane = _LANE + group.group_name
        if lane in lanes and (number := num_calls_started(group)) is not None:
            found[lane] = number
    return found


def _call_of_frame(frame: FrameType | None) -> TorchCall | None:
    if frame is None or frame.f_code.co_filename != _FILE:
        return None
    group = frame.f_locals.get("group")
    group = dist.group.WORLD if group is None else group
    name = frame.f_code.co_name
    if not isinstance(group, dist.ProcessGroup) or (number := num_calls_started(group)) is None:
        return None
    calls = _NEEDS_THE_OTHER if group.size() == 2 else _NEEDS_ALL
    return TorchCall(group, name, number) if name in calls else None


def _may_call(frame: FrameType | None) -> bool:
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _FILE or is_users(path):
            return True
        frame = frame.f_back
    return False


# ---------------------------------------------------------------------- the connections of a Gloo group


def _close_connections(group: dist.ProcessGroup) -> None:
    """Close the connections of this process that belong to a Gloo group. This ends waits that `abort` does not end.

    Each rank wrote its addresses to the store when the group was created. A connection belongs to the group if one of
    its ends has such an address.
    """
    try:
        announced = b"".join(interruptibly(partial(_announced, group), ANSWER_SECONDS))
    except StoreSilent:
        return  # the waits end at their deadlines
    for file_descriptor in open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file_descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ends = (connection.getsockname(), connection.getpeername())
            if any(_as_announced(connection.family, *end[:2]) in announced for end in ends):
                connection.shutdown(socket.SHUT_RDWR)


def _announced(group: dist.ProcessGroup) -> list[bytes]:
    found: list[bytes] = []
    with contextlib.suppress(RuntimeError):
        store = PrefixStore("cpu/", group.get_group_store())
        nth_context = 0
        while store.check([f"{nth_context}/0"]):
            keys = [f"{nth_context}/{rank}" for rank in range(group.size())]
            found += [store.get(key) for key in keys if store.check([key])]
            nth_context += 1
    return found


def _as_announced(family: int, host: str, port: int) -> bytes:
    """Return an address in the form in which Gloo announces it: the first bytes of the kernel's `sockaddr` structure.

    The later bytes are left out, because they vary between connections.
    """
    kind = int(family).to_bytes(2, sys.byteorder) + port.to_bytes(2, "big")
    address = socket.inet_pton(family, host)
    return kind + address if family == socket.AF_INET else kind + bytes(4) + address
