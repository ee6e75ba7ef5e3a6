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
from torch import Tensor, nn

from syncline import CollectiveMismatch, CollectiveTimeout, ContractMismatch, barrier, broadcast_, mean
from syncline.optimizers.contents import OptimizerNumbers
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

    run_ranks(2, program)
    assert not same_state(trained(0)[0].state_dict(), trained(1)[0].state_dict())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_an_optimizer_becomes_that_of_the_source(
    optimizer_class: Any, options: dict[str, Any], asynchronous: bool
) -> None:
    def program(transport: Transport) -> None:
        module, optimizer = trained(transport.rank, optimizer_class, **options)
        if transport.rank == 1:
            for group in optimizer.param_groups:
                group["lr"] = 0.5
        if asynchronous:
            broadcast_(optimizer, src=1, group=transport, async_op=True).wait()
        else:
            assert broadcast_(optimizer, src=1, group=transport) is optimizer
        _, expected = trained(1, optimizer_class, **options)
        expected.param_groups[0]["lr"] = 0.5
        assert same_state(optimizer.state_dict(), expected.state_dict())
        assert optimizer.param_groups[0]["params"][0] is module[0].weight

    run_ranks(2, program)
    assert not same_state(
        trained(0, optimizer_class, **options)[1].state_dict(),
        trained(1, optimizer_class, **options)[1].state_dict(),
    )


def test_ranks_that_start_apart_train_alike_after_broadcasting_module_and_optimizer() -> None:
    def program(transport: Transport) -> dict[str, Tensor]:
        module, optimizer = trained(transport.rank)
        broadcast_(module, group=transport)
        broadcast_(optimizer, group=transport)
        module(torch.tensor([0, 1, 2, 3, 4])).square().sum().backward()
        optimizer.step()
        return module.state_dict()

    first, second = run_ranks(2, program)
    assert same_state(first, second)


def test_python_numbers_in_an_optimizer_are_sent_with_their_types() -> None:
    def program(transport: Transport) -> dict[str, Any]:
        p = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.Adam(
            [p], lr=0.1 * (1 + transport.rank), betas=(0.9, 0.99 + 0.001 * transport.rank)
        )
        optimizer.state[p] = {"step": 7 + transport.rank, "history": [2**53 + transport.rank, 1.5]}
        broadcast_(optimizer, src=1, group=transport)
        return {**optimizer.state[p], **{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}}

    first, second = run_ranks(2, program)
    assert same_state(first, second)
    assert first["step"] == 8
    assert first["history"] == [2**53 + 1, 1.5]
    assert first["lr"] == 0.2
    assert first["betas"] == (0.9, 0.991)
    assert first["amsgrad"] is False


def test_on_the_source_an_optimizer_is_not_touched() -> None:
    def program(transport: Transport) -> bool:
        p = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([p])
        history = [1, 2.0]
        optimizer.state[p] = {"history": history}
        broadcast_(optimizer, group=transport)
        return optimizer.state[p]["history"] is history

    assert run_ranks(2, program)[0] is True


def test_waiting_twice_writes_once() -> None:
    def program(transport: Transport) -> float:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        work = broadcast_(optimizer, group=transport, async_op=True)
        work.wait()
        assert work.is_completed()
        optimizer.param_groups[0]["lr"] = 0.2
        work.wait()
        return float(optimizer.param_groups[0]["lr"])

    assert run_ranks(2, program) == [0.2, 0.2]


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (
            {"maximize": False},
            {"maximize": True},
            "maximize\n    expected False (rank 0)\n    got      True (rank 1)",
        ),
        ({"lr": 1}, {"lr": 0.5}, "lr\n    expected an integer (rank 0)\n    got      a float (rank 1)"),
        ({}, {"lr": torch.tensor(0.1)}, "lacks  param_groups[0].lr  a float"),
    ],
)
def test_optimizers_that_differ_in_more_than_numbers_are_a_mismatch(
    here: dict[str, Any], there: dict[str, Any], text: str
) -> None:
    def program(transport: Transport) -> str:
        options = there if transport.rank else here
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], **options)
        with pytest.raises(ContractMismatch) as caught:
            broadcast_(optimizer, group=transport)
        return str(caught.value)

    first, second = run_ranks(2, program)
    assert first == second
    assert text in first


