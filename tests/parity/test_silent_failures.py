"""What torch's class gets wrong without a word, one by one: right here, or an error with a name on every rank.

On ranks as threads; what only shows between processes is in `tests/fault/test_loud_failures.py`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from support.threads import on_threads
from syncline import (
    ContractMismatch,
    NonFiniteGradient,
    ReplicaDivergence,
    SynclineError,
    UnevenInputs,
    UnreducedGradients,
)
from syncline import DistributedDataParallel as DDP
from syncline.transport import Transport, run_ranks

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
NORMED = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def wrapped(t: Transport, module: nn.Module = NET, **options: Any) -> Any:
    return DDP(copy.deepcopy(module), process_group=t, **options)


def with_optimizer(t: Transport) -> tuple[Any, torch.optim.Optimizer]:
    ddp = wrapped(t)
    return ddp, ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))


def half_frozen() -> nn.Sequential:
    net = copy.deepcopy(NET)
    net[0].requires_grad_(False)
    return net


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def backward(ddp: nn.Module, t: Transport, step: int = 0) -> None:
    loss_of(ddp, batch(t.rank, step)).backward()


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def expected_gradients(module: nn.Module, *, steps: tuple[int, ...] = (0,), size: int = 2) -> list[Tensor]:
    """What one process gets from all ranks' batches: the sum over steps of the mean over ranks."""
    module = copy.deepcopy(module)
    for step, rank in itertools.product(steps, range(size)):
        (loss_of(module, batch(rank, step)) / size).backward()
    return gradients(module)


def raised_on_each_rank(kind: type[SynclineError], fn: Callable[[Transport], Any]) -> str:
    """The text of the error that `fn` raises on both ranks."""

    def rank(t: Transport) -> str:
        with pytest.raises(kind) as caught:
            fn(t)
        return str(caught.value)

    texts = run_ranks(2, rank)
    assert len(set(texts)) == 1, texts
    return texts[0]


# ---------------------------------------------------------------------- which backwards are reduced


def through_the_module(ddp: Any, t: Transport) -> None:
    backward(ddp.module, t)


def two_forwards_then_two_backwards(ddp: Any, t: Transport) -> None:
    first, second = (loss_of(ddp, batch(t.rank, step)) for step in (0, 1))
    first.backward()
    second.backward()


def one_graph_twice(ddp: Any, t: Transport) -> None:
    loss = loss_of(ddp, batch(t.rank))
    loss.backward(retain_graph=True)
    loss.backward()


def no_sync_first(ddp: Any, t: Transport) -> None:
    with ddp.no_sync():
        backward(ddp, t, 0)
    backward(ddp, t, 1)


@on_threads(2)
def test_each_backward_is_reduced(t: Transport) -> None:
    for program, steps, options in (
        (through_the_module, (0,), {}),
        (two_forwards_then_two_backwards, (0, 1), {}),
        (one_graph_twice, (0, 0), {}),
        (no_sync_first, (0, 1), {"static_graph": True}),
    ):
        ddp = wrapped(t, **options)
        program(ddp, t)
        with case(program.__name__):
            torch.testing.assert_close(gradients(ddp), expected_gradients(NET, steps=steps))
            assert ddp.last_step.synchronized


@on_threads(2)
def test_autograd_grad_is_local_as_documented_and_disturbs_nothing(t: Transport) -> None:
    for static_graph in (False, True):
        ddp = wrapped(t, static_graph=static_graph)
        x = batch(t.rank)[0].clone().requires_grad_()
        torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
        assert ddp.last_step is None
        local = torch.autograd.grad(loss_of(ddp, batch(t.rank)), list(ddp.parameters()))
        alone = copy.deepcopy(NET)
        backward(alone, t)
        torch.testing.assert_close(list(local), gradients(alone))
        assert ddp.last_step is None
        backward(ddp, t)
        torch.testing.assert_close(gradients(ddp), expected_gradients(NET))


