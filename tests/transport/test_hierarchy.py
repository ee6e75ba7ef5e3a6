"""Shared memory within hosts and Gloo across: the contract is tested in `test_contract.py`; here is what is its own.

The hosts are made up: ranks of this machine that give different ones share no memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meeting import end_by_sigkill, meet_at_the_store, tell, wait_for
from support.cases import case
from syncline import CollectiveMismatch, CollectiveTimeout, PeerFailed, PeerLost, SynclineError, UnevenInputs
from syncline.liveness import StepPhase
from syncline.transport import C10dTransport, HierarchicalTransport, Transport, Work, hierarchy
from syncline.transport.hosts import Hosts
from syncline.transport.phases import Phase, PhasedWork, PhaseQueue
from syncline.transport.shared_memory import SharedMemoryUnavailable, hub
from syncline.transport.shared_memory.memory import SharedMemory


def over_hosts(hosts: str, timeout_seconds: float = 3000) -> Transport:
    """By default, who waits until the timeout hangs."""
    beneath = C10dTransport(timeout_seconds=timeout_seconds)
    return HierarchicalTransport.over(beneath, host=hosts[beneath.rank])


@contextmanager
def pieces_from(num_bytes: int) -> Iterator[None]:
    """Tensors of this size and more are reduced in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchy, "_PIECES_FROM_BYTES", num_bytes)
        yield


# ---------------------------------------------------------------------- who lives where


def test_hosts_are_ordered_by_their_leaders_and_even_when_that_is_rank_order() -> None:
    hosts = Hosts.of(["b", "a", "b", "c", "a"])
    assert hosts.members == ((0, 2), (1, 4), (3,))
    assert hosts.host_of == (0, 1, 0, 2, 1)
    assert (hosts.leaders, hosts.widest) == ([0, 1, 3], 2)
    every = ["aabb", "bbaa", "abab", "aab", "abb", "babca"]
    assert [keys for keys in every if Hosts.of(keys).is_even] == ["aabb", "bbaa"]


# ---------------------------------------------------------------------- memory


@pytest.mark.ranks(4)
def test_a_host_without_memory_is_an_error_on_all_hosts() -> None:
    t = over_hosts("aabb")

    def refuse(num_bytes: int) -> SharedMemory:
        raise SharedMemoryUnavailable("no memory left")

    words = r"ranks 2, 3, numbered from 0 on their host: .* 100000 elements"
    for make in (t.allocate, t.allocate_shared):
        with pytest.MonkeyPatch.context() as patch:
            if t.rank == 2:
                patch.setattr(SharedMemory, "create", refuse)
            with pytest.raises(SharedMemoryUnavailable, match=words):
                make(100_000, torch.float32, torch.device("cpu"))
        tensor = make(100_000, torch.float32, torch.device("cpu"))
        assert tensor is not None
        assert tensor.numel() == 100_000
    total = torch.ones(2)
    t.all_reduce(total).wait()
    assert total.tolist() == [4.0, 4.0]


# ---------------------------------------------------------------------- what is chosen


@pytest.mark.ranks(3)
def test_the_transport_follows_from_who_lives_where() -> None:
    for hosts, name in {
        "aaa": "shared memory",
        "abc": "gloo",
        "aba": "shared memory within 2 hosts, gloo across",
    }.items():
        t = over_hosts(hosts)
        assert t.name == name
        t.barrier().wait()


@pytest.mark.ranks(3)
def test_where_another_backend_serves_another_device_lanes_are_made_all_the_same() -> None:
    beneath = C10dTransport(timeout_seconds=30)
    beneath.backends = {"cpu": "gloo", "cuda": "nccl"}  # which has no lanes
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
def test_one_rank_that_cannot_share_memory_is_enough_for_all_to_do_without() -> None:
    beneath = C10dTransport(timeout_seconds=30)
    for where in ("library", "listener", "memory", "memory for lanes"):

        def refuse(*args: object, where: str = where, **kwargs: object) -> None:
            raise SharedMemoryUnavailable(f"no {where} here")

        with case(where), pytest.MonkeyPatch.context() as patch:
            if beneath.rank == 2:
                if where == "library":
                    patch.setattr(hub, "library", refuse)
                elif where == "listener":
                    patch.setattr(hub.Hub, "_connect", refuse)
                elif where == "memory":
                    patch.setattr(SharedMemory, "create", refuse)
                else:  # after the proof, and what the group needs
                    makers = iter([*[SharedMemory.create] * 3, *[refuse] * 100])
                    patch.setattr(SharedMemory, "create", lambda num, makers=makers: next(makers)(num))
            with pytest.raises(SharedMemoryUnavailable, match=f"no {where} here"):
                HierarchicalTransport.over(beneath, host="aabb"[beneath.rank])
        total = torch.ones(2)
        beneath.all_reduce(total).wait()
        assert total.tolist() == [4.0, 4.0]


