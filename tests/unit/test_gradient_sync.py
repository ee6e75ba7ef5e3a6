"""What one backward does, on ranks as threads."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hangs
from syncline import DistributedDataParallel as DDP
from syncline import SynclineError, UnreducedGradients
from syncline.transport import Transport, run_ranks


def linear(num_in: int = 2, num_out: int = 1) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(num_in, num_out)


def inputs(transport: Transport) -> Tensor:
    """Rank r feeds r + 1, so the mean gradient over two ranks is 1.5."""
    return torch.full((1, 2), float(transport.rank + 1))


def each_rank(fn: Callable[[Transport], Any], size: int = 2) -> list[Any]:
    return run_ranks(size, fn)


def backward(ddp: DDP, x: Tensor) -> None:
    ddp(x).sum().backward()


# ---------------------------------------------------------------------- when a backward synchronizes


def test_a_backward_averages_over_ranks() -> None:
    def rank(t: Transport) -> list[float]:
        ddp = DDP(linear(), process_group=t)
        backward(ddp, inputs(t))
        return ddp.module.weight.grad.flatten().tolist()

    assert each_rank(rank) == [[1.5, 1.5]] * 2


def test_no_sync_around_the_forward_or_around_the_backward_keeps_gradients_local() -> None:
    def rank(t: Transport) -> tuple[float, float]:
        ddp = DDP(linear(), process_group=t)
        with ddp.no_sync():
            loss = ddp(inputs(t)).sum()
        loss.backward()
        outside = ddp.module.weight.grad[0, 0].item()
        ddp.zero_grad()
        loss = ddp(inputs(t)).sum()
        with ddp.no_sync():
            loss.backward()
        return outside, ddp.module.weight.grad[0, 0].item()

    assert each_rank(rank) == [(1.0, 1.0), (2.0, 2.0)]


def test_no_sync_is_restored_after_an_exception() -> None:
    def rank(t: Transport) -> bool:
        ddp = DDP(linear(), process_group=t)
        with pytest.raises(KeyError), ddp.no_sync():
            raise KeyError
        return ddp.require_backward_grad_sync

    assert each_rank(rank) == [True, True]


@pytest.mark.parametrize("view", [False, True])
def test_accumulated_micro_batches_are_reduced_together(view: bool) -> None:
    def rank(t: Transport) -> list[float]:
        ddp = DDP(linear(), process_group=t, gradient_as_bucket_view=view)
        seen = []
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                backward(ddp, inputs(t))
                backward(ddp, inputs(t))
            backward(ddp, 10 * inputs(t))
            seen.append(ddp.module.weight.grad[0, 0].item())
        return seen

    assert each_rank(rank) == [[18.0] * 3] * 2


@pytest.mark.parametrize("view", [False, True])
def test_repeated_backwards_add_means_as_torch_does(view: bool) -> None:
    def rank(t: Transport) -> float:
        ddp = DDP(linear(), process_group=t, gradient_as_bucket_view=view)
        loss = ddp(inputs(t)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return ddp.module.weight.grad[0, 0].item()

    assert each_rank(rank) == [3.0, 3.0]


def test_two_forwards_then_two_backwards_both_synchronize() -> None:
    def rank(t: Transport) -> list[float]:
        ddp = DDP(linear(), process_group=t)
        first, second = ddp(inputs(t)).sum(), ddp(10 * inputs(t)).sum()
        first.backward()
        seen = [ddp.module.weight.grad[0, 0].item()]
        second.backward()
        return [*seen, ddp.module.weight.grad[0, 0].item()]

    assert each_rank(rank) == [[1.5, 16.5]] * 2


def test_zeroing_in_place_and_to_none_give_the_same() -> None:
    def rank(t: Transport) -> list[float]:
        ddp = DDP(linear(), process_group=t, gradient_as_bucket_view=True)
        seen = []
        for to_none in (True, False, True):
            backward(ddp, inputs(t))
            seen.append(ddp.module.weight.grad[0, 0].item())
            ddp.zero_grad(set_to_none=to_none)
        return seen

    assert each_rank(rank) == [[1.5] * 3] * 2


# ---------------------------------------------------------------------- which parameters


def test_frozen_parameters_are_left_alone() -> None:
    def rank(t: Transport) -> Any:
        model = nn.Sequential(linear(2, 2), linear())
        model[0].requires_grad_(False)
        ddp = DDP(model, process_group=t)
        backward(ddp, inputs(t))
        return model[0].weight.grad, len(ddp.last_step.buckets), ddp.contract["gradients"].size

    assert each_rank(rank) == [(None, 1, "2 tensors, 12 B")] * 2


def test_a_shared_parameter_is_reduced_once() -> None:
    def rank(t: Transport) -> Any:
        shared = linear(2, 2)
        ddp = DDP(nn.Sequential(shared, shared), process_group=t)
        backward(ddp, inputs(t))
        return ddp.last_step.num_gradients, ddp.last_step.num_reduced

    assert each_rank(rank) == [(2, 6)] * 2


def test_channels_last_weights_keep_their_strides() -> None:
    def rank(t: Transport) -> Any:
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        ddp = DDP(conv, process_group=t, gradient_as_bucket_view=True)
        ddp(torch.full((1, 3, 2, 2), float(t.rank + 1))).sum().backward()
        return conv.weight.grad.stride() == conv.weight.stride(), conv.weight.grad.unique().tolist()

    assert each_rank(rank) == [(True, [1.5])] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_of_gradients_travels_exactly(dtype: torch.dtype) -> None:
    """Small integers are exact in all of them, so the mean must be."""

    def rank(t: Transport) -> Any:
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(5, dtype=dtype))})
        ddp = DDP(_Times(model), process_group=t)
        with ddp.normalize_by(3 + t.rank):
            ddp(torch.tensor(7 * (t.rank + 1), dtype=dtype)).backward()
        return model["w"].grad.real.float().tolist(), ddp.last_step.divisor

    assert each_rank(rank) == [([3.0] * 5, 7)] * 2


class _Times(nn.Module):
    def __init__(self, parameters: nn.ParameterDict) -> None:
        super().__init__()
        self.parameters_ = parameters

    def forward(self, x: Tensor) -> Tensor:
        out = (self.parameters_["w"] * x).sum()
        return out.real if out.is_complex() else out


@pytest.mark.parametrize("size", [1, 2])
def test_dropping_the_wrapper_takes_its_hooks_off(size: int) -> None:
    def rank(t: Transport) -> float:
        model = linear()
        DDP(model, process_group=t)
        ddp = DDP(model, process_group=t)
        backward(ddp, inputs(t))
        return model.weight.grad[0, 0].item()

    assert each_rank(rank, size) == [1.5 if size == 2 else 1.0] * size


# ---------------------------------------------------------------------- unused parameters


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = linear(2, 2)
        self.left = linear(2, 1)
        self.right = linear(2, 1)

    def forward(self, x: Tensor, *, left: bool) -> Tensor:
        x = self.body(x)
        return (self.left if left else self.right)(x)


@pytest.mark.parametrize("cap_mb", [None, 1e-6])
def test_an_unused_parameter_is_an_error_at_this_backward_on_every_rank(cap_mb: float | None) -> None:
    def rank(t: Transport) -> Any:
        ddp = DDP(TwoHeads(), process_group=t, bucket_cap_mb=cap_mb)
        with pytest.raises(UnreducedGradients) as error:
            ddp(inputs(t), left=t.rank == 0).sum().backward()
        return str(error.value), error.value.missing

    first, second = each_rank(rank)
    assert first == second
    assert first[1] == {0: ("right.weight", "right.bias"), 1: ("left.weight", "left.bias")}
    assert "on rank 0: right.weight, right.bias" in first[0]
    assert "find_unused_parameters=True" in first[0]


def test_a_rank_with_all_gradients_learns_that_another_lacks_some() -> None:
    def rank(t: Transport) -> Any:
        ddp = DDP(TwoHeads(), process_group=t)
        x = inputs(t)
        with pytest.raises(UnreducedGradients) as error:
            loss = ddp(x, left=True).sum()
            if t.rank == 0:
                loss = loss + ddp(x, left=False).sum()
            loss.backward()
        return error.value.missing

    assert each_rank(rank) == [{1: ("right.weight", "right.bias")}] * 2


def test_training_goes_on_after_an_unused_parameter_was_reported() -> None:
    def rank(t: Transport) -> float:
        ddp = DDP(TwoHeads(), process_group=t)
        with pytest.raises(UnreducedGradients):
            ddp(inputs(t), left=True).sum().backward()
        ddp.zero_grad()
        (ddp(inputs(t), left=True) + ddp(inputs(t), left=False)).sum().backward()
        return ddp.module.left.bias.grad.item()

    assert each_rank(rank) == [1.0, 1.0]


def test_alone_the_rule_is_the_same() -> None:
    def rank(t: Transport) -> Any:
        ddp = DDP(TwoHeads(), process_group=t)
        ddp(inputs(t), left=True).sum().backward()
        with pytest.raises(UnreducedGradients, match=r"in a world of one rank: right\.weight, right\.bias"):
            torch.optim.SGD(ddp.parameters()).step()

    each_rank(rank, size=1)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("argument", ["find_unused_parameters", "static_graph"])
def test_where_unused_is_allowed_a_missing_gradient_is_zero_and_a_global_one_untouched(
    argument: str, view: bool
) -> None:
    def rank(t: Transport) -> Any:
        ddp = DDP(TwoHeads(), process_group=t, gradient_as_bucket_view=view, **{argument: True})
        module = ddp.module
        seen = []
        for _ in range(2):
            ddp.zero_grad()
            ddp(inputs(t), left=True).sum().backward()
            seen.append((module.left.bias.grad.item(), module.right.bias.grad))
            ddp.zero_grad()
            ddp(inputs(t), left=t.rank == 0).sum().backward()
            seen.append((module.left.bias.grad.item(), module.right.bias.grad.item()))
        return seen

    assert each_rank(rank) == [[(1.0, None), (0.5, 0.5)] * 2] * 2


def test_use_under_no_sync_counts_as_use() -> None:
    def rank(t: Transport) -> Any:
        ddp = DDP(TwoHeads(), process_group=t, find_unused_parameters=True)
        with ddp.no_sync():
            ddp(inputs(t), left=False).sum().backward()
        ddp(inputs(t), left=True).sum().backward()
        return ddp.module.right.bias.grad.item(), ddp.module.left.bias.grad.item()

    assert each_rank(rank) == [(1.0, 1.0)] * 2


# ---------------------------------------------------------------------- normalize_by


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_normalize_by_is_exact_over_micro_batches_with_and_without_no_sync(size: int, view: bool) -> None:
    def rank(t: Transport) -> list[float]:
        ddp = DDP(linear(), process_group=t, gradient_as_bucket_view=view)
        seen = []
        for silent in (True, False, True):
            ddp.zero_grad()
            for micro in range(3):
                num_items = 4 * micro + t.rank + 1
                ddp.require_backward_grad_sync = not (silent and micro < 2)
                with ddp.normalize_by(num_items):
                    backward(ddp, torch.full((num_items, 2), 3.0))
            seen.append(ddp.module.weight.grad[0, 0].item())
            assert ddp.last_step.divisor == sum(4 * m + r + 1 for m in range(3) for r in range(size))
        return seen

    for row in each_rank(rank, size):
        assert row == pytest.approx([3.0] * 3, rel=1e-6)


def test_zeroing_in_place_starts_a_new_count() -> None:
    def rank(t: Transport) -> float:
        ddp = DDP(linear(), process_group=t)
        for _ in range(2):
            with ddp.normalize_by(2):
                backward(ddp, torch.full((2, 2), 3.0))
            divisor = ddp.last_step.divisor
            ddp.zero_grad(set_to_none=False)
        return divisor

    assert each_rank(rank) == [4, 4]


def test_a_dropped_micro_batch_does_not_count() -> None:
    """An exception, zero_grad, and on with the next batch."""

    def rank(t: Transport) -> int:
        ddp = DDP(linear(), process_group=t)
        for counted in (True, False):
            with ddp.no_sync(), ddp.normalize_by(100) if counted else nullcontext():
                backward(ddp, torch.ones(1, 2))
            ddp.zero_grad()
        with ddp.normalize_by(2):
            backward(ddp, torch.ones(2, 2))
        return ddp.last_step.divisor

    assert each_rank(rank) == [4, 4]


def test_gradients_that_were_changed_and_not_cleared_are_refused() -> None:
    def rank(t: Transport) -> float:
        ddp = DDP(linear(), process_group=t)
        with ddp.normalize_by(2):
            backward(ddp, torch.ones(2, 2))
        ddp.module.weight.grad.mul_(0.5)
        with pytest.raises(ValueError, match="zero_grad"), ddp.normalize_by(2):
            pass
        return ddp.module.weight.grad[0, 0].item()

    assert each_rank(rank) == [0.5, 0.5]


def test_a_block_that_ends_without_backward_changes_nothing() -> None:
    def rank(t: Transport) -> Any:
        ddp = DDP(linear(), process_group=t)
        with ddp.normalize_by(2):
            backward(ddp, torch.ones(2, 2))
        before = ddp.module.weight.grad.clone()
        with pytest.raises(KeyError), ddp.normalize_by(7):
            raise KeyError
        return torch.equal(before, ddp.module.weight.grad)

    assert each_rank(rank) == [True, True]


def test_no_items_anywhere_is_an_error_on_every_rank() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(linear(), process_group=t)
        with pytest.raises(ValueError, match=r"got 0 items on each of 2 ranks"), ddp.normalize_by(0):
            backward(ddp, torch.ones(0, 2))

    each_rank(rank)


def test_normalize_by_on_some_ranks_only_is_an_error_on_every_rank() -> None:
    def rank(t: Transport) -> str:
        ddp = DDP(linear(), process_group=t)
        loss = ddp(inputs(t)).sum()
        with pytest.raises(SynclineError) as error:
            if t.rank:
                with ddp.normalize_by(2):
                    loss.backward()
            else:
                loss.backward()
        return str(error.value)

    first, second = each_rank(rank)
    assert first == second
    assert "rank 1 ran this backward under normalize_by, but rank 0 did not" in first


# ---------------------------------------------------------------------- second derivatives


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph_averages_the_values_and_keeps_the_local_graph(view: bool) -> None:
    """A Hessian-vector product, as AdaHessian computes it: per rank, then averaged."""

    model = nn.Sequential(linear(), nn.Tanh())

    def rank(t: Transport) -> None:
        net = copy.deepcopy(model)
        ddp = DDP(net, process_group=t, gradient_as_bucket_view=view)
        parameters = list(net.parameters())
        for step in range(3):
            ddp.zero_grad(set_to_none=True)
            ddp(inputs(t)).sum().backward(create_graph=True)
            batches = [torch.full((1, 2), float(rank + 1)) for rank in range(2)]
            expected = [torch.autograd.grad(net(x).sum(), parameters, create_graph=True) for x in batches]
            for parameter, one, other in zip(parameters, *expected, strict=True):
                torch.testing.assert_close(parameter.grad.detach(), (one + other).detach() / 2)
            local = torch.autograd.grad(
                expected[t.rank], parameters, [torch.ones_like(p) for p in parameters]
            )
            second = torch.autograd.grad(
                [p.grad for p in parameters], parameters, [torch.ones_like(p) for p in parameters]
            )
            torch.testing.assert_close(second, local)
            assert ddp.last_step.step == step + 1
        ddp.zero_grad(set_to_none=True)
        ddp(inputs(t)).sum().backward()
        assert not any(p.grad.requires_grad for p in parameters)

    with pytest.warns(RuntimeWarning, match="step 1.*second derivatives are not averaged") as caught:
        each_rank(rank)
    assert sum(warning.category is RuntimeWarning for warning in caught) == 1


def test_a_gradient_penalty_is_averaged() -> None:
    """WGAN-GP: the inner gradient by torch.autograd.grad, then a plain backward."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        score = net(x).sum()
        (inner,) = torch.autograd.grad(score, x, create_graph=True)
        return score + inner.square().sum()

    model = nn.Sequential(linear(), nn.Tanh())

    def rank(t: Transport) -> None:
        net, alone = copy.deepcopy(model), copy.deepcopy(model)
        ddp = DDP(net, process_group=t)
        loss(ddp, inputs(t)).backward()
        (sum(loss(alone, torch.full((1, 2), float(rank + 1))) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in alone.parameters()])

    each_rank(rank)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph_is_refused_for_shards() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(linear(), process_group=t, sharded=True)
        with pytest.raises(SynclineError, match=r"step 1: backward\(create_graph=True\).*sharded=True"):
            ddp(inputs(t)).sum().backward(create_graph=True)

    each_rank(rank)


