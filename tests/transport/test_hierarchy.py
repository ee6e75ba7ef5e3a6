"""Shared memory within hosts and Gloo across: the contract is tested in `test_contract.py`; here is what is its own.

The hosts are made up: ranks of this machine that give different ones share no memory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from meeting import meet_at_the_store
from syncline import CollectiveMismatch, CollectiveTimeout, PeerFailed, PeerLost, UnevenInputs
from syncline.transport import C10dTransport, HierarchicalTransport, Transport
from syncline.transport.hosts import Hosts
from syncline.transport.shared_memory import SharedMemoryUnavailable, hub
from syncline.transport.shared_memory.memory import SharedMemory


def over_hosts(hosts: str, timeout_seconds: float = 30) -> Transport:
    beneath = C10dTransport(timeout_seconds=timeout_seconds)
    return HierarchicalTransport.over(beneath, host=hosts[beneath.rank])


def tell(key: str) -> None:
    dist.group.WORLD.get_group_store().set(key, "")  # type: ignore[union-attr]


def wait_for(key: str) -> None:
    dist.group.WORLD.get_group_store().wait([key])  # type: ignore[union-attr]


# ---------------------------------------------------------------------- who lives where


def test_hosts_are_ordered_by_their_leaders() -> None:
    hosts = Hosts.of(["b", "a", "b", "c", "a"])
    assert hosts.members == ((0, 2), (1, 4), (3,))
    assert hosts.host_of == (0, 1, 0, 2, 1)
    assert (hosts.leaders, hosts.widest, hosts.is_even) == ([0, 1, 3], 2, False)


@pytest.mark.parametrize(
    ("keys", "is_even"), [("aabb", True), ("abab", False), ("aab", False), ("abb", False), ("bbaa", True)]
)
def test_hosts_are_even_when_rank_order_is_host_order(keys: str, is_even: bool) -> None:
    assert Hosts.of(keys).is_even is is_even


# ---------------------------------------------------------------------- memory


@pytest.mark.ranks(4)
@pytest.mark.parametrize("what", ["allocate", "allocate_shared"])
def test_a_host_without_memory_is_an_error_on_all_hosts(what: str) -> None:
    t = over_hosts("aabb")
    make = getattr(t, what)

    def refuse(num_bytes: int) -> SharedMemory:
        raise SharedMemoryUnavailable("no memory left")

    with pytest.MonkeyPatch.context() as patch:
        if t.rank == 2:
            patch.setattr(SharedMemory, "create", refuse)
        with pytest.raises(
            SharedMemoryUnavailable, match=r"ranks 2, 3, numbered from 0 on their host: .* 100000 elements"
        ):
            make(100_000, torch.float32, torch.device("cpu"))
    tensor = make(100_000, torch.float32, torch.device("cpu"))
    assert tensor.numel() == 100_000
    total = torch.ones(2)
    t.all_reduce(total).wait()
    assert total.tolist() == [4.0, 4.0]


# ---------------------------------------------------------------------- what is chosen


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        ("aaa", "shared memory"),
        ("abc", "gloo"),
        ("aba", "shared memory within 2 hosts, gloo across"),
    ],
)
def test_the_transport_follows_from_who_lives_where(hosts: str, name: str) -> None:
    t = over_hosts(hosts)
    assert t.name == name
    t.barrier().wait()


@pytest.mark.ranks(3)
def test_where_another_backend_serves_another_device_lanes_are_made_all_the_same() -> None:
    beneath = C10dTransport(timeout_seconds=30)
    beneath._backends = {"cpu": "gloo", "cuda": "nccl"}  # which has no lanes
    t = HierarchicalTransport.over(beneath, host="aba"[beneath.rank])
    assert t.name == "shared memory within 2 hosts, gloo across, nccl (cuda)"
    lanes = [t, t.lane("gradients"), t.lane("gradients"), t.lane("buffers")]
    tensors = [torch.full((1000 + 7 * i,), float(t.rank)) for i in range(4)]
    works = [lane.all_reduce(tensor) for lane, tensor in zip(lanes, tensors, strict=True)]
    for work in works if t.rank else reversed(works):
        work.wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[3.0]] * 4
    lanes[2].close()
    t.barrier().wait()


@pytest.mark.ranks(4)
def test_a_part_is_what_its_ranks_can_have() -> None:
    t = over_hosts("aabb")
    names = []
    all_colors: list[list[int | None]] = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, None], [0, 1, 2, 3]]
    for colors in all_colors:
        part = t.split(colors[t.rank])
        names.append(None if part is None else part.name)
        if part is not None:
            total = torch.ones(3)
            part.all_reduce(total).wait()
            assert total.tolist() == [float(colors.count(colors[t.rank]))] * 3
            part.close()
    several = "shared memory within 2 hosts, gloo across" if t.rank < 3 else None
    assert names == ["shared memory", "gloo", several, "threads"]
    t.barrier().wait()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("where", ["library", "listener", "memory", "memory for lanes"])
def test_one_rank_that_cannot_share_memory_is_enough_for_all_to_do_without(where: str) -> None:
    beneath = C10dTransport(timeout_seconds=30)

    def refuse(*args: object, **kwargs: object) -> None:
        raise SharedMemoryUnavailable(f"no {where} here")

    with pytest.MonkeyPatch.context() as patch:
        if beneath.rank == 2:
            if where == "library":
                patch.setattr(hub, "library", refuse)
            elif where == "listener":
                patch.setattr(hub.Hub, "_connect", refuse)
            elif where == "memory":
                patch.setattr(SharedMemory, "create", refuse)
            else:  # after the proof, and what the group needs
                makers = iter([SharedMemory.create] * 3)
                patch.setattr(SharedMemory, "create", lambda num_bytes: next(makers, refuse)(num_bytes))
        with pytest.raises(SharedMemoryUnavailable, match=f"no {where} here"):
            HierarchicalTransport.over(beneath, host="aabb"[beneath.rank])
    total = torch.ones(2)
    beneath.all_reduce(total).wait()
    assert total.tolist() == [4.0, 4.0]


# ---------------------------------------------------------------------- in any order


@pytest.mark.ranks(4)
def test_operations_of_many_lanes_and_groups_are_waited_for_in_any_order() -> None:
    t = over_hosts("abab")
    inside, across = t.split(t.rank % 2), t.split(t.rank // 2)
    assert inside is not None
    assert across is not None
    transports = [t, t.lane("gradients"), t.lane("buffers"), inside, inside.lane("more"), across]
    for turn in range(6):
        generator = torch.Generator().manual_seed(turn * 10 + t.rank)
        started = []
        for i in range(20):
            transport = transports[(turn + i) % len(transports)]
            tensor = torch.full((1 + 997 * i * (turn % 2),), float(t.rank))
            work = transport.all_reduce(tensor) if i % 3 else transport.broadcast(tensor, i % transport.size)
            started.append((work, tensor, transport, i))
        for place in torch.randperm(len(started), generator=generator).tolist():
            work, tensor, transport, i = started[place]
            work.wait()
            members = {4: [0, 1, 2, 3], 2: [t.rank % 2, t.rank % 2 + 2]}[transport.size]
            if transport is across:
                members = [t.rank // 2 * 2, t.rank // 2 * 2 + 1]
            expected = sum(members) if i % 3 else members[i % transport.size]
            assert tensor.unique().tolist() == [float(expected)], (turn, i)
    t.barrier().wait()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_who_waits_for_a_message_drives_on_what_others_wait_for(slow: int) -> None:
    t = over_hosts("aabb")
    tensor, message = torch.ones(300_000), torch.zeros(5)
    work = t.all_reduce(tensor)
    peer = {0: 2, 1: 0, 2: 1}[slow]
    if t.rank == slow:
        t.recv(message, peer).wait()
        work.wait()
    else:
        work.wait()
        if t.rank == peer:
            t.send(message, slow).wait()
    assert tensor.unique().tolist() == [4.0]
    t.barrier().wait()


@pytest.mark.ranks(4)
def test_who_waits_in_a_part_drives_on_what_others_wait_for() -> None:
    t = over_hosts("aabb")
    part = t.split(t.rank // 2)
    assert part is not None
    tensor, small = torch.ones(300_000), torch.ones(3)
    works = [t.all_reduce(tensor), part.all_reduce(small)]
    for work in works if t.rank % 2 else reversed(works):
        work.wait()
    assert (tensor.unique().tolist(), small.tolist()) == ([4.0], [2.0] * 3)
    t.barrier().wait()


@pytest.mark.ranks(4)
def test_who_only_polls_drives_on_as_well() -> None:
    t = over_hosts("aabb")
    tensors = [torch.full((50_000,), float(t.rank)) for _ in range(8)]
    works = [t.all_reduce(tensor, "mean") for tensor in tensors]
    deadline = time.monotonic() + 20
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < deadline
    for work, tensor in zip(works, tensors, strict=True):
        work.wait(0.01)
        assert tensor.unique().tolist() == [1.5]
    t.barrier().wait()


# ---------------------------------------------------------------------- when it fails


def error_of(action: Callable[[], None]) -> tuple[Exception, float]:
    start = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011  (which one is what is asked)
        action()
    return caught.value, time.monotonic() - start


@pytest.mark.parametrize(
    "victim", [pytest.param(rank, marks=pytest.mark.ranks(4, killed=[rank])) for rank in (1, 2, 3)]
)
def test_a_killed_rank_is_named_on_all_hosts(victim: int) -> None:
    t = over_hosts("aabb")
    t.barrier().wait()
    meet_at_the_store("ready")
    if t.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    error, seconds = error_of(lambda: t.all_reduce(torch.ones(300_000)).wait())
    assert isinstance(error, PeerLost)
    assert seconds < 5
    text = str(error)
    assert f"rank {victim}" in text or "the connection to a peer is lost" in text
    with pytest.raises(PeerLost):
        t.barrier().wait()
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    survivors = [rank for rank in range(4) if rank != victim]
    store.set(f"seen {t.rank}", "")
    store.wait([f"seen {rank}" for rank in survivors])


@pytest.mark.ranks(3)
def test_a_rank_that_aborts_is_heard_on_all_hosts() -> None:
    t = over_hosts("aab")
    t.barrier().wait()
    if t.rank == 1:
        t.abort("a reason")
        meet_at_the_store("done")
        return
    error, seconds = error_of(lambda: t.all_reduce(torch.ones(10)).wait())
    assert isinstance(error, PeerFailed)
    assert "rank 1 aborted the group: a reason" in str(error)
    assert seconds < 5
    meet_at_the_store("done")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.slow
def test_a_timeout_names_the_rank_that_is_absent(absent: int) -> None:
    t = over_hosts("abab", timeout_seconds=2)
    t.barrier().wait()
    if t.rank == absent:
        t.board.step, t.board.phase = 7, "forward"
        wait_for("told")
        meet_at_the_store("done")
        return
    error, seconds = error_of(lambda: t.all_reduce(torch.ones(10)).wait())
    assert isinstance(error, CollectiveTimeout)
    assert f"rank {absent} did not make this call" in str(error)
    assert f"rank {absent}: step 7, forward" in str(error)
    assert "over shared memory within 2 hosts, gloo across" in str(error)
    assert seconds < 5
    tell("told")
    meet_at_the_store("done")


@pytest.mark.ranks(3)
def test_a_rank_that_has_left_in_good_order_is_uneven_inputs() -> None:
    t = over_hosts("aab")
    t.barrier().wait()
    if t.rank == 2:
        t.leave()
        meet_at_the_store("done")
        return
    error, seconds = error_of(lambda: t.all_reduce(torch.ones(10)).wait())
    assert isinstance(error, UnevenInputs)
    assert "rank 2 has shut down normally" in str(error)
    assert seconds < 5
    meet_at_the_store("done")


@pytest.mark.ranks(4)
def test_different_calls_within_a_host_are_told_by_the_numbers_of_the_whole_group() -> None:
    t = over_hosts("abab")
    t.barrier().wait()
    numel = 5 if t.rank == 3 else 4
    error, seconds = error_of(lambda: t.all_reduce(torch.ones(numel)).wait())
    assert isinstance(error, CollectiveMismatch)
    assert "rank 3: before the first step, waiting in all_reduce(sum) of 5 elements" in str(error)
    assert seconds < 5
    meet_at_the_store("done")


@pytest.mark.ranks(4)
def test_different_calls_on_different_hosts_are_told() -> None:
    t = over_hosts("aabb")
    t.barrier().wait()
    error, seconds = error_of(lambda: (t.barrier() if t.rank < 2 else t.lane("gradients").barrier()).wait())
    assert isinstance(error, CollectiveMismatch)
    assert seconds < 5
    meet_at_the_store("done")
