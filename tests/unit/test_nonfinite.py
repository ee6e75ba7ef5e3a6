"""Gradients that are not finite: who is named, and what all ranks do about them. Ranks are threads."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
"""Large parameters (0.weight, 2.weight), which are copied as soon as they are ready, and small ones."""
NAMES = [name for name, _ in NET.named_parameters()]

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True, scope="module")
def no_scaler_of_other_tests() -> Iterator[None]:
    note_scalers()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("syncline._torch.optimizers._scalers", weakref.WeakSet())
        assert not is_scaler_in_use()
        yield


def batch(t: Transport, step: int = 0) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * t.rank + step))


def put(parameter: Tensor, value: float, *, at: int = 0) -> Any:
    """From now on one element of its gradient is `value`, as it comes out of autograd."""

    def change(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1)[at] = value
        return changed

    return parameter.register_hook(change)


def backward(ddp: nn.Module, x: Tensor) -> None:
    ddp(x).square().mean().backward()


def poisoned(
    t: Transport, name: str = "2.weight", value: float = NAN, *, rank: int = 1, **kwargs: Any
) -> DDP:
    net = copy.deepcopy(NET)
    ddp = DDP(net, process_group=t, **kwargs)
    if t.rank == rank:
        put(net.get_parameter(name), value)
    return ddp


def backward_and_step(ddp: DDP, optimizer: torch.optim.Optimizer, x: Tensor) -> str:
    """The text of the error, if there was one; then no step is made."""
    try:
        backward(ddp, x)
    except NonFiniteGradient as error:
        return str(error)
    optimizer.step()
    return ""


def finite_gradients(module: nn.Module) -> list[bool]:
    return [bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None]


def each_rank(fn: Callable[[Transport], Any], size: int = 2) -> list[Any]:
    return run_ranks(size, fn)


def raised(fn: Callable[[Transport], Any], size: int = 2) -> NonFiniteGradient:
    """What `fn` raises on each rank, the same."""

    def rank(t: Transport) -> NonFiniteGradient:
        with pytest.raises(NonFiniteGradient) as caught:
            fn(t)
        return caught.value

    errors = each_rank(rank, size)
    assert len({str(error) for error in errors}) == 1, errors
    assert all(error.found == errors[0].found for error in errors)
    return errors[0]


def quietly(fn: Callable[[], Any]) -> list[str]:
    """The texts of the warnings of `fn`, which may come on any thread."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


# ---------------------------------------------------------------------- what is found


def test_sums_that_overflow_are_no_alarm() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
        assert not largest.sum().isfinite()
        assert is_finite(largest)
        assert is_finite(-largest)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("numel", [1, 7, 1000, 100_003])
def test_one_element_anywhere_is_found(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel).to(dtype)
    assert is_finite(values)
    for value in (NAN, INF, -INF):
        for at in {0, numel // 2, numel - 1}:
            bad = values.clone()
            bad[at] = complex(0, value) if dtype.is_complex else value
            assert not is_finite(bad)
            assert list(describe([(3, values), (5, bad)])) == [5]


def test_infinities_of_both_signs_do_not_cancel() -> None:
    bad = torch.tensor([1.0, INF, -INF])
    assert not is_finite(bad)
    assert describe([(0, bad)]) == {0: "infinity in 2 of 3 elements"}


def test_nothing_is_finite() -> None:
    assert is_finite(torch.zeros(0))


def test_what_will_be_rounded_is_judged_as_rounded() -> None:
    assert is_finite(torch.tensor([65504.0, 65519.0]), torch.float16)
    assert not is_finite(torch.tensor([1.0, 65520.0]), torch.float16)
    assert not is_finite(torch.tensor([NAN, 1.0]), torch.float16)


# ---------------------------------------------------------------------- raise


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap_mb", [None, 0.001], ids=["one bucket", "several"])
@pytest.mark.parametrize("name", ["0.weight", "2.weight", "2.bias", "4.bias"])
def test_rank_and_parameter_are_named_wherever_it_lies(name: str, cap_mb: float | None, view: bool) -> None:
    def rank(t: Transport) -> None:
        ddp = poisoned(t, name, bucket_cap_mb=cap_mb, gradient_as_bucket_view=view, on_nonfinite="raise")
        assert len(ddp._replica.gradients.layout.plans) == (1 if cap_mb is None else 3)
        backward(ddp, batch(t))

    error = raised(rank)
    assert error.found == {1: (name,)}
    assert error.step == 1
    assert error.in_mean == ()
    numel = NET.get_parameter(name).numel()
    assert f"rank 1: {name} (NaN in 1 of {numel} elements)" in str(error)


def test_all_ranks_that_have_some_are_named_with_what_they_have() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="raise")
        if t.rank == 0:
            put(ddp.module[0].bias, -INF)
        if t.rank == 2:
            for parameter in ddp.module.parameters():
                put(parameter, NAN)
        backward(ddp, batch(t))

    error = raised(rank, size=3)
    assert error.found == {0: ("0.bias",), 2: tuple(NAMES)}
    assert "rank 0: 0.bias (infinity in 1 of 40 elements)" in str(error)
    assert "and 2 more parameters" in str(error)


