"""What torch's class gets wrong without a word, one by one: right here, or an error with a name on every rank.

On ranks as threads; what only shows between processes is in `tests/fault/test_loud_failures.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
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


def batch(t: Transport, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * t.rank + step)
    return torch.randn(5, 3, generator=generator)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def expected_gradients(module: nn.Module, *, steps: tuple[int, ...] = (0,), size: int = 2) -> list[Tensor]:
    """What one process gets from all ranks' batches: the sum over steps of the mean over ranks."""
    module = copy.deepcopy(module)
    for step in steps:
        for rank in range(size):
            generator = torch.Generator().manual_seed(100 * rank + step)
            (loss_of(module, torch.randn(5, 3, generator=generator)) / size).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def each_rank(fn: Callable[[Transport], Any]) -> list[Any]:
    return run_ranks(2, fn)


def raised_on_each_rank(kind: type[SynclineError], fn: Callable[[Transport], Any]) -> str:
    """The text of the error that `fn` raises on both ranks."""

    def rank(t: Transport) -> str:
        with pytest.raises(kind) as caught:
            fn(t)
        return str(caught.value)

    texts = each_rank(rank)
    assert len(set(texts)) == 1, texts
    return str(texts[0])


# ---------------------------------------------------------------------- which backwards are reduced


def test_training_through_ddp_module_is_reduced_all_the_same() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        loss_of(ddp.module, batch(t)).backward()
        torch.testing.assert_close(gradients(ddp.module), expected_gradients(NET))
        assert ddp.last_step is not None
        assert ddp.last_step.synchronized

    each_rank(rank)


def test_two_forwards_and_two_backwards_are_both_reduced() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        first, second = loss_of(ddp, batch(t, 0)), loss_of(ddp, batch(t, 1))
        first.backward()
        second.backward()
        torch.testing.assert_close(gradients(ddp.module), expected_gradients(NET, steps=(0, 1)))
        assert ddp.last_step is not None
        assert ddp.last_step.step == 2

    each_rank(rank)


def test_two_backwards_of_one_graph_are_both_reduced() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        loss = loss_of(ddp, batch(t))
        loss.backward(retain_graph=True)
        loss.backward()
        torch.testing.assert_close(gradients(ddp.module), expected_gradients(NET, steps=(0, 0)))

    each_rank(rank)


@pytest.mark.parametrize("static_graph", [False, True])
def test_autograd_grad_is_local_as_documented_and_disturbs_nothing(static_graph: bool) -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t, static_graph=static_graph)
        x = batch(t)[0].clone().requires_grad_()
        torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
        assert ddp.last_step is None
        local = torch.autograd.grad(loss_of(ddp, batch(t)), list(ddp.module.parameters()))
        alone = copy.deepcopy(NET)
        loss_of(alone, batch(t)).backward()
        torch.testing.assert_close(list(local), gradients(alone))
        assert ddp.last_step is None
        loss_of(ddp, batch(t)).backward()
        torch.testing.assert_close(gradients(ddp.module), expected_gradients(NET))

    each_rank(rank)


@pytest.mark.parametrize("forward_inside", [True, False])
def test_no_sync_around_the_forward_or_the_backward_keeps_gradients_local(forward_inside: bool) -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        if forward_inside:
            with ddp.no_sync():
                loss = loss_of(ddp, batch(t))
            loss.backward()
        else:
            loss = loss_of(ddp, batch(t))
            with ddp.no_sync():
                loss.backward()
        alone = copy.deepcopy(NET)
        loss_of(alone, batch(t)).backward()
        torch.testing.assert_close(gradients(ddp.module), gradients(alone))

    each_rank(rank)


def test_static_graph_with_no_sync_first_is_reduced() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t, static_graph=True)
        with ddp.no_sync():
            loss_of(ddp, batch(t, 0)).backward()
        loss_of(ddp, batch(t, 1)).backward()
        torch.testing.assert_close(gradients(ddp.module), expected_gradients(NET, steps=(0, 1)))

    each_rank(rank)


# ---------------------------------------------------------------------- a module that changes after wrapping


