"""One suite for every engine: what a strategy may rely on, whatever it runs on.

A program is what one rank does with its transport. Each program runs over ranks as threads, over a `FaultyTransport`
without faults, and in processes over Gloo, over shared memory, and over a hierarchy of both, whose hosts are made up:
there all of them one after the other over one transport, which none of them may spoil for the next.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from support.cases import case
from support.faulty import FaultyTransport
from support.states import wait_until
from syncline import SynclineError
from syncline.transport import (
    C10dTransport,
    HierarchicalTransport,
    ReduceOp,
    Transport,
    run_ranks,
)
from syncline.transport.shared_memory import SharedMemoryTransport

REALS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCTIONS: dict[torch.dtype, tuple[ReduceOp, ...]] = {
    **dict.fromkeys(REALS, ("sum", "mean", "max", "min", "product")),
    **dict.fromkeys(INTEGERS, ("sum", "max", "min", "product")),
    **dict.fromkeys(COMPLEX, ("sum", "mean")),
    torch.bool: ("max", "min"),
}
MOVABLE = (*REALS, *INTEGERS, *COMPLEX, torch.bool, torch.uint16, torch.float8_e4m3fn)
NUMELS = (0, 1, 7, 100_003)


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What rank `rank` puts in, the same in every run: around 1, so that products of few stay in range."""
    return _values(rank, numel, dtype).clone()


@functools.cache
def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 3, (numel,), generator=generator).to(dtype)
    real = torch.rand(numel, generator=generator, dtype=torch.float64) + 0.5
    return (real * (1 + 2j)).to(dtype) if dtype.is_complex else real.to(dtype)


@functools.cache
def reference(size: int, numel: int, dtype: torch.dtype, op: ReduceOp) -> Tensor:
    """The reduction of all ranks' values in the widest type there is."""
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([_values(rank, numel, dtype).to(wide) for rank in range(size)])
    if op == "product":
        return stack.prod(0)
    return {"sum": stack.sum, "mean": stack.mean, "max": stack.amax, "min": stack.amin}[op](0)  # type: ignore[operator]


def assert_close(result: Tensor, expected: Tensor, size: int, what: str) -> None:
    """Within the rounding of `size` operations in the result's type; integers and truth values exactly."""
    if result.dtype.is_floating_point or result.dtype.is_complex:
        rtol = size * torch.finfo(result.dtype).eps
        torch.testing.assert_close(
            result.to(expected.dtype), expected, rtol=rtol, atol=0, msg=lambda m: f"{what}: {m}"
        )
    else:
        assert torch.equal(result, expected.to(result.dtype)), what


def raw(tensor: Tensor) -> bytes:
    data = tensor.detach().reshape(-1).view(torch.uint8).contiguous()
    return ctypes.string_at(data.data_ptr(), data.numel())


def assert_same_bits_on_all_ranks(transport: Transport, tensors: Mapping[str, Tensor]) -> None:
    digests = b"".join(hashlib.sha256(raw(tensor)).digest() for tensor in tensors.values())
    rows = transport.all_gather_bytes(digests)
    differ = [what for n, what in enumerate(tensors) if len({row[32 * n : 32 * n + 32] for row in rows}) > 1]
    assert not differ, f"the ranks' bits differ: {differ}"


# ---------------------------------------------------------------------- programs: reductions


def all_reduce_every_type_and_operation(t: Transport) -> None:
    results = {}
    for dtype, ops in REDUCTIONS.items():
        for op in ops:
            for numel in NUMELS[:3]:
                what = f"all_reduce({op}) of {numel} {dtype}"
                tensor = values(t.rank, numel, dtype)
                t.all_reduce(tensor, op).wait()
                assert_close(tensor, reference(t.size, numel, dtype, op), t.size, what)
                results[what] = tensor
    assert_same_bits_on_all_ranks(t, results)