# ---------------------------------------------------------------------- what cannot be right is refused


def test_after_a_backward_that_raised_early_the_next_one_is_right() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyError("in the user's backward")

    def rank(t: Transport) -> float:
        model = nn.Sequential(linear(2, 2), linear())
        ddp = DDP(model, process_group=t)
        with pytest.raises(KeyError):
            model[1](Fails.apply(model[0](inputs(t)))).sum().backward()
        ddp.zero_grad()
        backward(ddp, inputs(t))
        return model[1].bias.grad.item()

    assert each_rank(rank) == [1.0, 1.0]


def test_a_backward_that_raised_after_buckets_were_sent_breaks_the_module_by_name() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyError

    def rank(t: Transport) -> None:
        model = nn.Sequential(linear(2, 2), linear())
        ddp = DDP(model, process_group=t, bucket_cap_mb=1e-6)
        with pytest.raises(KeyError):
            model[1](Fails.apply(model[0](inputs(t)))).sum().backward()
        for _ in range(2):
            with pytest.raises(
                SynclineError,
                match=r"step 1, backward: a forward began before this backward .* already sent data \(2 bucket\(s\)\)",
            ):
                backward(ddp, inputs(t))

    each_rank(rank)


class Checkpointed(nn.Module):
    """Two re-entrant checkpoints, the first of which runs `num_uses` times."""

    def __init__(self, *, num_uses: int = 1, reentrant: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.num_uses, self.reentrant = num_uses, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_uses):
            x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.last(checkpoint(self.second, x, use_reentrant=self.reentrant))


