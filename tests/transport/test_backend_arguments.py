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
        if name != "two dimensions":  # see `test_what_gloo_refuses_and_this_backend_does_right`
            calls |= {
                "all_gather_into_tensor from": lambda g, _, bad=bad: g._allgather_base(four, bad),
                "all_gather_into_tensor into": lambda g, _, bad=bad: g._allgather_base(bad, two),
                "reduce_scatter_tensor from": lambda g, _, bad=bad: g._reduce_scatter_base(two, bad),
                "reduce_scatter_tensor into": lambda g, _, bad=bad: g._reduce_scatter_base(bad, four),
                "all_to_all_single into": lambda g, _, bad=bad: g.alltoall_base(bad, two, [], []),
                "all_to_all_single from": lambda g, _, bad=bad: g.alltoall_base(two, bad, [], []),
            }
            if name == "four elements":
                del (
                    calls["all_gather_into_tensor into"],
                    calls["reduce_scatter_tensor from"],
                )  # which are right
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
        ([1, 1, 0], [1, 1]),
        ([2], [1, 1]),
        ([1, 1], [2]),
        ([1, 2], [1, 1]),
        ([1, 1], [0, 1]),
        ([-1, 3], [1, 1]),
        ([0, 0], [0, 0]),
    ):

        def call(g: Any, _: int, into: list[int] = into, out_of: list[int] = out_of) -> None:
            dist.all_to_all_single(tensor(2), tensor(2), into, out_of, group=g)

        yield f"splits {into} and {out_of}", call
    yield "odd number of rows", lambda g, _: dist.all_to_all_single(tensor(3), tensor(3), group=g)
    yield (
        "rows of other lengths",
        lambda g, _: dist.all_to_all_single(tensor(2, 3), tensor(2, 2), group=g),
    )


def wrong_operations() -> Iterator[tuple[str, Call]]:
    premul = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
    cases = [
        (op, torch.float32) for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR, premul)
    ]
    cases += [
        (dist.ReduceOp.AVG, torch.int32),
        (premul, torch.int32),
        (dist.ReduceOp.SUM, torch.float8_e4m3fn),
    ]
    for op, dtype in cases:
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
            yield (
                f"{name} {op} {dtype}",
                lambda g, _, call=call, two=two, four=four, op=op: call(g, two, four, op),
            )
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


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_what_gloo_refuses_is_refused(table: Callable[[], Iterator[tuple[str, Call]]]) -> None:
    with pair_of_groups() as (ours, gloo):
        assert_refused(list(table()), ours, gloo)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_what_gloo_refuses_on_one_rank_is_refused_there() -> None:
    two = tensor(2)
    on_root: list[tuple[str, Call]] = [
        ("gather without outputs", lambda g, _: g.gather([], [two], dist.GatherOptions()).wait()),
        ("scatter without inputs", lambda g, _: g.scatter([two], [], dist.ScatterOptions()).wait()),
    ]
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
            on_root += [
                (
                    f"gather {at} {name}",
                    lambda g, _, p=parts: g.gather([p], [two], dist.GatherOptions()).wait(),
                ),
                (
                    f"scatter {at} {name}",
                    lambda g, _, p=parts: g.scatter([two], [p], dist.ScatterOptions()).wait(),
                ),
            ]
        on_root += [
            (
                f"gather of {name}",
                lambda g, _, b=bad: g.gather([[two, two]], [b], dist.GatherOptions()).wait(),
            ),
            (
                f"scatter into {name}",
                lambda g, _, b=bad: g.scatter([b], [[two, two]], dist.ScatterOptions()).wait(),
            ),
        ]
    elsewhere: list[tuple[str, Call]] = [
        ("gather with outputs", lambda g, _: g.gather([[two, two]], [two], dist.GatherOptions()).wait()),
        ("scatter with inputs", lambda g, _: g.scatter([two], [[two, two]], dist.ScatterOptions()).wait()),
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
            words = f"{name} over {dist.get_backend(group)}"
            if group is gloo and raised is None and ("meta" in name or name in GLOO_ACCEPTS):
                continue
            assert raised is not None, f"{words}: not refused"
            assert not isinstance(raised, SynclineError), (
                f"{words}: refused only after something was sent: {raised}"
            )
            if group is ours:
                assert isinstance(raised, ValueError), f"{words}: a raw error: {raised!r}"
    dist.barrier()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=ours)
    assert total.item() == 3


# ---------------------------------------------------------------------- what this backend can do and Gloo cannot