def test_numbers_of_an_optimizer_are_written_back_only_where_they_were() -> None:
    p = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1, momentum=0.5)
    before = dict(optimizer.param_groups[0])
    OptimizerNumbers(optimizer).write_back()
    assert same_state({**optimizer.param_groups[0], "params": 0}, {**before, "params": 0})
    assert optimizer.param_groups[0]["params"][0] is p
    assert p not in optimizer.state


def test_a_nested_tree_and_a_single_tensor() -> None:
    def program(transport: Transport) -> None:
        r = transport.rank
        tree = {
            "a": [torch.full((2,), r), (torch.full((1,), r, dtype=torch.float64),)],
            "b": torch.tensor(r == 1),
        }
        broadcast_(tree, 1, group=transport)
        assert tree["a"][0].tolist() == [1, 1]
        assert tree["a"][1][0].tolist() == [1.0]
        assert tree["b"].item() is True
        x = torch.full((2, 2), float(r))
        assert broadcast_(x, group=transport) is x
        assert (x == 0).all()

    run_ranks(3, program)


def test_the_order_of_keys_does_not_matter() -> None:
    def program(transport: Transport) -> tuple[float, float]:
        a, b = torch.tensor(1.0 + transport.rank), torch.tensor(10.0 + transport.rank)
        broadcast_({"a": a, "b": b} if transport.rank else {"b": b, "a": a}, group=transport)
        return a.item(), b.item()

    assert run_ranks(2, program) == [(1.0, 10.0)] * 2


def test_an_asynchronous_broadcast_returns_a_handle() -> None:
    def program(transport: Transport) -> list[float]:
        x, y = torch.full((2,), float(transport.rank)), torch.zeros(1)
        work = broadcast_([x, y], 1, group=transport, async_op=True)
        assert isinstance(work, Work)
        work.wait()
        work.wait()
        assert work.is_completed()
        return x.tolist()

    assert run_ranks(2, program) == [[1.0, 1.0]] * 2


def test_a_broadcast_of_a_module_costs_two_collectives() -> None:
    def program(transport: Transport) -> dict[str, int]:
        broadcast_(trained(0)[0], group=transport)
        return transport.statistics().num_calls

    assert run_ranks(2, program) == [{"all_gather": 1, "broadcast": 1}] * 2


def test_alone_nothing_happens() -> None:
    x = torch.ones(2)
    assert broadcast_(x) is x
    broadcast_(x, async_op=True).wait()
    assert x._version == 0
    barrier()


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (
            {"w": torch.zeros(2)},
            {"w": torch.zeros(3)},
            "tensor w\n    expected torch.float32 (2,) on cpu (rank 0)",
        ),
        (
            {"w": torch.zeros(2)},
            {"w": torch.zeros(2).half()},
            "    got      torch.float16 (2,) on cpu (rank 1)",
        ),
        ({"w": torch.zeros(2)}, {"v": torch.zeros(2)}, "  also has  tensor v  torch.float32 (2,) on cpu"),
        ([torch.zeros(2)], [torch.zeros(2)] * 0, "  lacks  tensor [0]"),
    ],
)
def test_trees_that_differ_are_told_on_every_rank_and_nothing_is_written(
    here: Any, there: Any, text: str
) -> None:
    def program(transport: Transport) -> tuple[str, dict[str, int]]:
        with pytest.raises(ContractMismatch) as caught:
            broadcast_(there if transport.rank else here, group=transport)
        return str(caught.value), transport.statistics().num_calls

    first, second = run_ranks(2, program)
    assert first == second
    assert text in first[0]
    assert "broadcast" not in first[1]


