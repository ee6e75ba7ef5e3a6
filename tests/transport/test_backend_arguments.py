"""Wrong arguments for the backend "syncline": it refuses what Gloo refuses, on the same ranks, and sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import syncline as sl
from support.cases import case
from syncline import CollectiveMismatch, SynclineError
from syncline.transport.shared_memory import SharedMemoryUnavailable

SECONDS = 5

Call = Callable[[Any, int], object]
"""A function of a group and this rank, which makes one call with wrong arguments."""


@contextmanager
def pair_of_groups() -> Iterator[tuple[Any, Any]]:
    """Two new groups, of our backend and of Gloo, in which no other test's mistakes are left."""
    sl.register_backend()
    timeout = timedelta(seconds=SECONDS)
    try:
        ours = dist.new_group(backend="syncline", timeout=timeout)
    except SharedMemoryUnavailable as error:
        pytest.skip(str(error))
    gloo = dist.new_group(backend="gloo", timeout=timeout)
    yield ours, gloo
    dist.barrier()
    for group in (ours, gloo):
        dist.destroy_process_group(group)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def with_one(wrong: Tensor, at: int) -> list[Tensor]:
    """A tensor for each of two ranks, of which one is `wrong`."""
    parts = [tensor(2), tensor(2)]
    parts[at] = wrong
    return parts


# ---------------------------------------------------------------------- what both refuse

ROOTED: dict[str, Callable[[Any, int], Any]] = {
    "broadcast": lambda g, root: g.broadcast([tensor(2)], options(dist.BroadcastOptions, rootRank=root)),
    "reduce": lambda g, root: g.reduce([tensor(2)], options(dist.ReduceOptions, rootRank=root)),
    "reduce of nothing": lambda g, root: g.reduce([tensor(0)], options(dist.ReduceOptions, rootRank=root)),
    "gather": lambda g, root: g.gather([], [tensor(2)], options(dist.GatherOptions, rootRank=root)),
    "gather of nothing": lambda g, root: g.gather(
        [], [tensor(0)], options(dist.GatherOptions, rootRank=root)
    ),
    "scatter": lambda g, root: g.scatter([tensor(2)], [], options(dist.ScatterOptions, rootRank=root)),
    "scatter of nothing": lambda g, root: g.scatter(
        [tensor(0)], [], options(dist.ScatterOptions, rootRank=root)
    ),
}


def wrong_roots() -> Iterator[tuple[str, Call]]:
    for name, call in ROOTED.items():
        for root in (-1, 2, 7):
            yield f"{name} with root {root}", lambda g, _, call=call, root=root: call(g, root).wait()
    for root in (-1, 2):
        yield f"dst={root}", lambda g, _, root=root: dist.reduce(tensor(2), group_dst=root, group=g)
        yield f"src={root}", lambda g, _, root=root: dist.broadcast(tensor(2), group_src=root, group=g)
    for index in (-1, 1):
        opts = options(dist.BroadcastOptions, rootRank=0, rootTensor=index)
        yield f"rootTensor={index}", lambda g, _, opts=opts: g.broadcast([tensor(2)], opts).wait()
        opts = options(dist.ReduceOptions, rootRank=0, rootTensor=index)
        yield f"reduce, rootTensor={index}", lambda g, _, opts=opts: g.reduce([tensor(2)], opts).wait()