# ---------------------------------------------------------------------- in pieces


class Step(Work):
    """A phase under way, which ends when the test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def wait(self, timeout_seconds: float | None = None) -> None:
        assert self.is_done

    def is_completed(self) -> bool:
        return self.is_done


def test_a_piece_moves_on_while_the_next_one_is_in_the_phase_before() -> None:
    steps: dict[str, Step] = {}

    def phase(track: str, name: str) -> Phase:
        return Phase(track, lambda: steps.setdefault(name, Step()))

    pieces = [[phase("up", f"up {n}"), phase("across", f"across {n}")] for n in range(3)]
    transport: Any = SimpleNamespace(
        health=SimpleNamespace(failure=None),
        own_lane=SimpleNamespace(name="main", num_started=1),
        timeout_seconds=1.0,
    )
    queue, ended = PhaseQueue(), []
    work = PhasedWork(transport, "all_reduce", "sum", None)
    queue.add(work, pieces, lambda: ended.append(True))
    later = PhasedWork(transport, "all_reduce", "sum", None)
    queue.add(later, [[phase("across", "later")]])

    def end(*names: str) -> list[str]:
        before = set(steps)
        for name in names:
            steps[name].is_done = True
        queue.drive()
        return sorted(set(steps) - before)

    assert sorted(steps) == ["up 0", "up 1", "up 2"]
    assert end("up 1") == [], "Gloo gets the pieces in order"
    assert end("up 0") == ["across 0", "across 1"]
    assert end("across 1") == [], "the last piece keeps its place before the next operation"
    assert end("up 2") == ["across 2", "later"]
    assert not work.is_done
    assert end("across 0", "later") == []
    assert (later.is_done, ended) == (True, [])
    assert end("across 2") == []
    assert (work.is_done, ended) == (True, [True])


@pytest.mark.parametrize(
    "hosts",
    [pytest.param(hosts, marks=pytest.mark.ranks(len(hosts))) for hosts in ("aabb", "abacb", "aaaaab")],
)
def test_pieces_have_the_bits_of_the_whole(hosts: str) -> None:
    """Of numbers whose sums are exact, or between two hosts, where Gloo adds up in one order only."""
    t = over_hosts(hosts)
    numel = 100_003
    assert isinstance(t, HierarchicalTransport)
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64, torch.float64):
        if len(set(hosts)) == 2 and dtype.is_floating_point:
            values = torch.randn(numel, generator=torch.Generator().manual_seed(t.rank)).to(dtype)
        else:
            values = (torch.arange(numel) % 5 + t.rank).to(dtype)
        placed, narrow = (t.allocate(length, dtype, torch.device("cpu")) for length in (numel, numel + 9))
        for op in ("sum", "mean", "max", "min")[: 1 if dtype is torch.int16 else 4]:
            if dtype.is_complex and op in ("max", "min"):
                continue
            whole = values.clone()
            t.all_reduce(whole, op).wait()
            with pieces_from(100_000):
                for tensor in (values.clone(), placed, t.narrow(narrow, numel)):
                    tensor.copy_(values)
                    num_before = t._across.own_lane.num_started if t._across else 0
                    t.all_reduce(tensor, op).wait()
                    assert t._across is None or t._across.own_lane.num_started == num_before + 8
                    assert torch.equal(tensor, whole), (dtype, op)
            with pieces_from(1000):
                t.reduce_scatter(part := torch.zeros(1000, dtype=dtype), values[: 1000 * t.size], op).wait()
            assert torch.equal(part, whole[1000 * t.rank :][:1000]), (dtype, op)
        rows = t.all_gather_bytes(placed.view(torch.uint8).numpy().tobytes()[:40_000])
        assert len(set(rows)) == 1
    t.barrier().wait()


@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.ranks(4)
def test_different_tensors_whose_first_pieces_are_alike_are_told_by_their_whole_length(
    is_placed: bool,
) -> None:
    t = over_hosts("abab")
    longest = 106_496
    numel = 99_328 if t.rank == 3 else longest
    tensor = torch.ones(longest)[:numel]
    if is_placed:
        tensor = t.narrow(t.allocate(longest, torch.float32, torch.device("cpu")), numel)
    assert hierarchy._bounds(99_328)[1] == hierarchy._bounds(longest)[1]
    t.barrier().wait()
    with pieces_from(100_000), pytest.raises(CollectiveMismatch) as caught:
        t.all_reduce(tensor).wait()
    words = "all_reduce in place(sum)" if is_placed else "all_reduce(sum)"
    for rank, told in ((1, longest), (3, 99_328)):
        place = f"rank {rank}: before the first step, waiting in {words} of {told} elements"
        assert place in str(caught.value)
    meet_at_the_store("done")


# ---------------------------------------------------------------------- in any order


@pytest.mark.ranks(4)
def test_operations_of_many_lanes_and_groups_are_waited_for_in_any_order() -> None:
    for num_bytes in (hierarchy._PIECES_FROM_BYTES, 40_000):
        with case(num_bytes), pieces_from(num_bytes):
            wait_for_many_in_any_order()


def wait_for_many_in_any_order() -> None:
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
def test_whoever_waits_or_polls_drives_on_what_others_wait_for() -> None:
    t = over_hosts("aabb")
    for slow, peer in ((0, 2), (1, 0), (2, 1)):  # one that waits for a message
        tensor, message = torch.ones(300_000), torch.zeros(5)
        work = t.all_reduce(tensor)
        if t.rank == slow:
            t.recv(message, peer).wait()
            work.wait()
        else:
            work.wait()
            if t.rank == peer:
                t.send(message, slow).wait()
        assert tensor.unique().tolist() == [4.0]
        t.barrier().wait()

    part = t.split(t.rank // 2)  # one that waits in a part
    assert part is not None
    tensor, small = torch.ones(300_000), torch.ones(3)
    works = [t.all_reduce(tensor), part.all_reduce(small)]
    for work in works if t.rank % 2 else reversed(works):
        work.wait()
    assert (tensor.unique().tolist(), small.tolist()) == ([4.0], [2.0] * 3)
    t.barrier().wait()

    tensors = [torch.full((50_000,), float(t.rank)) for _ in range(8)]  # one that only polls
    works = [t.all_reduce(tensor, "mean") for tensor in tensors]
    while not all(work.is_completed() for work in works):
        pass
    for work, tensor in zip(works, tensors, strict=True):
        work.wait(0.01)
        assert tensor.unique().tolist() == [1.5]
    t.barrier().wait()


# ---------------------------------------------------------------------- when it fails


def in_reach(hosts: str, timeout_seconds: float = 3000) -> Transport:
    """The transport of ranks that have all met over it."""
    t = over_hosts(hosts, timeout_seconds)
    t.barrier().wait()
    meet_at_the_store("ready")
    return t


def victims(*ranks: int) -> list[Any]:
    return [pytest.param(rank, marks=pytest.mark.ranks(4, killed=[rank])) for rank in ranks]


@pytest.mark.parametrize("victim", victims(2, 3))
def test_a_killed_rank_is_named_on_all_hosts(victim: int) -> None:
    t = in_reach("aabb")
    if t.rank == victim:
        end_by_sigkill()
    with pytest.raises(PeerLost, match=f"rank {victim}|the connection to a peer is lost"):
        t.all_reduce(torch.ones(300_000)).wait()
    with pytest.raises(PeerLost):
        t.barrier().wait()
    meet_at_the_store("seen", without=victim)


def reduce_four_buckets(t: Transport) -> None:
    """And a barrier, because the last bucket may have left the rank that is missing then. Any call may be the first
    that fails."""
    works = [t.all_reduce(torch.ones(2_500_000)) for _ in range(4)]
    for work in works:
        work.wait()
    t.barrier().wait()


def reduce_one_piece(t: Transport) -> None:
    """Start four buckets, and drive them until the first piece of the first one is done."""
    works: list[Any] = [t.all_reduce(torch.ones(2_500_000)) for _ in range(4)]
    while len(works[0]._inner._unfinished) == 8:
        works[0].is_completed()


@pytest.mark.parametrize("victim", victims(0, 1))
def test_a_rank_that_is_killed_between_two_pieces_ends_what_is_under_way(victim: int) -> None:
    t = in_reach("aabb")
    if t.rank == victim:
        reduce_one_piece(t)
        end_by_sigkill()
    with pytest.raises(PeerLost):
        reduce_four_buckets(t)
    with pytest.raises(PeerLost):
        t.barrier()
    meet_at_the_store("seen", without=victim)


@pytest.mark.ranks(4)
def test_an_abort_between_two_pieces_ends_the_other_pieces_on_all_hosts() -> None:
    t = over_hosts("aabb")
    if t.rank == 1:
        reduce_one_piece(t)
        t.abort("a reason")
    else:
        with pytest.raises(PeerFailed, match="rank 1 aborted the group: a reason"):
            reduce_four_buckets(t)
    meet_at_the_store("done")


@pytest.mark.ranks(4)
def test_who_is_interrupted_while_it_starts_a_piece_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the piece would be taken for done: the ranks would have different sums, and no error."""
    t = over_hosts("aabb")
    if t.rank == 0:
        start, num_started = C10dTransport._start_all_reduce, 0

        def interrupted(*args: Any) -> Any:
            nonlocal num_started
            work, num_started = start(*args), num_started + 1
            if num_started == 3:
                raise KeyboardInterrupt
            return work

        monkeypatch.setattr(C10dTransport, "_start_all_reduce", interrupted)
        with pytest.raises(KeyboardInterrupt):
            t.all_reduce(torch.ones(3_000_000)).wait()
        with pytest.raises(SynclineError, match="KeyboardInterrupt was raised in this process"):
            t.barrier()
    else:
        with pytest.raises(PeerFailed, match="KeyboardInterrupt"):
            t.all_reduce(torch.ones(3_000_000)).wait()
    meet_at_the_store("done")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("absent", [0, 3])