@on_threads(2)
def test_no_sync_around_the_forward_or_the_backward_keeps_gradients_local(t: Transport) -> None:
    around_forward, around_backward, alone = wrapped(t), wrapped(t), copy.deepcopy(NET)
    with around_forward.no_sync():
        loss = loss_of(around_forward, batch(t.rank))
    loss.backward()
    loss = loss_of(around_backward, batch(t.rank))
    with around_backward.no_sync():
        loss.backward()
    backward(alone, t)
    torch.testing.assert_close(gradients(around_forward), gradients(alone))
    torch.testing.assert_close(gradients(around_backward), gradients(alone))


# ---------------------------------------------------------------------- a module that changes after wrapping


@on_threads(2)
def test_unfrozen_after_wrapping_is_reduced_from_then_on(t: Transport) -> None:
    ddp = wrapped(t, half_frozen())
    net = ddp.module
    optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    backward(ddp, t)
    assert net[0].weight.grad is None
    optimizer.zero_grad()
    net[0].requires_grad_(True)
    backward(ddp, t)
    torch.testing.assert_close(gradients(net), expected_gradients(NET))
    assert ddp.contract["gradients"].size.startswith("4 tensors")
    assert ddp.last_step.step == 2, "steps are counted on"


@on_threads(2)
def test_added_or_replaced_after_wrapping_is_reduced(t: Transport) -> None:
    ddp = wrapped(t)
    backward(ddp, t)
    ddp.zero_grad()
    added = nn.Linear(2, 2)
    nn.init.constant_(added.weight, 1.0)
    nn.init.constant_(added.bias, 0.0)
    ddp.module.append(added)
    ddp.module[0].weight = nn.Parameter(torch.full((4, 3), 0.1))
    backward(ddp, t)
    torch.testing.assert_close(gradients(ddp), expected_gradients(ddp.module))


@on_threads(2)
def test_a_change_is_followed_where_the_forward_ran_under_no_sync_and_the_backward_did_not(
    t: Transport,
) -> None:
    ddp = wrapped(t, half_frozen())
    ddp.module[0].requires_grad_(True)
    with ddp.no_sync():
        loss = loss_of(ddp, batch(t.rank))
    loss.backward()
    backward(ddp, t)
    torch.testing.assert_close(gradients(ddp), expected_gradients(NET, steps=(0, 0)))


@on_threads(2)
def test_what_was_counted_and_accumulated_before_a_change_is_reduced_with_it(t: Transport) -> None:
    ddp = wrapped(t, half_frozen(), find_unused_parameters=True)
    net = ddp.module
    num_items = 1 + 2 * t.rank  # 4 on both ranks together
    with ddp.no_sync(), ddp.normalize_by(num_items):
        backward(ddp, t)
    net[0].requires_grad_(True)
    with ddp.normalize_by(num_items):
        net.forward = net[0].forward  # of the other layer there is only what was accumulated
        backward(ddp, t, 1)
    first = expected_gradients(nn.Sequential(net[0], nn.Tanh(), net[2]))[2:]
    second = expected_gradients(net[0], steps=(1,))
    torch.testing.assert_close(gradients(net), [gradient * 2 / 8 for gradient in (*second, *first)])


def test_added_with_different_values_is_an_error_that_names_the_remedy() -> None:
    def fn(t: Transport) -> None:
        ddp = wrapped(t)
        added = nn.Linear(2, 2)
        nn.init.constant_(added.weight, t.rank + 1.0)
        nn.init.constant_(added.bias, 0.0)
        ddp.module.append(added)
        backward(ddp, t)

    text = raised_on_each_rank(ContractMismatch, fn)
    assert "values of 3.weight" in text
    assert "3.bias" not in text
    assert "sl.broadcast_(ddp.module)" in text


@on_threads(2)
def test_a_change_on_one_rank_that_was_undone_before_the_backward_is_none(t: Transport) -> None:
    """Rank 0 evaluates something with more parameters than it trains, in grad mode and alone."""
    ddp = wrapped(t, half_frozen())
    backward(ddp, t)
    ddp.zero_grad()
    if t.rank == 0:
        ddp.module[0].requires_grad_(True)
        ddp.eval()(batch(t.rank))
        ddp.train().module[0].requires_grad_(False)
    backward(ddp, t)
    torch.testing.assert_close(gradients(ddp), expected_gradients(half_frozen()))


