"""Gradients that are not finite: who is named, and what all ranks do about them. Ranks are threads."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.cases import case
from support.inside import without_scalers
from support.threads import on_threads
from support.verbs import error_of_all
from syncline import (
    ContractMismatch,
    LocalSGD,
    NonFiniteGradient,
    ReplicaCheck,
    ReplicaDivergence,
    SynclineError,
    UnreducedGradients,
    sync_gradients_,
)
from syncline import DistributedDataParallel as DDP
from syncline._torch import is_scaler_in_use, note_scalers
from syncline.compression import Cast, PowerSGD, Quantize, TopK
from syncline.gradients.riders.finite import describe, is_finite, zero_nonfinite_
from syncline.gradients.riders.nonfinite import NonFiniteWatch
from syncline.transport import ThreadGroup, Transport, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:step:RuntimeWarning")

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
"""Large parameters (0.weight, 2.weight), which are copied as soon as they are ready, and small ones."""
NAMES = [name for name, _ in NET.named_parameters()]

NAN, INF = math.nan, math.inf

POLICIES: dict[Any, str] = {"raise": "raised", "skip": "discarded", "zero": "zeroed"}
"""The policies, and what the record says of a step with gradients that are not finite."""


IN_VIEWS = {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}
"""Several buckets, in which gradients are views."""


@pytest.fixture(autouse=True, scope="module")
def no_scaler_of_other_tests() -> Iterator[None]:
    note_scalers()
    with without_scalers():
        assert not is_scaler_in_use()
        yield


def batch(t: Transport, step: int = 0) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * t.rank + step))


@contextlib.contextmanager
def bad(parameter: Tensor, value: complex, when: bool) -> Iterator[None]:
    """In this block, if `when`, one element of its gradient is `value`, as it comes out of autograd."""

    def change(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1)[0] = value
        return changed

    handle = parameter.register_hook(change) if when else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def backward(ddp: nn.Module, x: Tensor) -> None:
    ddp(x).abs().square().mean().backward()


def wrapped(t: Transport, policy: Any, net: nn.Module = NET, **kwargs: Any) -> DDP:
    return DDP(copy.deepcopy(net), process_group=t, on_nonfinite=policy, **kwargs)


def with_sgd(
    t: Transport, policy: Any, net: nn.Module = NET, **kwargs: Any
) -> tuple[DDP, torch.optim.Optimizer]:
    ddp = wrapped(t, policy, net, **kwargs)
    return ddp, ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))


def values_of(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors)


def has_stepped(ddp: DDP, before: list[Tensor]) -> bool:
    """Whether all parameters have changed, or none; none may be NaN."""
    assert are_finite(values_of(ddp.module))
    (moved,) = {not torch.equal(p, old) for p, old in zip(ddp.module.parameters(), before, strict=True)}
    return moved


def each(size: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    return run_ranks(size, lambda t: fn(t, *args, **kwargs))


def raised(fn: Callable[..., Any], *args: Any, size: int = 2, **kwargs: Any) -> NonFiniteGradient:
    """What `fn` raises on each rank, the same."""

    def rank(t: Transport) -> NonFiniteGradient:
        with pytest.raises(NonFiniteGradient) as caught:
            fn(t, *args, **kwargs)
        return caught.value

    errors = run_ranks(size, rank)
    assert len({str(error) for error in errors}) == 1, errors
    assert all(error.found == errors[0].found for error in errors)
    return errors[0]


def warned(fn: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What `fn` returns, and the texts of its warnings, which may come on any thread."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fn()
    return result, [str(one.message) for one in caught if one.category is RuntimeWarning]


# ---------------------------------------------------------------------- what is found


def test_one_element_anywhere_is_found_and_sums_that_overflow_are_no_alarm() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        for numel in (1, 7, 1000, 100_003):
            values = torch.randn(numel).to(dtype)
            assert is_finite(values), (dtype, numel)
            for value in (NAN, INF, -INF):
                for at in (0, numel // 2, numel - 1):
                    wrong = values.clone()
                    wrong[at] = complex(0, value) if dtype.is_complex else value
                    assert not is_finite(wrong), (dtype, numel, value, at)
                    assert list(describe([(3, values), (5, wrong)])) == [5], (dtype, numel, value, at)
        if not dtype.is_complex:
            largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
            assert not largest.sum().isfinite()
            assert is_finite(largest), dtype
            assert is_finite(-largest), dtype
    cancelling = torch.tensor([1.0, INF, -INF])
    assert not is_finite(cancelling)
    assert describe([(0, cancelling)]) == {0: "infinity in 2 of 3 elements"}
    assert is_finite(torch.zeros(0))


def test_what_will_be_rounded_is_judged_as_rounded() -> None:
    assert is_finite(torch.tensor([65504.0, 65519.0]), torch.float16)
    assert not is_finite(torch.tensor([1.0, 65520.0]), torch.float16)
    assert not is_finite(torch.tensor([NAN, 1.0]), torch.float16)


# ---------------------------------------------------------------------- raise


def test_all_ranks_and_parameters_are_named_wherever_they_lie() -> None:
    def rank(t: Transport, name: str, **kwargs: Any) -> None:
        ddp = wrapped(t, "raise", **kwargs)
        with bad(ddp.module.get_parameter(name), NAN, t.rank == 1):
            backward(ddp, batch(t))

    for name, kwargs in product(("0.weight", "2.weight", "2.bias", "4.bias"), ({}, IN_VIEWS)):
        with case(name, kwargs):
            error = raised(rank, name, **kwargs)
            assert (error.found, error.step, error.in_mean) == ({1: (name,)}, 1, ())
            assert f"rank 1: {name} (NaN in 1 of {NET.get_parameter(name).numel()} elements)" in str(error)

    def on_two_ranks(t: Transport) -> None:
        ddp = wrapped(t, "raise")
        with contextlib.ExitStack() as stack:
            stack.enter_context(bad(ddp.module[0].bias, -INF, t.rank == 0))
            for parameter in ddp.module.parameters():
                stack.enter_context(bad(parameter, NAN, t.rank == 2))
            backward(ddp, batch(t))

    error = raised(on_two_ranks, size=3)
    assert error.found == {0: ("0.bias",), 2: tuple(NAMES)}
    assert "rank 0: 0.bias (infinity in 1 of 40 elements)" in str(error)
    assert "and 2 more parameters" in str(error)


def test_the_error_comes_before_the_step_and_training_may_go_on_after_it() -> None:
    def rank(t: Transport) -> list[Tensor]:
        ddp, optimizer = with_sgd(t, "raise")
        for step in range(5):
            optimizer.zero_grad()
            with bad(ddp.module[2].weight, NAN, (t.rank, step) == (1, 2)):
                if step == 2:
                    with pytest.raises(NonFiniteGradient, match="step 3, backward"):
                        backward(ddp, batch(t, step))
                    assert ddp.last_step.nonfinite.outcome == "raised"
                else:
                    backward(ddp, batch(t, step))
                    optimizer.step()
        assert ddp.last_step.nonfinite.num_steps == 1
        optimizer.zero_grad()
        with ddp.no_sync(), bad(ddp.module[4].weight, NAN, t.rank == 0):
            backward(ddp, batch(t))
        assert ddp.last_step.nonfinite.outcome == "not reduced"
        with pytest.raises(NonFiniteGradient) as caught:  # it is found when it is reduced
            backward(ddp, batch(t, 1))
        assert caught.value.found == {0: ("4.weight",)}
        return values_of(ddp.module)

    one, other = run_ranks(2, rank)
    assert are_same(one, other)
    assert are_finite(one)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@on_threads(2)
def test_an_optimizer_inside_backward_does_not_step_and_skip_refuses_it(t: Transport) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    for policy, error in (("raise", NonFiniteGradient), ("skip", ValueError)):
        net = copy.deepcopy(NET)
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        ddp = DDP(net, process_group=t, on_nonfinite=policy)
        with bad(net[0].weight, NAN, t.rank == 1), pytest.raises(error):
            backward(ddp, batch(t))
        assert policy == "skip" or are_same(values_of(net), values_of(NET))


def test_unused_parameters_are_no_obstacle() -> None:
    class Halves(nn.ModuleList):
        def forward(self, x: Tensor, which: int) -> Tensor:
            return self[which](x)

    halves = Halves([nn.Linear(3, 2), nn.Linear(3, 2)])

    def rank(t: Transport) -> None:
        ddp = wrapped(t, "raise", halves, find_unused_parameters=True)
        for step in (1, 2):
            ddp.zero_grad()
            with bad(ddp.module[1].bias, NAN, (t.rank, step) == (1, 2)):
                ddp(batch(t), t.rank).sum().backward()

    error = raised(rank)
    assert (error.step, error.found) == (2, {1: ("1.bias",)})


@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
def test_other_ways_to_reduce_and_other_types_are_looked_at_as_well() -> None:
    def rank(t: Transport, dtype: torch.dtype, value: complex, **how: Any) -> None:
        ddp = wrapped(t, "raise", copy.deepcopy(NET).to(dtype), **how)
        for step in (1, 2):
            ddp.zero_grad()
            with bad(ddp.module[0].weight, value, (t.rank, step) == (1, 2)):
                backward(ddp, batch(t).to(dtype))

    cases: list[tuple[torch.dtype, complex, dict[str, Any]]] = [
        (torch.float32, INF, {"static_graph": True}),
        (torch.float32, 1e6, {"reduce_dtype": torch.float16}),  # it does not fit in the type it travels in
        (torch.float32, INF, {"reduce_dtype": torch.float64}),
        (torch.float32, INF, {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}),
        (torch.float16, INF, {}),
        (torch.bfloat16, INF, {}),
        (torch.complex64, complex(1.0, INF), {}),
    ]
    for dtype, value, how in cases:
        with case(dtype, value, how):
            error = raised(rank, dtype, value, **how)
            assert (error.step, error.found) == (2, {1: ("0.weight",)})
            assert "infinity in 1 of 120 elements" in str(error)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        return (self.table(rows) * weights).sum() + self.shift.sum()


def test_rows_of_a_sparse_gradient() -> None:
    rows = Rows()

    def reduced(t: Transport, policy: str, value: float) -> tuple[DDP, torch.optim.Optimizer]:
        ddp, optimizer = with_sgd(t, policy, rows)
        weights = torch.tensor([[1.0], [value if t.rank == 1 else 1.0]])
        ddp(torch.tensor([t.rank, t.rank + 1]), weights).backward()
        return ddp, optimizer

    def zeroed(t: Transport) -> Tensor:
        ddp, _ = reduced(t, "zero", INF)
        return ddp.module.table.weight.grad.to_dense()

    def skipped(t: Transport) -> None:
        for value in (NAN, 1.0):
            ddp, optimizer = reduced(t, "skip", value)
            gc.collect()
            optimizer.step()
            assert are_same(values_of(ddp), values_of(rows)) is math.isnan(value)

    each(2, reduced, "raise", 1.0)
    error = raised(reduced, "raise", INF)
    assert error.found == {1: ("table.weight",)}
    assert "of 6 elements" in str(error), "of the rows that this rank has"
    expected = torch.zeros(6, 3)
    expected[0], expected[1] = 0.5, 1.0  # one rank, and both; rank 1's infinite row 2 counts as zero
    assert all(torch.equal(one, expected) for one in run_ranks(2, zeroed))
    run_ranks(2, skipped)


# ---------------------------------------------------------------------- skip


def train(
    t: Transport, policy: str, *, wrong: dict[tuple[int, int], float], num_steps: int = 6, **kwargs: Any
) -> tuple[DDP, torch.optim.Optimizer]:
    """Train with AdamW; `wrong` says what is in a gradient on which rank at which step."""
    ddp = wrapped(t, policy, **kwargs)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    for step in range(num_steps):
        optimizer.zero_grad()
        with bad(ddp.module[2].weight, wrong.get((t.rank, step), 0.0), (t.rank, step) in wrong):
            backward(ddp, batch(t, step))
        optimizer.step()
    return ddp, optimizer


def without(skipped: set[int], num_steps: int = 6) -> list[Tensor]:
    """What training on two ranks gives that never saw these steps."""

    def rank(t: Transport) -> list[Tensor]:
        ddp = wrapped(t, "warn")
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for step in range(num_steps):
            if step not in skipped:
                optimizer.zero_grad()
                backward(ddp, batch(t, step))
                optimizer.step()
        return values_of(ddp.module)

    return run_ranks(2, rank)[0]


def test_a_discarded_step_is_as_if_it_had_never_been() -> None:
    wrong = {(1, 0): NAN, (0, 3): INF, (1, 3): -INF}

    def rank(t: Transport, num_buckets: int, **kwargs: Any) -> list[Tensor]:
        ddp, optimizer = train(t, "skip", wrong=wrong, **kwargs)
        record = ddp.last_step.nonfinite
        assert (record.outcome, record.found, record.num_steps) == ("finite", {}, 2)
        assert len(ddp.last_step.buckets) == num_buckets
        assert {int(state["step"]) for state in optimizer.state.values()} == {4}
        return values_of(ddp.module)

    expected = without({0, 3})
    for num_buckets, kwargs in ((1, {}), (3, IN_VIEWS)):
        results, texts = warned(partial(each, 2, rank, num_buckets, **kwargs))
        assert all(are_same(one, expected) for one in results), kwargs
        assert len(texts) == 2, "rank 0 alone, once for each thing that is new"
        assert texts[0].startswith("step 1, backward: ")
        assert "no rank steps" in texts[0]
        assert "rank 1: 2.weight (NaN in 1 of 1600 elements)" in texts[0]
        assert "rank 0: 2.weight (infinity in 1 of 1600 elements)" in texts[1]


def test_warnings_do_not_flood() -> None:
    wrong = {(1, step): NAN for step in range(20)}
    _, texts = warned(lambda: each(2, train, "skip", wrong=wrong, num_steps=20))
    assert [text.split(",")[0] for text in texts] == ["step 1", "step 2", "step 4", "step 8", "step 16"]


def test_what_is_left_in_grad_is_skipped_until_it_is_cleared_and_a_scheduler_goes_on() -> None:
    def rank(t: Transport) -> tuple[list[str], float]:
        ddp, optimizer = with_sgd(t, "skip")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        outcomes = []
        for step in range(3):
            with bad(ddp.module[0].weight, NAN, (t.rank, step) == (1, 0)):
                backward(ddp, batch(t, step))
            assert optimizer.step() is None
            scheduler.step()
            outcomes.append(ddp.last_step.nonfinite.outcome)
            if step == 1:
                optimizer.zero_grad()
        assert are_finite(values_of(ddp))
        return outcomes, scheduler.get_last_lr()[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="step [12], backward")
        assert run_ranks(2, rank) == [(["discarded", "discarded", "finite"], 0.0125)] * 2


def test_a_closure_is_run_before_the_step_so_that_it_can_be_discarded() -> None:
    def rank(t: Transport, how: str) -> tuple[list[Tensor], list[float]]:
        ddp = wrapped(t, "skip")
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
        losses = []
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = ddp(batch(t, step)).square().mean()
                loss.backward()
                losses.append(loss.item())
                return loss

            with bad(ddp.module[2].weight, NAN, (t.rank, step) == (1, 1)):
                if how == "before":
                    closure()
                    optimizer.step()
                else:
                    loss = optimizer.step(closure=closure) if how == "by name" else optimizer.step(closure)
                    assert loss.item() == losses[-1]
        return values_of(ddp), losses

    plain = each(2, rank, "before")
    for how in ("by place", "by name"):
        for mine, theirs in zip(each(2, rank, how), plain, strict=True):
            assert mine[1] == theirs[1], how
            assert are_same(mine[0], theirs[0]), how


@on_threads(2)
def test_a_closure_that_fails_after_its_first_call_is_an_error(t: Transport) -> None:
    ddp = wrapped(t, "skip")
    optimizer = ddp.attach(torch.optim.LBFGS(ddp.parameters(), max_iter=5))
    num_calls = 0

    def closure() -> Tensor:
        nonlocal num_calls
        num_calls += 1
        optimizer.zero_grad()
        with bad(ddp.module[2].weight, NAN, num_calls == 3 and t.rank == 1):
            loss = ddp(batch(t)).square().mean()
            loss.backward()
        return loss

    with pytest.raises(SynclineError, match="a later call"):
        optimizer.step(closure)


def test_skip_needs_every_trained_parameter_in_an_attached_optimizer() -> None:
    def without_any(t: Transport) -> None:
        backward(wrapped(t, "skip"), batch(t))

    def without_some(t: Transport, ignore: list[str]) -> None:
        ddp = wrapped(t, "skip", ignore=ignore)
        ddp.attach(torch.optim.SGD([*ddp.module[0].parameters(), ddp.module[2].weight], lr=0.1))
        backward(ddp, batch(t))

    def enough(t: Transport) -> None:
        net = copy.deepcopy(NET)
        net[0].weight.requires_grad_(False)  # frozen or ignored parameters need not be attached
        ddp = DDP(net, process_group=t, on_nonfinite="skip", ignore=["4.*"])
        optimizers = [torch.optim.SGD(p, lr=0.1) for p in ([net[0].bias], [*net[2].parameters()])]
        for optimizer in optimizers:
            ddp.attach(optimizer)
        backward(ddp, batch(t))
        for optimizer in optimizers:
            optimizer.step()
        assert ddp.last_step.nonfinite.outcome == "finite"

    for size in (1, 2):
        run_ranks(size, enough)
        text = str(error_of_all(SynclineError, without_any, size))
        assert re.search(r"no optimizer is attached to Sequential.*ddp\.attach", text)
    for ignore, num in (([], "3 of the 6"), (["4.*"], "1 of the 4")):
        text = str(error_of_all(SynclineError, partial(without_some, ignore=ignore)))
        assert num in text
        assert "2.bias" in text


def poison_once(t: Transport, ddp: DDP) -> None:
    with bad(ddp.module[0].weight, NAN, t.rank == 0):
        backward(ddp, batch(t))


def discarded_once(t: Transport, **kwargs: Any) -> tuple[DDP, torch.optim.Optimizer, list[Tensor]]:
    """Its first step was left undone, and its gradients were cleared; and the parameters."""
    ddp, optimizer = with_sgd(t, "skip", **kwargs)
    poison_once(t, ddp)
    optimizer.step()
    assert ddp.last_step.nonfinite.outcome == "discarded"
    assert are_finite(values_of(ddp))
    optimizer.zero_grad()
    return ddp, optimizer, values_of(ddp.module)


@on_threads(1, 2)
def test_a_mark_is_on_the_discarded_gradients_whatever_is_done_to_them_and_on_no_others(t: Transport) -> None:
    for kwargs in ({}, IN_VIEWS):
        ddp, optimizer, before = discarded_once(t, **kwargs)
        poison_once(t, ddp)
        ddp.module[4].zero_grad()
        ddp.clip_grad_norm_(1.0)
        for parameter in ddp.module[0].parameters():
            parameter.grad.nan_to_num_()
        gc.collect()
        for _ in range(2):
            optimizer.step()
        with case(kwargs):
            assert not has_stepped(ddp, before)
        for parameter in ddp.module.parameters():
            parameter.grad = torch.ones_like(parameter)  # it comes another way
        optimizer.step()
        with case(kwargs):
            assert has_stepped(ddp, before)


@on_threads(1)
def test_alone_what_ran_under_no_sync_is_looked_at_when_it_is_stepped(t: Transport) -> None:
    ddp, optimizer, before = discarded_once(t)
    with ddp.no_sync():
        backward(ddp, batch(t))
    optimizer.step()
    assert ddp.last_step.nonfinite.outcome == "finite"
    assert has_stepped(ddp, before)
    before = values_of(ddp.module)
    with ddp.no_sync():
        poison_once(t, ddp)
        backward(ddp, batch(t))
    for _ in range(2):
        optimizer.step()
    assert (ddp.last_step.nonfinite.outcome, ddp.last_step.nonfinite.num_steps) == ("discarded", 2)
    assert not has_stepped(ddp, before)
    optimizer.zero_grad(set_to_none=False)
    with ddp.no_sync():
        backward(ddp, batch(t))
    optimizer.step()
    assert has_stepped(ddp, before)


@on_threads(2)
def test_when_replicas_are_found_to_differ_gradients_have_been_judged(t: Transport) -> None:
    for option, is_bad in product((None, "find_unused_parameters", "gradient_as_bucket_view"), (False, True)):
        options: dict[str, Any] = {
            "replica_check": ReplicaCheck(every=1),
            **({option: True} if option else {}),
        }
        if is_bad:
            ddp, optimizer = with_sgd(t, "skip", **options)
        else:
            ddp, optimizer, _ = discarded_once(t, **options)
        with torch.no_grad():
            ddp.module[0].bias[0] += t.rank
        before = values_of(ddp.module)
        with pytest.raises(ReplicaDivergence):
            poison_once(t, ddp) if is_bad else backward(ddp, batch(t))
        optimizer.step()
        with case(option, is_bad):
            assert has_stepped(ddp, before) is not is_bad


@on_threads(1, 2)
def test_gradients_of_a_backward_that_failed_are_not_stepped(t: Transport) -> None:
    ddp, optimizer = with_sgd(t, "skip")
    before = values_of(ddp.module)
    ddp.module[0](batch(t)).sum().mul(NAN).backward()  # without the rest
    with pytest.raises(UnreducedGradients):
        optimizer.step()
    optimizer.step()
    assert not has_stepped(ddp, before)
    optimizer.zero_grad()
    backward(ddp, batch(t))
    optimizer.step()
    assert has_stepped(ddp, before)


# ---------------------------------------------------------------------- zero


def test_only_what_is_not_finite_counts_as_zero() -> None:
    def rank(t: Transport, policy: str, name: str, value: float, view: bool) -> list[Tensor]:
        ddp = wrapped(t, policy, gradient_as_bucket_view=view)
        with bad(ddp.module.get_parameter(name), value, t.rank == 1):
            backward(ddp, batch(t))
        assert policy == "ignore" or ddp.last_step.nonfinite.outcome == "zeroed"
        return [p.grad for p in ddp.module.parameters()]

    for name, value, view in (("0.weight", NAN, False), ("0.bias", INF, True), ("4.weight", -INF, False)):
        expected = each(2, rank, "ignore", name, 0.0, view)[0]
        found, texts = warned(partial(each, 2, rank, "zero", name, value, view))
        assert all(are_same(one, expected) for one in found), name
        assert [f"rank 1: {name}" in text for text in texts] == [True]


# ---------------------------------------------------------------------- a mean that is not finite by itself


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False, dtype=dtype)


def test_a_mean_that_is_not_finite_is_found_though_no_rank_is_to_blame() -> None:
    half = torch.float16

    def undivided(t: Transport) -> None:
        ddp = wrapped(t, "raise", linear(half))
        with ddp.normalize_by(1):
            ddp(torch.full((1, 2), 6e4, dtype=half)).sum().backward()

    def too_large_for_the_parameter(t: Transport) -> None:
        ddp = wrapped(t, "raise", linear(half), reduce_dtype=torch.float32)
        for _ in range(2):
            with ddp.normalize_by(1):
                ddp(torch.full((1, 2), 5e4 if t.rank else 1e2, dtype=half)).sum().backward()
            ddp.zero_grad()
        with ddp.normalize_by(t.rank):
            ddp(torch.full((1, 2), 5e4, dtype=half)).sum().backward()

    def overflow(state: object, bucket: Any) -> Any:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().mul_(1e30).mul_(1e30))
        return future

    def overflowing_hook(t: Transport) -> None:
        ddp = wrapped(t, "raise", linear())
        ddp.register_comm_hook(None, overflow)
        ddp(torch.ones(1, 2)).sum().backward()

    def overflowing_cast(t: Transport) -> None:
        ddp = wrapped(t, "raise", linear(), compression=Cast(half))
        ddp(torch.full((1, 2), 1e6)).sum().backward()

    for program in (undivided, too_large_for_the_parameter, overflowing_hook, overflowing_cast):
        with case(program.__name__):
            error = raised(program)
            step = 3 if program is too_large_for_the_parameter else 1
            assert (error.step, error.found, error.in_mean) == (step, {}, ("weight",))
            assert "Each rank's own gradients are finite" in str(error)


def test_a_mean_is_not_blamed_for_what_a_rank_has_sent() -> None:
    def rank(t: Transport, policy: str) -> None:
        ddp = wrapped(t, policy)
        with ddp.normalize_by(2 + t.rank), bad(ddp.module[2].weight, NAN, t.rank == 1):
            ddp(batch(t)).square().sum().backward()
        assert ddp.last_step.divisor == 5
        assert are_finite([p.grad for p in ddp.parameters()])

    error = raised(rank, "raise")
    assert (error.found, error.in_mean) == ({1: ("2.weight",)}, ())
    each(2, rank, "zero")


@on_threads(2)
def test_an_overflow_in_the_mean_is_skipped_or_zeroed(t: Transport) -> None:
    for policy, outcome, moved in (("skip", "discarded", [False, False]), ("zero", "zeroed", [False, True])):
        ddp = wrapped(t, policy, linear(torch.float16))
        before = ddp.module.weight.detach().clone()
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=1.0))
        with ddp.normalize_by(1):
            ddp(torch.tensor([[6e4, 1.0]], dtype=torch.float16)).sum().backward()
        optimizer.step()
        assert ddp.last_step.nonfinite.outcome == outcome
        assert (ddp.module.weight != before).flatten().tolist() == moved


# ---------------------------------------------------------------------- compression, shards, alone, outside


def test_nothing_that_is_not_finite_is_kept_by_a_compression_or_a_shard() -> None:
    def rank(t: Transport, policy: str, **how: Any) -> list[Tensor]:
        ddp = wrapped(t, policy, **how)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
        for step in range(4):
            optimizer.zero_grad()
            is_bad = step == 1
            with (
                bad(ddp.module[2].weight, NAN, is_bad and t.rank == 1),
                contextlib.suppress(NonFiniteGradient),
            ):
                backward(ddp, batch(t, step))
                optimizer.step()
            assert ddp.last_step.nonfinite.outcome == (POLICIES[policy] if is_bad else "finite")
            assert ddp.last_step.nonfinite.found == ({1: ("2.weight",)} if is_bad else {})
            assert "sharded" in how or are_finite([p.grad for p in ddp.parameters()])
        if "compression" in how:
            assert are_finite([*ddp.sync_state_dict()["compression"].values()])
        return values_of(ddp.module)

    compressions = (Quantize(8), TopK(0.1), PowerSGD(2), Cast())
    hows: list[dict[str, Any]] = [{"compression": one} for one in compressions]
    for policy, how in product(POLICIES, [*hows, {"sharded": True, "bucket_cap_mb": 0.001}]):
        with case(policy, how):
            one, other = each(2, rank, policy, **how)
            assert are_same(one, other)
            assert are_finite(one)
            if "sharded" in how and policy != "zero":
                torch.testing.assert_close(one, without({1}, num_steps=4))


@on_threads(1)
def test_alone(t: Transport) -> None:
    ddp = wrapped(t, "raise")
    with pytest.raises(NonFiniteGradient, match=r"rank 0: 0\.weight \(NaN in 1 of 120 elements\)"):
        poison_once(t, ddp)
    ddp = wrapped(t, "zero")
    with ddp.normalize_by(2):
        poison_once(t, ddp)
    assert are_finite([p.grad for p in ddp.parameters()])
    assert ddp.last_step.nonfinite.found == {0: ("0.weight",)}
    ddp, optimizer = train(t, "skip", wrong={(0, 0): INF}, num_steps=3)
    assert ddp.last_step.nonfinite.num_steps == 1
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    assert ddp.contract["gradients"].how == "not finite: no rank steps"
    assert "all gradients are finite (not finite in 1 step so far)" in " ".join(ddp.explain().split())


@on_threads(2)
def test_gradients_reduced_outside_of_a_backward(t: Transport) -> None:
    ddp, optimizer = with_sgd(t, "skip")
    for step, expected in enumerate([("finite", ()), ("discarded", ("0.bias",)), ("finite", ())]):
        optimizer.zero_grad()
        with ddp.no_sync(), bad(ddp.module[0].bias, NAN, (t.rank, step) == (1, 1)):
            backward(ddp, batch(t, step))
        sync_gradients_(ddp)
        optimizer.step()
        assert (ddp.last_step.nonfinite.outcome, ddp.last_step.nonfinite.in_mean) == expected
    assert are_finite(values_of(ddp))


# ---------------------------------------------------------------------- a GradScaler owns what is not finite


def scaled_training(t: Transport, policy: str, **kwargs: Any) -> tuple[list[Tensor], list[float], list[str]]:
    """A gradient overflows on the last rank in step 1 and on rank 0 in step 4."""
    ddp = wrapped(t, policy, **kwargs)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales, outcomes = [], []
    for step in range(6):
        optimizer.zero_grad()
        with bad(ddp.module[2].weight, INF, (t.rank, step) in {(t.size - 1, 1), (0, 4)}):
            scaler.scale(ddp(batch(t, step)).square().mean()).backward()
        outcomes.append("" if policy == "ignore" else ddp.last_step.nonfinite.outcome)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return values_of(ddp.module), scales, outcomes


SCALES = [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]


def test_with_a_scaler_everything_is_as_if_ignored_bit_for_bit() -> None:
    left = "left to the GradScaler"
    for size, kwargs in ((1, {}), (2, {}), (2, IN_VIEWS), (2, {"sharded": True})):
        expected = each(size, scaled_training, "ignore", **kwargs)
        for policy in POLICIES:
            found = each(size, scaled_training, policy, **kwargs)
            with case(size, kwargs, policy):
                for mine, theirs in zip(found, expected, strict=True):
                    assert mine[1] == theirs[1] == SCALES
                    assert are_same(mine[0], theirs[0])
                    assert mine[2] == ["finite", left, "finite", "finite", left, "finite"]


def test_a_scaler_sees_what_compression_was_not_given() -> None:
    for compression in (Quantize(8), TopK(0.5)):
        for parameters, scales, _ in each(2, scaled_training, "skip", compression=compression):
            with case(compression):
                assert scales == SCALES
                assert are_finite(parameters)


def of_cuda() -> torch.amp.GradScaler:
    """As on a machine with CUDA, where it would be enabled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.cuda.amp.GradScaler(enabled=False)
    vars(scaler).update(vars(torch.amp.GradScaler("cpu")))
    return scaler


