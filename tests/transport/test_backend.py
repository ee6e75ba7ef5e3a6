"""torch.distributed over the "syncline" backend: every collective beside Gloo's, on the same inputs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hangs
import syncline as sl
from meeting import end_by_sigkill
from syncline import CollectiveTimeout, PeerFailed, PeerLost, SynclineError
from syncline.transport.shared_memory import SharedMemoryUnavailable

TORCH_SUBCLASSES_BACKEND = hasattr(torch._C._distributed_c10d.Backend, "split")
all_gather_single = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # the name since torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@contextmanager
def groups(**options: Any) -> Iterator[tuple[Any, Any]]:
    """A group over the backend, and Gloo's."""
    sl.register_backend()
    try:
        group = dist.new_group(backend="syncline", **options)
    except SharedMemoryUnavailable as error:
        pytest.skip(str(error))
    yield group, dist.group.WORLD
    dist.destroy_process_group(group)


def transport_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).transport


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers, whose sums no order of additions can change."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def assert_as_gloo(call: Callable[[Any, bool], tuple[list[Tensor], Any]]) -> None:
    """`call(group, async_op)` gives the tensors to compare and what torch returned."""
    with groups() as (group, gloo):
        expected, _ = call(gloo, False)
        for async_op in (False, True):
            result, work = call(group, async_op)
            if async_op:
                work.wait()
                assert work.is_completed()
            assert len(result) == len(expected)
            for mine, theirs in zip(result, expected, strict=True):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs), f"async_op={async_op}: {mine} instead of {theirs}"


# ---------------------------------------------------------------------- reductions


@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "MIN", "PRODUCT"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_all_reduce_of_real_numbers(op: str, dtype: torch.dtype) -> None:
    def call(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        tensor = values(dist.get_rank(), 5, 3, dtype=dtype) * 3  # thrice: a mean over 3 ranks is exact
        return [tensor], dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group, async_op)

    assert_as_gloo(call)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_all_reduce_of_integers(op: str, dtype: torch.dtype) -> None:
    def call(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        tensor = values(dist.get_rank(), 7, dtype=dtype)
        return [tensor], dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group, async_op)

    assert_as_gloo(call)