@on_threads(2)
def test_ranks_that_differ_in_hooks_are_told_so_again_in_each_backward(t: Transport) -> None:
    def hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        raise AssertionError("never called")

    ddp = wrapped(t)
    if t.rank:
        ddp.register_comm_hook(None, hook)
    for _ in range(2):
        with pytest.raises(
            ContractMismatch, match=r"communication hook\s+expected none \(rank 0\)\s+got +.*hook"
        ):
            backward(ddp, t)


@on_threads(2)
def test_a_model_moved_to_another_type_after_wrapping_is_reduced_in_it(t: Transport) -> None:
    for view in (False, True):
        ddp = wrapped(t, gradient_as_bucket_view=view)
        backward(ddp, t)
        ddp.zero_grad()
        ddp.double()
        loss_of(ddp, batch(t.rank).double()).backward()
        doubles = [g.double() for g in expected_gradients(NET)]
        torch.testing.assert_close(gradients(ddp), doubles, rtol=1e-5, atol=1e-6)
        ddp.module.to(torch.bfloat16)
        ddp.zero_grad()
        loss_of(ddp, batch(t.rank).bfloat16()).backward()
        assert ddp.module[0].weight.grad.dtype is torch.bfloat16


def test_ranks_that_change_their_modules_differently_are_told_the_difference() -> None:
    changes: list[tuple[Callable[[Any], object], str]] = [
        (lambda net: net[2].requires_grad_(False), "requires_grad=False"),
        (lambda net: net.append(nn.Linear(2, 2)), "3.weight"),
        (lambda net: net.double(), "torch.float64"),
    ]

    def fn(t: Transport, change: Callable[[Any], object]) -> None:
        ddp = wrapped(t, half_frozen())
        net = ddp.module
        backward(ddp, t)
        net[0].requires_grad_(True)  # both change, so both look
        if t.rank == 1:
            change(net)
        ddp(batch(t.rank).to(net[0].weight.dtype)).float().sum().backward()

    for change, words in changes:
        assert words in raised_on_each_rank(ContractMismatch, functools.partial(fn, change=change))


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(("policy", "expected"), [("broadcast", [1.0, 2.0]), ("average", [1.5, 3.0])])
def test_a_buffer_replaced_by_one_of_another_shape_is_right_on_all_ranks_or_an_error(
    policy: Any, expected: list[float]
) -> None:
    def rank(t: Transport) -> None:
        ddp = wrapped(t, Cache(), buffers=policy)
        ddp.module.seen = torch.tensor([1.0, 2.0]) * (t.rank + 1)
        backward(ddp, t)
        assert ddp.module.seen.tolist() == expected

    run_ranks(2, rank)

    def fn(t: Transport) -> None:
        ddp = wrapped(t, Cache(), buffers=policy)
        ddp.module.seen = torch.zeros(2 + t.rank)
        ddp(batch(t.rank))

    assert "seen" in raised_on_each_rank(ContractMismatch, fn)


# ---------------------------------------------------------------------- ranks that do different things


def test_a_learning_rate_changed_on_one_rank_is_an_error_before_anyone_steps() -> None:
    def fn(t: Transport) -> None:
        ddp, optimizer = with_optimizer(t)
        for step in range(3):
            if (step, t.rank) == (2, 1):
                optimizer.param_groups[0]["lr"] = 0.3
            optimizer.zero_grad()
            backward(ddp, t, step)
            optimizer.step()

    text = raised_on_each_rank(ContractMismatch, fn)
    assert "step 3" in text
    assert "lr of optimizer 0 (AdamW), param_groups[0]" in text
    assert "expected 0.1 (rank 0)" in text
    assert "got      0.3 (rank 1)" in text
    assert "weight_decay" not in text, "what is equal is not listed"


