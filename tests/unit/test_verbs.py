"""broadcast_, barrier and mean: results, refusals, and what they cost. Ranks are threads."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from tests.support.verbs import error_of_all
from torch import Tensor, nn

from syncline import CollectiveMismatch, CollectiveTimeout, ContractMismatch, barrier, broadcast_, mean
from syncline.transport import Transport, Work, run_ranks

# ---------------------------------------------------------------------- broadcast_


def trained(seed: int, optimizer_class: Any = torch.optim.Adam, **options: Any) -> tuple[nn.Sequential, Any]:
    """A module with tied weights and BatchNorm after two steps, different for every seed."""
    g = torch.Generator().manual_seed(seed)  # torch's own is shared by the threads
    module = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    module[2].weight = module[0].weight
    for p in module.parameters():
        nn.init.normal_(p, generator=g)
    optimizer = optimizer_class(module.parameters(), **options)
    for _ in range(2):
        module(torch.randint(0, 5, (8,), generator=g)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def same_state(a: Any, b: Any) -> bool:
    """Whether two state dicts are equal, tensors bit for bit and numbers with their types."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_state, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else type(a) is type(b) and a == b


def test_a_module_becomes_that_of_the_source_in_place_and_stays_tied() -> None:
    def program(transport: Transport) -> None:
        module, _ = trained(transport.rank)
        before = [(id(t), t.data_ptr()) for t in module.state_dict(keep_vars=True).values()]
        assert broadcast_(module, src=1, group=transport) is module
        assert same_state(module.state_dict(), trained(1)[0].state_dict())
        assert [(id(t), t.data_ptr()) for t in module.state_dict(keep_vars=True).values()] == before
        assert module[2].weight is module[0].weight
        assert transport.statistics().num_calls == {"all_gather": 1, "broadcast": 1}

    run_ranks(2, program)
    assert not same_state(trained(0)[0].state_dict(), trained(1)[0].state_dict())


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adafactor, {}),
    (torch.optim.RMSprop, {"centered": True}),
]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_optimizer_becomes_that_of_the_source_and_trains_alike(asynchronous: bool) -> None:
    def program(transport: Transport) -> None:
        for optimizer_class, options in OPTIMIZERS:
            module, optimizer = trained(transport.rank, optimizer_class, **options)
            optimizer.param_groups[0]["lr"] = 0.5 * transport.rank
            broadcast_(module, src=1, group=transport)
            if asynchronous:
                broadcast_(optimizer, src=1, group=transport, async_op=True).wait()
            else:
                assert broadcast_(optimizer, src=1, group=transport) is optimizer
            twin, expected = trained(1, optimizer_class, **options)
            expected.param_groups[0]["lr"] = 0.5
            assert same_state(optimizer.state_dict(), expected.state_dict()), optimizer_class
            assert optimizer.param_groups[0]["params"][0] is module[0].weight
            for one, stepped in ((module, optimizer), (twin, expected)):
                one(torch.tensor([0, 1, 2, 3, 4])).square().sum().backward()
                stepped.step()
            assert same_state(module.state_dict(), twin.state_dict()), optimizer_class

    run_ranks(2, program)