def assert_reduced_as_plain(ddp: DDP, plain: nn.Module, t: Transport) -> None:
    """In three steps, the gradients of a wrapped module are the means of those of a plain copy of it."""
    plain.load_state_dict(ddp.module.state_dict())
    x = (torch.arange(6.0).view(3, 2) + t.rank).requires_grad_()
    for step in range(3):
        for model in (plain, ddp):
            model.zero_grad()
            model(x + step).square().sum().backward()
        assert ddp.last_step is not None
        assert ddp.last_step.step == step + 1
        for mine, local in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert local.grad is not None
            t.all_reduce(local.grad, "mean").wait()
            torch.testing.assert_close(mine.grad, local.grad)


@pytest.mark.parametrize("cap_mb", [1e-6, None])
@pytest.mark.parametrize(
    ("num_uses", "options"), [(1, {}), (1, {"static_graph": True}), (3, {"static_graph": True})]
)
def test_reentrant_checkpoints_reduce_as_plain_ones_do(
    num_uses: int, options: dict[str, bool], cap_mb: float | None
) -> None:
    def rank(t: Transport) -> None:
        module, plain = Checkpointed(num_uses=num_uses), Checkpointed(num_uses=num_uses, reentrant=False)
        assert_reduced_as_plain(DDP(module, process_group=t, bucket_cap_mb=cap_mb, **options), plain, t)

    each_rank(rank)