def test_sources_that_differ_are_told_on_every_rank() -> None:
    def program(transport: Transport) -> str:
        with pytest.raises(ContractMismatch) as caught:
            broadcast_(torch.zeros(1), src=transport.rank, group=transport)
        return str(caught.value)

    first, second = run_ranks(2, program)
    assert first == second
    assert "expected rank 0 (rank 0)" in first
    assert "got      rank 1 (rank 1)" in first


def test_what_one_rank_refuses_every_rank_raises() -> None:
    def program(transport: Transport) -> str:
        with pytest.raises(TypeError) as caught:
            broadcast_([torch.zeros(1), "x" if transport.rank == 1 else torch.zeros(1)], group=transport)
        return str(caught.value)

    texts = run_ranks(3, program)
    assert texts[0].startswith(
        "sl.broadcast_: refused, nothing was sent\nrank 1: expected the target to be a Module, an Optimizer"
    )
    assert "got a str at [1]" in texts[0]
    assert texts == [texts[0]] * 3


def test_ranks_in_different_verbs_are_told_so() -> None:
    def program(transport: Transport) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            if transport.rank == 0:
                mean({"loss": 1.0}, group=transport)
            else:
                broadcast_(torch.zeros(1), group=transport)
        return str(caught.value)

    first, second = run_ranks(2, program)
    assert first == second
    assert "  rank 0: sl.mean, before the first step, at test_verbs.py:" in first
    assert "  rank 1: sl.broadcast_, before the first step, at test_verbs.py:" in first


@pytest.mark.parametrize(
    ("src", "error", "text"),
    [
        (2, ValueError, "consists of ranks 0, 1, got 2"),
        (-1, ValueError, "consists of ranks 0, 1, got -1"),
        (0.0, TypeError, "expected src to be an integer, got 0.0"),
    ],
)
def test_a_source_outside_of_the_group_is_refused(src: Any, error: type[Exception], text: str) -> None:
    def program(transport: Transport) -> None:
        with pytest.raises(error, match=text):
            broadcast_(torch.zeros(1), src, group=transport)

    run_ranks(2, program)


def test_what_all_ranks_refuse_is_the_error_itself() -> None:
    def program(transport: Transport) -> None:
        with pytest.raises(ValueError, match="an expanded tensor"):
            broadcast_({"x": torch.zeros(1).expand(3)}, group=transport)

    run_ranks(2, program)


# ---------------------------------------------------------------------- barrier


def test_a_barrier_waits_for_every_rank() -> None:
    arrived: list[int] = []

    def program(transport: Transport) -> int:
        arrived.append(transport.rank)
        barrier(transport)
        return len(arrived)

    assert run_ranks(4, program) == [4, 4, 4, 4]


def test_a_barrier_that_a_rank_does_not_reach_is_a_timeout() -> None:
    told = threading.Event()

    def program(transport: Transport) -> None:
        if transport.rank == 0:
            with pytest.raises(CollectiveTimeout):
                barrier(transport)
            told.set()
        else:
            assert told.wait(30)

    run_ranks(2, program, timeout_seconds=0.05)


# ---------------------------------------------------------------------- mean: values


def means(values: list[Any], weights: list[Any] | None = None) -> list[Any]:
    """`mean` of one entry of `values` a rank; the results, in rank order."""
    weights = weights or [1.0] * len(values)
    return run_ranks(
        len(values), lambda transport: mean(values[transport.rank], weights[transport.rank], group=transport)
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 2.0], 1.5), ([1, 2], 1.5), ([True, False, False, True], 0.5), ([Fraction(1, 2), 1.5], 1.0)],
)
def test_numbers_become_their_mean_as_float(values: list[Any], expected: float) -> None:
    for result in means(values):
        assert result == expected
        assert type(result) is float


def test_weights_count_as_items() -> None:
    assert means([1.0, 3.0], [2, 6]) == [2.5, 2.5]
    assert means([1.0, 3.0], [torch.tensor(2), torch.tensor(6.0)]) == [2.5, 2.5]


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
        assert result["z"] == 0.5