def test_unfrozen_after_wrapping_is_reduced_from_then_on() -> None:
    def rank(t: Transport) -> None:
        net = copy.deepcopy(NET)
        net[0].requires_grad_(False)
        ddp = DDP(net, process_group=t)
        optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1))
        loss_of(ddp, batch(t)).backward()
        assert net[0].weight.grad is None
        optimizer.zero_grad()
        net[0].requires_grad_(True)
        loss_of(ddp, batch(t)).backward()
        torch.testing.assert_close(gradients(net), expected_gradients(NET))
        assert ddp.contract["gradients"].size.startswith("4 tensors")
        assert ddp.last_step is not None
        assert ddp.last_step.step == 2, "steps are counted on"

    each_rank(rank)


def test_added_or_replaced_after_wrapping_is_reduced() -> None:
    def rank(t: Transport) -> list[Tensor]:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        loss_of(ddp, batch(t)).backward()
        ddp.zero_grad()
        added = nn.Linear(2, 2)
        nn.init.constant_(added.weight, 1.0)
        nn.init.constant_(added.bias, 0.0)
        ddp.module.append(added)
        ddp.module[0].weight = nn.Parameter(torch.full((4, 3), 0.1))
        loss_of(ddp, batch(t)).backward()
        return [p.grad for p in (*added.parameters(), ddp.module[0].weight)]

    first, second = each_rank(rank)
    torch.testing.assert_close(first, second)
    assert all(g.abs().sum() > 0 for g in first)


def test_a_change_is_followed_where_the_forward_ran_under_no_sync_and_the_backward_did_not() -> None:
    def rank(t: Transport) -> None:
        net = copy.deepcopy(NET)
        net[0].requires_grad_(False)
        ddp = DDP(net, process_group=t)
        net[0].requires_grad_(True)
        with ddp.no_sync():
            loss = loss_of(ddp, batch(t))
        loss.backward()
        loss_of(ddp, batch(t)).backward()
        torch.testing.assert_close(gradients(net), [2 * g for g in expected_gradients(NET)])

    each_rank(rank)


def test_what_was_counted_and_accumulated_before_a_change_is_reduced_with_it() -> None:
    def rank(t: Transport) -> None:
        net = copy.deepcopy(NET)
        net[0].requires_grad_(False)
        ddp = DDP(net, process_group=t, find_unused_parameters=True)
        num_items = 1 + 2 * t.rank  # 4 on both ranks together
        with ddp.no_sync(), ddp.normalize_by(num_items):
            loss_of(ddp, batch(t)).backward()
        net[0].requires_grad_(True)
        with ddp.normalize_by(num_items):
            net.forward = net[0].forward  # type: ignore[method-assign]  # of the other layer there is only what was accumulated
            ddp(batch(t, 1)).square().mean().backward()
        first = expected_gradients(nn.Sequential(net[0], nn.Tanh(), net[2]))[2:]
        second = expected_gradients(net[0], steps=(1,))
        means = [gradient * 2 / 8 for gradient in (*second, *first)]
        torch.testing.assert_close(gradients(net), means)

    each_rank(rank)