class CheckpointedThroughout(nn.Module):
    """All of its parameters are in re-entrant checkpoints, one after the other or in one; some may be unused."""

    def __init__(self, *, num_checkpoints: int = 2, has_unused: bool = False, reentrant: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.num_checkpoints, self.reentrant = num_checkpoints, reentrant
        if has_unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        def both(x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

        parts = [self.first, self.second] if self.num_checkpoints == 2 else [both]
        for part in parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("num_checkpoints", [1, 2])
@pytest.mark.parametrize("view", [False, True])
def test_reentrant_checkpoints_of_all_parameters_reduce_as_plain_ones_do(
    num_checkpoints: int, view: bool
) -> None:
    def rank(t: Transport) -> None:
        module = CheckpointedThroughout(num_checkpoints=num_checkpoints)
        plain = CheckpointedThroughout(num_checkpoints=num_checkpoints, reentrant=False)
        assert_reduced_as_plain(DDP(module, process_group=t, gradient_as_bucket_view=view), plain, t)

    each_rank(rank)


@pytest.mark.parametrize("seen_by", ["forward", "optimizer"])
@pytest.mark.parametrize("allows_unused", [False, True])
def test_a_backward_whose_end_is_not_seen_is_an_error_by_name(seen_by: str, allows_unused: bool) -> None:
    """All gradients come from a checkpoint, and a parameter has none. Nothing tells when the backward is over."""

    def rank(t: Transport) -> None:
        module = CheckpointedThroughout(num_checkpoints=1, has_unused=True)
        ddp = DDP(module, process_group=t, find_unused_parameters=allows_unused)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        x = inputs(t).requires_grad_()
        ddp(x).sum().backward()
        names = r"unused.weight, unused.bias"
        expected = rf"2 of 6 .*{names}.*use_reentrant" if allows_unused else rf"each of 6 .*\n.*{names}"
        with pytest.raises(SynclineError, match=rf"step 1.*{expected}"):
            ddp(x) if seen_by == "forward" else optimizer.step()

    each_rank(rank)


@pytest.mark.parametrize(("learnt", "later"), [(1, 2), (2, 3), (2, 1)])
def test_a_static_graph_that_changes_is_an_error_by_name(learnt: int, later: int) -> None:
    def rank(t: Transport) -> None:
        module = Checkpointed(num_uses=learnt)
        ddp = DDP(module, process_group=t, static_graph=True)
        x = inputs(t).requires_grad_()
        ddp(x).sum().backward()
        module.num_uses = later
        with pytest.raises(SynclineError, match=rf"first.weight \({learnt} before, {later} now\)"):
            ddp(x).sum().backward()

    each_rank(rank)


def test_a_parameter_in_two_reentrant_checkpoints_without_static_graph_is_an_error_that_names_the_remedy() -> (
    None
):
    def rank(t: Transport) -> None:
        ddp = DDP(Checkpointed(num_uses=2), process_group=t, bucket_cap_mb=1e-6)
        x = inputs(t).requires_grad_()
        with pytest.raises(SynclineError, match="static_graph=True"):
            for _ in range(2):
                ddp(x).sum().backward()

    each_rank(rank)


# ---------------------------------------------------------------------- what it costs, what it records


@pytest.fixture(scope="module")
def calls_of_a_step() -> dict[str, Any]:
    """What `python_calls.py` counts. It is a process of its own: see there."""
    program = Path(__file__).with_name("python_calls.py")
    done = hangs.run([sys.executable, program])
    assert done.returncode == 0, done.stderr
    counted: dict[str, Any] = json.loads(done.stdout)
    return counted


@pytest.mark.real
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("size", "budget"), [(1, 51), (2, 124)])
def test_python_calls_are_one_a_parameter_and_few_a_bucket(
    size: int, budget: int, view: bool, calls_of_a_step: dict[str, Any]
) -> None:
    """Pure-Python reducers lose their time in calls; this is the budget."""
    for counted in calls_of_a_step[f"{size} {view}"]:
        assert counted["num_buckets"] == size - 1
        calls = sorted(counted["calls"].items(), key=lambda item: (-item[1], item[0]))
        num_calls = sum(number for _, number in calls)
        assert 100 <= num_calls <= 100 + budget, (
            f"expected one call for each of 100 parameters, and at most {budget} beside them, got {num_calls}:\n"
            + "\n".join(f"{number:4} {name}" for name, number in calls)
        )


class Reversed(nn.Module):
    """Its parameters are registered in another order than the one that forward uses them in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = linear(2, 2), linear(2, 2), linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def test_the_order_is_learnt_from_rank_0() -> None:
    """Registered backwards: the first plan is wrong, the second follows the recorded order."""

    def rank(t: Transport) -> Any:
        ddp = DDP(Reversed(), process_group=t, bucket_cap_mb=30 / 2**20, gradient_as_bucket_view=True)
        orders = []
        for _ in range(3):
            ddp.zero_grad()
            backward(ddp, inputs(t))
            orders.append([bucket.trigger for bucket in ddp.last_step.buckets])
        return orders, ddp.module.last.weight.grad.tolist()

    (first, second), gradient = zip(*each_rank(rank), strict=True)
    assert first == second
    assert first[1] == first[2] == ["last.weight", "middle.weight", "first.weight"]
    assert first[0] != first[1]
    assert gradient[0] == gradient[1]


@pytest.mark.parametrize("knows", [True, False], ids=["rank 0 has trained", "rank 0 is new"])
def test_in_a_new_group_the_order_is_that_of_rank_0(knows: bool) -> None:
    """Rank 2 joins a group that has trained; or rank 0 does, and then no rank relies on an order."""
    trained = (0, 1) if knows else (1, 2)

    def rank(t: Transport) -> list[list[str | None]]:
        group = t.split(0 if t.rank in trained else 1)
        assert group is not None
        ddp = DDP(Reversed(), process_group=group, bucket_cap_mb=30 / 2**20, replica_check=None)
        if t.rank in trained:
            backward(ddp, inputs(t))
        ddp._replica.use_transport(t)
        orders = []
        for _ in range(2):
            backward(ddp, inputs(t))
            orders.append([bucket.trigger for bucket in ddp.last_step.buckets])
        return orders

    learnt = ["last.weight", "middle.weight", "first.weight"]
    for first, second in each_rank(rank, size=3):
        assert (first == learnt) is knows
        assert second == learnt
