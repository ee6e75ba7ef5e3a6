"""Shared memory, where the suite for all engines does not go: sizes at every edge, addresses, threads, many ranks."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hangs
from support.cases import case
from syncline import CollectiveMismatch, SynclineError
from syncline.native import find_library, library
from syncline.transport import C10dTransport, ReduceOp, Transport, Work
from syncline.transport.shared_memory import SharedMemoryTransport
from syncline.transport.shared_memory.engine import Engine, EngineLane, LaneSizes
from syncline.transport.shared_memory.memory import SharedMemory, available_bytes

pytestmark = pytest.mark.skipif(find_library() is None, reason="the native core was not built")

CPU = torch.device("cpu")
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
HUGE_NUMEL = 2**31 + 4097


def met() -> SharedMemoryTransport:
    """Who waits until the timeout hangs."""
    transport = SharedMemoryTransport.over(C10dTransport(timeout_seconds=3000))
    assert isinstance(transport, SharedMemoryTransport)
    return transport


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many sizes, so that the order of a sum is seen in its bits."""
    return _values(rank, numel, dtype).clone()


@functools.lru_cache(maxsize=32)
def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (numel,), generator=generator).to(dtype)
    exponents = torch.randint(-6, 6, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 2.0**exponents).to(dtype)


def in_rank_order(size: int, numel: int, dtype: torch.dtype, op: ReduceOp) -> Tensor:
    """What one process makes of all ranks' values, one after the other."""
    total = _sum_in_rank_order(size, numel, dtype)
    return (total / size if op == "mean" else total).to(dtype)


@functools.lru_cache(maxsize=8)
def _sum_in_rank_order(size: int, numel: int, dtype: torch.dtype) -> Tensor:
    """In the type in which it is added up."""
    wide = WIDE.get(dtype, dtype)
    total = _values(0, numel, dtype).to(wide)
    for rank in range(1, size):
        total = total + _values(rank, numel, dtype).to(wide)
    return total


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


# ---------------------------------------------------------------------- sizes and bits


def edges(of_bytes: int, itemsize: int, num_slots: int) -> list[int]:
    numel = of_bytes // itemsize
    return [0, 1, numel - 1, numel, numel + 1, num_slots * numel, num_slots * numel + 1]