def test_the_error_comes_before_the_step_and_training_may_go_on_after_it() -> None:
    def rank(t: Transport) -> list[Tensor]:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite="raise")
        optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(5):
            optimizer.zero_grad()
            handle = put(net[2].weight, NAN) if (t.rank, step) == (1, 2) else None
            if step == 2:
                with pytest.raises(NonFiniteGradient, match="step 3, backward"):
                    backward(ddp, batch(t, step))
                assert ddp.last_step.nonfinite.outcome == "raised"
            else:
                backward(ddp, batch(t, step))
                optimizer.step()
            if handle is not None:
                handle.remove()
        assert ddp.last_step.nonfinite.num_steps == 1
        return list(net.parameters())

    one, other = each_rank(rank)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(bool(p.isfinite().all()) for p in one)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_optimizer_inside_backward_does_not_step() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def rank(t: Transport) -> None:
        net = copy.deepcopy(NET)
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        ddp = DDP(net, process_group=t, on_nonfinite="raise")
        if t.rank == 1:
            put(net[0].weight, NAN)
        with pytest.raises(NonFiniteGradient):
            backward(ddp, batch(t))
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), NET.parameters(), strict=True))

    each_rank(rank)


def test_finite_gradients_whose_sum_overflows_are_no_alarm() -> None:
    def rank(t: Transport) -> Tensor:
        net = nn.Linear(4, 1, bias=False)
        ddp = DDP(net, process_group=t, on_nonfinite="raise")
        (ddp(torch.full((1, 4), 2e38)) * 1.0).sum().backward()
        assert not net.weight.grad.sum().isfinite()
        return net.weight.grad

    assert all(torch.equal(g, torch.full((1, 4), 2e38)) for g in each_rank(rank))


def test_what_accumulates_under_no_sync_is_found_when_it_is_reduced() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="raise")
        handle = put(ddp.module[4].weight, NAN) if t.rank == 0 else None
        with ddp.no_sync():
            backward(ddp, batch(t))
        assert ddp.last_step.nonfinite.outcome == "not reduced"
        if handle is not None:
            handle.remove()
        backward(ddp, batch(t, 1))

    assert raised(rank).found == {0: ("4.weight",)}


def test_unused_parameters_are_no_obstacle() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.halves[which](x)

    def rank(t: Transport) -> None:
        ddp = DDP(Halves(), process_group=t, find_unused_parameters=True, on_nonfinite="raise")
        ddp(batch(t), t.rank).sum().backward()
        ddp.zero_grad()
        if t.rank == 1:
            put(ddp.module.halves[1].bias, NAN)
        ddp(batch(t), t.rank).sum().backward()

    error = raised(rank)
    assert (error.step, error.found) == (2, {1: ("halves.1.bias",)})


@pytest.mark.parametrize(
    "how",
    [
        {"static_graph": True},
        {"reduce_dtype": torch.float64},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    ],
    ids=["static", "wider", "unused are not sent"],
)
def test_other_ways_to_reduce_look_as_well(how: dict[str, Any]) -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="raise", **how)
        backward(ddp, batch(t))
        ddp.zero_grad()
        if t.rank == 1:
            put(ddp.module[0].weight, INF)
        backward(ddp, batch(t))

    assert raised(rank).found == {1: ("0.weight",)}


def test_a_gradient_that_does_not_fit_in_the_type_it_travels_in_is_found() -> None:
    def rank(t: Transport) -> None:
        net = nn.Linear(2, 1, bias=False)
        ddp = DDP(net, process_group=t, reduce_dtype=torch.float16, on_nonfinite="raise")
        ddp(torch.full((1, 2), 1e6 if t.rank == 1 else 1.0)).sum().backward()

    assert "rank 1: weight (infinity in 2 of 2 elements)" in str(raised(rank))


def test_complex_gradients() -> None:
    def rank(t: Transport) -> None:
        net = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
        ddp = DDP(net, process_group=t, on_nonfinite="raise")
        x = torch.ones(1, 2, dtype=torch.complex64)
        if t.rank == 1:
            put(net.weight, complex(1.0, NAN))
        ddp(x).abs().sum().backward()

    assert "rank 1: weight (NaN in 1 of 2 elements)" in str(raised(rank))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET).to(dtype), process_group=t, on_nonfinite="raise")
        backward(ddp, batch(t).to(dtype))
        ddp.zero_grad()
        if t.rank == 0:
            put(ddp.module[2].bias, INF)
        backward(ddp, batch(t).to(dtype))

    assert raised(rank).found == {0: ("2.bias",)}


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows))


def test_rows_of_a_sparse_gradient() -> None:
    def rank(t: Transport, value: float) -> None:
        ddp = DDP(Sparse(), process_group=t, on_nonfinite="raise")
        weight = torch.ones(2, 1)
        weight[1] = value if t.rank == 1 else 1.0
        with torch.no_grad():
            ddp.module.head.bias.zero_()
        ddp.module.head.requires_grad_(True)
        handle = ddp.module.head.weight.register_hook(torch.zeros_like)
        other = ddp.module.head.bias.register_hook(torch.zeros_like)
        (ddp(torch.tensor([t.rank, t.rank + 1])) * weight).sum().backward()
        handle.remove()
        other.remove()

    each_rank(lambda t: rank(t, 1.0))
    error = raised(lambda t: rank(t, INF))
    assert error.found == {1: ("table.weight",)}
    assert "of 6 elements" in str(error), "of the rows that this rank has"


# ---------------------------------------------------------------------- skip