@pytest.mark.ranks(2)
def test_what_gloo_refuses_and_this_backend_does_right() -> None:
    """The exceptions from the rule: Gloo refuses these calls, and NCCL does most of them. Each result is checked."""
    rank = dist.get_rank()
    mine = torch.full((2,), rank + 1.0)

    def unequal_gather(g: Any) -> tuple[Tensor, list[float]]:
        parts = [torch.zeros(1), torch.zeros(2)]
        dist.all_gather(parts, mine[: rank + 1], group=g)
        return torch.cat(parts), [1.0, 2.0, 2.0]

    def unequal_scatter(g: Any) -> tuple[Tensor, list[float]]:
        output = torch.zeros(rank + 1)
        dist.reduce_scatter(output, [mine[:1], mine], group=g)
        return output, [3.0] * (rank + 1)

    def unequal_exchange(g: Any) -> tuple[Tensor, list[float]]:
        parts = [torch.zeros(1 + rank), torch.zeros(1 + rank)]
        dist.all_to_all(parts, [mine[:1], mine], group=g)
        return torch.cat(parts), [1.0] * (rank + 1) + [2.0] * (rank + 1)

    def stacked_gather(g: Any) -> tuple[Tensor, list[float]]:
        whole = torch.zeros(4)
        g._allgather_base(whole, mine.view(1, 2)).wait()
        return whole, [1.0, 1.0, 2.0, 2.0]

    def stacked_scatter(g: Any) -> tuple[Tensor, list[float]]:
        output = torch.zeros(1, 2)
        g._reduce_scatter_base(output, torch.cat([mine, mine])).wait()
        return output[0], [3.0, 3.0]

    def strided(g: Any) -> tuple[Tensor, list[float]]:
        output = torch.zeros(2, 2).t()
        dist.all_to_all_single(output, mine.repeat(2, 1).t().contiguous().t(), group=g)
        return output[:, 0], [1.0, 2.0]

    with pair_of_groups() as (ours, gloo):
        for call in (
            unequal_scatter,
            unequal_gather,
            unequal_exchange,
            stacked_gather,
            stacked_scatter,
            strided,
        ):
            result, expected = call(ours)
            assert result.tolist() == expected, call.__name__
            if (
                call is not unequal_scatter
            ):  # which Gloo refuses on one rank only, so the other one would wait
                with pytest.raises((RuntimeError, ValueError)):
                    call(gloo)


@pytest.mark.ranks(2)
def test_rows_of_every_number_and_length_arrive_as_over_gloo() -> None:
    rank = dist.get_rank()
    with pair_of_groups() as (ours, gloo):
        results = []
        for group in (ours, gloo):
            output = torch.zeros(2, 4)
            splits = [[0, 2], [2, 0]][rank]
            dist.all_to_all_single(
                output, torch.arange(8.0).view(4, 2) + rank, splits, [2 * s for s in splits], group
            )
            results.append(output)
        assert torch.equal(*results)


# ---------------------------------------------------------------------- arguments that differ between the ranks

DIFFERENT: dict[str, Call] = {
    "gather of another size": lambda g, r: dist.gather(
        tensor(2 + r), None if r else [tensor(2), tensor(2)], 0, group=g
    ),
    "gather of something into nothing": lambda g, r: dist.gather(
        tensor(2 * r), None if r else [tensor(0), tensor(0)], 0, group=g
    ),
    "gather of another dtype": lambda g, r: dist.gather(
        tensor(2, dtype=torch.int32 if r else torch.float32),
        None if r else [tensor(2), tensor(2)],
        0,
        group=g,
    ),
    "scatter into another size": lambda g, r: dist.scatter(
        tensor(2 + r), None if r else [tensor(2), tensor(2)], 0, group=g
    ),
    "scatter into nothing": lambda g, r: dist.scatter(
        tensor(0 if r else 2), None if r else [tensor(2), tensor(2)], 0, group=g
    ),
    "rows for a rank that expects none": lambda g, r: dist.all_to_all_single(
        tensor(1 if r else 2), tensor(2), [0, 1] if r else [1, 1], [1, 1], group=g
    ),
    "recv of another dtype": lambda g, r: (
        dist.recv(tensor(2, dtype=torch.int32), 0, group=g) if r else dist.send(tensor(2), 1, group=g)
    ),
    "recv of nothing": lambda g, r: (
        dist.recv(tensor(0), 0, group=g) if r else dist.send(tensor(2), 1, group=g)
    ),
    "broadcast from two roots": lambda g, r: dist.broadcast(tensor(2), group_src=r, group=g),
    "reduce to two roots": lambda g, r: dist.reduce(tensor(2), group_dst=1 - r, group=g),
    "reduce by two operations": lambda g, r: dist.all_reduce(
        tensor(2), dist.ReduceOp.MAX if r else dist.ReduceOp.SUM, group=g
    ),
    "sparse tensors of two shapes": lambda g, r: dist.all_reduce(
        torch.sparse_coo_tensor([[0]], [1.0], (2 + r,), check_invariants=True), group=g
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", DIFFERENT)
def test_arguments_that_differ_between_the_ranks_raise_an_error(name: str) -> None:
    """Over Gloo some of these end the process, so only ours is called. A rank that only sends may return normally."""
    with pair_of_groups() as (ours, _):
        has_raised = False
        try:
            DIFFERENT[name](ours, dist.get_rank())
        except (CollectiveMismatch, ValueError):
            has_raised = True
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, has_raised)
        assert any(ranks)


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
            with pytest.raises(
                ValueError, match=r"got a DTensor without\. Of a DTensor, pass tensor\.to_local"
            ):
                call(spread, **({"src": 0} if call is dist.broadcast else {}), group=ours)
        with pytest.raises(ValueError, match="inside of a transform such as vmap"):
            torch.func.vmap(lambda row: (dist.all_reduce(row, group=ours), row)[1])(tensor(3, 2))


@pytest.mark.ranks(2)
def test_errors_say_what_was_expected_and_what_to_do() -> None:
    sparse, meta = torch.eye(2).to_sparse(), torch.ones(2, device="meta")
    for call, words in (
        (
            lambda g: dist.reduce(tensor(2), group_dst=-1, group=g),
            "expected the root to be a rank from 0 to 1, got -1",
        ),
        (
            lambda g: dist.broadcast(sparse, 0, group=g),
            r"torch\.sparse_coo.*Only all_reduce takes sparse tensors",
        ),
        (lambda g: dist.all_reduce(meta, group=g), r"no data that could be sent.*to_empty"),
        (lambda g: g.broadcast([tensor(2)] * 2, dist.BroadcastOptions()), "one item, got 2 items"),
    ):
        with pair_of_groups() as (ours, _), pytest.raises(ValueError, match=words):
            call(ours)