def test_a_learning_rate_changed_between_backward_and_step_is_an_error_too() -> None:
    def fn(t: Transport) -> None:
        ddp, optimizer = with_optimizer(t)
        backward(ddp, t)
        optimizer.param_groups[0]["lr"] = 0.1 * (t.rank + 2)  # both change it, to different values
        optimizer.step()

    text = raised_on_each_rank(ContractMismatch, fn)
    assert "expected 0.2 (rank 0)" in text
    assert "got      0.3" in text


@on_threads(2)
def test_a_learning_rate_that_all_ranks_change_is_fine(t: Transport) -> None:
    ddp, optimizer = with_optimizer(t)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.3 + step
        backward(ddp, t, step)
        optimizer.param_groups[0]["lr"] = 0.4 + step
        optimizer.step()


def test_a_step_more_on_one_rank_is_an_error_at_the_next_backward() -> None:
    def fn(t: Transport) -> None:
        ddp, optimizer = with_optimizer(t)
        backward(ddp, t)
        if t.rank == 1:
            optimizer.step()
        backward(ddp, t)

    text = raised_on_each_rank(ContractMismatch, fn)
    assert "steps of optimizer 0 (AdamW)" in text
    assert "got      1 (rank 1)" in text


@on_threads(2)
def test_a_step_with_unreduced_gradients_is_refused(t: Transport) -> None:
    ddp, optimizer = with_optimizer(t)
    with ddp.no_sync():
        backward(ddp, t)
    with pytest.raises(SynclineError, match="clip_grad_norm_"):
        ddp.clip_grad_norm_(1.0)
    with pytest.raises(SynclineError, match="no_sync"):
        optimizer.step()
    backward(ddp, t)
    optimizer.step()


def train_with_a_nan(t: Transport, policy: Any) -> list[Tensor]:
    """On rank 1, in the third step."""
    ddp = wrapped(t, on_nonfinite=policy)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))
    for step in range(4):
        loss = loss_of(ddp, batch(t.rank, step))
        (loss * float("nan") if (t.rank, step) == (1, 2) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in ddp.parameters()]


def test_a_gradient_that_is_not_finite_on_one_rank_is_named_before_anyone_steps() -> None:
    text = raised_on_each_rank(NonFiniteGradient, lambda t: train_with_a_nan(t, "raise"))
    assert text.startswith("step 3, backward")
    assert "rank 1: 0.weight (NaN in 12 of 12 elements), 0.bias" in text
    assert "rank 0" not in text


@pytest.mark.filterwarnings("ignore:step 3, backward:RuntimeWarning")
def test_a_gradient_that_is_not_finite_on_one_rank_does_not_spoil_the_weights() -> None:
    for policy in ("skip", "zero"):
        one, other = run_ranks(2, lambda t, policy=policy: train_with_a_nan(t, policy))
        with case(policy):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            assert all(bool(p.isfinite().all()) for p in one)