def test_added_with_different_values_is_an_error_that_names_the_remedy() -> None:
    def fn(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        added = nn.Linear(2, 2)
        nn.init.constant_(added.weight, t.rank + 1.0)
        nn.init.constant_(added.bias, 0.0)
        ddp.module.append(added)
        loss_of(ddp, batch(t)).backward()

    text = raised_on_each_rank(ContractMismatch, fn)
    assert "values of 3.weight" in text
    assert "3.bias" not in text
    assert "sl.broadcast_(ddp.module)" in text


def test_a_change_on_one_rank_that_was_undone_before_the_backward_is_none() -> None:
    """Rank 0 evaluates something with more parameters than it trains, in grad mode and alone."""

    def rank(t: Transport) -> list[Tensor]:
        net = copy.deepcopy(NET)
        net[0].requires_grad_(False)
        ddp = DDP(net, process_group=t)
        loss_of(ddp, batch(t)).backward()
        ddp.zero_grad()
        if t.rank == 0:
            net[0].requires_grad_(True)
            ddp.eval()
            ddp(batch(t))
            ddp.train()
            net[0].requires_grad_(False)
        loss_of(ddp, batch(t)).backward()
        return [p.grad for p in net[2].parameters()]

    first, second = each_rank(rank)
    torch.testing.assert_close(first, second)


def test_ranks_that_differ_in_hooks_are_told_so_again_in_each_backward() -> None:
    def hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        raise AssertionError("never called")

    def rank(t: Transport) -> None:
        ddp = DDP(nn.Linear(2, 1), process_group=t)
        if t.rank:
            ddp.register_comm_hook(None, hook)
        for _ in range(2):
            with pytest.raises(ContractMismatch, match="communication hook"):
                ddp(torch.ones(1, 2)).sum().backward()

    run_ranks(2, rank)


def test_a_hook_that_is_registered_inside_of_normalize_by_is_refused() -> None:
    ddp = DDP(nn.Linear(2, 1))
    with ddp.normalize_by(1), pytest.raises(ValueError, match="normalize_by cannot divide"):
        ddp.register_comm_hook(None, lambda state, bucket: None)


@pytest.mark.parametrize("view", [False, True])
def test_a_model_moved_to_another_type_after_wrapping_is_reduced_in_it(view: bool) -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t, gradient_as_bucket_view=view)
        loss_of(ddp, batch(t)).backward()
        ddp.zero_grad()
        ddp.double()
        loss_of(ddp, batch(t).double()).backward()
        torch.testing.assert_close(
            gradients(ddp.module),
            [g.double() for g in expected_gradients(NET)],
            rtol=1e-5,
            atol=1e-6,
            check_dtype=True,
        )
        ddp.module.to(torch.bfloat16)
        ddp.zero_grad()
        loss_of(ddp, batch(t).bfloat16()).backward()
        assert ddp.module[0].weight.grad.dtype is torch.bfloat16

    each_rank(rank)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: net[0].requires_grad_(False), "requires_grad=False"),
        (lambda net: net.append(nn.Linear(2, 2)), "3.weight"),
        (lambda net: net.double(), "torch.float64"),
    ],
    ids=["frozen", "added", "moved"],
)
def test_ranks_that_change_their_modules_differently_are_told_the_difference(
    change: Callable[[nn.Sequential], object], words: str
) -> None:
    def fn(t: Transport) -> None:
        net = copy.deepcopy(NET)
        net[2].bias.requires_grad_(False)
        ddp = DDP(net, process_group=t)
        loss_of(ddp, batch(t)).backward()
        net[2].bias.requires_grad_(True)  # both change, so both look
        if t.rank == 1:
            change(net)
        ddp(batch(t).to(net[0].weight.dtype)).float().sum().backward()

    assert words in raised_on_each_rank(ContractMismatch, fn)


def test_a_buffer_replaced_by_assignment_is_broadcast() -> None:
    def rank(t: Transport) -> Tensor:
        ddp = DDP(copy.deepcopy(NORMED), process_group=t)
        ddp.module[1].running_mean = torch.full((4,), float(t.rank + 1))
        ddp.eval()
        ddp(batch(t))
        return ddp.module[1].running_mean

    assert [x.tolist() for x in each_rank(rank)] == [[1.0] * 4] * 2


@pytest.mark.parametrize("policy", ["broadcast", "average"])
def test_a_buffer_replaced_by_one_of_another_shape_is_right_on_all_ranks_or_an_error(policy: Any) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    def rank(t: Transport) -> list[float]:
        ddp = DDP(Cache(), process_group=t, buffers=policy)
        ddp.module.seen = torch.tensor([1.0, 2.0]) * (t.rank + 1)
        loss_of(ddp, batch(t)).backward()
        return ddp.module.seen.tolist()

    value = [1.0, 2.0] if policy == "broadcast" else [1.5, 3.0]
    assert each_rank(rank) == [value, value]

    def fn(t: Transport) -> None:
        ddp = DDP(Cache(), process_group=t, buffers=policy)
        ddp.module.seen = torch.zeros(2 + t.rank)
        ddp(batch(t))

    assert "seen" in raised_on_each_rank(ContractMismatch, fn)


# ---------------------------------------------------------------------- ranks that do different things


