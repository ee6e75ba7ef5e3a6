"""While a group connects: ranks are killed, threads wait at the store, and strangers connect to what listens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meeting import end_by_sigkill, meet_at_the_store
from syncline import PeerLost
from syncline._torch.gloo import addresses_gathered
from syncline._torch.process_groups import new_group_of, record_ranks
from syncline.liveness import RankProcess
from syncline.transport import C10dTransport


class Gathering:
    """Addresses at the store. The victim is killed when the others have its address."""

    def __init__(self, victim: int) -> None:
        self._store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        self._rank, self._victim = dist.get_rank(), victim
        own = RankProcess.own()
        assert own is not None
        self._processes = [
            RankProcess.from_json(text.decode()) for text in self._of_all("process", own.to_json())
        ]

    def _of_all(self, name: str, text: str | bytes) -> list[bytes]:
        self._store.set(f"{name} {self._rank}", text)
        return [self._store.get(f"{name} {peer}") for peer in range(dist.get_world_size())]

    def __call__(self, payload: bytes, /) -> list[bytes]:
        texts = self._of_all("address", payload)
        self._of_all("all have it", "")
        if self._rank == self._victim:
            end_by_sigkill()
        return texts

    def check_processes(self) -> None:
        if self._processes[self._victim].has_ended():
            raise PeerLost(f"rank {self._victim} has ended")


@pytest.mark.ranks(3, killed=[1])
def test_a_rank_that_is_killed_while_gloo_connects_is_noticed_at_once() -> None:
    """Gloo has its address. If the rank was to connect to another one, that one waits up to five times the timeout.

    In the other direction, the connection is made by the kernel, and the first collective fails.
    """
    gather = Gathering(victim=1)
    found = "rank 1 has ended"
    try:
        with addresses_gathered(gather):
            dist.new_group([0, 1, 2], timeout=timedelta(seconds=20), backend="gloo")
    except PeerLost as error:
        found = str(error)
    assert found == "rank 1 has ended"
    meet_at_the_store("seen", without=1)


def test_a_rank_whose_end_is_seen_after_gloo_has_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections of a process close a moment before the kernel reports its end."""
    looks = []

    class Sees:
        def __call__(self, payload: bytes, /) -> list[bytes]:
            return [payload] * 2

        def check_processes(self) -> None:
            looks.append(time.monotonic())
            if len(looks) == 3:
                raise PeerLost("rank 1 has ended")

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("Connection refused")

    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupGloo", refused)
    with addresses_gathered(Sees()), pytest.raises(PeerLost, match="rank 1 has ended"):
        dist.distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 2)


@pytest.mark.ranks(2)
def test_a_lane_is_created_while_a_thread_waits_at_the_store_of_the_group() -> None:
    """The threads of a rank share the connection of a TCPStore, so one that waits there keeps the others out."""
    rank, server = dist.get_rank(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = [server.port]
    dist.broadcast_object_list(port)
    store = dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
    other_connection = store.clone()
    group = new_group_of([0, 1], rank, "gloo", store, "group", timedelta(seconds=20))
    record_ranks(group, [0, 1])
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get(f"told {rank}")), daemon=True)
    waiting.start()
    transport = C10dTransport(group, timeout_seconds=20, exchanges_notices=False)
    try:
        lane = transport.lane("test")
        assert waiting.is_alive()
    finally:
        other_connection.set(f"told {rank}", "done")
    waiting.join()
    assert found == [b"done"]
    lane.close()
    transport.close()
    dist.barrier()  # the server of rank 0 is needed until then


# ---------------------------------------------------------------------- strangers


def listening() -> set[tuple[str, int]]:
    """Return the addresses at which this process listens."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family is socket.AF_INET and one.getsockopt(
                        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                    ):
                        found.add(one.getsockname())
    return found


@pytest.mark.ranks(2)
def test_no_stranger_can_use_up_the_files_of_a_rank_by_connecting_to_gloo() -> None:
    """Gloo accepts every connection, and aborts when this process has no file left."""
    with socket.socket() as one:
        code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # one instruction: drop
        try:
            one.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(code)))
        except PermissionError:
            pytest.skip("this system lets only root filter connections")
    transport = C10dTransport(timeout_seconds=20)
    before = listening()
    lane = transport.lane("first")
    new = listening() - before
    assert new
    for address in new:
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
    second = transport.lane("second")  # the ranks can still connect to each other, by other sockets
    for one in (lane, second):
        values = torch.ones(3)
        one.all_reduce(values, "sum").wait()
        assert values.tolist() == [2.0] * 3
        one.close()
    transport.close()
