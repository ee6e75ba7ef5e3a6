"""One contract suite for every engine: threads, the faulty one without faults, and c10d over Gloo in processes.

Each check is a function of one rank's transport that asserts what this rank sees.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.faulty import FaultyTransport
from syncline.transport.threads import run_ranks

Check = Callable[[Transport], None]
CHECKS: dict[str, Check] = {}

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int16)
COMPLEX = (torch.complex64,)
SIZES = (0, 1, 7, 1000, 70_001)


def check(function: Check) -> Check:
    CHECKS[function.__name__.removeprefix("check_")] = function
    return function


def everyones(t: Transport, make: Callable[[int], Tensor]) -> list[Tensor]:
    """What each rank contributes, computed on every rank."""
    return [make(rank) for rank in range(t.size)]


def values(rank: int, numel: int, dtype: torch.dtype, *, salt: int = 0) -> Tensor:
    """Small integers in any dtype: sums and products of a few are exact in all of them."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 4, (numel,), generator=generator).to(dtype)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected), f"expected {expected}, got {actual}"


# ---------------------------------------------------------------------- what each operation gives


@check
def check_all_reduce_sums_every_dtype_and_size(t: Transport) -> None:
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX):
        for numel in SIZES:
            mine = values(t.rank, numel, dtype)
            t.all_reduce(mine).wait()
            parts = everyones(t, lambda r, n=numel, d=dtype: values(r, n, d))  # type: ignore[misc]
            assert_equal(mine, torch.stack(parts).sum(0).to(dtype))


@check
def check_all_reduce_by_every_operation(t: Transport) -> None:
    parts = torch.stack(everyones(t, lambda r: values(r, 100, torch.float64)))
    for op, expected in {
        "sum": parts.sum(0),
        "mean": parts.mean(0),
        "max": parts.amax(0),
        "min": parts.amin(0),
        "product": parts.prod(0),
    }.items():
        mine = values(t.rank, 100, torch.float64)
        t.all_reduce(mine, op).wait()  # type: ignore[arg-type]
        torch.testing.assert_close(mine, expected, rtol=1e-15, atol=0)


@check
def check_a_mean_is_close_to_float64_in_every_precision(t: Transport) -> None:
    def noise(rank: int) -> Tensor:
        return torch.randn(999, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    expected = torch.stack(everyones(t, noise)).mean(0)
    for dtype in FLOATS:
        mine = noise(t.rank).to(dtype)
        t.all_reduce(mine, "mean").wait()
        # Inputs are rounded once, the result once; one more for backends that add in the dtype itself.
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine.double(), expected, rtol=tolerance, atol=4 * tolerance)


@check
def check_every_rank_ends_with_the_same_bits_and_so_does_every_run(t: Transport) -> None:
    results = []
    for _ in range(2):
        mine = torch.randn(5003, generator=torch.Generator().manual_seed(t.rank))
        t.all_reduce(mine, "mean").wait()
        results.append(mine)
    assert_equal(results[0], results[1])
    everyone = torch.empty(t.size * 5003)
    t.all_gather(everyone, results[0]).wait()
    for row in everyone.view(t.size, -1):
        assert_equal(row, results[0])


@check
def check_reduce_scatter_gives_each_rank_its_part(t: Transport) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (0, 1, 257):
            whole = values(t.rank, numel * t.size, dtype)
            before = whole.clone()
            part = torch.empty(numel, dtype=dtype)
            t.reduce_scatter(part, whole).wait()
            total = torch.stack(
                everyones(t, lambda r, n=numel, d=dtype: values(r, n * t.size, d))  # type: ignore[misc]
            ).sum(0)
            assert_equal(part, total.to(dtype).view(t.size, -1)[t.rank] if numel else part)
            assert_equal(whole, before)


@check
def check_all_gather_concatenates_in_rank_order(t: Transport) -> None:
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool):
        for numel in (0, 1, 33):
            everyone = torch.empty(t.size * numel, dtype=dtype)
            t.all_gather(everyone, values(t.rank, numel, dtype)).wait()
            assert_equal(everyone, torch.cat(everyones(t, lambda r, n=numel, d=dtype: values(r, n, d))))  # type: ignore[misc]


@check
def check_broadcast_from_every_rank(t: Transport) -> None:
    for src in range(t.size):
        for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool):
            for numel in (0, 1, 33):
                mine = values(t.rank, numel, dtype)
                t.broadcast(mine, src).wait()
                assert_equal(mine, values(src, numel, dtype))


@check
def check_messages_between_two_ranks_keep_their_order(t: Transport) -> None:
    if t.rank == 0:
        for k in range(5):
            t.send(values(k, 100 + k, torch.float32), 1).wait()
        answer = torch.empty(3)
        t.recv(answer, 1).wait()
        assert_equal(answer, torch.ones(3))
    elif t.rank == 1:
        for k in range(5):
            message = torch.empty(100 + k)
            t.recv(message, 0).wait()
            assert_equal(message, values(k, 100 + k, torch.float32))
        t.send(torch.ones(3), 0).wait()
    t.barrier().wait()