def train(
    t: Transport,
    policy: str,
    *,
    bad: dict[tuple[int, int], float],
    num_steps: int = 6,
    net: nn.Module = NET,
    name: str = "2.weight",
    **kwargs: Any,
) -> tuple[DDP, torch.optim.Optimizer]:
    """Train with AdamW; `bad` says what is in a gradient on which rank at which step."""
    net = copy.deepcopy(net)
    ddp = DDP(net, process_group=t, on_nonfinite=policy, **kwargs)
    handles: list[Any] = []

    def change(gradient: Tensor) -> Tensor:
        value = bad.get((t.rank, at))
        if value is None:
            return gradient
        changed = gradient.clone()
        changed.view(-1)[0] = value
        return changed

    handles.append(net.get_parameter(name).register_hook(change))
    optimizer = ddp.attach(torch.optim.AdamW(net.parameters(), lr=0.01))
    for at in range(num_steps):
        optimizer.zero_grad()
        backward(ddp, batch(t, at))
        optimizer.step()
    return ddp, optimizer


def without(skipped: set[int], num_steps: int = 6, size: int = 2) -> list[Tensor]:
    """What training gives that never saw these steps."""

    def rank(t: Transport) -> list[Tensor]:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(num_steps):
            if step not in skipped:
                optimizer.zero_grad()
                backward(ddp, batch(t, step))
                optimizer.step()
        return [p.detach() for p in net.parameters()]

    return each_rank(rank, size)[0]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap_mb", [None, 0.001])
def test_a_discarded_step_is_as_if_it_had_never_been(cap_mb: float | None, view: bool) -> None:
    bad = {(1, 0): NAN, (0, 3): INF, (1, 3): -INF}

    def rank(t: Transport) -> list[Tensor]:
        ddp, optimizer = train(t, "skip", bad=bad, bucket_cap_mb=cap_mb, gradient_as_bucket_view=view)
        record = ddp.last_step.nonfinite
        assert (record.outcome, record.found, record.num_steps) == ("finite", {}, 2)
        assert {int(state["step"]) for state in optimizer.state.values()} == {4}
        return [p.detach() for p in ddp.module.parameters()]

    results: list[Any] = []
    texts = quietly(lambda: results.extend(each_rank(rank)))
    expected = without({0, 3})
    for one in results:
        assert all(torch.equal(a, b) for a, b in zip(one, expected, strict=True))
    assert len(texts) == 2, "rank 0 alone, once for each thing that is new"
    assert texts[0].startswith(
        'step 1, backward: gradients are not finite, so no rank steps (on_nonfinite="skip", 1 step so far):\n'
        "  rank 1: 2.weight (NaN in 1 of 1600 elements)\n"
    )
    assert "rank 0: 2.weight (infinity in 1 of 1600 elements)" in texts[1]


def test_warnings_do_not_flood() -> None:
    texts = quietly(
        lambda: each_rank(
            lambda t: train(t, "skip", bad={(1, s): NAN for s in range(20)}, num_steps=20) and None
        )
    )
    assert [text.split(",")[0] for text in texts] == ["step 1", "step 2", "step 4", "step 8", "step 16"]


@pytest.mark.filterwarnings("ignore:step [12], backward:RuntimeWarning")
def test_what_is_left_in_grad_keeps_being_skipped_until_it_is_cleared() -> None:
    def rank(t: Transport) -> list[str]:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite="skip")
        optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1))
        handle = put(net[0].weight, NAN) if t.rank == 1 else None
        outcomes = []
        for step in range(3):
            backward(ddp, batch(t, step))
            optimizer.step()
            outcomes.append(ddp.last_step.nonfinite.outcome)
            if handle is not None:
                handle.remove()
            if step == 1:
                optimizer.zero_grad()
        assert all(bool(p.isfinite().all()) for p in net.parameters())
        return outcomes

    assert each_rank(rank) == [["discarded", "discarded", "finite"]] * 2


def test_a_scheduler_is_not_confused_by_a_discarded_first_step() -> None:
    def rank(t: Transport) -> float:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite="skip")
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        ddp.attach(optimizer)
        handle = put(net[0].weight, NAN) if t.rank == 1 else None
        for step in range(2):
            backward(ddp, batch(t, step))
            assert optimizer.step() is None
            scheduler.step()
            optimizer.zero_grad()
            if handle is not None:
                handle.remove()
        return scheduler.get_last_lr()[0]

    results: list[Any] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="step 1, backward")
        results = each_rank(rank)
    assert results == [0.25, 0.25]


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_a_closure_is_run_before_the_step_so_that_it_can_be_discarded() -> None:
    def rank(t: Transport, with_closure: bool, by_name: bool) -> tuple[list[Tensor], list[float]]:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite="skip")
        optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        losses = []
        for step in range(4):
            handle = put(net[2].weight, NAN) if (t.rank, step) == (1, 1) else None

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = ddp(batch(t, step)).square().mean()
                loss.backward()
                losses.append(loss.item())
                return loss

            if not with_closure:
                closure()
                optimizer.step()
            else:
                loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
                assert loss.item() == losses[-1]
            if handle is not None:
                handle.remove()
        return [p.detach() for p in net.parameters()], losses

    plain = each_rank(lambda t: rank(t, False, False))
    for closed in (each_rank(lambda t: rank(t, True, False)), each_rank(lambda t: rank(t, True, True))):
        for (a, losses_a), (b, losses_b) in zip(plain, closed, strict=True):
            assert losses_a == losses_b
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_a_closure_that_fails_after_its_first_call_is_an_error() -> None:
    def rank(t: Transport) -> None:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite="skip")
        optimizer = ddp.attach(torch.optim.LBFGS(net.parameters(), max_iter=5))
        num_calls = 0

        def closure() -> Tensor:
            nonlocal num_calls
            num_calls += 1
            optimizer.zero_grad()
            if num_calls == 3 and t.rank == 1:
                put(net[2].weight, NAN)
            loss = ddp(batch(t)).square().mean()
            loss.backward()
            return loss

        with pytest.raises(SynclineError, match="a later call computed gradients that are not finite"):
            optimizer.step(closure)

    each_rank(rank)