def wrong_lists() -> Iterator[tuple[str, Call]]:
    two = tensor(2)
    lists: dict[str, Callable[[Any, int], Any]] = {
        "all_reduce": lambda g, _: g.allreduce([], dist.AllreduceOptions()),
        "all_reduce of two sizes": lambda g, _: g.allreduce([two, tensor(3)], dist.AllreduceOptions()),
        "coalesced": lambda g, _: g.allreduce_coalesced([], dist.AllreduceCoalescedOptions()),
        "broadcast": lambda g, _: g.broadcast([], dist.BroadcastOptions()),
        "broadcast of two sizes": lambda g, _: g.broadcast([two, tensor(3)], dist.BroadcastOptions()),
        "reduce": lambda g, _: g.reduce([], dist.ReduceOptions()),
        "reduce of two": lambda g, _: g.reduce([two, two], dist.ReduceOptions()),
        "all_gather": lambda g, _: g.allgather([], []),
        "all_gather without parts": lambda g, _: g.allgather([[]], [two]),
        "all_gather of two": lambda g, _: g.allgather([[two] * 2] * 2, [two] * 2),
        "gather": lambda g, _: g.gather([], [], dist.GatherOptions()),
        "gather of two": lambda g, _: g.gather([], [two, two], dist.GatherOptions()),
        "scatter": lambda g, _: g.scatter([], [], dist.ScatterOptions()),
        "scatter of two": lambda g, _: g.scatter([two, two], [], dist.ScatterOptions()),
        "reduce_scatter": lambda g, _: g.reduce_scatter([], []),
        "reduce_scatter of two": lambda g, _: g.reduce_scatter([two] * 2, [[two] * 2] * 2),
        "all_to_all": lambda g, _: g.alltoall([], []),
        "send": lambda g, rank: g.send([], 1 - rank, 0),
        "send of two": lambda g, rank: g.send([two, two], 1 - rank, 0),
        "recv": lambda g, rank: g.recv([], 1 - rank, 0),
        "all_gathers": lambda g, _: g.allgather_coalesced([], []),
        "all_gathers of one rank": lambda g, _: g.allgather_coalesced([[two]], [two]),
        "all_gathers, no input": lambda g, _: g.allgather_coalesced([[two], [two]], []),
        "all_gathers, too few inputs": lambda g, _: g.allgather_coalesced([[two, two]] * 2, [two]),
        "all_gathers, too few outputs": lambda g, _: g.allgather_coalesced([[two]] * 2, [two, two]),
        "all_gathers, wrong size": lambda g, _: g.allgather_coalesced([[tensor(3)]] * 2, [two]),
        "flat all_gathers": lambda g, _: g.allgather_into_tensor_coalesced([], []),
        "flat all_gathers, unequal": lambda g, _: g.allgather_into_tensor_coalesced([tensor(4)], [two] * 2),
        "flat reduce_scatters": lambda g, _: g.reduce_scatter_tensor_coalesced([], []),
        "flat reduce_scatters, unequal": lambda g, _: g.reduce_scatter_tensor_coalesced(
            [two], [tensor(4)] * 2
        ),
    }
    for name, call in lists.items():
        yield name, lambda g, rank, call=call: call(g, rank).wait()
    for n in (0, 1, 3):
        parts = [tensor(2) for _ in range(n)]
        yield f"all_gather, {n}", lambda g, _, parts=parts: dist.all_gather(parts, two, group=g)
        yield f"reduce_scatter, {n}", lambda g, _, parts=parts: dist.reduce_scatter(two, parts, group=g)
        yield f"all_to_all from {n}", lambda g, _, parts=parts: dist.all_to_all([two] * 2, parts, group=g)
        yield f"all_to_all into {n}", lambda g, _, parts=parts: dist.all_to_all(parts, [two] * 2, group=g)


WRONG: dict[str, Callable[[], Tensor]] = {
    "one element": lambda: tensor(1),
    "four elements": lambda: tensor(4),
    "two dimensions": lambda: tensor(1, 2),
    "no element": lambda: tensor(0),
    "float64": lambda: tensor(2, dtype=torch.float64),
    "int32": lambda: tensor(2, dtype=torch.int32),
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: tensor(2).to_sparse(),
}