@check
def check_bytes_of_unequal_length(t: Transport) -> None:
    assert t.all_gather_bytes(b"x" * (3 * t.rank)) == [b"x" * (3 * rank) for rank in range(t.size)]
    assert t.all_gather_bytes(b"") == [b""] * t.size
    assert t.all_gather_bytes(bytes(range(256))) == [bytes(range(256))] * t.size


# ---------------------------------------------------------------------- asynchrony


@check
def check_many_operations_in_flight_waited_for_in_any_order(t: Transport) -> None:
    tensors = [values(t.rank, 100 + k, torch.float32, salt=k) for k in range(12)]
    works = [t.all_reduce(x) if k % 3 else t.broadcast(x, k % t.size) for k, x in enumerate(tensors)]
    for k in reversed(range(12)):
        works[k].wait()
    for k, x in enumerate(tensors):
        parts = everyones(t, lambda r, k=k: values(r, 100 + k, torch.float32, salt=k))  # type: ignore[misc]
        assert_equal(x, torch.stack(parts).sum(0) if k % 3 else parts[k % t.size])


@check
def check_a_work_that_was_waited_for_is_completed(t: Transport) -> None:
    work = t.all_reduce(torch.ones(4))
    work.wait()
    assert work.is_completed()
    work.wait()


# ---------------------------------------------------------------------- groups


@check
def check_split_makes_groups_in_rank_order(t: Transport) -> None:
    part = t.split(t.rank % 2)
    assert part is not None
    members = [rank for rank in range(t.size) if rank % 2 == t.rank % 2]
    assert (part.rank, part.size) == (members.index(t.rank), len(members))
    mine = torch.full((3,), float(t.rank))
    part.all_reduce(mine).wait()
    assert_equal(mine, torch.full((3,), float(sum(members))))
    everyone = t.split(7)
    assert everyone is not None
    assert (everyone.rank, everyone.size) == (t.rank, t.size)
    everyone.barrier().wait()
    left_out = t.split(None if t.rank == 0 else 1)
    assert (left_out is None) == (t.rank == 0)
    t.barrier().wait()


# ---------------------------------------------------------------------- bad input, on every rank alike


@check
def check_bad_input_is_refused_and_nothing_is_lost(t: Transport) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        t.all_reduce(torch.ones(4, 4)[:, 1])
    with pytest.raises(ValueError, match="one of sum, mean, max, min, product; got 'average'"):
        t.all_reduce(torch.ones(1), "average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mean"):
        t.all_reduce(torch.ones(1, dtype=torch.int64), "mean")
    with pytest.raises(ValueError, match="max"):
        t.all_reduce(torch.ones(1, dtype=torch.complex64), "max")
    with pytest.raises(ValueError, match=f"src between 0 and {t.size - 1}, got {t.size}"):
        t.broadcast(torch.ones(1), t.size)
    with pytest.raises(ValueError, match="elements"):
        t.all_gather(torch.ones(t.size * 2 + 1), torch.ones(2))
    with pytest.raises(ValueError, match="elements"):
        t.reduce_scatter(torch.ones(2), torch.ones(t.size * 2 + 1))
    with pytest.raises(ValueError, match="cannot be its own"):
        t.send(torch.ones(1), t.rank)
    mine = torch.ones(3)
    t.all_reduce(mine).wait()
    assert_equal(mine, torch.full((3,), float(t.size)))


@check
def check_statistics_count_calls_and_bytes(t: Transport) -> None:
    before = t.statistics()
    t.all_reduce(torch.ones(10)).wait()
    t.all_reduce(torch.ones(5, dtype=torch.float64)).wait()
    t.barrier().wait()
    done = t.statistics() - before
    assert done.num_calls == {"all_reduce": 2, "barrier": 1}
    assert done.payload_bytes == {"all_reduce": 80}
    assert done.waited_seconds > 0
    assert (done.total_calls, done.total_bytes) == (3, 80)


# ---------------------------------------------------------------------- the engines


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_threads(name: str, size: int) -> None:
    run_ranks(size, CHECKS[name])


@pytest.mark.parametrize("name", CHECKS)
def test_faulty_without_faults(name: str) -> None:
    run_ranks(3, lambda t: CHECKS[name](FaultyTransport(t, [])))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CHECKS)
def test_c10d_on_two_processes(name: str) -> None:
    CHECKS[name](C10dTransport())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CHECKS)
def test_c10d_on_three_processes(name: str) -> None:
    CHECKS[name](C10dTransport())


@pytest.mark.parametrize("name", sorted(set(CHECKS) - {"messages_between_two_ranks_keep_their_order"}))
def test_a_world_of_one(name: str) -> None:
    if name == "bad_input_is_refused_and_nothing_is_lost":
        pytest.skip("one rank has no wrong peers")
    run_ranks(1, CHECKS[name])