def test_keys_in_another_order_are_the_same_structure() -> None:
    first, second = means([{"a": 1.0, "b": 10.0}, {"b": 20.0, "a": 2.0}])
    assert first == second == {"a": 1.5, "b": 15.0}
    assert (list(first), list(second)) == (["a", "b"], ["b", "a"])


def test_an_empty_structure_comes_back() -> None:
    assert means([{}, {}]) == [{}, {}]


@pytest.mark.parametrize("numel", [0, 1, 5, 40, 5000])
@pytest.mark.parametrize(
    ("dtype", "result_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.complex64, torch.complex64),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_tensors_keep_shape_and_dtype_and_integers_become_float32(
    numel: int, dtype: torch.dtype, result_dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(numel)
    values = [(torch.randn(numel, 1, generator=g, dtype=torch.float64) * 4).to(dtype) for _ in range(3)]
    weights = [1.0, 2.0, 5.0]
    exact = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(v.to(exact) * w for v, w in zip(values, weights, strict=True)) / 8  # type: ignore[misc]
    before = [value.clone() for value in values]
    results = means(values, weights)
    for result in results:
        assert result.dtype == result_dtype
        assert result.shape == (numel, 1)
        assert torch.equal(result, results[0])
        # One rounding to the result's precision; large tensors are added up in fp32 (three roundings more).
        torch.testing.assert_close(
            result, expected.to(result_dtype), rtol=3e-7 if numel == 5000 else 0, atol=1e-6
        )
    assert all(map(torch.equal, values, before))


def test_the_result_is_detached_and_its_own_memory() -> None:
    def program(transport: Transport) -> bool:
        x = torch.ones(2, requires_grad=True)
        y = torch.ones(5000, requires_grad=True)
        results = mean([x, y], group=transport)
        for result in results:
            result.zero_()
        return not any(r.requires_grad for r in results) and bool((x == 1).all()) and bool((y == 1).all())

    assert run_ranks(2, program) == [True, True]
    assert run_ranks(1, program) == [True]


@pytest.mark.parametrize("numel", [2, 5000])
def test_a_pending_conjugation_counts(numel: int) -> None:
    x = torch.full((numel,), 1 + 2j, dtype=torch.complex128).conj()
    for result in means([x, x]):
        assert torch.equal(result, torch.full((numel,), 1 - 2j, dtype=torch.complex128))


def test_scalar_tensors_stay_scalar_tensors() -> None:
    for result in means([torch.tensor(1.0), torch.tensor(2.0)]):
        assert result.shape == ()
        assert result.item() == 1.5


def test_every_rank_gets_the_same_bits_whatever_the_values() -> None:
    g = torch.Generator().manual_seed(0)
    values = [{"x": torch.randn(100, generator=g), "big": torch.randn(5000, generator=g)} for _ in range(4)]
    weights = torch.rand(4, generator=g).tolist()
    results = means(values, weights)
    for name in ("x", "big"):
        assert all(torch.equal(result[name], results[0][name]) for result in results)


def test_one_weighted_rank_gives_exactly_its_values() -> None:
    values = [{"x": 0.1, "t": torch.tensor([0.3]), "big": torch.full((5000,), 0.7)} for _ in range(3)]
    for result in means(values, [0, 0.3, 0]):
        assert result["x"] == 0.1
        assert torch.equal(result["t"], torch.tensor([0.3]))
        assert torch.equal(result["big"], torch.full((5000,), 0.7))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_rank_of_weight_zero_contributes_nothing_even_if_its_values_are_not_finite(bad: float) -> None:
    nothing = {"x": bad, "t": torch.full((20,), bad), "big": torch.full((5000,), bad)}
    something = {"x": 2.0, "t": torch.full((20,), 2.0), "big": torch.full((5000,), 2.0)}
    for result in means([something, nothing, something], [1, 0, 1]):
        assert result["x"] == 2.0
        assert (result["t"] == 2).all()
        assert (result["big"] == 2).all()


def test_nan_of_a_rank_that_counts_stays_visible() -> None:
    for result in means([1.0, math.nan]):
        assert math.isnan(result)


# ---------------------------------------------------------------------- mean: cost


@pytest.mark.parametrize(
    ("values", "num_calls"),
    [
        (1.0, {"all_gather": 1}),
        ({"a": [1.0] * 8}, {"all_gather": 1}),
        ([1.0] * 9, {"all_gather": 2}),
        ([1.0, torch.zeros(5000), torch.zeros(5000)], {"all_gather": 1, "all_reduce": 2}),
    ],
)
def test_a_few_numbers_cost_one_collective(values: Any, num_calls: dict[str, int]) -> None:
    def program(transport: Transport) -> dict[str, int]:
        mean(values, group=transport)
        return transport.statistics().num_calls

    assert run_ranks(2, program) == [num_calls, num_calls]


def test_alone_a_mean_sends_nothing() -> None:
    def program(transport: Transport) -> int:
        assert mean({"x": 3, "t": torch.ones(9)}, 0.1, group=transport)["x"] == 3.0
        return transport.statistics().total_calls

    assert run_ranks(1, program) == [0]
    assert mean(2) == 2.0


# ---------------------------------------------------------------------- mean: refusals


def errors(error_class: type[Exception], values: list[Any], weights: list[Any]) -> str:
    """The text of the error that every rank raises."""

    def program(transport: Transport) -> str:
        with pytest.raises(error_class) as caught:
            mean(values[transport.rank], weights[transport.rank], group=transport)
        assert type(caught.value) is error_class
        x = torch.ones(1)
        transport.all_reduce(x).wait()  # nothing is left over that a peer would wait for
        assert x.item() == transport.size
        return str(caught.value)

    texts = run_ranks(len(values), program)
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.parametrize("weight", [-1, -1e-9, math.nan, math.inf, "x", torch.ones(2), 10**400])
def test_a_bad_weight_is_an_error_on_every_rank(weight: Any) -> None:
    is_number = isinstance(weight, int | float)
    text = errors(ValueError if is_number else TypeError, [1.0, 1.0, 1.0], [1, weight, 1])
    assert text.startswith(
        "sl.mean: refused, nothing was sent\nrank 1: expected weight to be a finite number of at least 0, got "
    )


def test_a_bad_weight_says_what_was_expected() -> None:
    text = errors(ValueError, [1.0, 1.0, 1.0], [-2, 1, -2])
    assert text.splitlines()[1:] == [
        "ranks 0, 2: expected weight to be a finite number of at least 0, got -2"
    ]


def test_weights_that_are_all_zero_are_an_error_on_every_rank() -> None:
    assert "got [0.0, 0.0] (in rank order)" in errors(ValueError, [1.0, 2.0], [0, 0])


def test_weights_whose_sum_is_not_finite_are_an_error_on_every_rank() -> None:
    assert "finite sum above 0" in errors(ValueError, [1.0, 2.0], [1e308, 1e308])


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("x", "got a str at values.a"),
        (None, "got a NoneType at values.a"),
        (1j, "got a complex at values.a"),
    ],
)
def test_a_leaf_that_is_no_number_is_a_type_error_on_every_rank(leaf: Any, text: str) -> None:
    assert text in errors(TypeError, [{"a": 1.0}, {"a": leaf}], [1, 1])


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        ({"loss": 1.0}, {"loss": 1.0, "acc": 1.0}, "also has  values.acc  a number"),
        ({"loss": torch.zeros(2)}, {"loss": torch.zeros(3)}, "expected torch.float32 (2,) (rank 0)"),
        ({"loss": torch.zeros(5000)}, {"loss": 1.0}, "got      a number (rank 1)"),
        ([1.0] * 20, [1.0] * 5, "lacks  values[19]  a number"),
    ],
)
def test_structures_that_differ_are_a_mismatch_on_every_rank(here: Any, there: Any, text: str) -> None:
    message = errors(ContractMismatch, [here, there], [1, 1])
    assert message.startswith("sl.mean: the ranks do not agree.")
    assert text in message