def test_numbers_of_an_optimizer_are_sent_with_their_types_and_written_once_but_not_on_the_source() -> None:
    def program(transport: Transport) -> None:
        p, rank = nn.Parameter(torch.zeros(1)), transport.rank
        optimizer = torch.optim.Adam([p], lr=0.1 * (1 + rank), betas=(0.9, 0.99 + 0.001 * rank))
        history = [2**53 + rank, 1.5]
        optimizer.state[p] = {"step": 7 + rank, "history": history}
        work = broadcast_(optimizer, src=1, group=transport, async_op=True)
        work.wait()
        assert work.is_completed()
        assert same_state(optimizer.state[p], {"step": 8, "history": [2**53 + 1, 1.5]})
        assert (optimizer.state[p]["history"] is history) == (rank == 1)
        group = optimizer.param_groups[0]
        assert same_state([group["lr"], group["betas"], group["amsgrad"]], [0.2, (0.9, 0.991), False])
        group["lr"] = 0.3
        work.wait()
        assert group["lr"] == 0.3

    run_ranks(2, program)


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ({"maximize": False}, {"maximize": True}, ["maximize", "False (rank 0)", "True (rank 1)"]),
        ({"lr": 1}, {"lr": 0.5}, ["lr", "an integer (rank 0)", "a float (rank 1)"]),
        ({}, {"lr": torch.tensor(0.1)}, ["lacks  param_groups[0].lr  a float"]),
    ],
)
def test_optimizers_that_differ_in_more_than_numbers_are_a_mismatch(
    here: dict[str, Any], there: dict[str, Any], words: list[str]
) -> None:
    def program(transport: Transport) -> None:
        options = there if transport.rank else here
        broadcast_(torch.optim.SGD([torch.zeros(1, requires_grad=True)], **options), group=transport)

    text = str(error_of_all(ContractMismatch, program))
    assert all(one in text for one in words), text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_nested_tree_in_any_order_of_keys_and_a_single_tensor(asynchronous: bool) -> None:
    def program(transport: Transport) -> None:
        r = transport.rank
        tree: dict[str, Any] = {
            "a": [torch.full((2,), r), (torch.full((1,), r, dtype=torch.float64),)],
            "b": torch.tensor(r == 1),
        }
        x = torch.full((2, 2), float(r))
        if asynchronous:
            works = [broadcast_(one, 1, group=transport, async_op=True) for one in (tree, x)]
            for work in (*works, *works):
                assert isinstance(work, Work)
                work.wait()
                assert work.is_completed()
        else:
            broadcast_(tree if r else dict(reversed(tree.items())), 1, group=transport)
            assert broadcast_(x, 1, group=transport) is x
        assert tree["a"][0].tolist() == [1, 1]
        assert tree["a"][1][0].tolist() == [1.0]
        assert tree["b"].item() is True
        assert (x == 1).all()

    run_ranks(3, program)


def test_alone_nothing_happens() -> None:
    x = torch.ones(2)
    assert broadcast_(x) is x
    broadcast_(x, async_op=True).wait()
    assert x._version == 0
    barrier()
    assert mean(2) == 2.0


def test_targets_and_sources_that_differ_are_an_error_on_every_rank_and_nothing_is_sent() -> None:
    def program(transport: Transport) -> None:
        try:
            broadcast_({"w": torch.zeros(2 + transport.rank), "vu"[transport.rank]: x}, group=transport)
        finally:
            assert "broadcast" not in transport.statistics().num_calls

    x = torch.zeros(2).half()
    text = str(error_of_all(ContractMismatch, program))
    for words in (
        "float32 (2,) on cpu (rank 0)",
        "also has  tensor u  torch.float16 (2,)",
        "lacks  tensor v",
    ):
        assert words in text

    def sources(transport: Transport) -> None:
        broadcast_(torch.zeros(1), src=transport.rank, group=transport)

    text = str(error_of_all(ContractMismatch, sources))
    assert "rank 0 (rank 0)" in text
    assert "rank 1 (rank 1)" in text


def test_what_ranks_refuse_every_rank_raises() -> None:
    def one_rank(transport: Transport) -> None:
        broadcast_([torch.zeros(1), "x" if transport.rank == 1 else torch.zeros(1)], group=transport)

    text = str(error_of_all(TypeError, one_rank, 3))
    assert text.startswith(
        "sl.broadcast_: refused, nothing was sent\nrank 1: expected the target to be a Module"
    )
    assert "got a str at [1]" in text

    def all_ranks(transport: Transport) -> None:
        broadcast_({"x": torch.zeros(1).expand(3)}, group=transport)

    assert "expected x to be writable in place" in str(error_of_all(ValueError, all_ranks))

    rows: list[tuple[Any, type[Exception], str]] = [
        (2, ValueError, "consists of ranks 0, 1, got 2"),
        (-1, ValueError, "consists of ranks 0, 1, got -1"),
        (0.0, TypeError, "src to be an integer, got 0.0"),
    ]
    for src, error, words in rows:
        found = error_of_all(error, lambda t, src=src: broadcast_(torch.zeros(1), src, group=t))
        assert words in str(found), src


def test_ranks_in_different_verbs_are_an_error_that_names_verbs_and_lines() -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            mean({"loss": 1.0}, group=transport)
        else:
            broadcast_(torch.zeros(1), group=transport)

    text = str(error_of_all(CollectiveMismatch, program))
    for rank, name in enumerate(("mean", "broadcast_")):
        assert f"  rank {rank}: sl.{name}, before the first step, at test_verbs.py:" in text


# ---------------------------------------------------------------------- barrier


