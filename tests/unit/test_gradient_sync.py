"""What one backward does, on ranks as threads."""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hangs
from support.cases import case
from support.functions import Fails
from support.threads import on_threads
from support.verbs import error_of_all
from syncline import DistributedDataParallel as DDP
from syncline import SynclineError, UnreducedGradients
from syncline.transport import Transport, run_ranks


def linear(num_in: int = 2, num_out: int = 1) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(num_in, num_out)


def inputs(transport: Transport) -> Tensor:
    """Rank r feeds r + 1, so the mean gradient over two ranks is 1.5."""
    return torch.full((1, 2), float(transport.rank + 1))


def gradient_of(ddp: DDP) -> float:
    """Of one element; all are equal."""
    return ddp.module.weight.grad[0, 0].item()


def backward(ddp: DDP, x: Tensor) -> None:
    ddp(x).sum().backward()


# ---------------------------------------------------------------------- when a backward synchronizes


@on_threads(2)
def test_no_sync_around_the_forward_or_around_the_backward_keeps_gradients_local(t: Transport) -> None:
    ddp = DDP(linear(), process_group=t)
    with ddp.no_sync():
        loss = ddp(inputs(t)).sum()
    loss.backward()
    assert gradient_of(ddp) == 1.0 + t.rank
    ddp.zero_grad()
    loss = ddp(inputs(t)).sum()
    with ddp.no_sync():
        loss.backward()
    assert gradient_of(ddp) == 1.0 + t.rank


@on_threads(2)
def test_no_sync_is_restored_after_an_exception(t: Transport) -> None:
    ddp = DDP(linear(), process_group=t)
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.require_backward_grad_sync


@on_threads(2)
def test_backwards_add_up_and_only_those_of_no_sync_wait_for_the_next_one(t: Transport) -> None:
    for view in (False, True):
        ddp = DDP(linear(), process_group=t, gradient_as_bucket_view=view)
        for set_to_none in (True, False, True):
            with ddp.no_sync():
                backward(ddp, inputs(t))
                backward(ddp, inputs(t))
            backward(ddp, 10 * inputs(t))
            assert gradient_of(ddp) == 18.0
            ddp.zero_grad(set_to_none=set_to_none)
        early, late = ddp(inputs(t)).sum(), ddp(10 * inputs(t)).sum()
        seen = []
        for loss in (late, early, late):
            loss.backward(retain_graph=True)
            seen.append(gradient_of(ddp))
        with case(view):
            assert seen == [15.0, 16.5, 31.5]


# ---------------------------------------------------------------------- which parameters


@on_threads(2)
def test_frozen_parameters_are_left_alone_and_shared_ones_are_reduced_once(t: Transport) -> None:
    shared = linear(2, 2)
    model = nn.Sequential(linear(2, 2).requires_grad_(False), shared, shared)
    ddp = DDP(model, process_group=t)
    backward(ddp, inputs(t))
    assert model[0].weight.grad is None
    assert (ddp.last_step.num_gradients, ddp.last_step.num_reduced, len(ddp.last_step.buckets)) == (2, 6, 1)
    assert ddp.contract["gradients"].size == "2 tensors, 24 B"


@on_threads(2)
def test_channels_last_weights_keep_their_strides(t: Transport) -> None:
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    ddp = DDP(conv, process_group=t, gradient_as_bucket_view=True)
    ddp(torch.full((1, 3, 2, 2), float(t.rank + 1))).sum().backward()
    assert conv.weight.grad.stride() == conv.weight.stride()
    assert conv.weight.grad.unique().tolist() == [1.5]