def wrong_tensors() -> Iterator[tuple[str, Call]]:
    """Tensors that are wrong on all ranks. A list is wrong in this rank's entry, or in all."""
    two, four = tensor(2), tensor(4)
    for name, make in WRONG.items():
        bad = make()
        calls: dict[str, Callable[[Any, int], Any]] = {
            "all_gather": lambda g, r, bad=bad: g.allgather([with_one(bad, r)], [two]),
            "reduce_scatter": lambda g, _, bad=bad: g.reduce_scatter([two], [[bad, bad]]),
            "reduce_scatter into": lambda g, _, bad=bad: g.reduce_scatter([bad], [[two, two]]),
            "all_to_all from": lambda g, r, bad=bad: g.alltoall([two, two], with_one(bad, r)),
            "all_to_all into": lambda g, r, bad=bad: g.alltoall(with_one(bad, r), [two, two]),
        }
        if name != "two dimensions":  # which this backend accepts: its elements are as many
            calls |= {
                "all_gather_into_tensor from": lambda g, _, bad=bad: g._allgather_base(four, bad),
                "all_gather_into_tensor into": lambda g, _, bad=bad: g._allgather_base(bad, two),
                "reduce_scatter_tensor from": lambda g, _, bad=bad: g._reduce_scatter_base(two, bad),
                "reduce_scatter_tensor into": lambda g, _, bad=bad: g._reduce_scatter_base(bad, four),
                "all_to_all_single into": lambda g, _, bad=bad: g.alltoall_base(bad, two, [], []),
                "all_to_all_single from": lambda g, _, bad=bad: g.alltoall_base(two, bad, [], []),
            }
            if name == "four elements":  # which are right
                del calls["all_gather_into_tensor into"], calls["reduce_scatter_tensor from"]
        for operation, call in calls.items():
            yield f"{operation} {name}", lambda g, rank, call=call: call(g, rank).wait()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.ones(4, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda: tensor(4, 4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(tensor(4), 1.0, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([tensor(2), tensor(3)]),
}


def wrong_layouts() -> Iterator[tuple[str, Call]]:
    for name, make in LAYOUTS.items():
        if name == "mkldnn" and not torch.backends.mkldnn.is_available():
            continue
        bad = make()
        calls: dict[str, Callable[[Any, int], Any]] = {
            "all_reduce": lambda g, _, bad=bad: g.allreduce([bad], dist.AllreduceOptions()),
            "coalesced": lambda g, _, bad=bad: g.allreduce_coalesced([bad], dist.AllreduceCoalescedOptions()),
            "broadcast": lambda g, _, bad=bad: g.broadcast([bad], dist.BroadcastOptions()),
            "reduce": lambda g, _, bad=bad: g.reduce([bad], dist.ReduceOptions()),
            "all_gather": lambda g, _, bad=bad: g.allgather([[bad, bad]], [bad]),
            "gather": lambda g, r, bad=bad: g.gather([[bad, bad]] * (r == 0), [bad], dist.GatherOptions()),
            "scatter": lambda g, r, bad=bad: g.scatter([bad], [[bad, bad]] * (r == 0), dist.ScatterOptions()),
            "reduce_scatter": lambda g, _, bad=bad: g.reduce_scatter([bad], [[bad, bad]]),
            "all_to_all": lambda g, _, bad=bad: g.alltoall([bad, bad], [bad, bad]),
            "all_to_all_single": lambda g, _, bad=bad: g.alltoall_base(bad, bad, [], []),
            "all_gather_into_tensor": lambda g, _, bad=bad: g._allgather_base(bad, bad),
            "reduce_scatter_tensor": lambda g, _, bad=bad: g._reduce_scatter_base(bad, bad),
            "message": lambda g, r, bad=bad: g.recv([bad], 0, 0) if r else g.send([bad], 1, 0),
        }
        if name == "sparse":
            del calls["all_reduce"]  # which both can reduce
        for operation, call in calls.items():
            yield f"{operation} {name}", lambda g, rank, call=call: call(g, rank).wait()


def wrong_splits() -> Iterator[tuple[str, Call]]:
    for into, out_of in (
        *(([1, 1, 0], [1, 1]), ([2], [1, 1]), ([1, 1], [2]), ([1, 2], [1, 1]), ([1, 1], [0, 1])),
        *(([-1, 3], [1, 1]), ([0, 0], [0, 0])),
    ):

        def call(g: Any, _: int, into: list[int] = into, out_of: list[int] = out_of) -> None:
            dist.all_to_all_single(tensor(2), tensor(2), into, out_of, group=g)

        yield f"splits {into} and {out_of}", call
    yield "odd number of rows", lambda g, _: dist.all_to_all_single(tensor(3), tensor(3), group=g)
    longer, shorter = tensor(2, 3), tensor(2, 2)
    yield "rows of other lengths", lambda g, _: dist.all_to_all_single(longer, shorter, group=g)


def wrong_operations() -> Iterator[tuple[str, Call]]:
    premul = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
    of_integers = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    for op, dtype in (
        *((op, torch.float32) for op in (*of_integers, premul)),
        *((op, torch.int32) for op in (dist.ReduceOp.AVG, premul)),
        (dist.ReduceOp.SUM, torch.float8_e4m3fn),
    ):
        two, four = tensor(2).to(dtype), tensor(4).to(dtype)
        calls: dict[str, Callable[..., object]] = {
            "all_reduce": lambda g, two, _, op: dist.all_reduce(two, op, group=g),
            "reduce": lambda g, two, _, op: dist.reduce(two, 0, op, group=g),
            "reduce_scatter": lambda g, two, _, op: dist.reduce_scatter(two, [two, two], op, group=g),
            "reduce_scatter_tensor": lambda g, two, four, op: g._reduce_scatter_base(
                two, four, options(dist.ReduceScatterOptions, reduceOp=op)
            ).wait(),
        }
        for name, call in calls.items():
            arguments = two, four, op
            yield f"{name} {op} {dtype}", lambda g, _, call=call, given=arguments: call(g, *given)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, premul):
        yield f"sparse {op}", lambda g, _, op=op: dist.all_reduce(torch.eye(2).to_sparse(), op, group=g)


def wrong_messages() -> Iterator[tuple[str, Call]]:
    two = tensor(2)
    yield "send to itself", lambda g, rank: g.send([two], rank, 0).wait()
    yield "recv from itself", lambda g, rank: g.recv([two], rank, 0).wait()
    yield "dist.send to itself", lambda g, rank: dist.send(two, rank, group=g)
    yield "tag", lambda g, r: dist.recv(two, 0, group=g, tag=-1) if r else dist.send(two, 1, group=g, tag=-1)


TABLES = (
    wrong_roots,
    wrong_lists,
    wrong_tensors,
    wrong_layouts,
    wrong_splits,
    wrong_operations,
    wrong_messages,
)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.filterwarnings("ignore")
def test_what_gloo_refuses_is_refused() -> None:
    with pair_of_groups() as (ours, gloo):
        for table in TABLES:
            assert_refused(list(table()), ours, gloo)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_what_gloo_refuses_on_one_rank_is_refused_there() -> None:
    two = tensor(2)

    def gathering(name: str, *arguments: Any) -> tuple[str, Call]:
        return f"gather {name}", lambda g, _: g.gather(*arguments, dist.GatherOptions()).wait()

    def scattering(name: str, *arguments: Any) -> tuple[str, Call]:
        return f"scatter {name}", lambda g, _: g.scatter(*arguments, dist.ScatterOptions()).wait()

    on_root = [gathering("without outputs", [], [two]), scattering("without inputs", [two], [])]
    for n in (0, 1, 3):
        parts = [tensor(2) for _ in range(n)]
        on_root += [
            (f"gather into {n}", lambda g, _, p=parts: dist.gather(two, p, 0, group=g)),
            (f"scatter of {n}", lambda g, _, p=parts: dist.scatter(two, p, 0, group=g)),
        ]
    for name, make in WRONG.items():
        bad = make()
        for at in (0, 1):
            parts = with_one(bad, at)
            on_root += [gathering(f"{at} {name}", [parts], [two]), scattering(f"{at} {name}", [two], [parts])]
        on_root += [
            gathering(f"of {name}", [[two, two]], [bad]),
            scattering(f"into {name}", [bad], [[two, two]]),
        ]
    elsewhere = [
        gathering("with outputs", [[two, two]], [two]),
        scattering("with inputs", [two], [[two, two]]),
    ]
    with pair_of_groups() as (ours, gloo):
        assert_refused(elsewhere if dist.get_rank() else on_root, ours, gloo)


GLOO_ACCEPTS = {
    "odd number of rows",
    *(f"all_to_all_single {way} {dtype}" for way in ("from", "into") for dtype in ("float64", "int32")),
}
"""The calls that only our backend refuses: it would not know what to do. On the meta device Gloo does nothing."""


def assert_refused(cases: list[tuple[str, Call]], ours: Any, gloo: Any) -> None:
    """Each call raises an error on both groups, and not by a timeout. Ours sends nothing, so its group still works."""
    rank = dist.get_rank()
    for name, call in cases:
        for group in (gloo, ours):
            raised: Exception | None = None
            try:
                call(group, rank)
            except Exception as error:
                raised = error
            if group is gloo and raised is None and ("meta" in name or name in GLOO_ACCEPTS):
                continue
            with case(name, dist.get_backend(group), raised):
                assert raised is not None, "not refused"
                assert not isinstance(raised, SynclineError), "refused only after something was sent"
                assert group is gloo or isinstance(raised, ValueError), "a raw error"
    dist.barrier()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=ours)
    assert total.item() == 3