def test_skip_needs_an_attached_optimizer() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="skip")
        with pytest.raises(SynclineError, match=r"no optimizer is attached to Sequential.*ddp\.attach"):
            backward(ddp, batch(t))

    each_rank(rank)
    each_rank(rank, size=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_skip_refuses_optimizers_inside_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def rank(t: Transport) -> None:
        net = copy.deepcopy(NET)
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        ddp = DDP(net, process_group=t, on_nonfinite="skip")
        with pytest.raises(ValueError, match="steps inside backward"):
            backward(ddp, batch(t))

    each_rank(rank)


@pytest.mark.parametrize("with_ignore", [False, True])
def test_skip_needs_every_trained_parameter_in_an_attached_optimizer(with_ignore: bool) -> None:
    def rank(t: Transport) -> str:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite="skip", ignore=["4.*"] if with_ignore else ())
        ddp.attach(torch.optim.SGD([*net[0].parameters(), net[2].weight], lr=0.1))
        other = torch.optim.SGD([net[2].bias, *net[4].parameters()], lr=0.1)
        with pytest.raises(SynclineError) as caught:
            backward(ddp, batch(t))
        if t.rank == 0 or with_ignore:
            net[2].bias.requires_grad_(False)
            net[4].requires_grad_(False)
        else:
            ddp.attach(other)
        return str(caught.value)

    one, other = each_rank(rank)
    assert one == other
    num = "1 of the 4" if with_ignore else "3 of the 6"
    assert (
        f"{num} trained parameters of Sequential are in no attached optimizer. The first of them is 2.bias."
        in one
    )


def test_what_is_frozen_or_ignored_need_not_be_attached() -> None:
    def rank(t: Transport) -> None:
        net = copy.deepcopy(NET)
        net[0].weight.requires_grad_(False)
        ddp = DDP(net, process_group=t, on_nonfinite="skip", ignore=["4.*"])
        one = ddp.attach(torch.optim.SGD([net[0].bias], lr=0.1))
        two = ddp.attach(torch.optim.SGD([net[0].weight, *net[2].parameters()], lr=0.1))
        backward(ddp, batch(t))
        one.step()
        two.step()
        assert ddp.last_step.nonfinite.outcome == "finite"

    each_rank(rank)
    each_rank(rank, size=1)


def discarded_once(t: Transport, **kwargs: Any) -> tuple[DDP, torch.optim.Optimizer, list[Tensor]]:
    """Its first step was left undone, and its gradients were cleared; and the parameters."""
    net = copy.deepcopy(kwargs.pop("net", NET))
    ddp = DDP(net, process_group=t, on_nonfinite="skip", **kwargs)
    optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    poison_once(t, ddp)
    optimizer.step()
    assert ddp.last_step.nonfinite.outcome == "discarded"
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    optimizer.zero_grad()
    return ddp, optimizer, [p.detach().clone() for p in net.parameters()]


def poison_once(t: Transport, ddp: DDP) -> None:
    handle = put(ddp.module[0].weight, NAN) if t.rank == 0 else None
    try:
        backward(ddp, batch(t))
    finally:
        if handle is not None:
            handle.remove()