def sums_have_the_bits_of_rank_order(t: SharedMemoryTransport) -> None:
    sizes, ops = t.engine_lane.sizes, ("sum", "mean")
    for dtype, op in product((torch.float32, torch.float64, torch.bfloat16, torch.float16), ops):
        for numel in edges(sizes.chunk_bytes, dtype.itemsize, sizes.num_slots):
            tensor = values(t.rank, numel, dtype)
            t.all_reduce(tensor, op).wait()
            assert same_bits(tensor, in_rank_order(t.size, numel, dtype, op)), (
                f"all_reduce of {numel} {dtype}"
            )
        for numel in edges(sizes.chunk_bytes // t.size, dtype.itemsize, sizes.num_slots):
            part = torch.empty(numel, dtype=dtype)
            t.reduce_scatter(part, values(t.rank, numel * t.size, dtype), op).wait()
            mine = in_rank_order(t.size, numel * t.size, dtype, op)[t.rank * numel :][:numel]
            assert same_bits(part, mine), f"reduce_scatter of {numel} {dtype}"
        for numel in (2**16, 2**17 + 1, 300_001):  # more than one piece
            target = t.allocate(numel, dtype, CPU)
            target.copy_(values(t.rank, numel, dtype))
            t.all_reduce(target, op).wait()
            assert same_bits(target, in_rank_order(t.size, numel, dtype, op)), f"in place, {numel} {dtype}"


def bytes_arrive(t: SharedMemoryTransport) -> None:
    sizes = t.engine_lane.sizes
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for numel in edges(sizes.chunk_bytes, 1, sizes.num_slots):
        everyone = torch.empty(t.size * numel, dtype=torch.uint8)
        t.all_gather(everyone, values(t.rank, numel, torch.uint8)).wait()
        assert torch.equal(everyone, torch.cat([values(rank, numel, torch.uint8) for rank in range(t.size)]))
        tensor = values(t.rank, numel, torch.uint8)
        t.broadcast(tensor, t.size - 1).wait()
        assert torch.equal(tensor, values(t.size - 1, numel, torch.uint8))
    for numel in edges(sizes.message_bytes, 1, 2):
        incoming = torch.empty(numel, dtype=torch.uint8)
        works = [t.send(values(t.rank, numel, torch.uint8), after), t.recv(incoming, before)]
        for work in works:
            work.wait()
        assert torch.equal(incoming, values(before, numel, torch.uint8))


def parts_are_reduced_to_the_first_rank_alone(t: SharedMemoryTransport) -> None:
    numel = 100_003
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
        expected = in_rank_order(t.size, numel, dtype, "sum")
        for tensor in (values(t.rank, numel, dtype), t.allocate(numel, dtype, CPU)):
            tensor.copy_(values(t.rank, numel, dtype))
            bounds = [0, 1, 1, 50_000, 99_999]
            works = [t.start_reduce(tensor, a, b, "sum") for a, b in pairwise(bounds)]
            for work in reversed(works):
                work.wait()
            t.barrier().wait()
            num_reduced = 99_999 if t.rank == 0 else 0
            wanted = torch.cat([expected[:num_reduced], values(t.rank, numel, dtype)[num_reduced:]])
            assert same_bits(tensor.clone(), wanted), dtype


def tensors_may_lie_anywhere(t: SharedMemoryTransport) -> None:
    """Read from a file or a message, a tensor may begin at any byte."""

    def shifted(source: Tensor, offset: int) -> Tensor:
        data = bytearray(source.numel() * source.itemsize + offset)
        data[offset:] = source.view(torch.uint8).numpy().tobytes()
        return torch.frombuffer(data, dtype=source.dtype, offset=offset)

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        for numel in (1, 1000, 100_003):
            offset = 1 + 2 * t.rank % dtype.itemsize  # each rank's another
            tensor = shifted(values(t.rank, numel, dtype), offset)
            assert tensor.data_ptr() % dtype.itemsize
            t.all_reduce(tensor).wait()
            expected = in_rank_order(t.size, numel, dtype, "sum")
            assert same_bits(tensor.clone(), expected), f"all_reduce of {numel} {dtype}"
            part = shifted(torch.zeros(numel, dtype=dtype), offset)
            t.reduce_scatter(part, shifted(values(t.rank, numel * t.size, dtype), offset)).wait()
            mine = in_rank_order(t.size, numel * t.size, dtype, "sum")[t.rank * numel :][:numel]
            assert same_bits(part.clone(), mine.clone()), f"reduce_scatter of {numel} {dtype}"
            everyone = shifted(torch.zeros(numel * t.size, dtype=dtype), offset)
            t.all_gather(everyone, shifted(values(t.rank, numel, dtype), offset)).wait()
            expected = torch.cat([values(rank, numel, dtype) for rank in range(t.size)])
            assert same_bits(everyone.clone(), expected), f"all_gather of {numel} {dtype}"


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.ranks(n, timeout=240)) for n in (2, 3, 5)]
)
def test_bits_at_every_edge_and_address(size: int) -> None:
    t = met()
    for program in (
        sums_have_the_bits_of_rank_order,
        bytes_arrive,
        parts_are_reduced_to_the_first_rank_alone,
        tensors_may_lie_anywhere,
    ):
        with case(program.__name__):
            program(t)