class OwnScale(torch.amp.GradScaler):
    """As torch's `ShardedGradScaler`, it does not call the one it overrides."""

    def scale(self, outputs: Any) -> Any:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_a_scaler_is_found_from_its_first_use_even_if_it_is_frozen() -> None:
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(torch.ones(()))
    for make in (partial(torch.amp.GradScaler, "cpu"), of_cuda, partial(OwnScale, "cpu")):
        scaler = make()
        assert not is_scaler_in_use(), "neither scales"
        scaler.scale(torch.ones(()))
        assert is_scaler_in_use()
        gc.freeze()
        note_scalers()
        assert is_scaler_in_use()
        del scaler
        assert not is_scaler_in_use(), "it is not kept alive"
        gc.unfreeze()


def test_scalers_are_noted_once_and_look_as_they_did() -> None:
    note_scalers()
    create, scale = torch.amp.GradScaler.__init__, torch.amp.GradScaler.scale
    note_scalers()
    assert torch.amp.GradScaler.__init__ is create
    assert torch.amp.GradScaler.scale is scale
    assert (create.__name__, scale.__name__) == ("__init__", "scale")
    assert list(inspect.signature(scale).parameters) == ["self", "outputs"]
    assert list(inspect.signature(torch.amp.GradScaler).parameters)[:2] == ["device", "init_scale"]