def has_stepped(ddp: DDP, before: list[Tensor]) -> list[bool]:
    """By parameter; none may be NaN."""
    assert all(bool(p.isfinite().all()) for p in ddp.module.parameters())
    return [not torch.equal(p, old) for p, old in zip(ddp.module.parameters(), before, strict=True)]


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_come_another_way_are_stepped(size: int, kwargs: dict[str, Any]) -> None:
    def rank(t: Transport) -> None:
        ddp, optimizer, before = discarded_once(t, **kwargs)
        for parameter in ddp.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert has_stepped(ddp, before) == [True] * 6

    each_rank(rank, size)


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_done_to_discarded_gradients_makes_them_no_better(size: int, kwargs: dict[str, Any]) -> None:
    def rank(t: Transport) -> None:
        ddp, optimizer, before = discarded_once(t, **kwargs)
        poison_once(t, ddp)
        ddp.module[4].zero_grad()
        ddp.clip_grad_norm_(1.0)
        for parameter in ddp.module[0].parameters():
            parameter.grad.nan_to_num_()
        gc.collect()
        for _ in range(2):
            optimizer.step()
        assert has_stepped(ddp, before) == [False] * 6

    each_rank(rank, size)


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_rows_that_were_discarded_are_not_stepped() -> None:
    def rank(t: Transport) -> None:
        net = Sparse()
        ddp = DDP(net, process_group=t, on_nonfinite="skip")
        optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1))
        before = [p.detach().clone() for p in net.parameters()]
        for is_bad in (True, False):
            optimizer.zero_grad()
            loss = ddp(torch.tensor([t.rank, 3])).sum()
            (loss * (NAN if is_bad and t.rank == 1 else 1.0)).backward()
            gc.collect()
            optimizer.step()
            assert any(has_stepped(ddp, before)) is not is_bad

    each_rank(rank)


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_alone_what_ran_under_no_sync_is_looked_at_when_it_is_stepped() -> None:
    t = ThreadGroup(1).transport(0)
    ddp, optimizer, before = discarded_once(t)
    with ddp.no_sync():
        backward(ddp, batch(t))
    optimizer.step()
    assert ddp.last_step.nonfinite.outcome == "finite"
    assert has_stepped(ddp, before) == [True] * 6
    before = [p.detach().clone() for p in ddp.module.parameters()]
    with ddp.no_sync():
        poison_once(t, ddp)
        backward(ddp, batch(t))
    for _ in range(2):
        optimizer.step()
    assert (ddp.last_step.nonfinite.outcome, ddp.last_step.nonfinite.num_steps) == ("discarded", 2)
    assert has_stepped(ddp, before) == [False] * 6
    optimizer.zero_grad(set_to_none=False)
    with ddp.no_sync():
        backward(ddp, batch(t))
    optimizer.step()
    assert has_stepped(ddp, before) == [True] * 6


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("is_bad", [False, True])
def test_when_replicas_are_found_to_differ_gradients_have_been_judged(
    is_bad: bool, kwargs: dict[str, Any]
) -> None:
    def rank(t: Transport) -> None:
        options = {"replica_check": ReplicaCheck(every=1), **kwargs}
        if is_bad:
            ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="skip", **options)
            optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        else:
            ddp, optimizer, _ = discarded_once(t, **options)
        with torch.no_grad():
            ddp.module[0].bias[0] += t.rank
        before = [p.detach().clone() for p in ddp.module.parameters()]
        with pytest.raises(ReplicaDivergence):
            poison_once(t, ddp) if is_bad else backward(ddp, batch(t))
        optimizer.step()
        assert has_stepped(ddp, before) == [not is_bad] * 6

    each_rank(rank)


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_a_backward_that_failed_are_not_stepped(size: int) -> None:
    def rank(t: Transport) -> None:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite="skip")
        optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1))
        before = [p.detach().clone() for p in net.parameters()]
        net[0](batch(t)).sum().mul(NAN).backward()  # without the rest
        with pytest.raises(UnreducedGradients):
            optimizer.step()
        optimizer.step()
        assert has_stepped(ddp, before) == [False] * 6
        optimizer.zero_grad()
        backward(ddp, batch(t))
        optimizer.step()
        assert has_stepped(ddp, before) == [True] * 6

    each_rank(rank, size)


def test_without_skip_a_mark_is_on_no_gradient() -> None:
    def rank(t: Transport, policy: str) -> list[dict[str, Any]]:
        ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite=policy)
        with contextlib.suppress(NonFiniteGradient):
            poison_once(t, ddp)
        return [vars(p.grad) for p in ddp.parameters()]

    for policy in ("ignore", "raise"):
        assert each_rank(lambda t, p=policy: rank(t, p)) == [[{}] * 6] * 2


# ---------------------------------------------------------------------- zero


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("name", "value"), [("0.weight", NAN), ("0.bias", INF), ("4.weight", -INF)])
def test_only_what_is_not_finite_counts_as_zero(name: str, value: float, view: bool) -> None:
    def rank(t: Transport, value: float | None, policy: str) -> list[Tensor]:
        ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite=policy, gradient_as_bucket_view=view)
        if t.rank == 1:
            put(ddp.module.get_parameter(name), 0.0 if value is None else value)
        backward(ddp, batch(t))
        if value is not None:
            assert ddp.last_step.nonfinite.outcome == "zeroed"
        return [p.grad for p in ddp.module.parameters()]

    expected = each_rank(lambda t: rank(t, None, "ignore"))[0]
    results: list[Any] = []
    texts = quietly(lambda: results.extend(each_rank(lambda t: rank(t, value, "zero"))))
    for one in results:
        assert all(torch.equal(a, b) for a, b in zip(one, expected, strict=True))
    assert len(texts) == 1
    assert 'count as zero (on_nonfinite="zero", 1 step so far):\n  rank 1: ' + name in texts[0]


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_zero_with_items_counted() -> None:
    def rank(t: Transport) -> list[bool]:
        ddp = poisoned(t, on_nonfinite="zero")
        with ddp.normalize_by(2 + t.rank):
            ddp(batch(t)).square().sum().backward()
        assert ddp.last_step.divisor == 5
        return finite_gradients(ddp)

    assert all(all(one) for one in each_rank(rank))


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_zero_of_sparse_rows() -> None:
    module = Sparse()  # here, for threads that draw at once share a generator

    def rank(t: Transport) -> Tensor:
        ddp = DDP(copy.deepcopy(module), process_group=t, on_nonfinite="zero")
        weight = torch.ones(2, 1)
        weight[1] = INF if t.rank == 1 else 1.0
        (ddp(torch.tensor([t.rank, t.rank + 1])) * weight).sum().backward()
        return ddp.module.table.weight.grad.to_dense()

    head = module.head.weight.detach()[0]
    expected = torch.zeros(6, 3)
    expected[0] = head / 2
    expected[1] = head  # of both; rank 1's infinite row 2 counts as zero
    for one in each_rank(rank):
        torch.testing.assert_close(one, expected)