class Times(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        out = (self.w * x).sum()
        return out.real if out.is_complex() else out


@on_threads(2)
def test_every_dtype_of_gradients_travels_exactly(t: Transport) -> None:
    """Small integers are exact in all of them, so the mean must be."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        ddp = DDP(Times(dtype), process_group=t)
        with ddp.normalize_by(3 + t.rank):
            ddp(torch.tensor(7 * (t.rank + 1), dtype=dtype)).backward()
        with case(dtype):
            assert ddp.module.w.grad.tolist() == [3.0] * 5
            assert ddp.last_step.divisor == 7


@on_threads(1, 2)
def test_dropping_the_wrapper_takes_its_hooks_off(t: Transport) -> None:
    model = linear()
    DDP(model, process_group=t)
    ddp = DDP(model, process_group=t)
    backward(ddp, inputs(t))
    assert gradient_of(ddp) == (1 + t.size) / 2


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


LEFT, RIGHT = ("left.weight", "left.bias"), ("right.weight", "right.bias")


def test_an_unused_parameter_is_an_error_at_this_backward_on_every_rank() -> None:
    def rank(t: Transport) -> list[str]:
        texts = []
        for cap_mb in (None, 1e-6):
            ddp, x = DDP(TwoHeads(), process_group=t, bucket_cap_mb=cap_mb), inputs(t)
            with pytest.raises(UnreducedGradients, match="find_unused_parameters=True") as error:
                ddp(x, left=t.rank == 0).sum().backward()
            assert error.value.missing == {0: RIGHT, 1: LEFT}
            texts.append(str(error.value))
            ddp.zero_grad()
            loss = ddp(x, left=True).sum()
            if t.rank == 0:  # it has all gradients, and learns that the other rank lacks some
                loss = loss + ddp(x, left=False).sum()
            with pytest.raises(UnreducedGradients) as error:
                loss.backward()
            assert error.value.missing == {1: RIGHT}
            ddp.zero_grad()
            (ddp(x, left=True) + ddp(x, left=False)).sum().backward()
            assert ddp.module.left.bias.grad.item() == 1.0, "training goes on"
        return texts

    first, second = run_ranks(2, rank)
    assert first == second
    assert all("on rank 0: right.weight, right.bias" in text for text in first)


@on_threads(1)
def test_alone_the_rule_is_the_same(t: Transport) -> None:
    ddp = DDP(TwoHeads(), process_group=t)
    ddp(inputs(t), left=True).sum().backward()
    with pytest.raises(UnreducedGradients, match=r"in a world of one rank: right\.weight, right\.bias"):
        torch.optim.SGD(ddp.parameters()).step()


@on_threads(2)
def test_where_unused_is_allowed_a_missing_gradient_is_zero_and_a_global_one_untouched(t: Transport) -> None:
    for argument, view in product(("find_unused_parameters", "static_graph"), (False, True)):
        ddp = DDP(TwoHeads(), process_group=t, gradient_as_bucket_view=view, **{argument: True})
        left, right = ddp.module.left.bias, ddp.module.right.bias
        with case(argument, view):
            for _ in range(2):
                ddp.zero_grad()
                ddp(inputs(t), left=True).sum().backward()
                assert (left.grad.item(), right.grad) == (1.0, None)
                ddp.zero_grad()
                ddp(inputs(t), left=t.rank == 0).sum().backward()
                assert (left.grad.item(), right.grad.item()) == (0.5, 0.5)


@on_threads(2)
def test_use_under_no_sync_counts_as_use(t: Transport) -> None:
    ddp = DDP(TwoHeads(), process_group=t, find_unused_parameters=True)
    with ddp.no_sync():
        (ddp(inputs(t), left=False) * (1 + t.rank)).sum().backward()
    ddp(inputs(t), left=True).sum().backward()
    assert (ddp.module.right.bias.grad.item(), ddp.module.left.bias.grad.item()) == (1.5, 1.0)


# ---------------------------------------------------------------------- normalize_by


@on_threads(1, 2, 3)
def test_normalize_by_is_exact_over_micro_batches_with_and_without_no_sync(t: Transport) -> None:
    for view in (False, True):
        ddp = DDP(linear(), process_group=t, gradient_as_bucket_view=view)
        for silent in (True, False, True):
            ddp.zero_grad()
            for micro in range(3):
                num_items = 4 * micro + t.rank + 1
                ddp.require_backward_grad_sync = not (silent and micro < 2)
                with ddp.normalize_by(num_items):
                    backward(ddp, torch.full((num_items, 2), 3.0))
            with case(view, silent):
                assert gradient_of(ddp) == pytest.approx(3.0, rel=1e-6)
                assert ddp.last_step.divisor == sum(4 * m + r + 1 for m in range(3) for r in range(t.size))


@on_threads(2)
def test_what_was_cleared_does_not_count(t: Transport) -> None:
    """By zeroing in place, too; after an exception, zero_grad, and on with the next batch."""
    ddp = DDP(linear(), process_group=t)
    for counted in (True, False):
        with ddp.no_sync(), ddp.normalize_by(100) if counted else nullcontext():
            backward(ddp, torch.ones(1, 2))
        ddp.zero_grad()
    for _ in range(2):
        with ddp.normalize_by(2):
            backward(ddp, torch.full((2, 2), 3.0))
        assert ddp.last_step.divisor == 4
        ddp.zero_grad(set_to_none=False)


@on_threads(2)
def test_gradients_that_were_changed_and_not_cleared_are_refused(t: Transport) -> None:
    ddp = DDP(linear(), process_group=t)
    with ddp.normalize_by(2):
        backward(ddp, torch.ones(2, 2))
    with pytest.raises(KeyError), ddp.normalize_by(7):
        raise KeyError
    assert gradient_of(ddp) == 1.0, "a block without backward changes nothing"
    ddp.module.weight.grad.mul_(0.5)
    with pytest.raises(ValueError, match="zero_grad"), ddp.normalize_by(2):
        pass
    assert gradient_of(ddp) == 0.5


@on_threads(2)
def test_no_items_anywhere_is_an_error_on_every_rank(t: Transport) -> None:
    ddp = DDP(linear(), process_group=t)
    with pytest.raises(ValueError, match=r"got 0 items on each of 2 ranks"), ddp.normalize_by(0):
        backward(ddp, torch.ones(0, 2))


def test_normalize_by_on_some_ranks_only_is_an_error_on_every_rank() -> None:
    def program(t: Transport) -> None:
        ddp = DDP(linear(), process_group=t)
        loss = ddp(inputs(t)).sum()
        with ddp.normalize_by(2) if t.rank else nullcontext():
            loss.backward()

    error = error_of_all(SynclineError, program)
    assert "rank 1 ran this backward under normalize_by, but rank 0 did not" in str(error)


# ---------------------------------------------------------------------- second derivatives


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph_averages_the_values_and_keeps_the_local_graph() -> None:
    """A Hessian-vector product, as AdaHessian computes it: per rank, then averaged."""
    model = nn.Sequential(linear(), nn.Tanh())

    def rank(t: Transport, view: bool) -> None:
        net = copy.deepcopy(model)
        ddp = DDP(net, process_group=t, gradient_as_bucket_view=view)
        parameters = list(net.parameters())
        ones = [torch.ones_like(p) for p in parameters]
        for step in range(3):
            ddp.zero_grad(set_to_none=True)
            ddp(inputs(t)).sum().backward(create_graph=True)
            batches = [torch.full((1, 2), float(rank + 1)) for rank in range(2)]
            expected = [torch.autograd.grad(net(x).sum(), parameters, create_graph=True) for x in batches]
            for parameter, one, other in zip(parameters, *expected, strict=True):
                torch.testing.assert_close(parameter.grad.detach(), (one + other).detach() / 2)
            local = torch.autograd.grad(expected[t.rank], parameters, ones)
            second = torch.autograd.grad([p.grad for p in parameters], parameters, ones)
            torch.testing.assert_close(second, local)
            assert ddp.last_step.step == step + 1
        ddp.zero_grad(set_to_none=True)
        ddp(inputs(t)).sum().backward()
        assert not any(p.grad.requires_grad for p in parameters)

    for view in (False, True):
        text = "step 1.*second derivatives are not averaged"
        with case(view), pytest.warns(RuntimeWarning, match=text) as caught:
            run_ranks(2, partial(rank, view=view))
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
        loss(DDP(net, process_group=t), inputs(t)).backward()
        for number in range(2):
            (loss(alone, torch.full((1, 2), float(number + 1))) / 2).backward()
        torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in alone.parameters()])

    run_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@on_threads(2)
def test_create_graph_is_refused_for_shards(t: Transport) -> None:
    ddp = DDP(linear(), process_group=t, sharded=True)
    with pytest.raises(SynclineError, match=r"step 1: backward\(create_graph=True\).*sharded=True"):
        ddp(inputs(t)).sum().backward(create_graph=True)


# ---------------------------------------------------------------------- what cannot be right is refused


@on_threads(2)
def test_a_backward_that_raised_breaks_the_module_by_name_only_if_buckets_were_sent(t: Transport) -> None:
    for cap_mb in (None, 1e-6):
        model = nn.Sequential(linear(2, 2), linear())
        ddp = DDP(model, process_group=t, bucket_cap_mb=cap_mb)
        with pytest.raises(KeyError):
            model[1](Fails.apply(model[0](inputs(t)))).sum().backward()
        ddp.zero_grad()
        if cap_mb is None:
            backward(ddp, inputs(t))
            assert model[1].bias.grad.item() == 1.0
    for _ in range(2):
        with pytest.raises(
            SynclineError, match=r"step 1, backward: a forward began .* already sent data \(2 bucket\(s\)\)"
        ):
            backward(ddp, inputs(t))


class Checkpointed(nn.Module):
    """Runs layers in re-entrant checkpoints, each of which names the layers in it; the last layer is in none."""

    def __init__(self, *parts: str, is_last_plain: bool = True, has_unused: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.last = nn.Linear(2, 1) if is_last_plain else None
        self.unused = nn.Linear(2, 2) if has_unused else None
        self.parts, self.reentrant = parts, True

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(self.run, part, x, use_reentrant=self.reentrant)
        return x if self.last is None else self.last(x)

    def run(self, part: str, x: Tensor) -> Tensor:
        for name in part.split():
            x = self.get_submodule(name)(x).tanh()
        return x


def assert_reduced_as_plain(t: Transport, module: Checkpointed, **options: Any) -> None:
    """In three steps, the gradients are the means of those with plain checkpoints."""
    plain = copy.deepcopy(module)
    plain.reentrant = False
    ddp = DDP(module, process_group=t, **options)
    plain.load_state_dict(module.state_dict())
    x = (torch.arange(6.0).view(3, 2) + t.rank).requires_grad_()
    for step in range(3):
        for model in (plain, ddp):
            model.zero_grad()
            model(x + step).square().sum().backward()
        assert ddp.last_step.step == step + 1
        for mine, local in zip(ddp.parameters(), plain.parameters(), strict=True):
            t.all_reduce(local.grad, "mean").wait()
            torch.testing.assert_close(mine.grad, local.grad)


@on_threads(2)
def test_reentrant_checkpoints_reduce_as_plain_ones_do(t: Transport) -> None:
    for is_static, cap_mb in product((False, True), (1e-6, None)):
        for num_uses in (1, 3) if is_static else (1,):
            with case(num_uses, is_static, cap_mb):
                module = Checkpointed(*["first"] * num_uses, "second")
                assert_reduced_as_plain(t, module, bucket_cap_mb=cap_mb, static_graph=is_static)


@on_threads(2)
def test_reentrant_checkpoints_of_all_parameters_reduce_as_plain_ones_do(t: Transport) -> None:
    for parts, view in product((["first", "second"], ["first second"]), (False, True)):
        with case(parts, view):
            module = Checkpointed(*parts, is_last_plain=False)
            assert_reduced_as_plain(t, module, gradient_as_bucket_view=view)


@on_threads(2)
def test_a_backward_whose_end_is_not_seen_is_an_error_by_name(t: Transport) -> None:
    """All gradients come from a checkpoint, and a parameter has none. Nothing tells when the backward is over."""
    for seen_by, allows_unused in product(("forward", "optimizer"), (False, True)):
        module = Checkpointed("first second", is_last_plain=False, has_unused=True)
        ddp = DDP(module, process_group=t, find_unused_parameters=allows_unused)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        x = inputs(t).requires_grad_()
        ddp(x).sum().backward()
        names = r"unused.weight, unused.bias"
        expected = rf"2 of 6 .*{names}.*use_reentrant" if allows_unused else rf"each of 6 .*\n.*{names}"
        with case(seen_by, allows_unused), pytest.raises(SynclineError, match=rf"step 1.*{expected}"):
            ddp(x) if seen_by == "forward" else optimizer.step()


@on_threads(2)
def test_a_static_graph_that_changes_is_an_error_by_name(t: Transport) -> None:
    for learnt, later in ((1, 2), (2, 3), (2, 1)):
        module = Checkpointed(*["first"] * learnt, "second")
        ddp = DDP(module, process_group=t, static_graph=True)
        x = inputs(t).requires_grad_()
        ddp(x).sum().backward()
        module.parts = (*["first"] * later, "second")
        with pytest.raises(SynclineError, match=rf"first.weight \({learnt} before, {later} now\)"):
            ddp(x).sum().backward()


@on_threads(2)
def test_a_parameter_in_two_checkpoints_without_static_graph_is_an_error_that_names_it(t: Transport) -> None:
    ddp = DDP(Checkpointed("first", "first", "second"), process_group=t, bucket_cap_mb=1e-6)
    x = inputs(t).requires_grad_()
    with pytest.raises(SynclineError, match="static_graph=True"):
        for _ in range(2):
            ddp(x).sum().backward()


# ---------------------------------------------------------------------- what it costs, what it records


@pytest.mark.real
def test_python_calls_are_one_a_parameter_and_few_a_bucket() -> None:
    """Pure-Python reducers lose their time in calls; this is the budget. `python_calls.py` counts them."""
    done = hangs.run([sys.executable, Path(__file__).with_name("python_calls.py")])
    assert done.returncode == 0, done.stderr
    calls_of_a_step: dict[str, Any] = json.loads(done.stdout)
    for (size, budget), view in product(((1, 51), (2, 124)), (False, True)):
        for counted in calls_of_a_step[f"{size} {view}"]:
            assert counted["num_buckets"] == size - 1
            calls = sorted(counted["calls"].items(), key=lambda item: (-item[1], item[0]))
            num_calls = sum(number for _, number in calls)
            assert 100 <= num_calls <= 100 + budget, (
                f"{size} ranks, gradient_as_bucket_view={view}: expected one call for each of 100 parameters, "
                f"and at most {budget} beside them, got {num_calls}:\n"
                + "\n".join(f"{number:4} {name}" for name, number in calls)
            )


class Reversed(nn.Module):
    """Its parameters are registered in another order than the one that forward uses them in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = linear(2, 2), linear(2, 2), linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


LEARNT = ["last.weight", "middle.weight", "first.weight"]


def triggers(ddp: DDP) -> list[str | None]:
    return [bucket.trigger for bucket in ddp.last_step.buckets]


def test_the_order_is_learnt_from_rank_0() -> None:
    """Registered backwards: the first plan is wrong, the second follows the recorded order."""

    def rank(t: Transport) -> Any:
        ddp = DDP(Reversed(), process_group=t, bucket_cap_mb=30 / 2**20, gradient_as_bucket_view=True)
        orders = []
        for _ in range(3):
            ddp.zero_grad()
            backward(ddp, inputs(t))
            orders.append(triggers(ddp))
        return orders, ddp.module.last.weight.grad.tolist()

    first, second = run_ranks(2, rank)
    assert first == second
    wrong, *orders = first[0]
    assert orders == [LEARNT, LEARNT]
    assert wrong != LEARNT


@on_threads(3)
def test_in_a_new_group_the_order_is_that_of_rank_0(t: Transport) -> None:
    """Rank 2 joins a group that has trained; or rank 0 does, and then no rank relies on an order."""
    for trained in ((0, 1), (1, 2)):
        group = t.split(0 if t.rank in trained else 1)
        ddp = DDP(Reversed(), process_group=group, bucket_cap_mb=30 / 2**20, replica_check=None)
        if t.rank in trained:
            backward(ddp, inputs(t))
        ddp._update_process_group(t)
        backward(ddp, inputs(t))
        with case(f"ranks {trained} have trained"):
            assert (triggers(ddp) == LEARNT) is (0 in trained)
            backward(ddp, inputs(t))
            assert triggers(ddp) == LEARNT