@pytest.mark.ranks(2)
def test_all_reduce_of_complex_numbers() -> None:
    def call(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        tensor = torch.complex(values(dist.get_rank(), 4), values(dist.get_rank() + 5, 4))
        return [tensor], dist.all_reduce(tensor, group=group, async_op=async_op)

    assert_as_gloo(call)


@pytest.mark.ranks(2)
def test_all_reduce_of_a_large_tensor() -> None:
    def call(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        tensor = values(dist.get_rank(), 1_000_003)
        return [tensor], dist.all_reduce(tensor, group=group, async_op=async_op)

    assert_as_gloo(call)


def strided(rank: int) -> list[Tensor]:
    """Tensors that are no flat piece of memory, empty, without dimensions, or not where their type would have them."""
    return [
        values(rank, 4, 6).t(),
        values(rank, 4, 6)[:, ::2],
        values(rank, 2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        values(rank, 0),
        values(rank, 1)[0],
        torch.frombuffer(bytearray(41), dtype=torch.float32, offset=1).copy_(values(rank, 10)),
        torch.nn.Parameter(values(rank, 3)),
    ]


@pytest.mark.ranks(2)
def test_tensors_in_any_layout() -> None:
    def reduced(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        tensors = strided(dist.get_rank())
        with torch.no_grad():
            works = [dist.all_reduce(tensor, group=group, async_op=async_op) for tensor in tensors]
            if async_op:
                for work in works:
                    work.wait()
        return tensors, works[0]

    def sent(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        tensors = strided(dist.get_rank())
        with torch.no_grad():
            works = [dist.broadcast(tensor, 1, group=group, async_op=async_op) for tensor in tensors]
            if async_op:
                for work in works:
                    work.wait()
        return tensors, works[0]

    with groups() as (group, _):
        everyones = [strided(rank) for rank in range(2)]
        for async_op in (False, True):
            for mine, first, second in zip(reduced(group, async_op)[0], *everyones, strict=True):
                assert torch.equal(mine, first + second)
            for mine, theirs in zip(sent(group, async_op)[0], everyones[1], strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.ranks(3)
def test_reduce_leaves_the_others_theirs() -> None:
    with groups() as (group, _):
        rank = dist.get_rank()
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.BXOR):
            for tensor in (values(rank, 6, dtype=torch.int32), values(rank, 6, 2, dtype=torch.int32)[:, 0]):
                before = tensor.clone()
                dist.reduce(tensor, 1, op, group=group)
                expected = before.clone()
                dist.all_reduce(expected, op)
                assert torch.equal(tensor, expected if rank == 1 else before)


@pytest.mark.ranks(2)
def test_all_reduce_coalesced_with_several_types() -> None:
    with groups() as (group, _):
        rank = dist.get_rank()
        tensors = [values(rank, 3), values(rank, 2, 2, dtype=torch.float64), values(rank, 4).view(2, 2).t()]
        group.allreduce_coalesced(tensors).wait()
        for mine, first, second in zip(tensors, *everyone_s_three(), strict=True):
            assert torch.equal(mine, first + second)
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for tensor in tensors[:1]:
                dist.all_reduce(tensor, group=group)
        manager.wait()
        assert torch.equal(tensors[0], 2 * (values(0, 3) + values(1, 3)))


def everyone_s_three() -> list[list[Tensor]]:
    return [
        [values(rank, 3), values(rank, 2, 2, dtype=torch.float64), values(rank, 4).view(2, 2).t()]
        for rank in range(2)
    ]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_all_reduce() -> None:
    def call(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        rank = dist.get_rank()
        rows = torch.tensor([[0, 2, 2], [1, 2, 0]][rank][: 2 + rank])  # unequally many, some of them the same
        tensor = torch.sparse_coo_tensor(
            rows[None], values(rank, len(rows), 4), (5, 4), check_invariants=True
        )
        work = dist.all_reduce(tensor, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        return [tensor.to_dense()], work

    assert_as_gloo(call)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_reduce_scatter(op: str) -> None:
    def single(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        output = torch.zeros(3)
        whole = values(dist.get_rank(), dist.get_world_size() * 3)
        return [output], reduce_scatter_single(output, whole, getattr(dist.ReduceOp, op), group, async_op)

    assert_as_gloo(single)
    with groups() as (group, _):
        rank, size = dist.get_rank(), dist.get_world_size()
        for lengths in ([2] * size, [r + 1 for r in range(size)]):
            output = torch.zeros(lengths[rank], 2)[:, 0]
            reduce_op = getattr(dist.ReduceOp, op)
            dist.reduce_scatter(
                output, [values(rank + r, n) for r, n in enumerate(lengths)], reduce_op, group
            )
            parts = torch.stack([values(source + rank, lengths[rank]) for source in range(size)])
            assert torch.equal(output, parts.sum(0) if op == "SUM" else parts.amax(0))


# ---------------------------------------------------------------------- data


@pytest.mark.ranks(3)
def test_broadcast_from_every_rank() -> None:
    for src in range(3):

        def call(group: Any, async_op: bool, src: int = src) -> tuple[list[Tensor], Any]:
            tensor = values(dist.get_rank(), 5)
            return [tensor], dist.broadcast(tensor, src, group, async_op)

        assert_as_gloo(call)


@pytest.mark.ranks(3)
def test_all_gather() -> None:
    def listed(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        parts = [torch.zeros(2, 3) for _ in range(dist.get_world_size())]
        return parts, dist.all_gather(parts, values(dist.get_rank(), 2, 3), group, async_op)

    def single(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        whole = torch.zeros(dist.get_world_size() * 2, 3, dtype=torch.int64)
        mine = values(dist.get_rank(), 2, 3, dtype=torch.int64)
        return [whole], all_gather_single(whole, mine, group, async_op)

    assert_as_gloo(listed)
    assert_as_gloo(single)


@pytest.mark.ranks(3)
def test_all_gather_of_unequal_and_strided_tensors() -> None:
    with groups() as (group, _):
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = [torch.zeros(r, 2).t() for r in range(size)]
        dist.all_gather(parts, values(rank, 2, rank), group=group)
        for r, part in enumerate(parts):
            assert torch.equal(part, values(r, 2, r))
        parts = [torch.zeros(4, 2).t() for r in range(size)]
        dist.all_gather(parts, values(rank, 4, 2).t(), group=group)
        for r, part in enumerate(parts):
            assert torch.equal(part, values(r, 4, 2).t())


@pytest.mark.ranks(2)
def test_coalesced_gathers_and_scatters() -> None:
    with groups() as (group, _):
        rank, size = dist.get_rank(), dist.get_world_size()
        wholes = [torch.zeros(size * 2), torch.zeros(size * 3)]
        with dist._coalescing_manager(group) as _:
            for whole, n in zip(wholes, (2, 3), strict=True):
                all_gather_single(whole, values(rank, n), group=group)
        for whole, n in zip(wholes, (2, 3), strict=True):
            assert torch.equal(whole, torch.cat([values(r, n) for r in range(size)]))
        parts = [torch.zeros(2), torch.zeros(3)]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for part in parts:
                reduce_scatter_single(part, values(rank, size * len(part)), group=group)
        manager.wait()
        for part in parts:
            n = len(part)
            total = torch.stack([values(r, size * n) for r in range(size)]).sum(0)
            assert torch.equal(part, total[rank * n : (rank + 1) * n])
        lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
        group.allgather_coalesced(lists, [values(rank, 2), values(rank, 3)]).wait()
        for r, row in enumerate(lists):
            assert torch.equal(row[0], values(r, 2))
            assert torch.equal(row[1], values(r, 3))


@pytest.mark.ranks(3)
def test_gather_and_scatter() -> None:
    def gathered(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        parts = [torch.zeros(4) for _ in range(dist.get_world_size())] if dist.get_rank() == 1 else None
        work = dist.gather(values(dist.get_rank(), 4), parts, 1, group, async_op)
        return parts or [], work

    def scattered(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        output, is_root = torch.zeros(4), dist.get_rank() == 2
        parts = [values(r, 4) for r in range(dist.get_world_size())] if is_root else None
        return [output], dist.scatter(output, parts, 2, group, async_op)

    assert_as_gloo(gathered)
    assert_as_gloo(scattered)


@pytest.mark.ranks(3)
def test_all_to_all() -> None:
    def single(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        size = dist.get_world_size()
        output = torch.zeros(size * 2, 3)
        work = dist.all_to_all_single(
            output, values(dist.get_rank(), size * 2, 3), group=group, async_op=async_op
        )
        return [output], work

    def uneven(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        rank, size = dist.get_rank(), dist.get_world_size()
        given = [
            (rank + peer) % size for peer in range(size)
        ]  # some of them 0; symmetric, so the same come back
        output = torch.zeros(sum(given), 2)
        input = values(rank, sum(given), 2)
        return [output], dist.all_to_all_single(output, input, given, given, group, async_op)

    assert_as_gloo(single)
    assert_as_gloo(uneven)
    with groups() as (group, _):
        rank, size = dist.get_rank(), dist.get_world_size()
        outputs = [torch.zeros(2, 1 + rank + r).t() for r in range(size)]
        dist.all_to_all(outputs, [values(10 * rank + r, 1 + rank + r, 2) for r in range(size)], group)
        for r, output in enumerate(outputs):
            assert torch.equal(output, values(10 * r + rank, 1 + rank + r, 2))


# ---------------------------------------------------------------------- messages and barriers


@pytest.mark.ranks(3)
def test_messages() -> None:
    with groups() as (group, _):
        rank, size = dist.get_rank(), dist.get_world_size()
        after, before = (rank + 1) % size, (rank - 1) % size
        received = torch.zeros(3, 2).t()
        works = [dist.isend(values(rank, 2, 3), after, group), dist.irecv(received, before, group)]
        for work in works:
            work.wait()
        assert torch.equal(received, values(before, 2, 3))
        if rank == 0:
            dist.send(values(7, 2), 1, group)
        elif rank == 1:
            message = torch.zeros(2)
            assert dist.recv(message, 0, group) == 0
            assert torch.equal(message, values(7, 2))
        first, second = torch.zeros(2), torch.zeros(2)
        operations = [
            dist.P2POp(dist.isend, values(rank, 2), after, group),
            dist.P2POp(dist.irecv, first, before, group),
            dist.P2POp(dist.isend, values(rank + 3, 2), after, group),
            dist.P2POp(dist.irecv, second, before, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(first, values(before, 2))
        assert torch.equal(second, values(before + 3, 2))


@pytest.mark.ranks(2)
def test_barriers() -> None:
    with groups() as (group, _):
        dist.barrier(group)
        dist.barrier(group, async_op=True).wait()
        if TORCH_SUBCLASSES_BACKEND:  # before, torch asks Gloo for it by name
            dist.monitored_barrier(group, timedelta(seconds=20))


# ---------------------------------------------------------------------- what is refused, and errors


@pytest.mark.ranks(2)
def test_what_is_refused_says_so() -> None:
    with groups() as (group, _):
        tensor = torch.ones(2)
        with pytest.raises(ValueError, match="multiply the tensor yourself, and use SUM"):
            dist.all_reduce(tensor, torch._C._distributed_c10d._make_nccl_premul_sum(2.0), group)
        with pytest.raises(ValueError, match="expected a tensor of integers"):
            dist.all_reduce(tensor, dist.ReduceOp.BAND, group)
        with pytest.raises(ValueError, match=r"not defined for torch\.int64"):
            dist.all_reduce(tensor.long(), dist.ReduceOp.AVG, group)
        with pytest.raises(ValueError, match="keep their order"):
            dist.isend(tensor, 1 - dist.get_rank(), group, tag=3)
        with pytest.raises(ValueError, match="pass the sender as src="):
            dist.recv(tensor, group=group)
        with pytest.raises(
            ValueError,
            match=r"a multiple of 2 as its first dimension; got no split sizes and a tensor of shape \(3,\)",
        ):
            dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group)
        with pytest.raises(ValueError, match=r"on the device meta\. Such a tensor has no data"):
            dist.all_reduce(torch.ones(2, device="meta"), group=group)
        dist.barrier(group)


@pytest.mark.ranks(2)
def test_an_error_comes_out_of_the_call_the_wait_and_the_future() -> None:
    for where in ("call", "wait", "future"):
        with groups() as (group, gloo):
            if dist.get_rank() == 0:
                dist.barrier(gloo)
                transport_of(group).abort("enough")
            elif where == "call":
                dist.barrier(gloo)
                with pytest.raises(PeerFailed, match="enough"):
                    dist.all_reduce(torch.ones(2), group=group)
            else:
                work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
                future = work.get_future() if where == "future" else None
                dist.barrier(gloo)
                if future is None:
                    with pytest.raises(PeerFailed, match="enough"):
                        work.wait()
                else:
                    with pytest.raises(RuntimeError, match="enough"):
                        future.wait()
                with pytest.raises(PeerFailed, match="enough"):
                    work.wait()
                assert work.is_completed()
                assert not work.is_success()
                assert isinstance(work.exception(), PeerFailed)
            dist.barrier(gloo)


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    with groups(timeout=timedelta(seconds=30)) as (group, gloo):
        transport = transport_of(group)
        assert transport.timeout_seconds == 30
        transport.timeout_seconds = 0.5
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveTimeout, match="rank 1"):
                dist.all_reduce(torch.ones(2), group=group)
        dist.barrier(gloo)


@pytest.mark.ranks(3, killed=[1])
def test_a_killed_rank_is_a_lost_peer() -> None:
    with groups() as (group, _):
        dist.barrier(group)
        if dist.get_rank() == 1:
            end_by_sigkill()
        with pytest.raises(PeerLost, match="rank 1"):
            dist.all_reduce(torch.ones(2), group=group)


@pytest.mark.ranks(2)
def test_ranks_in_different_calls_are_told_so() -> None:
    with groups() as (group, gloo):
        with pytest.raises(SynclineError, match="broadcast"):
            if dist.get_rank():
                dist.all_reduce(torch.ones(2), group=group)
            else:
                dist.broadcast(torch.ones(3), 0, group=group)
        dist.barrier(gloo)


# ---------------------------------------------------------------------- works


@pytest.mark.ranks(2)
def test_many_are_under_way_at_once() -> None:
    with groups() as (group, _):
        tensors = [torch.full((1000,), float(i + dist.get_rank())) for i in range(20)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full((1000,), 2.0 * i + 1))


@pytest.mark.ranks(2)
def test_a_call_does_not_wait_unless_asked_to() -> None:
    with groups() as (group, gloo):
        if dist.get_rank() == 0:
            tensor = torch.ones(2)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert not work.is_completed()
            with pytest.raises(CollectiveTimeout, match="still under way"):
                work.wait(timedelta(milliseconds=20))
            future = work.get_future()
            assert not future.done()
            dist.barrier(gloo)
        else:
            dist.barrier(gloo)
            tensor = torch.ones(2)
            future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        assert [result.tolist() for result in future.wait()] == [[2.0, 2.0]]
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert doubled.wait().tolist() == [4.0, 4.0]


@pytest.mark.ranks(2)
def test_works_and_tensors_nobody_keeps_live_until_they_are_done() -> None:
    with groups() as (group, _):
        for _ in range(50):
            dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
            dist.broadcast(torch.ones(3, 7).t(), 0, group=group, async_op=True)
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0] * 3


_ENDS_EARLY = """
import sys
import torch, torch.distributed as dist
import syncline as sl
print("ready", flush=True)
sl.register_backend()
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("syncline", store=store, rank=rank, world_size=2)
if rank == 0:
    work = dist.all_reduce(torch.ones(5), async_op=True)
    future = work.get_future()
    store.set("called", "")
    if sys.argv[3] == "destroy":
        dist.destroy_process_group()
else:
    store.wait(["called"])
"""


@pytest.mark.parametrize("how", ["destroy", "exit"])
@pytest.mark.real
def test_a_process_ends_in_peace_while_a_future_waits(how: str, tmp_path: Path) -> None:
    with groups_of_processes(_ENDS_EARLY, str(tmp_path / "store"), how) as ranks:
        for rank in ranks:  # on a busy machine it may take a minute to import torch
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n", hangs.communicate(rank)[1]
        for rank, (_, errors) in zip(ranks, hangs.communicate_with_all(ranks), strict=True):
            if "SharedMemoryUnavailable" in errors:
                pytest.skip(errors)
            assert rank.returncode == 0, errors


@contextmanager
def groups_of_processes(program: str, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()  # which closes what it read from, too


# ---------------------------------------------------------------------- groups


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend", ["syncline", "cpu:syncline", "cpu:syncline,cuda:nccl"])
def test_default_group_sub_groups_and_again(backend: str) -> None:
    sl.register_backend()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    dist.barrier()
    dist.destroy_process_group()
    for attempt in range(2):
        try:
            dist.init_process_group(
                backend, store=dist.PrefixStore(f"again {attempt}", store), rank=rank, world_size=size
            )
        except SharedMemoryUnavailable as error:
            pytest.skip(str(error))
        world = dist.group.WORLD
        assert world is not None
        assert (dist.get_rank(), dist.get_world_size(), world.rank(), world.size()) == (
            rank,
            size,
            rank,
            size,
        )
        assert dist.get_backend() in (backend, "syncline", "undefined", "custom")
        assert transport_of(world).name == "shared memory"
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
        part = dist.new_group([0, 2])
        same = dist.new_group([0, 2], backend="syncline", group_desc="pair")
        for group in (part, same):
            if rank != 1:
                assert (group.size(), dist.get_rank(group)) == (2, rank // 2)
                assert dist.get_process_group_ranks(group) == [0, 2]
                mine = torch.tensor([float(rank)])
                dist.all_reduce(mine, group=group)
                assert mine.item() == 2
                dist.broadcast(mine, 2, group=group)
        if rank != 1:
            assert same.group_desc == "pair"
            assert part.group_name != same.group_name
            dist.destroy_process_group(same)
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_tensors_on_other_devices_go_to_their_own_backend() -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake", which does nothing

    sl.register_backend()
    try:
        group = dist.new_group(backend="cpu:syncline,meta:fake")
    except SharedMemoryUnavailable as error:
        pytest.skip(str(error))
    known = len(dist.distributed_c10d._world.pg_map)
    assert {device.type for device in group._device_types} == {"cpu", "meta"}
    elsewhere, here = torch.ones(4, device="meta"), torch.ones(4)
    part, size = torch.ones(2, device="meta"), dist.get_world_size()
    for _ in range(2):
        dist.all_reduce(elsewhere, group=group)
        dist.all_reduce(elsewhere, group=group, async_op=True).wait()
        dist.broadcast(elsewhere, 0, group=group)
        all_gather_single(elsewhere, part, group=group)
        reduce_scatter_single(part, elsewhere, group=group)
        dist.all_gather([part] * size, part, group=group)
        dist.all_to_all_single(elsewhere, elsewhere, group=group)
        dist.all_reduce(here, group=group)
    assert here.tolist() == [size**2] * 4
    assert type(group._get_backend(torch.device("meta"))).__name__ == "FakeProcessGroup"
    assert len(dist.distributed_c10d._world.pg_map) == known
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_gloo_stays_the_default_of_the_cpu() -> None:
    before = dict(dist.Backend.default_device_backend_map)
    sl.register_backend()
    sl.register_backend()
    assert dist.Backend.default_device_backend_map == before
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.get_backend(dist.new_group()) == "gloo"


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["torch.distributed.backends"].items()
    found = EntryPoint(name=name, value=value, group="torch.distributed.backends")
    assert (name, found.load()) == ("syncline", sl.register_backend)


@pytest.mark.ranks(3)
def test_split_group() -> None:
    with groups() as (group, gloo):
        child = group.split_group([0, 2], timedelta(seconds=30), None, "child", "a part")
        rank = dist.get_rank()
        assert (child is None) == (rank == 1)
        if child is not None:
            assert (child.size(), child.rank(), child.group_name, child.group_desc) == (
                2,
                rank // 2,
                "child",
                "a part",
            )
            tensor = torch.tensor([float(rank)])
            child.allreduce([tensor], dist.AllreduceOptions()).wait()
            assert tensor.item() == 2
            child.shutdown()
        dist.barrier(gloo)
        if TORCH_SUBCLASSES_BACKEND:  # before, torch wants an accelerator for it
            part: Any = dist.split_group(group, [[0, 1], [2]])
            total = torch.ones(1)
            dist.all_reduce(total, group=part)
            assert total.item() == part.size() == (1 if rank == 2 else 2)
            assert dist.get_process_group_ranks(part) == ([2] if rank == 2 else [0, 1])
            dist.barrier(group)
            dist.destroy_process_group(part)


@pytest.mark.ranks(2)
def test_names() -> None:
    with groups(group_desc="described") as (group, _):
        assert group.name() == "syncline"
        assert group.group_desc == "described"
        assert dist.get_backend(group) == "syncline"
        assert dist.get_backend_config(group) == "cpu:syncline"
        assert [device.type for device in group._device_types] == ["cpu"]
        found = torch._C._distributed_c10d._resolve_process_group(group.group_name)
        assert (found.rank(), found.size()) == (group.rank(), group.size())
        assert dist.ProcessGroup.unbox(group.boxed()).size() == 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize("feature", ["reconfigure", "window", "shrinking"])
def test_features_that_torch_may_ask_for(feature: str) -> None:
    """torch 2.15's own answers, for a class in Python, call themselves."""
    with groups() as (group, _):
        for one in (group, group._get_backend(torch.device("cpu"))):
            assert not getattr(one, f"supports_{feature}")


@pytest.mark.ranks(1)
def test_a_group_of_one() -> None:
    with groups() as (group, _):
        tensor = torch.ones(3)
        for call in (
            lambda: dist.all_reduce(tensor, group=group),
            lambda: dist.broadcast(tensor, 0, group=group),
            lambda: dist.reduce(tensor, 0, group=group),
            lambda: dist.all_gather([tensor], tensor.clone(), group=group),
            lambda: dist.gather(tensor, [tensor], 0, group=group),
            lambda: dist.scatter(tensor, [tensor], 0, group=group),
            lambda: dist.all_to_all_single(tensor, tensor.clone(), group=group),
            lambda: dist.barrier(group),
        ):
            call()
        assert tensor.tolist() == [1.0] * 3