def test_a_barrier_waits_for_every_rank() -> None:
    arrived: list[int] = []

    def program(transport: Transport) -> int:
        arrived.append(transport.rank)
        barrier(transport)
        return len(arrived)

    assert run_ranks(4, program) == [4, 4, 4, 4]


def test_a_barrier_that_a_rank_does_not_reach_is_a_timeout() -> None:
    has_raised = threading.Event()

    def program(transport: Transport) -> None:
        if transport.rank == 0:
            with pytest.raises(CollectiveTimeout):
                barrier(transport)
            has_raised.set()
        else:
            assert has_raised.wait(30)

    run_ranks(2, program, timeout_seconds=0.05)


# ---------------------------------------------------------------------- mean: values


def means(values: list[Any], weights: list[Any] | None = None) -> list[Any]:
    """`mean` of one entry of `values` a rank; the results, in rank order."""
    weights = weights or [1.0] * len(values)
    return run_ranks(
        len(values), lambda transport: mean(values[transport.rank], weights[transport.rank], group=transport)
    )


def test_numbers_become_their_mean_as_float_and_weights_count_as_items() -> None:
    rows: list[tuple[list[Any], Any, float]] = [
        ([1.0, 2.0], None, 1.5),
        ([1, 2], None, 1.5),
        ([True, False, False, True], None, 0.5),
        ([Fraction(1, 2), 1.5], None, 1.0),
        ([1.0, 3.0], [2, 6], 2.5),
        ([1.0, 3.0], [torch.tensor(2), torch.tensor(6.0)], 2.5),
    ]
    for values, weights, expected in rows:
        for result in means(values, weights):
            assert (result, type(result)) == (expected, float), values
    assert all(map(math.isnan, means([1.0, math.nan])))  # of a rank that counts


Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Metrics:
    loss: float
    parts: list[Tensor]


def test_the_same_structure_comes_back() -> None:
    def values(rank: int) -> dict[str, Any]:
        return OrderedDict(
            z=rank,
            a=[float(rank), (rank,)],
            pair=Pair(rank, torch.tensor([rank, 1.0])),
            metrics=Metrics(rank, [torch.tensor(rank, dtype=torch.float64)]),
        )

    for result in means([values(0), values(1)]):
        assert type(result) is OrderedDict
        assert list(result) == ["z", "a", "pair", "metrics"]
        assert result["a"] == [0.5, (0.5,)]
        assert type(result["pair"]) is Pair
        assert result["pair"].y.tolist() == [0.5, 1.0]
        assert result["metrics"].loss == 0.5
        assert result["metrics"].parts[0].dtype == torch.float64
        assert result["metrics"].parts[0].shape == ()
        assert result["z"] == 0.5
    first, second = means([{"a": 1.0, "b": 10.0}, {"b": 20.0, "a": 2.0}])
    assert first == second == {"a": 1.5, "b": 15.0}
    assert (list(first), list(second)) == (["a", "b"], ["b", "a"])
    assert means([{}, {}]) == [{}, {}]


@pytest.mark.parametrize("numel", [0, 1, 5, 40, 5000])
def test_tensors_keep_shape_and_dtype_and_integers_become_float32(numel: int) -> None:
    g = torch.Generator().manual_seed(numel)
    weights = [1.0, 2.0, 5.0]
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
    for dtype in (*floats, torch.int64, torch.bool):
        values = [(torch.randn(numel, 1, generator=g, dtype=torch.float64) * 4).to(dtype) for _ in range(3)]
        exact = torch.complex128 if dtype.is_complex else torch.float64
        expected = sum(v.to(exact) * w for v, w in zip(values, weights, strict=True)) / 8  # type: ignore[misc]
        before = [value.clone() for value in values]
        results = means(values, weights)
        result_dtype = dtype if dtype in floats else torch.float32
        for result in results:
            assert (result.dtype, result.shape) == (result_dtype, (numel, 1)), dtype
            assert torch.equal(result, results[0]), dtype
            # One rounding to the result's precision; large tensors are added up in fp32 (three roundings more).
            torch.testing.assert_close(
                result, expected.to(result_dtype), rtol=3e-7 if numel == 5000 else 0, atol=1e-6
            )
        assert all(map(torch.equal, values, before)), dtype


