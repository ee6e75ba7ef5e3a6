"""Ranks meet at a store before the first collective. Threads stand for ranks; the store is real."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from failure_rows import record
from meeting import in_threads
from syncline import CollectiveTimeout, ContractMismatch, PeerLost, SynclineError
from syncline.launchers import Environment
from syncline.liveness import RankProcess
from syncline.session import Presence, rendezvous, wait_for_all
from syncline.session.rendezvous import Stores, backend_for, connect, failed_connection


def presence(rank: int, size: int = 2, *, pid: int = 0, host: str = "h", gpu: str | None = None) -> Presence:
    return Presence(rank=rank, size=size, host=host, pid=pid or 100 + rank, gpu=gpu)


def met(*ranks: Presence, timeout_seconds: float = 30.0) -> list[list[Presence] | Exception]:
    """What `meet` gave each of these ranks."""
    server = open_store()
    found: list[list[Presence] | Exception] = [[] for _ in ranks]

    def come(index: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        try:
            found[index] = wait_for_all(store, ranks[index], timeout_seconds)
        except Exception as error:
            found[index] = error

    in_threads([lambda index=index: come(index) for index in range(len(ranks))])
    return found


def environment(**given: Any) -> Environment:
    return Environment(**{"launcher": "environment", "size": 2, "master_addr": "127.0.0.1", **given})


def open_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_all_ranks_learn_of_all_and_those_that_do_not_come_are_named() -> None:
    everyone = [presence(rank, 3) for rank in range(3)]
    assert met(*everyone) == [everyone] * 3
    for error in met(presence(0, 4), presence(2, 4), timeout_seconds=1.0):
        assert isinstance(error, CollectiveTimeout)
        assert "ranks 1, 3 of 4" in str(error)


@pytest.mark.real
def test_a_rank_that_has_ended_before_the_ranks_were_connected_is_named() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    own, theirs = RankProcess.own(), RankProcess.here(child.pid)
    assert own is not None
    assert theirs is not None
    everyone = [
        replace(presence(0, 3), host_key=own.host, pid=own.pid, started=own.started),
        replace(presence(1, 3), host_key=theirs.host, pid=theirs.pid, started=theirs.started),
        presence(2, 3),  # on a system that does not show the states of processes
    ]
    closed = RuntimeError("[pair.cc:1] Connection closed by peer [10.0.0.2]:4321\nand more lines")
    lost = failed_connection(closed, everyone[0], everyone, 20.0)
    assert isinstance(lost, PeerLost)
    assert "a connection was lost" in str(lost)
    child.kill()
    child.wait()
    for error in (closed, dist.DistStoreError("wait timeout")):
        named = failed_connection(error, everyone[0], everyone, 20.0)
        assert isinstance(named, PeerLost)
        assert "on rank 0 of 3" in str(named)
        assert f"rank 1 (pid {theirs.pid} on h): its process has ended" in str(named)
    late = failed_connection(dist.DistStoreError("wait timeout"), everyone[2], everyone, 20.0)
    assert isinstance(late, CollectiveTimeout)
    assert "within 20 s" in str(late)
    assert failed_connection(RuntimeError("no network interface"), everyone[2], everyone, 20.0) is None


def test_a_store_that_ends_while_ranks_meet_is_a_lost_peer() -> None:
    """Rank 0, which opened it, may give up a moment before the others."""
    server = open_store()
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    errors: list[Exception] = []

    def come() -> None:
        try:
            wait_for_all(store, presence(1), 30.0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=come)
    thread.start()
    server.wait(["rank 1"])
    del server
    thread.join()
    assert isinstance(errors[0], PeerLost)
    assert "rank 1 of 2 lost the connection to the store in sl.init" in str(errors[0])


def test_two_processes_that_are_the_same_rank_are_named() -> None:
    first, second = met(presence(0, 1, pid=7), presence(0, 1, pid=8))
    error = first if isinstance(first, Exception) else second
    assert isinstance(error, SynclineError)
    assert "two processes claim to be rank 0" in str(error)
    assert "pid 7" in str(error)
    assert "pid 8" in str(error)
    record("same rank", "", error)


def test_ranks_that_count_differently_are_told_who() -> None:
    errors = met(presence(0, 2), presence(1, 2), presence(2, 3))
    assert isinstance(errors[2], SynclineError)
    assert "2 on rank 0 (pid 100 on h)" in str(errors[2])
    assert "3 on rank 2 (pid 102 on h)" in str(errors[2])
    record("world size", "", errors[2])


def test_a_port_in_use_and_a_store_that_nobody_opened_are_named() -> None:
    server = open_store()
    with pytest.raises(SynclineError, match=rf"127\.0\.0\.1:{server.port} .*the port is in use") as caught:
        connect(environment(master_port=server.port), 5.0)
    record("port", "", caught.value)
    with pytest.raises(CollectiveTimeout, match=r"rank 1 of 2 .* 127\.0\.0\.1:9"):
        connect(environment(rank=1, master_port=9), 0.5)


def test_a_process_that_was_at_another_store_meets_one_that_was_not() -> None:
    servers = [open_store(), open_store()]
    elsewhere, here = (
        environment(launcher="torchrun", master_port=one.port, launcher_has_store=True) for one in servers
    )
    first, second = Stores(), Stores()
    first.of_next_init(elsewhere, 5.0)
    for number in range(2):
        first.of_next_init(here, 5.0).set("a key", str(number))
        assert second.of_next_init(replace(here, rank=1), 5.0).get("a key") == str(number).encode()


def test_all_ranks_choose_the_backend_that_serves_them_all() -> None:
    for gpus, backend in (
        ([None, None], "gloo"),
        (["a", "b"], "cpu:gloo,cuda:nccl"),
        (["a", "a"], "cpu:gloo,cuda:gloo"),
    ):
        everyone = [presence(rank, gpu=gpu) for rank, gpu in enumerate(gpus)]
        assert backend_for(everyone, warn=False) == backend
    with pytest.warns(UserWarning, match=r"2 ranks share 1 GPU"):
        backend_for(everyone, warn=True)


def test_what_the_ranks_gave_init_is_compared() -> None:
    asked = ["transport: 'shm'", "device: 'cuda'"], ["transport: 'shm'", "device: 'cpu'"]
    errors = met(*(replace(presence(rank, 3), asked=asked[rank == 1]) for rank in range(3)))
    assert len(set(map(str, errors))) == 1
    assert all(isinstance(error, ContractMismatch) for error in errors)
    assert "rank 1 against ranks 0, 2:\n  device\n    expected 'cuda'" in str(errors[0])
    assert 'device="cpu" on all' in str(errors[0])


def test_a_rank_that_cannot_join_is_an_error_on_all() -> None:
    errors = met(presence(0), replace(presence(1), fault=["TypeError", "expected timeout, got None"]))
    for error in errors:
        assert isinstance(error, TypeError)
        assert str(error) == "sl.init: refused, no rank has joined\nrank 1: expected timeout, got None"


def test_a_process_says_who_it_is() -> None:
    mine = Presence.of_this_process(environment(rank=1), torch.device("cpu"))
    assert (mine.rank, mine.size, mine.gpu) == (1, 2, None)


def test_a_host_without_a_loopback_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "has_loopback", lambda: False)
    alone = environment(launcher="torchrun", rank=0, size=1, local_rank=0, local_size=1, master_port=1)
    with pytest.raises(SynclineError, match=r"no IPv4 loopback address.*ip link set lo up"):
        connect(alone, 30.0)
    raw = RuntimeError("[enforce fail] Cannot resolve 127.0.0.1 to a (local) address")
    assert "ip link set lo up" in str(failed_connection(raw, presence(0), [presence(0), presence(1)], 30.0))


def test_a_restarted_rank_names_what_it_found_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ROUND_SECONDS", 0.0)
    store = dist.HashStore()
    store.set("round", "syncline plain 7")
    store.set("rank 1 in 7", "syncline plain junk")
    restarted = environment(
        launcher="torchrun", rank=1, local_rank=1, local_size=2, master_port=1, launcher_has_store=True
    )
    with pytest.raises(
        SynclineError, match=r"rank 1 found 'junk' under the key 'rank 1 in 7'.*Start the whole job"
    ):
        rendezvous._round(store, restarted, 30.0)