@pytest.mark.real
@pytest.mark.ranks(2, timeout=120)
def test_more_than_two_gibibytes() -> None:
    t = met()
    enough = t.all_gather_bytes(bytes([(available_bytes() or 0) > 10e9]))
    if b"\0" in enough:
        pytest.skip("needs 10 GB of free memory")
    tensor = torch.zeros(HUGE_NUMEL, dtype=torch.uint8)
    places = [0, 2**31 - 1, 2**31, 2**31 + 1, HUGE_NUMEL - 1]
    for n, place in enumerate(places):
        tensor[place] = 10 * n + 1 + t.rank
    t.all_reduce(tensor, "max").wait()
    assert [int(tensor[place]) for place in places] == [10 * n + 2 for n in range(len(places))]
    for place in places:
        tensor[place] = 0
    assert not tensor.view(-1)[: HUGE_NUMEL // 8 * 8].view(torch.int64).any()


# ---------------------------------------------------------------------- lanes, threads, groups


def started(t: Transport, numel: int) -> tuple[Tensor, Work]:
    tensor = values(t.rank, numel)
    return tensor, t.all_reduce(tensor)


@pytest.mark.ranks(3)
def test_lanes_and_groups_that_overlap_may_be_waited_for_in_opposite_order() -> None:
    t = met()
    again, pair = t.split(0), t.split(1 if t.rank else None)
    groups = [one for one in (t, t.lane("more"), t.lane("more"), again, pair) if one is not None]
    for numel in (10, 300_003):
        for _ in range(5):
            under_way = [(group, *started(group, numel)) for group in groups for _ in range(3)]
            for group, tensor, work in reversed(under_way) if t.rank % 2 else under_way:
                work.wait()
                assert same_bits(tensor, in_rank_order(group.size, numel, torch.float32, "sum"))
    t.barrier().wait()


@pytest.mark.ranks(2)
def test_threads_of_a_rank_each_have_a_lane() -> None:
    t = met()
    lanes = [t.lane("a"), t.lane("b")]
    errors: list[BaseException] = []

    def talk(lane: Transport, numel: int) -> None:
        try:
            expected = in_rank_order(t.size, numel, torch.float32, "sum")
            for _ in range(30):
                under_way = [started(lane, numel) for _ in range(4)]
                for tensor, work in reversed(under_way) if t.rank else under_way:
                    work.wait()
                    assert same_bits(tensor, expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(lane, 10_001 + n)) for n, lane in enumerate(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not errors, errors


@pytest.mark.ranks(3)
def test_ranks_may_meet_again_and_again_at_one_store() -> None:
    """As torch's groups do that are destroyed and made anew: old addresses stay there."""
    store = dist.PrefixStore("once more", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    rank, size = dist.get_rank(), dist.get_world_size()
    for value in range(12):
        t = SharedMemoryTransport.connect(store, rank=rank, size=size, timeout_seconds=30)
        total = torch.full((3,), float(value))
        t.all_reduce(total).wait()
        assert total.tolist() == [3.0 * value] * 3
        t.close()


@pytest.mark.ranks(2)
def test_a_call_on_a_broken_group_says_that_it_comes_too_late() -> None:
    t = met()
    with pytest.raises(CollectiveMismatch, match=r"^the ranks made different calls"):
        t.all_reduce(torch.ones(2 + t.rank)).wait()
    for _ in range(2):
        with pytest.raises(
            CollectiveMismatch,
            match=r"^this process group failed before(.|\n)*create the group again(.|\n)*of 3 elements",
        ):
            t.all_reduce(torch.ones(2)).wait()


# ---------------------------------------------------------------------- many ranks


def one_of_many(store_path: str, rank: int, size: int) -> None:
    store = dist.FileStore(store_path, size)
    t = SharedMemoryTransport.connect(store, rank=rank, size=size, timeout_seconds=60)
    for numel in (1, 5000, 100_003):
        tensor = torch.full((numel,), float(rank + 1))
        t.all_reduce(tensor).wait()
        assert (tensor == size * (size + 1) / 2).all()
        t.broadcast(tensor.fill_(rank), size - 1).wait()
        assert (tensor == size - 1).all()
        t.barrier().wait()
    part = torch.empty(3)
    t.reduce_scatter(part, torch.arange(3.0 * size)).wait()
    assert part.tolist() == [size * (3.0 * rank + n) for n in range(3)]
    t.barrier().wait()


def many_ranks(size: int, store_path: str) -> None:
    """All forked from this process, which takes no part: torch is imported once."""
    pids = []
    for rank in range(size):
        pid = os.fork()  # before anything has started a thread
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                one_of_many(store_path, rank, size)
                code = 0
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))


@pytest.mark.real
def test_many_ranks(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    for size in (16, 64):  # the largest number with large slots, and one with small ones
        store = str(tmp_path / f"store of {size}")
        program = f"from test_shared_memory import many_ranks; many_ranks({size}, {store!r})"
        result = hangs.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path})
        assert result.returncode == 0, f"{size} ranks: {result.stderr[-5000:]}"


# ---------------------------------------------------------------------- different calls