# ---------------------------------------------------------------------- a mean that is not finite by itself


def half_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False, dtype=torch.float16)


def test_undivided_sums_that_overflow_are_found_in_the_mean() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(half_linear(), process_group=t, on_nonfinite="raise")
        with ddp.normalize_by(1):
            ddp(torch.full((1, 2), 6e4, dtype=torch.float16)).sum().backward()

    error = raised(rank)
    assert (error.found, error.in_mean) == ({}, ("weight",))
    assert "Each rank's own gradients are finite" in str(error)


def test_a_mean_is_not_blamed_for_what_a_rank_has_sent() -> None:
    def rank(t: Transport) -> None:
        ddp = poisoned(t, on_nonfinite="raise")
        with ddp.normalize_by(5):
            ddp(batch(t)).square().sum().backward()

    error = raised(rank)
    assert (error.found, error.in_mean) == ({1: ("2.weight",)}, ())


def test_a_mean_that_does_not_fit_in_the_parameters_type_is_found() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(half_linear(), process_group=t, reduce_dtype=torch.float32, on_nonfinite="raise")
        for _ in range(2):
            with ddp.normalize_by(1):
                ddp(torch.full((1, 2), 5e4 if t.rank else 1e2, dtype=torch.float16)).sum().backward()
            ddp.zero_grad()
        with ddp.normalize_by(t.rank):
            ddp(torch.full((1, 2), 5e4, dtype=torch.float16)).sum().backward()

    error = raised(rank)
    assert (error.step, error.in_mean) == (3, ("weight",))


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_an_overflow_in_the_mean_is_skipped_or_zeroed(policy: Any) -> None:
    def rank(t: Transport) -> tuple[str, list[bool]]:
        ddp = DDP(half_linear(), process_group=t, on_nonfinite=policy)
        before = ddp.module.weight.detach().clone()
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=1.0))
        with ddp.normalize_by(1):
            ddp(torch.tensor([[6e4, 1.0]], dtype=torch.float16)).sum().backward()
        optimizer.step()
        moved = (ddp.module.weight != before).flatten().tolist()
        return ddp.last_step.nonfinite.outcome, moved

    expected = ("discarded", [False, False]) if policy == "skip" else ("zeroed", [False, True])
    assert each_rank(rank) == [expected] * 2


def test_what_a_hook_makes_of_finite_gradients_is_looked_at() -> None:
    def overflow(state: object, bucket: Any) -> Any:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().mul_(1e30).mul_(1e30))
        return future

    def rank(t: Transport) -> None:
        ddp = DDP(nn.Linear(2, 1, bias=False), process_group=t, on_nonfinite="raise")
        ddp.register_comm_hook(None, overflow)
        ddp(torch.ones(1, 2)).sum().backward()

    error = raised(rank)
    assert (error.found, error.in_mean) == ({}, ("weight",))


# ---------------------------------------------------------------------- compression


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("compression", [Quantize(8), TopK(0.1), PowerSGD(2), Cast()], ids=str)
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
def test_nothing_that_is_not_finite_gets_into_what_compression_keeps(policy: Any, compression: Any) -> None:
    def rank(t: Transport) -> str:
        ddp = DDP(copy.deepcopy(NET), process_group=t, compression=compression, on_nonfinite=policy)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.01))
        outcome = ""
        for step in range(4):
            optimizer.zero_grad()
            handle = put(ddp.module[2].weight, NAN) if (t.rank, step) == (1, 1) else None
            backward_and_step(ddp, optimizer, batch(t, step))
            if step == 1:
                outcome = ddp.last_step.nonfinite.outcome
                assert ddp.last_step.nonfinite.found == {1: ("2.weight",)}
            if handle is not None:
                handle.remove()
            assert all(finite_gradients(ddp))
        state = ddp.sync_state_dict()["compression"]
        assert all(bool(kept.isfinite().all()) for kept in state.values())
        assert all(bool(p.isfinite().all()) for p in ddp.parameters())
        return outcome

    assert each_rank(rank) == [{"raise": "raised", "skip": "discarded", "zero": "zeroed"}[policy]] * 2


def test_a_cast_that_overflows_is_found_in_the_mean() -> None:
    def rank(t: Transport) -> None:
        net = nn.Linear(2, 1, bias=False)
        ddp = DDP(net, process_group=t, compression=Cast(torch.float16), on_nonfinite="raise")
        ddp(torch.full((1, 2), 1e6)).sum().backward()

    assert raised(rank).in_mean == ("weight",)