def test_submodules_registered_in_another_order_are_refused_at_construction() -> None:
    def fn(t: Transport) -> None:
        a, b = ("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))
        net = nn.Module()
        for name, child in (a, b) if t.rank == 0 else (b, a):
            net.add_module(name, child)
        DDP(net, process_group=t)

    text = raised_on_each_rank(ContractMismatch, fn)
    assert "order" in text
    assert "a.weight" in text


@pytest.mark.parametrize(
    ("other", "words"),
    [(nn.Linear(3, 4, dtype=torch.float64), "torch.float64"), (nn.Linear(4, 4), "(4, 4)")],
    ids=["dtype", "shape"],
)
def test_another_type_or_shape_is_refused_at_construction(other: nn.Module, words: str) -> None:
    text = raised_on_each_rank(
        ContractMismatch, lambda t: DDP(copy.deepcopy(NET[0] if t.rank == 0 else other), process_group=t)
    )
    assert words in text
    assert "weight" in text


def train(t: Transport, change: Callable[[Transport, DDP, torch.optim.Optimizer], None]) -> None:
    ddp = DDP(copy.deepcopy(NET), process_group=t)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))
    for step in range(3):
        if step == 2:
            change(t, ddp, optimizer)
        optimizer.zero_grad()
        loss_of(ddp, batch(t, step)).backward()
        optimizer.step()


def test_a_learning_rate_changed_on_one_rank_is_an_error_before_anyone_steps() -> None:
    def change(t: Transport, _: DDP, optimizer: torch.optim.Optimizer) -> None:
        if t.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.3

    text = raised_on_each_rank(ContractMismatch, lambda t: train(t, change))
    assert "step 3" in text
    assert "lr of optimizer 0 (AdamW), param_groups[0]" in text
    assert "expected 0.1 (rank 0)" in text
    assert "got      0.3 (rank 1)" in text
    assert "weight_decay" not in text, "what is equal is not listed"


def test_a_learning_rate_changed_between_backward_and_step_is_an_error_too() -> None:
    def fn(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))
        loss_of(ddp, batch(t)).backward()
        optimizer.param_groups[0]["lr"] = 0.1 * (t.rank + 2)  # both change it, to different values
        optimizer.step()

    text = raised_on_each_rank(ContractMismatch, fn)
    assert "expected 0.2 (rank 0)" in text
    assert "got      0.3" in text


def test_a_learning_rate_that_all_ranks_change_is_fine() -> None:
    def change(_: Transport, ddp: DDP, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.3
        loss_of(ddp, torch.ones(2, 3)).backward()
        optimizer.param_groups[0]["lr"] = 0.4
        optimizer.step()

    each_rank(lambda t: train(t, change))


def test_a_step_more_on_one_rank_is_an_error_at_the_next_backward() -> None:
    def fn(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))
        loss_of(ddp, batch(t)).backward()
        if t.rank == 1:
            optimizer.step()
        loss_of(ddp, batch(t)).backward()

    text = raised_on_each_rank(ContractMismatch, fn)
    assert "steps of optimizer 0 (AdamW)" in text
    assert "got      1 (rank 1)" in text


def test_a_step_with_unreduced_gradients_is_refused() -> None:
    def fn(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))
        with ddp.no_sync():
            loss_of(ddp, batch(t)).backward()
        with pytest.raises(SynclineError, match="clip_grad_norm_"):
            ddp.clip_grad_norm_(1.0)
        with pytest.raises(SynclineError, match="no_sync"):
            optimizer.step()
        loss_of(ddp, batch(t)).backward()
        optimizer.step()

    each_rank(fn)


def test_a_gradient_that_is_not_finite_on_one_rank_is_named_before_anyone_steps() -> None:
    def fn(t: Transport) -> None:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite="raise")
        for step in range(3):
            loss = loss_of(ddp, batch(t, step))
            (loss * float("nan") if (t.rank, step) == (1, 2) else loss).backward()
            ddp.zero_grad()

    text = raised_on_each_rank(NonFiniteGradient, fn)
    assert text.startswith("step 3, backward")
    assert "rank 1: 0.weight (NaN in 12 of 12 elements), 0.bias" in text
    assert "rank 0" not in text


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.filterwarnings("ignore:step 3, backward:RuntimeWarning")
def test_a_gradient_that_is_not_finite_on_one_rank_does_not_spoil_the_weights(policy: Any) -> None:
    def rank(t: Transport) -> list[Tensor]:
        net = copy.deepcopy(NET)
        ddp = DDP(net, process_group=t, on_nonfinite=policy)
        optimizer = ddp.attach(torch.optim.AdamW(net.parameters(), lr=0.1))
        for step in range(4):
            loss = loss_of(ddp, batch(t, step))
            (loss * float("nan") if (t.rank, step) == (1, 2) else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in net.parameters()]

    one, other = each_rank(rank)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(bool(p.isfinite().all()) for p in one)


