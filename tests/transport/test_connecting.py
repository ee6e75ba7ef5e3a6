"""While a group connects: ranks are killed, and threads wait at the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from meeting import end_by_sigkill, meet_at_the_store
from syncline import PeerLost
from syncline._torch.process_groups import addresses_gathered, new_group_of, record_ranks
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