# ---------------------------------------------------------------------- arguments that differ between the ranks


def gather_to_rank_0(g: Any, rank: int, part: Tensor) -> None:
    dist.gather(part, None if rank else [torch.ones_like(part), torch.ones_like(part)], 0, group=g)


def scatter_from_rank_0(g: Any, rank: int, size: int) -> None:
    dist.scatter(tensor(size), None if rank else [tensor(2), tensor(2)], 0, group=g)


def message_to_rank_1(g: Any, rank: int, received: Tensor) -> None:
    dist.recv(received, 0, group=g) if rank else dist.send(tensor(2), 1, group=g)


def two_operations(g: Any, rank: int) -> None:
    dist.all_reduce(tensor(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=g)


def two_collectives(g: Any, rank: int) -> None:
    dist.all_reduce(tensor(2), group=g) if rank else dist.broadcast(tensor(2), 0, group=g)


def rows_for_a_rank_that_expects_none(g: Any, rank: int) -> None:
    dist.all_to_all_single(tensor(1 if rank else 2), tensor(2), [0, 1] if rank else [1, 1], [1, 1], group=g)


def sparse_tensors_of_two_shapes(g: Any, rank: int) -> None:
    dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2 + rank,), check_invariants=True), group=g)


DIFFERENT: dict[str, Call] = {
    "gather of another size": lambda g, r: gather_to_rank_0(g, r, tensor(2 + r)),
    "gather of something into nothing": lambda g, r: gather_to_rank_0(g, r, tensor(2 * r)),
    "gather of another dtype": lambda g, r: gather_to_rank_0(
        g, r, tensor(2, dtype=torch.int32 if r else torch.float32)
    ),
    "scatter into another size": lambda g, r: scatter_from_rank_0(g, r, 2 + r),
    "scatter into nothing": lambda g, r: scatter_from_rank_0(g, r, 0 if r else 2),
    "rows for a rank that expects none": rows_for_a_rank_that_expects_none,
    "recv of another dtype": lambda g, r: message_to_rank_1(g, r, tensor(2, dtype=torch.int32)),
    "recv of nothing": lambda g, r: message_to_rank_1(g, r, tensor(0)),
    "broadcast from two roots": lambda g, r: dist.broadcast(tensor(2), group_src=r, group=g),
    "reduce to two roots": lambda g, r: dist.reduce(tensor(2), group_dst=1 - r, group=g),
    "two operations": two_operations,
    "two collectives": two_collectives,
    "sparse tensors of two shapes": sparse_tensors_of_two_shapes,
}


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_arguments_that_differ_between_the_ranks_raise_an_error() -> None:
    """Over Gloo some of these end the process, so only ours is called. A rank that only sends may return normally."""
    for name, call in DIFFERENT.items():
        with case(name), pair_of_groups() as (ours, _):
            has_raised = False
            try:
                call(ours, dist.get_rank())
            except (CollectiveMismatch, ValueError):
                has_raised = True
            ranks: list[Any] = [None, None]
            dist.all_gather_object(ranks, has_raised)
            assert any(ranks), "no rank has raised an error"