def test_a_timeout_names_the_rank_that_is_absent(absent: int) -> None:
    t = in_reach("abab", timeout_seconds=2)
    if t.rank == absent:
        t.board.step, t.board.phase = 7, StepPhase.FORWARD
        wait_for("told")
    else:
        with pytest.raises(CollectiveTimeout) as caught:
            t.all_reduce(torch.ones(10)).wait()
        text = str(caught.value)
        assert f"rank {absent} did not reach all_reduce(sum) within 2" in text
        assert re.search(rf"rank {absent}: at its last report, \d\.\d s ago: step 7, forward", text)
        assert "over shared memory within 2 hosts, gloo across" in text
        tell("told")
    meet_at_the_store("done")


@pytest.mark.ranks(3)
def test_a_rank_that_has_left_in_good_order_is_uneven_inputs() -> None:
    t = in_reach("aab")
    if t.rank == 2:
        t.leave()
    else:
        with pytest.raises(UnevenInputs, match="rank 2 has shut down normally"):
            t.all_reduce(torch.ones(10)).wait()
    meet_at_the_store("done")


@pytest.mark.ranks(4)
def test_different_calls_within_a_host_are_told_by_the_numbers_of_the_whole_group() -> None:
    t = in_reach("abab")
    words = r"rank 3: before the first step, waiting in all_reduce\(sum\) of 5 elements"
    with pytest.raises(CollectiveMismatch, match=words):
        t.all_reduce(torch.ones(5 if t.rank == 3 else 4)).wait()
    meet_at_the_store("done")


@pytest.mark.ranks(4)
def test_different_calls_on_different_hosts_are_told() -> None:
    t = in_reach("aabb")
    with pytest.raises(CollectiveMismatch):
        (t.barrier() if t.rank < 2 else t.lane("gradients").barrier()).wait()
    meet_at_the_store("done")


@pytest.mark.ranks(4, killed=[1])
def test_the_first_error_of_ranks_that_connect_is_the_loss_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        monkeypatch.setattr(hub, "connected", lambda *_: end_by_sigkill())
    with pytest.raises(PeerLost, match="rank 1: its process has ended") as caught:
        over_hosts("aabb")
    meet_at_the_store("seen", without=1)
    assert "failed before" not in str(caught.value)