# ---------------------------------------------------------------------- shards, joins, alone, outside


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
def test_sharded_replicas(policy: Any) -> None:
    def rank(t: Transport) -> tuple[str, list[Tensor]]:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, sharded=True, bucket_cap_mb=0.001, on_nonfinite=policy)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
        outcome = ""
        for step in range(4):
            optimizer.zero_grad()
            handle = (
                put(net[0].weight, NAN if policy != "zero" else INF) if (t.rank, step) == (1, 2) else None
            )
            backward_and_step(ddp, optimizer, batch(t, step))
            if step == 2:
                outcome = ddp.last_step.nonfinite.outcome
                assert ddp.last_step.nonfinite.found == {1: ("0.weight",)}
            if handle is not None:
                handle.remove()
        return outcome, [p.detach().clone() for p in net.parameters()]

    (outcome, one), (_, other) = each_rank(rank)
    assert outcome == {"raise": "raised", "skip": "discarded", "zero": "zeroed"}[policy]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(bool(p.isfinite().all()) for p in one)
    if policy != "zero":
        for a, b in zip(one, without({2}, num_steps=4), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_alone() -> None:
    t = ThreadGroup(1).transport(0)
    with pytest.raises(NonFiniteGradient, match=r"rank 0: 2\.weight \(NaN in 1 of 1600 elements\)"):
        backward(poisoned(t, rank=0, on_nonfinite="raise"), batch(t))
    ddp = poisoned(t, rank=0, on_nonfinite="zero")
    with ddp.normalize_by(2):
        backward(ddp, batch(t))
    assert all(finite_gradients(ddp))
    assert ddp.last_step.nonfinite.found == {0: ("2.weight",)}
    ddp, optimizer = train(t, "skip", bad={(0, 0): INF}, num_steps=3)
    assert ddp.last_step.nonfinite.num_steps == 1
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    assert ddp.contract["gradients"].how == "not finite: no rank steps"
    assert "all gradients are finite (not finite in 1 step so far)" in " ".join(ddp.explain().split())


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_gradients_reduced_outside_of_a_backward() -> None:
    def rank(t: Transport) -> list[str]:
        ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="skip")
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        outcomes = []
        for step in range(3):
            handle = put(ddp.module[0].bias, NAN) if (t.rank, step) == (1, 1) else None
            optimizer.zero_grad()
            with ddp.no_sync():
                backward(ddp, batch(t, step))
            sync_gradients_(ddp)
            optimizer.step()
            outcomes.append(ddp.last_step.nonfinite.outcome)
            if step == 1:
                assert ddp.last_step.nonfinite.in_mean == ("0.bias",)
            if handle is not None:
                handle.remove()
        assert all(bool(p.isfinite().all()) for p in ddp.parameters())
        return outcomes

    assert each_rank(rank) == [["finite", "discarded", "finite"]] * 2


# ---------------------------------------------------------------------- a GradScaler owns what is not finite


def scaled_training(t: Transport, policy: str, **kwargs: Any) -> tuple[list[Tensor], list[float], list[str]]:
    """A gradient overflows on rank 1 in step 1 and on rank 0 in step 4."""
    net = copy.deepcopy(NET)
    ddp = DDP(net, process_group=t, on_nonfinite=policy, **kwargs)
    optimizer = ddp.attach(torch.optim.AdamW(net.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales, outcomes = [], []
    for step in range(6):
        handle = put(net[2].weight, INF) if (t.rank, step) in {(1, 1), (0, 4)} else None
        optimizer.zero_grad()
        scaler.scale(ddp(batch(t, step)).square().mean()).backward()
        if ddp.last_step.nonfinite is not None:
            outcomes.append(ddp.last_step.nonfinite.outcome)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if handle is not None:
            handle.remove()
    return [p.detach().clone() for p in net.parameters()], scales, outcomes


@pytest.mark.parametrize(
    "kwargs", [{}, {"gradient_as_bucket_view": True}, {"sharded": True}, {"bucket_cap_mb": 0.001}]
)
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
def test_with_a_scaler_everything_is_as_if_ignored_bit_for_bit(policy: str, kwargs: dict[str, Any]) -> None:
    expected = each_rank(lambda t: scaled_training(t, "ignore", **kwargs))
    assert expected[0][1] == [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]
    for mine, theirs in zip(each_rank(lambda t: scaled_training(t, policy, **kwargs)), expected, strict=True):
        assert mine[1] == theirs[1]
        assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))
        left = "left to the GradScaler"
        assert mine[2] == ["finite", left, "finite", "finite", left, "finite"]


def test_a_scaler_sees_what_compression_was_not_given() -> None:
    for compression in (Quantize(8), TopK(0.5)):
        for parameters, scales, _ in each_rank(
            lambda t, c=compression: scaled_training(t, "skip", compression=c)
        ):
            assert scales == [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]
            assert all(bool(p.isfinite().all()) for p in parameters)


def test_with_a_scaler_alone() -> None:
    expected = each_rank(lambda t: scaled_training(t, "ignore"), size=1)[0]
    for policy in ("raise", "skip", "zero"):
        parameters, scales, _ = each_rank(lambda t, p=policy: scaled_training(t, p), size=1)[0]
        assert scales == expected[1]
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected[0], strict=True))


