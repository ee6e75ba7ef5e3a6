"""Calls of torch.distributed's own, in which a rank waits for ranks that wait for it here.

torch counts what is started on each of its groups. So such a call is a wait like one of ours: the group is the lane,
and a rank that has started fewer calls on it is absent. It ends with the same proof (`deadlock.py`), and by an error
that is raised inside of the call.

The frame of the main thread is looked at only once `faulthandler` has shown that it is in such a call: it sleeps then.
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
from syncline.liveness.store_connection import open_sockets
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
"""Calls that end on no rank before every rank of the group has made them."""

_NEEDS_THE_OTHER = _NEEDS_ALL | {"broadcast", "gather", "recv", "reduce", "scatter", "send"}
"""In a group of two, whoever waits waits for the other."""

_LANE = "torch group "


@dataclass(frozen=True)
class TorchCall:
    """A call in which the main thread waits."""

    group: dist.ProcessGroup
    name: str
    number: int
    """Which call on the group, as torch counts."""

    @classmethod
    def latest(cls, group: dist.ProcessGroup, name: str) -> TorchCall | None:
        """The call that was started last on `group`; None if its backend does not count."""
        number = num_calls_started(group)
        return None if number is None else cls(group, name, number)

    def as_wait(self, *, blocks_rank: bool) -> Wait:
        """What the peers are told of it."""
        words = f"torch.distributed.{self.name}"
        lane = _LANE + self.group.group_name
        return Wait(lane=lane, call=self.number, words=words, blocks_rank=blocks_rank, is_torchs=True)

    def end(self, error: SynclineError) -> None:
        """Raise `error` in the main thread, inside of this call; do nothing if it is there no more."""
        main = threading.main_thread().ident or 0
        if _call_of_frame(sys._current_frames().get(main)) != self:
            return

        class Raised(type(error)):  # type: ignore[misc]  # what is raised is a class, called without arguments
            def __new__(cls, *_: object) -> Any:
                return error

        # It is raised where Python goes on next: torch's functions pass exceptions through a handler in Python.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Raised))
        _close_connections(self.group)


def call_in_dump(dump: str) -> TorchCall | None:
    """The call of torch.distributed in which the main thread was when `dump` was written, and still is."""
    main = threading.main_thread().ident or 0
    path, name = innermost_in_dump(dump, main)
    if path != _FILE or name not in _NEEDS_THE_OTHER:
        return None
    return _call_of_frame(sys._current_frames().get(main))


def num_started(lanes: set[str]) -> dict[str, int]:
    """How many calls this rank has started on groups of torch, by their lanes.

    Nothing where another thread may start more of them: one in the user's code, or in torch.distributed.
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
    """Close this process's connections of a Gloo group, whose waits end then: `abort` of the group ends none.

    They are those with an end at an address that a rank has announced at the store when the group was made.
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
    """As the kernel's structure for an address begins, without what differs from one connection to the next."""
    kind = int(family).to_bytes(2, sys.byteorder) + port.to_bytes(2, "big")
    address = socket.inet_pton(family, host)
    return kind + address if family == socket.AF_INET else kind + bytes(4) + address