def all_reduce_a_large_tensor_repeats_its_bits(t: Transport) -> None:
    first, second = values(t.rank, NUMELS[-1], torch.float32), values(t.rank, NUMELS[-1], torch.float32)
    t.all_reduce(first, "mean").wait()
    t.all_reduce(second, "mean").wait()
    assert_close(first, reference(t.size, NUMELS[-1], torch.float32, "mean"), t.size, "mean")
    assert torch.equal(first, second)
    assert_same_bits_on_all_ranks(t, {"mean": first})


def reduce_scatter_every_type_and_operation(t: Transport) -> None:
    for dtype, ops in REDUCTIONS.items():
        for op in ops:
            for numel in (0, 1, 5):
                whole = values(t.rank, t.size * numel, dtype)
                before = whole.clone()
                part = torch.zeros(numel, dtype=dtype)
                t.reduce_scatter(part, whole, op).wait()
                expected = reference(t.size, t.size * numel, dtype, op)[t.rank * numel : (t.rank + 1) * numel]
                assert_close(part, expected, t.size, f"reduce_scatter({op}) of {numel} {dtype}")
                assert torch.equal(whole, before), f"reduce_scatter({op}) of {dtype} changed its input"


def reduce_spans_leaves_each_rank_its_own(t: Transport) -> None:
    team = t.team(torch.device("cpu"))
    numel = 7 * team.size + 3
    equal = [member * 7 for member in range(team.size)] + [7 * team.size]
    uneven = [0] + [min(numel, 2 * member * member) for member in range(1, team.size)] + [numel]
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
        for bounds in (equal, uneven):
            tensor = values(t.rank, bounds[-1], dtype)
            expected = reference(t.size, bounds[-1], dtype, "sum")
            t.reduce_spans(tensor, bounds).wait()
            mine = slice(bounds[team.position], bounds[team.position + 1])
            assert_close(tensor[mine], expected[mine], t.size, f"{dtype} in spans {bounds}")
    with pytest.raises(ValueError, match="bounds in ascending order"):
        t.reduce_spans(torch.zeros(4), [1, *[4] * team.size])