@pytest.mark.parametrize("enabled", [False, True])
def test_a_scaler_that_does_not_scale_owns_nothing(enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    if not enabled:
        scaler.scale(torch.ones(()))

    assert raised(lambda t: backward(poisoned(t, on_nonfinite="raise"), batch(t))).found == {1: ("2.weight",)}
    del scaler


def test_a_scaler_of_a_subclass_is_one() -> None:
    class Mine(torch.amp.GradScaler):
        pass

    scaler = Mine("cpu")
    assert not is_scaler_in_use()
    scaler.scale(torch.ones(()))
    assert is_scaler_in_use()
    del scaler
    assert not is_scaler_in_use(), "it is not kept alive"


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


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


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("make", [lambda: torch.amp.GradScaler("cpu"), of_cuda, lambda: OwnScale("cpu")])
def test_a_frozen_scaler_is_found(make: Callable[[], torch.amp.GradScaler]) -> None:
    scaler = make()
    scaler.scale(torch.ones(()))
    gc.freeze()
    assert is_scaler_in_use()
    note_scalers()
    assert is_scaler_in_use()
    del scaler
    assert not is_scaler_in_use(), "it is not kept alive"


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
def test_a_scaler_owns_what_is_not_finite_after_a_freeze(policy: Any) -> None:
    t = ThreadGroup(1).transport(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    gc.freeze()
    ddp = DDP(copy.deepcopy(NET), process_group=t, on_nonfinite=policy)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    before = [p.detach().clone() for p in ddp.module.parameters()]
    put(ddp.module[2].weight, INF)
    scaler.scale(ddp(batch(t)).square().mean()).backward()
    assert ddp.last_step.nonfinite.outcome == "left to the GradScaler"
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert has_stepped(ddp, before) == [False] * 6


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
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_scaler_that_is_older_than_the_first_wrapper_is_found(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first wrapper of a process searches for scalers. It cannot find a frozen one before that scales a loss."""
    monkeypatch.setattr("syncline._torch.optimizers._scalers", weakref.WeakSet())
    for name in ("__init__", "scale", "_lazy_init_scale_growth_tracker"):
        monkeypatch.setattr(torch.amp.GradScaler, name, vars(torch.amp.GradScaler)[name].__wrapped__)
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


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
@pytest.mark.parametrize("name", ["0.weight", "4.bias"])
def test_what_is_looked_at_later_is_found_before_anyone_steps(
    name: str, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.gradients.riders.roster.NonFiniteWatch", OnAccelerator)

    def rank(t: Transport) -> str:
        ddp = poisoned(t, name, bucket_cap_mb=0.001, on_nonfinite=policy)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        text = backward_and_step(ddp, optimizer, batch(t))
        assert (f"rank 1: {name} (NaN)" in text) is (policy == "raise")
        assert ddp.last_step.nonfinite.found == {1: (name,)}
        assert all(bool(p.isfinite().all()) for p in ddp.parameters())
        return ddp.last_step.nonfinite.outcome

    assert each_rank(rank) == [{"raise": "raised", "skip": "discarded", "zero": "zeroed"}[policy]] * 2


# ---------------------------------------------------------------------- arguments, contract, words


def test_what_is_not_known_or_does_not_go_together_is_refused() -> None:
    t = ThreadGroup(1).transport(0)
    with pytest.raises(ValueError, match=r"one of 'ignore', 'warn', 'raise', 'skip', 'zero', got 'warm'"):
        DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="warm")
    with pytest.raises(ValueError, match=r"cannot be combined with strategy=LocalSGD.*EveryStep"):
        DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="skip", strategy=LocalSGD(4))


def test_ranks_agree_on_the_policy() -> None:
    def rank(t: Transport) -> str:
        with pytest.raises(ContractMismatch) as caught:
            DDP(copy.deepcopy(NET), process_group=t, on_nonfinite="raise" if t.rank else "skip")
        return str(caught.value)

    one, other = each_rank(rank)
    assert one == other
    assert "on_nonfinite\n    expected skip (rank 0)\n    got      raise (rank 1)" in one


def test_contract_and_timeline_say_it() -> None:
    def rank(t: Transport) -> list[str]:
        ddp = poisoned(t, "0.bias", on_nonfinite="skip")
        ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        planned = ddp.explain()
        backward(ddp, batch(t))
        texts = (planned, str(ddp.contract), ddp.explain())
        return [ddp.contract["gradients"].how, *(" ".join(text.split()) for text in texts)]

    results: list[Any] = []
    quietly(lambda: results.extend(each_rank(rank)))
    how, planned, contract, recorded = results[0]
    assert how == "mean, all_reduce; not finite: no rank steps"
    assert "; a gradient that is not finite: no rank steps" in planned
    assert "not finite: discarded" in contract
    assert "not finite on rank 1: 0.bias -> discarded (1 step so far)" in recorded


def test_with_ignore_nobody_looks() -> None:
    def rank(t: Transport) -> None:
        ddp = poisoned(t, on_nonfinite="ignore")
        backward(ddp, batch(t))
        assert ddp.last_step.nonfinite is None
        assert "finite" not in str(ddp.contract) + ddp.explain()
        assert finite_gradients(ddp) == [name != "2.weight" for name in NAMES]

    each_rank(rank)


def test_the_policy_goes_on_when_the_module_changes() -> None:
    def rank(t: Transport) -> None:
        ddp, optimizer = train(t, "skip", bad={(1, 2): NAN}, num_steps=3)
        assert ddp.last_step.nonfinite.num_steps == 1
        added = nn.Linear(2, 2)
        for parameter in added.parameters():
            nn.init.constant_(parameter, 0.1)  # equal on both ranks, or it is an error
        ddp.module.append(added)
        optimizer.add_param_group({"params": list(added.parameters())})
        optimizer.zero_grad()
        if t.rank == 0:
            put(added.weight, NAN)
        backward(ddp, batch(t))
        assert ddp.last_step.nonfinite.found == {0: ("5.weight",), 1: ("2.weight",)}
        assert ddp.last_step.nonfinite.num_steps == 2
        before = added.weight.detach().clone()
        optimizer.step()
        assert torch.equal(added.weight, before)

    quietly(lambda: each_rank(rank))