@pytest.mark.filterwarnings("ignore:step 3, backward. rank 1 ran forwards:RuntimeWarning")
def test_a_batch_skipped_on_one_rank_is_an_error_where_its_batches_end() -> None:
    """Rank 1 skips the backward of its third batch: its loss was not finite, say."""

    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        for step in range(4):
            loss = loss_of(ddp, batch(t, step))
            if (t.rank, step) == (1, 2):
                continue
            if (t.rank, step) == (0, 3):
                with pytest.raises(UnevenInputs, match="step 4"):
                    loss.backward()
            else:
                loss.backward()

    each_rank(rank)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.filterwarnings("ignore:step 1, backward. rank 0 ran forwards:RuntimeWarning")
def test_forwards_of_one_rank_that_need_no_backward_are_none_of_the_others_business(is_kept: bool) -> None:
    """Train accuracy on rank 0, in training mode and in grad mode; also before the first step."""

    def rank(t: Transport) -> list[Tensor]:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        kept = []
        for step in range(3):
            if t.rank == 0:
                output = ddp(batch(t, step))
                kept += [output] if is_kept else []
                del output
            loss_of(ddp, batch(t, step)).backward()
        return gradients(ddp.module)

    first, second = each_rank(rank)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, expected_gradients(NET, steps=(0, 1, 2)))


def test_a_batch_skipped_on_all_ranks_is_fine() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        for step in range(4):
            loss = loss_of(ddp, batch(t, step))
            if step != 2:
                loss.backward()

    each_rank(rank)


def test_ranks_may_run_different_numbers_of_forwards_for_one_backward() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        for step in range(2):
            sum(loss_of(ddp, batch(t, part)) for part in range(1 + t.rank + step)).backward()  # type: ignore[union-attr]

    each_rank(rank)


def test_a_forward_without_gradients_or_in_eval_mode_needs_no_backward() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        if t.rank == 0:
            with torch.no_grad():
                ddp(batch(t))
            ddp.eval()
            ddp(batch(t))
            ddp.train()
        loss_of(ddp, batch(t)).backward()

    each_rank(rank)


# ---------------------------------------------------------------------- unused parameters, and buffers at the end


def test_an_unused_parameter_is_an_error_at_this_backward_by_name() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, *, both: bool) -> Tensor:
            return self.always(x) + self.sometimes(x) if both else self.always(x)

    def fn(t: Transport) -> None:
        ddp = DDP(Branches(), process_group=t)
        ddp(batch(t), both=t.rank == 0).sum().backward()

    text = raised_on_each_rank(UnreducedGradients, fn)
    assert "step 1" in text
    assert "on rank 1: sometimes.weight, sometimes.bias" in text


def test_buffers_can_be_made_equal_after_the_last_step() -> None:
    def rank(t: Transport) -> Tensor:
        ddp = DDP(copy.deepcopy(NORMED), process_group=t)
        for step in range(3):
            loss_of(ddp, batch(t, step)).backward()
        before = ddp.module[1].running_mean.clone()
        ddp.sync_buffers_()
        if t.rank == 1:
            assert not torch.equal(before, ddp.module[1].running_mean), "they had drifted in the last step"
        return ddp.module[1].running_mean

    first, second = each_rank(rank)
    assert torch.equal(first, second)


# ---------------------------------------------------------------------- weights that drift apart


def test_a_weight_changed_on_one_rank_after_construction_is_noticed() -> None:
    def fn(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t, replica_check=sl.ReplicaCheck(every=3))
        loss_of(ddp, batch(t)).backward()
        if t.rank == 1:
            with torch.no_grad():
                next(ddp.module.parameters()).add_(1)
        for step in range(3):
            loss_of(ddp, batch(t, step)).backward()

    text = raised_on_each_rank(ReplicaDivergence, fn)
    assert "rank 0 | rank 1" in text
    assert "With two ranks there is no majority" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer_class", [torch.nn.parallel.DistributedDataParallel, DDP])
def test_a_module_that_is_wrapped_twice_is_a_warning(outer_class: type[nn.Module]) -> None:
    """A framework that wraps a wrapped module reduces its gradients twice."""
    outer = outer_class(DDP(copy.deepcopy(NET)))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    with pytest.warns(RuntimeWarning, match="this Sequential is wrapped twice"):
        loss_of(outer, x).backward()


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
