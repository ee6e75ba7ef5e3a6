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
from support.cases import case
from syncline import CollectiveTimeout, PeerFailed, PeerLost
from syncline.transport.shared_memory import SharedMemoryUnavailable

TORCH_SUBCLASSES_BACKEND = hasattr(torch._C._distributed_c10d.Backend, "split")
# The names since torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Call = Callable[[Any, bool], tuple[list[Tensor], Any]]
"""A function of a group and async_op. It returns the tensors to compare and what torch returned."""


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


def sum_of_all(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([values(rank, *shape, dtype=dtype) for rank in range(dist.get_world_size())]).sum(0)


# ---------------------------------------------------------------------- beside Gloo

REDUCTIONS = {
    **dict.fromkeys(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16), ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
    ),
    **dict.fromkeys(
        (torch.int8, torch.uint8, torch.int32, torch.int64),
        ("SUM", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"),
    ),
}


def all_reduces() -> Iterator[tuple[str, Call]]:
    def reduced(make: Callable[[], Tensor], op: str = "SUM") -> Call:
        def call(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
            tensor = make()
            return [tensor], dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group, async_op)

        return call

    rank = dist.get_rank()
    for dtype, ops in REDUCTIONS.items():
        factor = 3 if dtype.is_floating_point else 1  # a mean over 3 ranks is exact
        for op in ops:
            tensor = values(rank, 5, 3, dtype=dtype) * factor
            yield f"all_reduce {op} of {dtype}", reduced(tensor.clone, op)
    yield "all_reduce of complex numbers", reduced(torch.complex(values(rank, 4), values(rank + 5, 4)).clone)
    yield "all_reduce of a large tensor", reduced(values(rank, 1_000_003).clone)


def sparse(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
    rank = dist.get_rank()
    rows = torch.tensor([[0, 2], [1, 2, 0], [4, 4, 0, 2]][rank])  # unequally many, some of them the same
    tensor = torch.sparse_coo_tensor(rows[None], values(rank, len(rows), 4), (5, 4), check_invariants=True)
    work = dist.all_reduce(tensor, group=group, async_op=async_op)
    if work is not None:
        work.wait()
    return [tensor.to_dense()], work


def others() -> Iterator[tuple[str, Call]]:
    rank, size = dist.get_rank(), dist.get_world_size()

    def scattered_sum(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        output, whole = torch.zeros(3), values(rank, size * 3)
        return [output], reduce_scatter_single(output, whole, dist.ReduceOp.SUM, group, async_op)

    def scattered_maximum(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        output, whole = torch.zeros(3), values(rank, size * 3)
        return [output], reduce_scatter_single(output, whole, dist.ReduceOp.MAX, group, async_op)

    def gathered_list(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        parts = [torch.zeros(2, 3) for _ in range(size)]
        return parts, dist.all_gather(parts, values(rank, 2, 3), group, async_op)

    def gathered_whole(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        whole = torch.zeros(size * 2, 3, dtype=torch.int64)
        return [whole], all_gather_single(whole, values(rank, 2, 3, dtype=torch.int64), group, async_op)

    def gathered_at_root(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        parts = [torch.zeros(4) for _ in range(size)] if rank == 1 else None
        return parts or [], dist.gather(values(rank, 4), parts, 1, group, async_op)

    def scattered_from_root(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        output = torch.zeros(4)
        parts = [values(r, 4) for r in range(size)] if rank == 2 else None
        return [output], dist.scatter(output, parts, 2, group, async_op)

    def exchanged(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        output, whole = torch.zeros(size * 2, 3), values(rank, size * 2, 3)
        return [output], dist.all_to_all_single(output, whole, group=group, async_op=async_op)

    def exchanged_unevenly(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        given = [(rank + peer) % size for peer in range(size)]  # some are 0; symmetric, so the same come back
        output, whole = torch.zeros(sum(given), 2), values(rank, sum(given), 2)
        return [output], dist.all_to_all_single(output, whole, given, given, group, async_op)

    def exchanged_in_rows_of_another_length(group: Any, async_op: bool) -> tuple[list[Tensor], Any]:
        output, whole = torch.zeros(2, 4), values(rank, 4, 2)
        into, out_of = [2 * (peer == (rank - 1) % size) for peer in range(size)], [0] * size
        out_of[(rank + 1) % size] = 4
        return [output], dist.all_to_all_single(output, whole, into, out_of, group, async_op)

    for call in (scattered_sum, scattered_maximum, gathered_list, gathered_whole, gathered_at_root,
                 scattered_from_root, exchanged, exchanged_unevenly, exchanged_in_rows_of_another_length):  # fmt: skip
        yield call.__name__, call
    for src in range(size):

        def broadcast(group: Any, async_op: bool, src: int = src) -> tuple[list[Tensor], Any]:
            tensor = values(rank, 5)
            return [tensor], dist.broadcast(tensor, src, group, async_op)

        yield f"broadcast from rank {src}", broadcast


@pytest.mark.ranks(3, timeout=120)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_collectives_have_the_results_of_gloo() -> None:
    with groups() as (group, gloo):
        for name, call in (*all_reduces(), ("sparse", sparse), *others()):
            expected, _ = call(gloo, False)
            for async_op in (False, True):
                with case(name, f"async_op={async_op}"):
                    result, work = call(group, async_op)
                    if async_op:
                        work.wait()
                        assert work.is_completed()
                    assert len(result) == len(expected)
                    for mine, theirs in zip(result, expected, strict=True):
                        assert mine.dtype == theirs.dtype
                        assert torch.equal(mine, theirs), f"{mine} instead of {theirs}"


# ---------------------------------------------------------------------- where Gloo has no reference


def in_any_layout(rank: int) -> list[Tensor]:
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
def test_tensors_in_any_layout_and_works_in_any_order() -> None:
    firsts, seconds = in_any_layout(0), in_any_layout(1)
    with groups() as (group, _), torch.no_grad():
        for async_op in (False, True):
            reduced, received = in_any_layout(dist.get_rank()), in_any_layout(dist.get_rank())
            works = [dist.all_reduce(tensor, group=group, async_op=async_op) for tensor in reduced]
            works += [dist.broadcast(tensor, 1, group=group, async_op=async_op) for tensor in received]
            if async_op:
                for work in reversed(works):
                    work.wait()
            for total, copy, first, second in zip(reduced, received, firsts, seconds, strict=True):
                assert torch.equal(total, first + second)
                assert torch.equal(copy, second)


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
def test_coalesced_calls() -> None:
    with groups() as (group, _):
        rank, size = dist.get_rank(), dist.get_world_size()
        tensors = [values(rank, 3), values(rank, 2, 2, dtype=torch.float64), values(rank, 4).view(2, 2).t()]
        group.allreduce_coalesced(tensors).wait()
        expected = [sum_of_all(3), sum_of_all(2, 2, dtype=torch.float64), sum_of_all(4).view(2, 2).t()]
        for mine, total in zip(tensors, expected, strict=True):
            assert torch.equal(mine, total)
        with dist._coalescing_manager(group, async_ops=True) as manager:
            dist.all_reduce(tensors[0], group=group)
        manager.wait()
        assert torch.equal(tensors[0], 2 * sum_of_all(3))

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
            assert torch.equal(part, sum_of_all(size * len(part)).view(size, -1)[rank])

        lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
        group.allgather_coalesced(lists, [values(rank, 2), values(rank, 3)]).wait()
        for r, row in enumerate(lists):
            assert torch.equal(row[0], values(r, 2))
            assert torch.equal(row[1], values(r, 3))


@pytest.mark.ranks(3)
def test_tensors_that_gloo_refuses() -> None:
    with groups() as (group, _):
        rank, size = dist.get_rank(), dist.get_world_size()
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            for lengths in ([2] * size, [r + 1 for r in range(size)]):
                output = torch.zeros(lengths[rank], 2)[:, 0]
                dist.reduce_scatter(output, [values(rank + r, n) for r, n in enumerate(lengths)], op, group)
                parts = torch.stack([values(source + rank, lengths[rank]) for source in range(size)])
                assert torch.equal(output, parts.sum(0) if op == dist.ReduceOp.SUM else parts.amax(0))
        gathered = [torch.zeros(r, 2).t() for r in range(size)]
        dist.all_gather(gathered, values(rank, 2, rank), group=group)
        for r, part in enumerate(gathered):
            assert torch.equal(part, values(r, 2, r))
        gathered = [torch.zeros(4, 2).t() for r in range(size)]
        dist.all_gather(gathered, values(rank, 4, 2).t(), group=group)
        for r, part in enumerate(gathered):
            assert torch.equal(part, values(r, 4, 2).t())
        outputs = [torch.zeros(2, 1 + rank + r).t() for r in range(size)]
        dist.all_to_all(outputs, [values(10 * rank + r, 1 + rank + r, 2) for r in range(size)], group)
        for r, output in enumerate(outputs):
            assert torch.equal(output, values(10 * r + rank, 1 + rank + r, 2))
        row, whole, part = values(rank, 2), torch.zeros(2 * size), torch.zeros(1, 2)
        group._allgather_base(whole, row.view(1, 2)).wait()
        assert torch.equal(whole, torch.cat([values(r, 2) for r in range(size)]))
        group._reduce_scatter_base(part, row.repeat(size)).wait()
        assert torch.equal(part[0], sum_of_all(2))
        strided = torch.zeros(2, size).t()
        dist.all_to_all_single(strided, row.repeat(size, 1).t().contiguous().t(), group=group)
        assert torch.equal(strided, torch.stack([values(r, 2) for r in range(size)]))


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


# ---------------------------------------------------------------------- errors


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


# ---------------------------------------------------------------------- works


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
def test_default_group_sub_groups_and_again() -> None:
    sl.register_backend()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    dist.barrier()
    dist.destroy_process_group()
    backends = ["syncline", "syncline", "cpu:syncline", "cpu:syncline,cuda:nccl"]
    for attempt, backend in enumerate(backends):
        again = dist.PrefixStore(f"again {attempt}", store)
        try:
            dist.init_process_group(backend, store=again, rank=rank, world_size=size)
        except SharedMemoryUnavailable as error:
            pytest.skip(str(error))
        world = dist.group.WORLD
        assert world is not None
        found = dist.get_rank(), dist.get_world_size(), world.rank(), world.size()
        assert found == (rank, size, rank, size)
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
            assert (child.size(), child.rank()) == (2, rank // 2)
            assert (child.group_name, child.group_desc) == ("child", "a part")
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
def test_features_that_torch_may_ask_for() -> None:
    """torch 2.15's own answers, for a class in Python, call themselves."""
    with groups() as (group, _):
        for one in (group, group._get_backend(torch.device("cpu"))):
            for feature in ("reconfigure", "window", "shrinking"):
                assert not getattr(one, f"supports_{feature}"), feature


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