DIFFERENT: list[tuple[Callable[[Transport], Work], Callable[[Transport], Work], str, str]] = [
    (
        lambda t: t.all_reduce(torch.ones(3)),
        lambda t: t.all_reduce(torch.ones(3), "max"),
        "all_reduce(sum) of 3 elements, torch.float32",
        "all_reduce(max) of 3 elements, torch.float32",
    ),
    (
        lambda t: t.all_reduce(torch.ones(3)),
        lambda t: t.all_reduce(torch.ones(2_000_000)),
        "all_reduce(sum) of 3 elements, torch.float32",
        "all_reduce(sum) of 2000000 elements, torch.float32",
    ),
    (  # a dtype of the same width
        lambda t: t.broadcast(torch.ones(3)),
        lambda t: t.broadcast(torch.ones(3, dtype=torch.int32)),
        "broadcast(from rank 0) of 3 elements, torch.float32",
        "broadcast(from rank 0) of 3 elements, torch.int32",
    ),
    (
        lambda t: t.broadcast(torch.ones(3)),
        lambda t: t.broadcast(torch.ones(3), 2),
        "broadcast(from rank 0) of 3 elements, torch.float32",
        "broadcast(from rank 2) of 3 elements, torch.float32",
    ),
    (
        lambda t: t.barrier(),
        lambda t: t.reduce_scatter(torch.ones(2), torch.ones(6)),
        "barrier",
        "reduce_scatter(sum) of 6 elements, torch.float32",
    ),
]


@pytest.mark.ranks(3)
def test_different_calls_are_told_at_once_on_all_ranks() -> None:
    t = met()
    for most, one, words_of_most, words_of_one in DIFFERENT:
        with case(words_of_most, words_of_one):
            part = t.split(0)
            assert part is not None
            part.barrier().wait()
            with pytest.raises(CollectiveMismatch) as caught:
                (one if t.rank == 1 else most)(part).wait()
            text = str(caught.value)
            for rank, words in enumerate((words_of_most, words_of_one, words_of_most)):
                (line,) = [line for line in text.split("\n") if line.strip().startswith(f"rank {rank}:")]
                assert f"waiting in {words} (call " in line
            texts = [""] * t.size
            dist.all_gather_object(texts, text)
            assert len(set(texts)) == 1


@pytest.mark.ranks(2)
def test_a_message_of_another_size_is_told_on_both_sides() -> None:
    t = met()
    with pytest.raises(CollectiveMismatch, match=r"send\(to rank 1\) of 3 elements") as caught:
        (t.recv(torch.ones(4), 0) if t.rank else t.send(torch.ones(3), 1)).wait()
        t.barrier().wait()
    assert "recv(from rank 0) of 4 elements" in str(caught.value)


# ---------------------------------------------------------------------- fork


@pytest.mark.ranks(2)
def test_a_fork_is_refused_and_its_parent_goes_on() -> None:
    t = met()
    lane = t.lane("more")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for transport in (t, lane):
                for call in (transport.barrier, lambda: transport.all_reduce(torch.ones(1))):  # noqa: B023
                    with pytest.raises(SynclineError, match="this process was forked from a rank"):
                        call()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for transport in (t, lane):
        tensor = torch.ones(70_000)
        transport.all_reduce(tensor).wait()
        assert (tensor == 2).all()


def test_a_lane_is_closed_before_its_memory_goes_in_whatever_order_garbage_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may move on what is under way on all lanes, while one that is garbage is freed."""
    order: list[str] = []
    close = library().lane_close
    monkeypatch.setattr(library(), "lane_close", lambda handle: (order.append("lane"), close(handle)))

    def leave_garbage() -> None:
        of_group, sizes = SharedMemory.create(Engine.num_bytes(2)), LaneSizes(2)
        of_lane, of_tensor = SharedMemory.create(sizes.total_bytes), SharedMemory.create(4096)
        for memory in (of_group, of_lane, of_tensor):
            weakref.finalize(memory.map, order.append, "memory")
        lane = EngineLane(Engine(of_group, rank=0, size=2), of_lane, sizes)
        lane.keep(0, 1, [torch.frombuffer(of_tensor.map, dtype=torch.uint8)])
        cycle: list[Any] = [of_tensor, of_lane, of_group, lane]
        cycle.append(cycle)

    gc.collect()
    leave_garbage()
    gc.collect()
    assert order == ["lane", "memory", "memory", "memory"]