def test_the_result_is_detached_and_its_own_memory_and_a_pending_conjugation_counts() -> None:
    def program(transport: Transport) -> None:
        for numel in (2, 5000):
            x = torch.ones(numel, requires_grad=True)
            result = mean([x], group=transport)[0]
            assert not result.requires_grad
            result.zero_()
            assert bool((x == 1).all())
            z = torch.full((numel,), 1 + 2j, dtype=torch.complex128).conj()
            assert torch.equal(mean(z, group=transport), torch.full_like(z, 1 - 2j)), numel

    for size in (1, 2):
        run_ranks(size, program)


def test_every_rank_gets_the_same_bits_and_those_of_a_single_weighted_rank() -> None:
    g = torch.Generator().manual_seed(0)
    values = [{"x": torch.randn(100, generator=g), "big": torch.randn(5000, generator=g)} for _ in range(4)]
    for weights in (torch.rand(4, generator=g).tolist(), [0, 0, 0.3, 0]):
        results = means(values, weights)
        for name in ("x", "big"):
            expected = values[2][name] if 0 in weights else results[0][name]
            assert all(torch.equal(result[name], expected) for result in results), (name, weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_rank_of_weight_zero_contributes_nothing_even_if_its_values_are_not_finite(bad: float) -> None:
    nothing = {"x": bad, "t": torch.full((20,), bad), "big": torch.full((5000,), bad)}
    something = {"x": 2.0, "t": torch.full((20,), 2.0), "big": torch.full((5000,), 2.0)}
    for result in means([something, nothing, something], [1, 0, 1]):
        assert result["x"] == 2.0
        assert (result["t"] == 2).all()
        assert (result["big"] == 2).all()


@pytest.mark.parametrize(
    ("values", "num_calls"),
    [
        (1.0, {"all_gather": 1}),
        ({"a": [1.0] * 8}, {"all_gather": 1}),
        ([1.0] * 9, {"all_gather": 2}),
        ([1.0, torch.zeros(5000), torch.zeros(5000)], {"all_gather": 1, "all_reduce": 1}),
    ],
)
def test_a_few_numbers_cost_one_collective(values: Any, num_calls: dict[str, int]) -> None:
    def program(transport: Transport) -> dict[str, int]:
        mean(values, 0.1, group=transport)
        return transport.statistics().num_calls

    assert run_ranks(2, program) == [num_calls, num_calls]
    if "all_reduce" not in num_calls:
        assert run_ranks(1, program) == [{}], "alone nothing is sent"


# ---------------------------------------------------------------------- mean: refusals


def error_of_mean(kind: type[Exception], values: list[Any], weights: list[Any] | None = None) -> str:
    """The text of the error that every rank raises."""
    weights = weights or [1] * len(values)
    return str(error_of_all(kind, lambda t: mean(values[t.rank], weights[t.rank], group=t), len(values)))


def test_weights_without_a_mean_are_an_error_on_every_rank() -> None:
    for weight in (-1, -1e-9, math.nan, math.inf, "x", torch.ones(2), 10**400):
        kind = ValueError if isinstance(weight, int | float) else TypeError
        text = error_of_mean(kind, [1.0] * 3, [1, weight, 1])
        assert text.startswith("sl.mean: refused, nothing was sent\nrank 1: expected weight to be"), weight
    assert "\nranks 0, 2: expected weight" in error_of_mean(ValueError, [1.0] * 3, [-2, 1, -2])
    assert "got [0.0, 0.0] (in rank order)" in error_of_mean(ValueError, [1.0, 2.0], [0, 0])
    assert "finite sum above 0" in error_of_mean(ValueError, [1.0, 2.0], [1e308, 1e308])


def test_leaves_that_are_no_numbers_and_structures_that_differ_are_errors_on_every_rank() -> None:
    for leaf, kind in (("x", "str"), (None, "NoneType"), (1j, "complex")):
        assert f"got a {kind} at values.a" in error_of_mean(TypeError, [{"a": 1.0}, {"a": leaf}])
    rows: list[tuple[Any, Any, str]] = [
        ({"loss": 1.0}, {"loss": 1.0, "acc": 1.0}, "also has  values.acc  a number"),
        ({"loss": torch.zeros(2)}, {"loss": torch.zeros(3)}, "expected torch.float32 (2,) (rank 0)"),
        ({"loss": torch.zeros(5000)}, {"loss": 1.0}, "got      a number (rank 1)"),
        ([1.0] * 20, [1.0] * 5, "lacks  values[19]  a number"),
    ]
    for here, there, text in rows:
        assert text in error_of_mean(ContractMismatch, [here, there])