@pytest.mark.usefixtures("unfrozen")
def test_a_scaler_that_is_older_than_the_first_wrapper_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wrapper of a process searches for scalers. It cannot find a frozen one before that scales a loss."""
    for is_frozen in (False, True):
        with monkeypatch.context() as patch, without_scalers():
            for name in ("__init__", "scale", "_lazy_init_scale_growth_tracker"):
                patch.setattr(torch.amp.GradScaler, name, vars(torch.amp.GradScaler)[name].__wrapped__)
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            if is_frozen:
                gc.freeze()
            note_scalers()
            assert is_scaler_in_use() is not is_frozen
            scaler.scale(torch.ones(()))
            assert is_scaler_in_use()


# ---------------------------------------------------------------------- on accelerators


class OnAccelerator(NonFiniteWatch):
    """Takes the way of accelerators, with tensors of the CPU."""

    def look_at(self, bucket: Any) -> None:
        self._own.check_later(bucket.own_parts())
        if self._replaces:
            zero_nonfinite_(bucket.own())


def test_what_is_looked_at_later_is_found_before_anyone_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.gradients.riders.roster.NonFiniteWatch", OnAccelerator)

    def rank(t: Transport, name: str, value: float, policy: str) -> None:
        ddp, optimizer = with_sgd(t, policy, bucket_cap_mb=0.001)
        text = ""
        try:
            with bad(ddp.module.get_parameter(name), value, t.rank == 1):
                backward(ddp, batch(t))
            optimizer.step()
        except NonFiniteGradient as error:
            text = str(error)
        kind = "NaN" if math.isnan(value) else "infinity"
        assert (f"rank 1: {name} ({kind})" in text) is (policy == "raise")
        assert ddp.last_step.nonfinite.found == {1: (name,)}
        assert ddp.last_step.nonfinite.outcome == POLICIES[policy]
        assert are_finite(values_of(ddp))

    for name, value in (("0.weight", NAN), ("4.bias", INF)):
        for policy in POLICIES:
            with case(name, policy):
                each(2, rank, name, value, policy)


# ---------------------------------------------------------------------- arguments, contract, words


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strategy=LocalSGD.*EveryStep"):
        wrapped(ThreadGroup(1).transport(0), "skip", strategy=LocalSGD(4))
    error = error_of_all(ContractMismatch, lambda t: wrapped(t, "raise" if t.rank else "skip"))
    assert "on_nonfinite\n    expected skip (rank 0)\n    got      raise (rank 1)" in str(error)


@on_threads(2)
def test_contract_and_timeline_say_it(t: Transport) -> None:
    ddp, _ = with_sgd(t, "skip")
    planned = ddp.explain()
    poison_once(t, ddp)
    planned, contract, recorded = (
        " ".join(text.split()) for text in (planned, str(ddp.contract), ddp.explain())
    )
    assert ddp.contract["gradients"].how == "mean, all_reduce; not finite: no rank steps"
    assert "; a gradient that is not finite: no rank steps" in planned
    assert "not finite: discarded" in contract
    assert "not finite on rank 0: 0.weight -> discarded (1 step so far)" in recorded


@on_threads(2)
def test_with_ignore_nobody_looks(t: Transport) -> None:
    ddp = wrapped(t, "ignore")
    poison_once(t, ddp)
    assert ddp.last_step.nonfinite is None
    assert "finite" not in str(ddp.contract) + ddp.explain()
    assert [are_finite([p.grad]) for p in ddp.parameters()] == [name != "0.weight" for name in NAMES]


def test_the_policy_and_its_warnings_go_on_when_the_module_changes() -> None:
    def rank(t: Transport) -> None:
        ddp, optimizer = train(t, "skip", wrong={(1, 1): NAN, (1, 2): NAN}, num_steps=3)
        added = nn.Linear(2, 2)
        for parameter in added.parameters():
            nn.init.constant_(parameter, 0.1)  # equal on both ranks, or it is an error
        ddp.module.append(added)
        optimizer.add_param_group({"params": list(added.parameters())})
        before = values_of(added)
        for name, found in (("5.weight", {0: ("5.weight",)}), ("2.weight", {1: ("2.weight",)})):
            optimizer.zero_grad()
            with bad(ddp.module.get_parameter(name), NAN, t.rank in found):
                backward(ddp, batch(t))
            assert ddp.last_step.nonfinite.found == found
            optimizer.step()
            assert are_same(values_of(added), before)
        assert ddp.last_step.nonfinite.num_steps == 4

    _, texts = warned(lambda: run_ranks(2, rank))
    # A new name is a reason to warn in step 4, where only twice as many steps would be another one.
    assert [text.split(",")[0] for text in texts] == ["step 2", "step 3", "step 4"]


def test_a_finding_of_an_interrupted_backward_ends_with_the_group() -> None:
    watch = NonFiniteWatch("skip")
    for value, outcome in ((math.nan, "discarded"), (1.0, "finite")):
        watch.use(["weight"], ThreadGroup(1).transport(0), list)
        watch.conclude_alone([(0, torch.tensor([value]))], step=1)
        assert watch.last.outcome == outcome