@pytest.mark.ranks(2)
def test_a_message_of_a_failed_exchange_never_arrives_in_a_later_one() -> None:
    with pair_of_groups() as (ours, _):
        rank = dist.get_rank()
        if rank == 0:
            dist.scatter(tensor(2), [tensor(2), tensor(2)], 0, group=ours)
        else:
            with pytest.raises(ValueError, match="expected no list"):  # so it never receives its part
                ours.scatter([tensor(2)], [[tensor(2), tensor(2)]], dist.ScatterOptions())
        later = [torch.full((2,), 5.0), torch.full((2,), 5.0)]
        if rank == 0:
            with suppress(SynclineError):  # a rank that only sends may not notice it
                dist.scatter(tensor(2), later, 0, group=ours)
        else:
            with pytest.raises(CollectiveMismatch, match="of exchange 2"):
                dist.scatter(tensor(2), None, 0, group=ours)


@pytest.mark.ranks(2)
def test_a_tensor_without_memory_of_its_own_is_named() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    with pair_of_groups() as (ours, gloo):
        mesh = DeviceMesh.from_group(gloo, "cpu")
        spread = DTensor.from_local(tensor(2), mesh, [Replicate()])
        for call in (dist.all_reduce, dist.broadcast):
            with pytest.raises(ValueError, match=r"a DTensor without\..* tensor\.to_local"):
                call(spread, **({"src": 0} if call is dist.broadcast else {}), group=ours)
        with pytest.raises(ValueError, match="inside of a transform such as vmap"):
            torch.func.vmap(lambda row: (dist.all_reduce(row, group=ours), row)[1])(tensor(3, 2))


