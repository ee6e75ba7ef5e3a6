"""Calls of torch.distributed in which a rank waits for ranks that wait for it in a call of Syncline.

torch counts the calls that are started on each of its groups. Such a call can therefore be treated as a wait of our
own: the group is the lane, and a rank that has started fewer calls on it is absent. The same proof applies
(`deadlock.py`), and an error raised inside the call ends it.

The frame of the main thread is read only once `faulthandler` has shown that the thread is in such a call, because the
thread sleeps then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from syncline._torch.process_groups import PrefixStore, default_group, living_groups, num_calls_started
from syncline.errors import SynclineError
from syncline.liveness.board import Wait
from syncline.liveness.store import open_sockets
from syncline.user_code import innermost_in_dump, is_users

__all__ = ["TorchCall", "call_in_dump", "num_started"]


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
"""Calls that return on no rank before every rank of the group has made them."""

_NEEDS_THE_OTHER = _NEEDS_ALL | {"broadcast", "gather", "recv", "reduce", "scatter", "send"}
"""Calls that wait for the other rank in a group of two."""

_LANE = "torch group "


@dataclass(frozen=True)
class TorchCall:
    """A call of torch.distributed in which the main thread waits."""

    group: dist.ProcessGroup
    name: str
    number: int
    """The number of the call on the group, as counted by torch."""

    @classmethod
    def latest(cls, group: dist.ProcessGroup, name: str) -> TorchCall | None:
        """Return the call that was started last on `group`; None if its backend does not count calls."""
        number = num_calls_started(group)
        return None if number is None else cls(group, name, number)

    def as_wait(self, *, blocks_rank: bool) -> Wait:
        """Return the wait to publish to the peers."""
        words = f"torch.distributed.{self.name}"
        lane = _LANE + self.group.group_name
        return Wait(lane=lane, call=self.number, words=words, blocks_rank=blocks_rank, is_torchs=True)

    def end(self, error: SynclineError) -> None:
        """Raise `error` in the main thread, inside this call; do nothing if the call has returned."""
        main = threading.main_thread().ident or 0
        if _call_of_frame(sys._current_frames().get(main)) != self:
            return

        class Raised(type(error)):  # type: ignore[misc]  # CPython needs a class that it calls without arguments
            def __new__(cls, *_: object) -> Any:
                return error

        # CPython raises it at the next Python instruction: torch's functions have an exception handler in Python.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Raised))
        _close_connections(self.group)


def call_in_dump(dump: str) -> TorchCall | None:
    """Return the call of torch.distributed that the main thread was in when `dump` was written, and is still in."""
    main = threading.main_thread().ident or 0
    path, name = innermost_in_dump(dump, main)
    if path != _FILE or name not in _NEEDS_THE_OTHER:
        return None
    return _call_of_frame(sys._current_frames().get(main))


def num_started(lanes: set[str]) -> dict[str, int]:
    """Return the number of calls that this rank has started on groups of torch, by lane.

    The result is empty if another thread, in the user's code or in torch.distributed, may start more of them.
    """
    if any(
        _may_call(frame) for ident, frame in sys._current_frames().items() if ident != threading.get_ident()
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
    group = default_group() if group is None else group
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
    """Close this process's connections of a Gloo group, so that its waits end. The group's `abort` does not end them.

    A connection belongs to the group if one end has an address that a rank announced in the store when the group was
    created.
    """
    announced = b"".join(_announced(group))
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
    """Return the first bytes of the kernel's address structure, without the fields that vary between connections."""
    kind = int(family).to_bytes(2, sys.byteorder) + port.to_bytes(2, "big")
    address = socket.inet_pton(family, host)
    return kind + address if family == socket.AF_INET else kind + bytes(4) + address
