"""`ddp.report`: means of metrics that ride behind the gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline import ContractMismatch
from syncline.transport import Transport, run_ranks

with torch.random.fork_rng():
    torch.manual_seed(0)
    _NET = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def wrapped(t: Transport, dtype: torch.dtype = torch.float32, **options: Any) -> sl.DistributedDataParallel:
    """The same values in each call: ranks are threads, which share one random number generator."""
    return sl.DistributedDataParallel(copy.deepcopy(_NET).to(dtype), process_group=t, **options)


def means_after_step(ddp: sl.DistributedDataParallel, rank: int = 0) -> dict[str, float]:
    parameter = next(ddp.parameters())
    ddp(torch.full((2, 3), 1.0 + rank, dtype=parameter.dtype)).square().sum().backward()
    assert ddp.last_step is not None
    return dict(ddp.last_step.metrics)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"bucket_cap_mb": 1e-5}),
        (torch.float16, {"gradient_as_bucket_view": True}),
        (torch.float32, {"find_unused_parameters": True}),
        (torch.float32, {"static_graph": True}),
        (torch.float32, {"sharded": True}),
        (torch.float32, {"compression": sl.compression.Cast(torch.bfloat16)}),
        (torch.float32, {"replica_check": sl.ReplicaCheck(every=2), "on_nonfinite": "raise"}),
    ],
    ids=["plain", "bf16", "fp16-view", "unused", "static", "sharded", "compressed", "checked"],
)
def test_means_are_weighted_and_the_same_bits_on_every_rank(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    def program(t: Transport) -> list[dict[str, float]]:
        ddp = wrapped(t, dtype, **options)
        found = []
        for at in range(3):
            ddp.report(loss=torch.tensor(0.1) * (t.rank + 1), accuracy=at / 7 + t.rank, weight=1 + t.rank)
            ddp.zero_grad()
            found.append(means_after_step(ddp, t.rank))
        return found

    for num_ranks in (1, 2, 3):
        seen = run_ranks(num_ranks, program)
        assert seen == [seen[0]] * num_ranks
        weights = range(1, num_ranks + 1)
        for at, means in enumerate(seen[0]):
            losses = [float(torch.tensor(0.1) * weight) for weight in weights]
            accuracies = [float(torch.tensor(at / 7 + rank)) for rank in range(num_ranks)]
            for name, values in (("loss", losses), ("accuracy", accuracies)):
                exact = math.fsum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
                assert means[name] == pytest.approx(exact, rel=1e-12), (num_ranks, at, name)


def test_no_collective_is_added_and_gradients_are_the_same() -> None:
    def program(t: Transport, reports: bool) -> tuple[int, Tensor]:
        ddp = wrapped(t, gradient_as_bucket_view=True)
        for at in range(4):
            ddp.zero_grad()
            if reports and at > 1:  # from the third step on: the buckets are laid out anew
                ddp.report(loss=float(at))
            before = ddp.statistics().total_calls
            means = means_after_step(ddp, t.rank)
        if reports:
            assert means == {"loss": 3.0}
            assert "metrics: loss 3" in str(ddp.last_step)
            assert ddp.contract["loss, metrics"].when == "every backward after ddp.report(...)"
        gradients = [p.grad.flatten() for p in ddp.parameters() if p.grad is not None]
        return ddp.statistics().total_calls - before, torch.cat(gradients)

    reported, plain = (run_ranks(2, lambda t, one=one: program(t, one)) for one in (True, False))
    for mine, theirs in zip(reported, plain, strict=True):
        assert mine[0] == theirs[0]
        assert torch.equal(mine[1], theirs[1])


def test_micro_batches_are_averaged_with_the_backward_that_synchronizes() -> None:
    def program(t: Transport) -> list[dict[str, float]]:
        ddp = wrapped(t)
        found = []
        for _ in range(2):
            with ddp.no_sync():
                ddp.report(loss=1.0 + t.rank, weight=1)
                found.append(means_after_step(ddp))
            ddp.report(loss=4.0, weight=3)
            found.append(means_after_step(ddp))
        return [*found, means_after_step(ddp)]

    mean = {"loss": (1 + 12 + 2 + 12) / 8}
    assert run_ranks(2, program) == [[{}, mean, {}, mean, {}]] * 2


def test_a_rank_that_reports_nothing_or_with_weight_0_does_not_count() -> None:
    def program(t: Transport) -> list[dict[str, float]]:
        ddp = wrapped(t)
        found = []
        for at in range(3):
            if at != 1 or t.rank:
                ddp.report(loss=2.0 if t.rank else math.nan, weight=t.rank)
                ddp.report(loss=math.nan, weight=0)
            found.append(means_after_step(ddp))
        return found

    assert run_ranks(2, program) == [[{"loss": 2.0}] * 3] * 2


def test_what_is_not_finite_is_reported_as_it_is() -> None:
    rows = {
        (1.0, math.nan): math.nan,
        (1.0, math.inf): math.inf,
        (math.inf, -math.inf): math.nan,
        (1e300, 1.0): math.inf,
    }

    def program(t: Transport) -> list[float]:
        ddp, found = wrapped(t), []
        for values in rows:
            ddp.report(loss=values[t.rank])
            found.append(means_after_step(ddp)["loss"])
        return found

    assert list(map(repr, run_ranks(2, program))) == [repr(list(rows.values()))] * 2


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
def test_other_names_on_another_rank_are_an_error_everywhere(first: bool) -> None:
    def program(t: Transport) -> str:
        ddp = wrapped(t)
        if not first:
            means_after_step(ddp)
        ddp.report(**{"loss" if t.rank else "los": 1.0})
        with pytest.raises(ContractMismatch) as caught:
            means_after_step(ddp)
        return str(caught.value)

    one, other = run_ranks(2, program)
    assert one == other
    assert "reported metric loss" in one
    assert "reported metric los" in one.replace("reported metric loss", "")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "at least one metric by name"),
        ({"loss": "low"}, TypeError, "got a str for 'loss'"),
        ({"loss": torch.ones(2)}, TypeError, r"got a Tensor of shape \(2,\)"),
        ({"loss": 1j}, TypeError, "a real number"),
        ({"loss": 1.0, "weight": -1}, ValueError, "weight"),
        ({"loss": 1.0, "weight": math.nan}, ValueError, "weight"),
        ({"loss": 1.0, "weight": "3"}, TypeError, "weight"),
    ],
    ids=str,
)
def test_nonsense_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    ddp = sl.DistributedDataParallel(copy.deepcopy(_NET))
    with pytest.raises(error, match=words):
        ddp.report(**arguments)


def test_a_strategy_under_which_gradients_stay_local_gives_this_ranks_own() -> None:
    def program(t: Transport) -> dict[str, float]:
        ddp = wrapped(t, strategy=sl.LocalSGD(4))
        ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        ddp.report(loss=float(t.rank))
        means = means_after_step(ddp)
        assert ddp.last_step is not None
        assert not ddp.last_step.synchronized
        return means

    assert run_ranks(2, program) == [{"loss": 0.0}, {"loss": 1.0}]


def test_a_module_that_changes_keeps_its_metrics() -> None:
    def program(t: Transport) -> list[dict[str, float]]:
        ddp = wrapped(t)
        found = []
        for at in range(4):
            if at == 2:
                ddp.module.append(nn.Linear(2, 2))
                sl.broadcast_(ddp.module, group=t)
            ddp.report(loss=float(at + t.rank))
            found.append(means_after_step(ddp, t.rank))
        return found

    assert run_ranks(2, program) == [[{"loss": at + 0.5} for at in range(4)]] * 2