def what_one_of_a_team_writes_all_of_it_see(t: Transport) -> None:
    cpu = torch.device("cpu")
    team = t.team(cpu)
    told = [row.decode() for row in t.all_gather_bytes(f"{team.position} of {team.members}".encode())]
    assert t.size % team.size == 0
    every = [f"{position} of {team.members}" for position in range(team.size)]
    assert sorted(told) == sorted(every * (t.size // team.size))
    assert [told[rank] for rank in team.members] == every
    for numel, dtype in ((0, torch.bfloat16), (5, torch.float32)):
        flat = t.allocate_shared(numel, dtype, cpu)
        if flat is None:
            return
        assert (flat.shape, flat.dtype, flat.any().item()) == ((numel,), dtype, False)
    t.barrier().wait()
    if team.position == team.size - 1:
        flat[2] = 7.0
    t.barrier().wait()
    assert flat.tolist() == [0, 0, 7, 0, 0]
    t.barrier().wait()
    flat[3] = float(t.rank)  # nobody on another host is told
    t.barrier().wait()
    seen = [float(row) for row in t.all_gather_bytes(str(flat[3].item()).encode())]
    assert len(set(seen)) == t.size // team.size


def allocated_memory_is_reduced_like_any_other(t: Transport) -> None:
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float64):
        for numel in (5, 100_003):
            tensor, again = t.allocate(numel, dtype, cpu), t.allocate(numel, dtype, cpu)
            assert (tensor.shape, tensor.dtype, tensor.any().item()) == ((numel,), dtype, False)
            for op in ("sum", "mean"):
                for target in (tensor, again):
                    target.copy_(values(t.rank, numel, dtype))
                works = [t.all_reduce(tensor, op), t.all_reduce(again, op)]
                for work in reversed(works):
                    work.wait()
                expected = reference(t.size, numel, dtype, op)
                for target in (tensor, again):
                    assert_close(target, expected, t.size, f"{op} of {numel} {dtype}")
                assert_same_bits_on_all_ranks(t, {op: tensor, f"{op} again": again})
            tensor.copy_(values(t.rank, numel, dtype))
            team = t.team(cpu)
            bounds = [member * numel // team.size for member in range(team.size + 1)]
            mine = slice(bounds[team.position], bounds[team.position + 1])
            t.reduce_spans(tensor, bounds).wait()
            expected = reference(t.size, numel, dtype, "sum")
            assert_close(tensor[mine], expected[mine], t.size, f"spans of {numel} {dtype}")
            t.barrier().wait()


def any_shape_will_do(t: Transport) -> None:
    scalar, cube = torch.tensor(float(t.rank)), torch.full((2, 3, 2), t.rank)
    parameter = torch.nn.Parameter(torch.full((2, 2), float(t.rank)))
    for work in (t.all_reduce(scalar), t.all_reduce(cube, "max"), t.broadcast(parameter, t.size - 1)):
        work.wait()
    assert scalar.item() == sum(range(t.size))
    assert torch.equal(cube, torch.full((2, 3, 2), t.size - 1))
    assert torch.equal(parameter, torch.full((2, 2), float(t.size - 1)))
    assert parameter.requires_grad


# ---------------------------------------------------------------------- programs: data


def all_gather_every_type(t: Transport) -> None:
    for dtype in MOVABLE:
        for numel in NUMELS[:3]:
            mine = values(t.rank, numel, dtype)
            everyone = torch.zeros(t.size * numel).to(dtype)
            t.all_gather(everyone, mine).wait()
            expected = torch.cat([values(rank, numel, dtype) for rank in range(t.size)])
            assert raw(everyone) == raw(expected), f"{numel} {dtype}"
            assert raw(mine) == raw(values(t.rank, numel, dtype)), "the input was changed"


def broadcast_every_type_from_every_rank(t: Transport) -> None:
    for dtype in MOVABLE:
        for src in range(t.size):
            for numel in NUMELS[:3]:
                tensor = values(t.rank, numel, dtype)
                t.broadcast(tensor, src).wait()
                assert raw(tensor) == raw(values(src, numel, dtype)), f"{numel} {dtype} from rank {src}"


def messages_between_two_ranks_keep_their_order(t: Transport) -> None:
    if t.size == 1:
        return
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for dtype in MOVABLE:
        outgoing = [values(t.rank, numel, dtype) for numel in NUMELS[:3]]
        incoming = [torch.zeros(numel).to(dtype) for numel in NUMELS[:3]]
        works = [t.send(tensor, after) for tensor in outgoing] + [
            t.recv(tensor, before) for tensor in incoming
        ]
        for work in works:
            work.wait()
        for tensor, numel in zip(incoming, NUMELS, strict=False):
            assert raw(tensor) == raw(values(before, numel, dtype)), f"{numel} {dtype}"


def all_gather_bytes_of_unequal_lengths(t: Transport) -> None:
    for lengths in (
        [3 * rank for rank in range(t.size)],
        [0] * t.size,
        [5] + [0] * (t.size - 1),
        [100_000] * t.size,
    ):
        payloads = [bytes((rank + i) % 256 for i in range(length)) for rank, length in enumerate(lengths)]
        assert t.all_gather_bytes(payloads[t.rank]) == payloads


# ---------------------------------------------------------------------- programs: time


def many_under_way_may_be_waited_for_in_any_order(t: Transport) -> None:
    sums = [torch.full((1 + 50 * i,), float(t.rank + i)) for i in range(20)]
    copies = [torch.full((3,), float(t.rank)) for _ in range(20)]
    works = []
    for i in range(20):
        works += [t.all_reduce(sums[i]), t.broadcast(copies[i], i % t.size)]
    for work in reversed(works):
        work.wait()
    for i in range(20):
        assert torch.equal(sums[i], torch.full((1 + 50 * i,), float(sum(range(t.size)) + i * t.size)))
        assert torch.equal(copies[i], torch.full((3,), float(i % t.size)))


def what_is_completed_needs_no_wait(t: Transport) -> None:
    tensor = torch.ones(10)
    works = [t.all_reduce(tensor), t.barrier()]
    if t.size > 1:
        message, received = torch.full((4,), float(t.rank)), torch.zeros(4)
        works += [t.send(message, (t.rank + 1) % t.size), t.recv(received, (t.rank - 1) % t.size)]
    for work in works:
        wait_until(work.is_completed)
    for work in works:
        work.wait(0.001)
    assert tensor.tolist() == [float(t.size)] * 10
    if t.size > 1:
        assert received.tolist() == [float((t.rank - 1) % t.size)] * 4


def a_second_wait_changes_nothing(t: Transport) -> None:
    tensor = torch.ones(3, dtype=torch.int16)
    work = t.all_reduce(tensor)
    work.wait()
    tensor.zero_()
    work.wait()
    assert work.is_completed()
    assert tensor.tolist() == [0, 0, 0]


def a_slow_rank_is_waited_for(t: Transport) -> None:
    if t.size > 1 and t.rank == 0:
        t.send(torch.zeros(1), t.size - 1).wait()  # this rank calls next
    before = t.statistics()
    if t.rank == t.size - 1:
        if t.size > 1:
            t.recv(torch.zeros(1), 0).wait()
        time.sleep(0.4)  # longer than any engine waits before it looks around
    tensor = torch.ones(2)
    t.all_reduce(tensor, "sum").wait()
    t.barrier().wait()
    assert tensor.tolist() == [float(t.size)] * 2
    waited_seconds = (t.statistics() - before).waited_seconds
    assert waited_seconds < 60
    if t.rank == 0 and t.size > 1:
        assert waited_seconds > 0.05, "rank 0 came first, unless it was held up for as long"


# ---------------------------------------------------------------------- programs: groups


def split_by_color(t: Transport) -> None:
    half = t.split(t.rank % 2)
    assert half is not None
    members = [rank for rank in range(t.size) if rank % 2 == t.rank % 2]
    assert (half.rank, half.size) == (members.index(t.rank), len(members))
    total = torch.tensor(t.rank)
    half.all_reduce(total).wait()
    assert total.item() == sum(members)
    half.close()
    half.close()
    t.barrier().wait()


def split_leaves_out_who_gives_no_color(t: Transport) -> None:
    child = t.split(None if t.rank == 0 else -7)
    if t.rank == 0:
        assert child is None
        return
    assert child is not None
    assert child.all_gather_bytes(bytes([t.rank])) == [bytes([rank]) for rank in range(1, t.size)]
    child.close()


def split_again_and_again(t: Transport) -> None:
    for left_out in (*range(t.size), 0, 0, t.size - 1):
        child = t.split(None if t.rank == left_out else 1)
        if child is not None:
            total = torch.ones(1)
            child.all_reduce(total).wait()
            assert total.item() == t.size - 1
            child.barrier().wait()
            child.close()


def split_a_part(t: Transport) -> None:
    part = t.split(0)
    assert part is not None
    lone = part.split(part.rank)
    assert lone is not None
    assert (lone.rank, lone.size) == (0, 1)
    tensor = torch.tensor([1.0 + t.rank])
    lone.all_reduce(tensor, "mean").wait()
    assert tensor.item() == 1.0 + t.rank
    part.barrier().wait()
    part.close()


def a_closed_transport_says_so(t: Transport) -> None:
    part = t.split(0)
    assert part is not None
    part.barrier().wait()
    t.barrier().wait()
    part.close()
    part.close()
    if t.size > 1:  # a rank that is alone needs nothing to go on
        with pytest.raises(SynclineError, match="closed"):
            part.all_reduce(torch.ones(1)).wait()
    t.barrier().wait()


# ---------------------------------------------------------------------- programs: lanes


def lanes_need_no_common_order_when_they_are_waited_for(t: Transport) -> None:
    first, second = t.lane("gradients"), t.lane("gradients")
    a, b, c = torch.ones(3), torch.ones(500, dtype=torch.float64), torch.tensor(t.rank)
    works = [first.all_reduce(a), second.all_reduce(b), t.broadcast(c, t.size - 1)]
    for work in works if t.rank % 2 else reversed(works):
        work.wait()
    assert a.tolist() == [float(t.size)] * 3
    assert b.tolist() == [float(t.size)] * 500
    assert c.item() == t.size - 1


def lanes_share_board_and_statistics(t: Transport) -> None:
    lane = t.lane("gradients")
    lane.board.step = 7
    assert (t.board.step, t.timeout_seconds) == (7, lane.timeout_seconds)
    part = t.split(0)
    assert part is not None
    assert part.board is t.board
    before = t.statistics()
    lane.all_reduce(torch.zeros(6)).wait()
    t.barrier().wait()
    assert (t.statistics() - before).num_calls == {"all_reduce": 1, "barrier": 1}
    assert lane.statistics() == t.statistics()
    part.close()


def a_closed_lane_leaves_the_others_open(t: Transport) -> None:
    lane, other = t.lane("gradients"), t.lane("buffers")
    lane.barrier().wait()
    t.barrier().wait()
    if lane is not t:
        lane.close()
        lane.close()
        with pytest.raises(SynclineError, match="closed"):
            lane.barrier().wait()
    other.barrier().wait()
    t.barrier().wait()


def a_transport_closes_its_lanes(t: Transport) -> None:
    part = t.split(0)
    assert part is not None
    lane = part.lane("gradients")
    inner = lane.lane("more")
    inner.barrier().wait()
    t.barrier().wait()
    part.close()
    for closed in (lane, inner):
        if t.size > 1:
            with pytest.raises(SynclineError, match="closed"):
                closed.barrier().wait()
        closed.close()
    t.barrier().wait()


def what_breaks_one_lane_breaks_all(t: Transport) -> None:
    part = t.split(0)
    assert part is not None
    lane, other = part.lane("gradients"), part.lane("buffers")
    if t.rank == 0:
        lane.abort("enough")
    for transport in (other, part, lane):
        with pytest.raises(SynclineError, match="enough"):
            transport.barrier().wait()
    t.barrier().wait()
    part.close()


# ---------------------------------------------------------------------- programs: misuse and statistics


def misuse_is_refused_on_the_spot(t: Transport) -> None:
    table = torch.zeros(4, 6).t()
    for start in (t.all_reduce, t.broadcast):
        with pytest.raises(ValueError, match=r"contiguous .* strides \(1, 6\)"):
            start(table)
    with pytest.raises(ValueError, match=f"src to be a rank from 0 to {t.size - 1}; got {t.size}"):
        t.broadcast(torch.zeros(1), t.size)
    for move, word in ((t.send, "dst"), (t.recv, "src")):
        with pytest.raises(ValueError, match=f"{word} to be another rank"):
            move(torch.zeros(1), t.rank)
    with pytest.raises(ValueError, match=f"{t.size} x 2 elements"):
        t.all_gather(torch.zeros(t.size * 2 + 1), torch.zeros(2))
    with pytest.raises(ValueError, match=f"{t.size} x 2 elements"):
        t.reduce_scatter(torch.zeros(2), torch.zeros(t.size * 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="one of sum, mean"):
        t.all_reduce(torch.zeros(1), "avg")  # type: ignore[arg-type]
    for dtype, op in (
        (torch.int64, "mean"),
        (torch.complex64, "max"),
        (torch.bool, "sum"),
        (torch.uint16, "sum"),
    ):
        with pytest.raises(ValueError, match=f"op={op!r} is not defined for {dtype}"):
            t.all_reduce(torch.zeros(1).to(dtype), op)  # type: ignore[arg-type]
    t.barrier().wait()


def statistics_count_calls_and_bytes(t: Transport) -> None:
    before = t.statistics()
    t.all_reduce(torch.zeros(6)).wait()
    t.all_reduce(torch.zeros(2, dtype=torch.float64)).wait()
    t.broadcast(torch.zeros(3, dtype=torch.bool)).wait()
    t.all_gather(torch.zeros(t.size * 5), torch.zeros(5)).wait()
    t.barrier().wait()
    done = t.statistics() - before
    assert done.num_calls == {"all_reduce": 2, "broadcast": 1, "all_gather": 1, "barrier": 1}
    assert done.payload_bytes == {"all_reduce": 40, "broadcast": 3, "all_gather": t.size * 20}
    assert (done.total_calls, done.total_bytes) == (5, 43 + t.size * 20)
    assert 0 <= done.waited_seconds < 60


PROGRAMS: dict[str, Callable[[Transport], None]] = {
    program.__name__: program
    for program in (
        all_reduce_every_type_and_operation,
        all_reduce_a_large_tensor_repeats_its_bits,
        reduce_scatter_every_type_and_operation,
        reduce_spans_leaves_each_rank_its_own,
        what_one_of_a_team_writes_all_of_it_see,
        allocated_memory_is_reduced_like_any_other,
        any_shape_will_do,
        all_gather_every_type,
        broadcast_every_type_from_every_rank,
        messages_between_two_ranks_keep_their_order,
        all_gather_bytes_of_unequal_lengths,
        many_under_way_may_be_waited_for_in_any_order,
        what_is_completed_needs_no_wait,
        a_second_wait_changes_nothing,
        split_by_color,
        split_leaves_out_who_gives_no_color,
        split_again_and_again,
        split_a_part,
        a_closed_transport_says_so,
        lanes_need_no_common_order_when_they_are_waited_for,
        lanes_share_board_and_statistics,
        a_closed_lane_leaves_the_others_open,
        a_transport_closes_its_lanes,
        what_breaks_one_lane_breaks_all,
        misuse_is_refused_on_the_spot,
        statistics_count_calls_and_bytes,
    )
}


# ---------------------------------------------------------------------- engines


def run_all(transport: Transport, name: str) -> None:
    assert transport.name == name
    for program_name, program in PROGRAMS.items():
        with case(program_name, name):
            program(transport)


def test_threads() -> None:
    for size in (1, 2, 3, 5):
        with case(size):
            run_ranks(size, lambda t: run_all(t, "threads"))


def test_faulty_without_faults() -> None:
    run_ranks(2, lambda t: run_all(FaultyTransport(t, []), "threads"))


@pytest.mark.real
def test_a_slow_rank_is_waited_for_on_threads() -> None:
    for size in (1, 2, 3):
        run_ranks(size, a_slow_rank_is_waited_for)


@pytest.mark.real
@pytest.mark.ranks(3)
def test_a_slow_rank_is_waited_for_on_processes() -> None:
    gloo = C10dTransport(timeout_seconds=60)
    a_slow_rank_is_waited_for(gloo)
    a_slow_rank_is_waited_for(HierarchicalTransport.over(gloo, host="aab"[gloo.rank]))
    a_slow_rank_is_waited_for(SharedMemoryTransport.over(gloo))


def processes(hosts: str, *, is_slow: bool = False) -> object:
    """One rank in a process of its own for each letter; equal letters are ranks of one host."""
    marks = [pytest.mark.ranks(len(hosts), timeout=120), *([pytest.mark.real] if is_slow else [])]
    return pytest.param(hosts, marks=marks)


@pytest.mark.parametrize("hosts", [processes("a"), processes("aa", is_slow=True), processes("aaa")])
def test_gloo(hosts: str) -> None:
    run_all(C10dTransport(timeout_seconds=60), "gloo")


@pytest.mark.parametrize("hosts", [processes("aa"), processes("aaa"), processes("aaaaa", is_slow=True)])
def test_shared_memory(hosts: str) -> None:
    run_all(SharedMemoryTransport.over(C10dTransport(timeout_seconds=60)), "shared memory")


@pytest.mark.ranks(1)
def test_a_rank_that_is_alone_needs_no_shared_memory() -> None:
    assert SharedMemoryTransport.over(C10dTransport(timeout_seconds=60)).name == "gloo"


@pytest.mark.parametrize(
    "hosts",
    [
        processes("aab"),
        processes("abba", is_slow=True),
        processes("abcac", is_slow=True),
        processes("aabb", is_slow=True),
    ],
)
def test_hierarchy(hosts: str) -> None:
    beneath = C10dTransport(timeout_seconds=60)
    transport = HierarchicalTransport.over(beneath, host=hosts[beneath.rank])
    run_all(transport, f"shared memory within {len(set(hosts))} hosts, gloo across")