@pytest.mark.filterwarnings("ignore:step 3, backward. rank 1 ran forwards:RuntimeWarning")
@on_threads(2)
def test_a_batch_skipped_on_one_rank_is_an_error_where_its_batches_end(t: Transport) -> None:
    """Rank 1 skips the backward of its third batch: its loss was not finite, say."""
    ddp = wrapped(t)
    for step in range(4):
        loss = loss_of(ddp, batch(t.rank, step))
        if (t.rank, step) == (1, 2):
            continue
        if (t.rank, step) == (0, 3):
            with pytest.raises(UnevenInputs, match="step 4"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.filterwarnings("ignore:step 1, backward. rank 0 ran forwards:RuntimeWarning")
@on_threads(2)
def test_forwards_of_one_rank_that_need_no_backward_are_none_of_the_others_business(t: Transport) -> None:
    """Train accuracy on rank 0, in training mode and in grad mode; also before the first step."""
    for is_kept in (False, True):
        ddp = wrapped(t)
        kept = []
        for step in range(3):
            if t.rank == 0:
                output = ddp(batch(t.rank, step))
                kept += [output] if is_kept else []
                del output
            backward(ddp, t, step)
        torch.testing.assert_close(gradients(ddp), expected_gradients(NET, steps=(0, 1, 2)))


@on_threads(2)
def test_forwards_whose_backward_no_rank_runs_or_that_need_none_are_fine(t: Transport) -> None:
    ddp = wrapped(t)
    for step in range(4):
        loss = loss_of(ddp, batch(t.rank, step))
        if step != 2:
            loss.backward()
    for step in range(2):  # different numbers for one backward
        losses = [loss_of(ddp, batch(t.rank, part)) for part in range(1 + t.rank + step)]
        torch.stack(losses).sum().backward()
    if t.rank == 0:
        with torch.no_grad():
            ddp(batch(t.rank))
        ddp.eval()
        ddp(batch(t.rank))
        ddp.train()
    backward(ddp, t)


# ---------------------------------------------------------------------- unused parameters, and buffers at the end


def test_an_unused_parameter_is_an_error_at_this_backward_by_name() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, *, both: bool) -> Tensor:
            return self.always(x) + self.sometimes(x) if both else self.always(x)

    text = raised_on_each_rank(
        UnreducedGradients,
        lambda t: wrapped(t, Branches())(batch(t.rank), both=t.rank == 0).sum().backward(),
    )
    assert "step 1" in text
    assert "on rank 1: sometimes.weight, sometimes.bias" in text


def test_buffers_can_be_made_equal_after_the_last_step() -> None:
    def rank(t: Transport) -> Tensor:
        ddp = wrapped(t, NORMED)
        for step in range(3):
            backward(ddp, t, step)
        before = ddp.module[1].running_mean.clone()
        ddp.sync_buffers_()
        if t.rank == 1:
            assert not torch.equal(before, ddp.module[1].running_mean), "they had drifted in the last step"
        return ddp.module[1].running_mean

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


# ---------------------------------------------------------------------- weights that drift apart


def test_a_weight_changed_on_one_rank_after_construction_is_noticed() -> None:
    def fn(t: Transport) -> None:
        ddp = wrapped(t, replica_check=sl.ReplicaCheck(every=3))
        backward(ddp, t)
        if t.rank == 1:
            with torch.no_grad():
                next(ddp.module.parameters()).add_(1)
        for step in range(3):
            backward(ddp, t, step)

    text = raised_on_each_rank(ReplicaDivergence, fn)
    assert "rank 0 | rank 1" in text
    assert "With two ranks there is no majority" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer_class", [torch.nn.parallel.DistributedDataParallel, DDP])
def test_a_module_that_is_wrapped_twice_is_a_warning(outer_class: type[nn.Module]) -> None:
    """A framework that wraps a wrapped module reduces its gradients twice."""
    outer = outer_class(DDP(copy.deepcopy(NET)))
    with pytest.warns(RuntimeWarning, match="this Sequential is wrapped twice"):
        loss_of(outer, batch(torch.distributed.get_rank())).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer_class", [torch.nn.parallel.DistributedDataParallel, DDP])
def test_a_wrapper_whose_parameters_the_outer_one_ignores_is_no_warning(outer_class: Any) -> None:
    """TorchRec wraps so. Warnings are errors here."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    net[0] = DDP(net[0])
    outer_class._set_params_and_buffers_to_ignore_for_model(net, ["0.module.weight", "0.module.bias"])
    outer = outer_class(net)
    loss_of(outer, torch.full((1, 3), float(torch.distributed.get_rank()))).backward()
    mine = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    rows = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(rows, mine)
    assert torch.equal(rows[0], rows[1])


def test_a_wrapper_beside_another_one_is_no_warning() -> None:
    """The forward of a wrapped module calls another wrapper, which is not a part of it. Warnings are errors here."""
    other = DDP(copy.deepcopy(NET))

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(other(x))

    loss_of(DDP(Caller()), torch.ones(5, 3)).backward()