@pytest.mark.ranks(2)
def test_errors_say_what_was_expected_and_what_to_do() -> None:
    sparse, meta, two = torch.eye(2).to_sparse(), torch.ones(2, device="meta"), tensor(2)
    premul = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
    peer = 1 - dist.get_rank()
    cases: tuple[tuple[Callable[[Any], object], str], ...] = (
        (lambda g: dist.reduce(two, group_dst=-1, group=g), "root .* from 0 to 1, got -1"),
        (lambda g: dist.broadcast(sparse, 0, group=g), r"torch\.sparse_coo.*Only all_reduce takes sparse"),
        (lambda g: dist.all_reduce(meta, group=g), r"on the device meta\..*no data .*to_empty"),
        (lambda g: g.broadcast([two] * 2, dist.BroadcastOptions()), "one item, got 2 items"),
        (lambda g: dist.all_reduce(two, premul, g), "multiply the tensor yourself, and use SUM"),
        (lambda g: dist.all_reduce(two, dist.ReduceOp.BAND, g), "expected a tensor of integers"),
        (lambda g: dist.all_reduce(two.long(), dist.ReduceOp.AVG, g), r"not defined for torch\.int64"),
        (lambda g: dist.isend(two, peer, g, tag=3), "keep their order"),
        (lambda g: dist.recv(two, group=g), "pass the sender as src="),
        (
            lambda g: dist.all_to_all_single(tensor(3), tensor(3), group=g),
            r"a multiple of 2 .*no split sizes and a tensor of shape \(3,\)",
        ),
    )
    with pair_of_groups() as (ours, _):
        for call, words in cases:
            with pytest.raises(ValueError, match=words):
                call(ours)
        dist.barrier(ours)
