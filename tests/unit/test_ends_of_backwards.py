"""Where a backward ends, and what programs do before that: more losses, hooks, changed modules, exceptions."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from support.functions import Fails
from support.threads import on_threads
from syncline import SynclineError, UnreducedGradients
from syncline.gradients.reducer import reducers_of
from syncline.testing import run_ranks
from syncline.transport import Transport

BODY = 64 * 64  # large gradients are copied as soon as they are ready, small ones when their bucket is sent


def linear(width: int = 1) -> nn.Linear:
    layer = nn.Linear(width, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


class TwoHeads(nn.Module):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.actor, self.critic = linear(width), linear(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


def wrapped(t: Transport, module: nn.Module, **arguments: Any) -> Any:
    return sl.DistributedDataParallel(module, process_group=t, **arguments)


def inputs(t: Transport, width: int = 1) -> Tensor:
    """Rank r feeds r + 1, so the mean gradient over two ranks is 1.5."""
    return torch.full((1, width), 1.0 + t.rank)


def firsts(module: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.flatten()[0].item() for p in module.parameters()]


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


# ---------------------------------------------------------------------- several losses of one forward


def two_losses(ddp: Any, x: Tensor) -> None:
    action, value = ddp(x)
    action.sum().backward()
    value.sum().backward()


def parts_in_turn(ddp: Any, x: Tensor) -> None:
    loss = torch.cat(ddp(x)).sum()
    loss.backward(inputs=list(ddp.module.actor.parameters()), retain_graph=True)
    loss.backward(inputs=list(ddp.module.critic.parameters()))


def evaluates_between(ddp: Any, x: Tensor) -> None:
    action, value = ddp(x)
    action.sum().backward()
    with torch.no_grad():
        ddp(x)
    value.sum().backward()


def first_under_no_sync(ddp: Any, x: Tensor) -> None:
    action, value = ddp(x)
    with ddp.no_sync():
        action.sum().backward()
    value.sum().backward()


def one_on_rank_0(ddp: Any, x: Tensor) -> None:
    if x.item() == 1:
        torch.cat(ddp(x)).sum().backward()
    else:
        two_losses(ddp, x)


def steps_others_between(ddp: Any, x: Tensor) -> None:
    action, value = ddp(x)
    action.sum().backward()
    sgd(linear()).step()
    value.sum().backward()


LOSSES = (
    two_losses,
    parts_in_turn,
    evaluates_between,
    first_under_no_sync,
    one_on_rank_0,
    steps_others_between,
)


@on_threads(1, 2, 3)
def test_backwards_over_different_parameters_are_one_step(t: Transport) -> None:
    for losses, cap_mb in product(LOSSES, (None, 1e-6)):
        with case(losses.__name__, cap_mb):
            ddp = wrapped(t, TwoHeads(), bucket_cap_mb=cap_mb)
            for _ in range(3):
                ddp.zero_grad()
                losses(ddp, inputs(t))
                assert firsts(ddp) == [(1 + t.size) / 2] * 2
            # On one rank, a backward that reaches only some parameters may get more until now.
            ddp(inputs(t))
            assert ddp.last_step.step == 3


NEXT: dict[str, Callable[[Any, Tensor], object]] = {
    "forward": lambda ddp, x: ddp(x),
    "optimizer": lambda ddp, _: sgd(ddp).step(),
    "zero_grad": lambda ddp, _: ddp.zero_grad(),
}


@on_threads(1, 2)
def test_a_loss_that_never_comes_is_an_error_on_every_rank_before_anything_is_lost(t: Transport) -> None:
    """Where a mean is missing, hooks of this backward do not run."""
    for name, following in NEXT.items():
        with case(name):
            ddp, x, seen = wrapped(t, TwoHeads()), inputs(t), []
            ddp.module.actor.weight.register_post_accumulate_grad_hook(seen.append)
            ddp(x)[0].sum().backward()
            with pytest.raises(UnreducedGradients) as error:
                following(ddp, x)
            assert error.value.missing == dict.fromkeys(range(t.size), ("critic.weight",))
            assert t.size == 1 or not seen
            two_losses(ddp, x)  # training can go on
            assert ddp.module.actor.weight.item() == 1.0


class ChosenHead(TwoHeads):
    def forward(self, x: Tensor, head: str) -> Tensor:
        return self.get_submodule(head)(x)


@pytest.mark.filterwarnings("ignore:step 1:RuntimeWarning")  # that second derivatives are not averaged
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@on_threads(1, 2)
def test_the_last_micro_batch_need_not_use_what_others_have_used(t: Transport) -> None:
    for width, create_graph in product((1, BODY), (False, True)):
        with case(width, create_graph):
            ddp, x = wrapped(t, ChosenHead(width)), inputs(t, width)
            with ddp.no_sync():
                for head in ("actor", "critic"):
                    ddp(x, head).sum().backward()
            assert firsts(ddp) == [1 + t.rank] * 2
            ddp(x, "critic").sum().backward(create_graph=create_graph)
            assert firsts(ddp) == ([1, 2] if t.size == 1 else [1.5, 3])


# ---------------------------------------------------------------------- a forward under no_sync


@on_threads(1, 2)
def test_micro_batches_whose_forwards_ran_under_no_sync_are_reduced_with_the_last_one(t: Transport) -> None:
    ddp = wrapped(t, linear())
    for _ in range(3):
        with ddp.no_sync():
            loss = ddp(inputs(t)).sum()
        loss.backward()
    with ddp.no_sync():
        ddp(inputs(t))  # for its output only: the backward of another forward is not local
    ddp(inputs(t)).sum().backward()
    sgd(ddp).step()
    assert (firsts(ddp), ddp.last_step.step) == ([2 * (1 + t.size)], 1)


def test_a_step_of_gradients_that_no_forward_outside_of_no_sync_followed_is_a_warning() -> None:
    """The program may average by itself. With an attached optimizer, it has asked for an error."""

    def rank(t: Transport) -> None:
        for is_attached in (True, False):
            ddp = wrapped(t, linear())
            optimizer = sgd(ddp)
            if is_attached:
                ddp.attach(optimizer)
            with ddp.no_sync():
                loss = ddp(inputs(t)).sum()
            loss.backward()
            if is_attached:
                with pytest.raises(SynclineError, match=r"step\(\).*: expected reduced gradients"):
                    optimizer.step()
                assert ddp.module.weight.item() == 1.0
        for _ in range(2):
            optimizer.step()
        assert ddp.module.weight.item() == pytest.approx(1 - 0.2 * (1 + t.rank))

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run_ranks(2, rank)
    assert len(heard) == 2, "one of each rank"
    assert all("SGD.step(): the gradients were not averaged" in str(one.message) for one in heard)


@on_threads(2)
def test_a_backward_of_a_forward_under_no_sync_can_be_reduced_by_the_name_that_torch_has_for_it(
    t: Transport,
) -> None:
    """Accelerate's `trigger_sync_in_backward` calls it."""
    ddp = wrapped(t, linear())
    for _ in range(2):
        with ddp.no_sync():
            losses = [ddp(inputs(t)).sum() for _ in range(2)]
        losses[0].backward()
        assert firsts(ddp) == [1.0 + t.rank]
        ddp.reducer.prepare_for_backward([])
        losses[1].backward()
        assert firsts(ddp) == [3.0]
        ddp.zero_grad()


# ---------------------------------------------------------------------- hooks of the program


def check_a_hook_that_steps_and_clears(t: Transport, as_view: bool, width: int, is_early: bool) -> None:
    module, seen = linear(width), []
    optimizer = sgd(module)

    def step_now(parameter: Tensor) -> None:
        seen.append(parameter.grad[0, 0].item())
        optimizer.step()
        optimizer.zero_grad()

    if is_early:
        module.weight.register_post_accumulate_grad_hook(step_now)
    ddp = wrapped(t, module, gradient_as_bucket_view=as_view)
    if not is_early:
        module.weight.register_post_accumulate_grad_hook(step_now)
    for _ in range(3):
        ddp(inputs(t, width)).sum().backward()
    assert (seen, module.weight.grad) == ([1.5] * 3, None)
    assert module.weight[0, 0].item() == pytest.approx(0.55)


@on_threads(2)
def test_a_hook_that_steps_and_clears_works_with_the_mean(t: Transport) -> None:
    for how in product((False, True), (1, BODY), (False, True)):
        with case(*how):
            check_a_hook_that_steps_and_clears(t, *how)


@on_threads(2)
def test_a_hook_that_clears_runs_after_the_last_of_the_wrappers_that_reduce_its_parameter(
    t: Transport,
) -> None:
    module, seen = linear(), []
    first, second = wrapped(t, nn.Sequential(module)), wrapped(t, nn.Sequential(module))

    def clear(parameter: Tensor) -> None:
        seen.append(parameter.grad.item())
        parameter.grad = None

    module.weight.register_post_accumulate_grad_hook(clear)
    for _ in range(2):
        (first(inputs(t)) + second(inputs(t))).sum().backward()
    assert (seen, module.weight.grad) == ([3.0, 3.0], None)


@on_threads(2)
def test_a_hook_runs_with_local_gradients_where_nothing_is_reduced_and_can_be_removed(t: Transport) -> None:
    module, seen = linear(), []
    early = module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(10 * p.grad.item()))
    ddp = wrapped(t, module)
    late = module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    with ddp.no_sync():
        ddp(inputs(t)).sum().backward()
    early.remove()
    ddp.zero_grad()
    ddp(inputs(t)).sum().backward()
    late.remove()
    ddp(inputs(t)).sum().backward()
    del ddp
    assert not module.weight._post_accumulate_grad_hooks
    assert seen == [10.0 * (1 + t.rank), 1.0 + t.rank, 1.5]


@on_threads(2)
def test_an_optimizer_does_not_step_inside_of_a_backward(t: Transport) -> None:
    def check(width: int) -> None:
        ddp = wrapped(t, linear(width))
        optimizer = sgd(ddp)
        ddp.module.register_full_backward_hook(lambda *_: optimizer.step())
        with pytest.raises(SynclineError, match=r"step 1, SGD.step\(\) was called inside of a backward"):
            ddp(inputs(t, width).requires_grad_()).sum().backward()
        assert ddp.module.weight[0, 0].item() == 1.0

    for width in (1, BODY):
        with case(width):
            check(width)


@on_threads(2)
def test_parameters_may_be_written_inside_of_a_backward(t: Transport) -> None:
    """If the ranks write different values, the next look at the replicas tells."""
    ddp = wrapped(t, TwoHeads())
    critic = ddp.module.critic

    def decay(*_: object) -> None:
        with torch.no_grad():
            critic.weight -= 0.5

    critic.register_full_backward_hook(decay)
    torch.cat(ddp(inputs(t).requires_grad_())).sum().backward()
    assert (critic.weight.item(), critic.weight.grad.item()) == (0.5, 1.5)


@on_threads(2)
def test_gradients_that_are_removed_inside_of_a_backward_are_named(t: Transport) -> None:
    ddp = wrapped(t, TwoHeads())
    action, value = ddp(inputs(t).requires_grad_())
    value.sum().backward()
    ddp.module.critic.weight.grad = None
    with pytest.raises(SynclineError, match=r"\.grad became None inside of the backward: critic\.weight\."):
        action.sum().backward()


# ---------------------------------------------------------------------- parameters whose contents are swapped


def swap(*layers: nn.Linear) -> None:
    for layer in layers:
        torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach().clone()))


SWAPPED = (["actor"], ["critic"], ["actor", "critic"])


@on_threads(2)
def test_gradients_of_swapped_parameters_are_averaged(t: Transport) -> None:
    options = ("static_graph", "gradient_as_bucket_view", "find_unused_parameters")
    for option, swapped, num_ranks_swapping in product((None, *options), SWAPPED, (1, 2)):
        with case(option, swapped, num_ranks_swapping):
            ddp = wrapped(t, TwoHeads(), **({option: True} if option else {}))
            for step in range(4):
                if step in (0, 2) and t.rank < num_ranks_swapping:
                    swap(*map(ddp.module.get_submodule, swapped))
                ddp.zero_grad()
                torch.cat(ddp(inputs(t))).sum().backward()
                assert firsts(ddp) == [1.5, 1.5]


class Hidden:
    def __init__(self, held: tuple[Tensor, Tensor]) -> None:
        self.held = held


class HiddenHeads(TwoHeads):
    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


@on_threads(2)
def test_gradients_whose_hooks_are_lost_are_looked_for_before_a_backward_waits_for_a_further_loss(
    t: Transport,
) -> None:
    ddp = wrapped(t, HiddenHeads())
    ddp(inputs(t))  # announces a reduction
    swap(ddp.module.actor, ddp.module.critic)
    output = ddp(inputs(t))
    swap(ddp.module.actor)
    torch.cat([ddp.module.actor(inputs(t)), output.held[1]]).sum().backward()
    assert firsts(ddp) == [1.5, 1.5]


@on_threads(2)
def test_a_module_that_is_wrapped_anew_is_its_new_wrappers(t: Transport) -> None:
    """On one rank, an output keeps the former wrapper alive."""
    module = linear()
    former = wrapped(t, module)
    kept = former(inputs(t)) if t.rank else None
    ddp = wrapped(t, module)
    ddp(inputs(t)).sum().backward()
    del kept, former
    assert firsts(ddp) == [1.5]


@on_threads(2)
def test_hooks_of_swapped_parameters_are_back_after_the_next_forward(t: Transport) -> None:
    for swapped in SWAPPED:
        ddp, seen = wrapped(t, HiddenHeads()), []
        swap(*map(ddp.module.get_submodule, swapped))
        output = ddp(inputs(t))
        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(seen.append)
        torch.cat(output.held).sum().backward()
        with case(swapped):
            assert (firsts(ddp), len(seen)) == ([1.5, 1.5], 2)


@on_threads(2)
def test_a_step_of_other_parameters_does_not_use_up_a_backward(t: Transport) -> None:
    ddp, other = wrapped(t, linear()), linear()
    optimizer, others = sgd(ddp, lr=1.0), sgd(other, lr=1.0)
    ddp(inputs(t)).sum().backward()
    others.step()
    copied = nn.Parameter(ddp.module.weight.detach().clone())
    copied.grad = ddp.module.weight.grad
    torch.utils.swap_tensors(ddp.module.weight, copied)
    optimizer.step()
    assert ddp.module.weight.item() == -0.5


@on_threads(2)
def test_a_wrapper_whose_hooks_another_one_has_registered_again_has_not_lost_them(t: Transport) -> None:
    inner = linear()
    outer = nn.Sequential(inner, linear())
    _first, second = wrapped(t, inner), wrapped(t, outer)
    optimizer = sgd(outer)
    swap(inner)
    second(inputs(t)).sum().backward()
    assert firsts(outer) == [1.5, 1.5]
    optimizer.step()


def test_a_converted_module_is_followed_with_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)

    def rank(t: Transport) -> None:
        ddp = wrapped(t, linear())
        ddp.double()
        for _ in range(2):
            ddp(inputs(t).double()).sum().backward()
            assert firsts(ddp) == [1.5]  # a swap drops what was in .grad
            ddp.load_state_dict(copy.deepcopy(ddp.state_dict()))

    run_ranks(2, rank)


# ---------------------------------------------------------------------- backwards that were interrupted


@on_threads(2)
def test_an_optimizer_does_not_step_after_a_backward_that_an_exception_interrupted(t: Transport) -> None:
    for cap_mb in (None, 1e-6):
        with case(cap_mb):
            last = linear()
            ddp = wrapped(t, nn.Sequential(linear(), last), bucket_cap_mb=cap_mb)
            with pytest.raises(KeyError):
                last(Fails.apply(ddp.module[0](inputs(t)))).sum().backward()
            before_its_end = r"step 1, backward: SGD.step\(\) began before this backward had ended"
            with pytest.raises(SynclineError, match=before_its_end):
                sgd(ddp).step()
            assert last.weight.item() == 1.0


# ---------------------------------------------------------------------- a wrapper that is dropped before the backward


@on_threads(2)
def test_an_output_keeps_its_wrapper_until_its_backward_has_ended(t: Transport) -> None:
    for arguments in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        module = linear()
        ddp = wrapped(t, module, **arguments)
        loss = ddp(inputs(t)).sum()
        del ddp
        gc.collect()
        loss.backward()
        with case(arguments):
            assert firsts(module) == [1.5]
            del loss
            gc.collect()
            assert reducers_of(module.parameters()) == []


# ---------------------------------------------------------------------- modules that change, shared parameters


@on_threads(2)
def test_a_wrapper_that_gets_a_parameter_of_another_one_reduces_it_with_that_one(t: Transport) -> None:
    """The first wrapper knows of the parameter only in the backward in which both reduce it."""
    for as_view, width, order in product((False, True), (1, 128), (1, -1)):
        layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        for layer in layers:
            nn.init.eye_(layer.weight)
        own, other, shared = layers
        shared.requires_grad_(False)
        first = wrapped(t, nn.Sequential(*[own, shared][::order]), gradient_as_bucket_view=as_view)
        shared.requires_grad_(True)
        second = wrapped(t, nn.Sequential(*[other, shared][::order]), gradient_as_bucket_view=as_view)
        for _ in range(3):
            (first(inputs(t, width)) + second(inputs(t, width))).sum().backward()
            with case(as_view, width, order):
                assert firsts(layers) == [1.5, 1.5, 3.0]
            for layer in layers:
                nn.init.zeros_(layer.weight.grad)


@on_threads(2)
def test_a_module_that_is_put_back_before_a_backward_is_trained(t: Transport) -> None:
    """Also if it is another one with the same parameters."""
    for keeps_layers in (False, True):
        layers = [linear(), linear()]
        former = nn.Sequential(*layers)
        ddp = wrapped(t, former)
        ddp.module = nn.Sequential(*(layers if keeps_layers else [linear()]), linear())
        ddp(inputs(t))
        ddp.module = nn.Sequential(*layers) if keeps_layers else former
        ddp(inputs(t)).sum().backward()
        with case(keeps_layers):
            assert firsts(former) == [1.5, 1.5]


@on_threads(2)
def test_a_layer_that_takes_the_place_of_one_that_was_deleted_is_trained(t: Transport) -> None:
    """To delete a layer, `nn.Sequential` makes a new table of layers."""
    for has_run in (False, True):
        net = nn.Sequential(linear())
        ddp = wrapped(t, net)
        net.append(linear())
        if has_run:
            ddp(inputs(t))
        del net[1]
        if has_run:
            ddp(inputs(t))
        net.append(linear())
        ddp(inputs(t)).sum().backward()
        with case(has_run):
            assert firsts(net) == [1.5, 1.5]


class Mixed(nn.Module):
    """Each layer has a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x.to(self.first.weight.dtype))
        found: Tensor = self.last(hidden.to(self.last.weight.dtype))
        return found


@on_threads(2)
def test_gradients_of_a_layer_that_is_converted_alone_are_not_rounded(t: Transport) -> None:
    for as_view, name in product((False, True), ("first", "last")):
        ddp = wrapped(t, Mixed().bfloat16(), gradient_as_bucket_view=as_view)
        ddp.module.get_submodule(name).double()
        for parameter in ddp.module.parameters():
            parameter.register_hook(lambda gradient: gradient * (1 + 2**-20))
        ddp(inputs(t)).sum().backward()
        with case(as_view, name):
            assert firsts(ddp.module.get_submodule(name)) == [1.5 * (1 + 2**-20)]


@on_threads(2)
def test_a_wrapper_of_a_larger_module_leaves_backwards_alone_that_bring_it_a_part_of_its_gradients(
    t: Transport,
) -> None:
    for is_repeated in (False, True):
        inner = linear()
        ddp = wrapped(t, inner)
        larger = wrapped(t, nn.Sequential(inner, linear()))
        if is_repeated:
            loss = ddp(inputs(t)).sum() / 2
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            ddp.module(inputs(t)).sum().backward()
        with case(is_repeated):
            assert firsts(larger) == [1.5, None]


@on_threads(2)
def test_a_hook_on_a_parameter_that_the_wrapper_does_not_know_yet_sees_the_mean(t: Transport) -> None:
    """Its gradient is the first one of the backward."""
    seen: list[float] = []

    def see(parameter: Tensor) -> None:
        seen.append(parameter.grad.item())

    for is_early in (False, True):
        net = nn.Sequential(linear(), linear())
        net[1].requires_grad_(False)
        ddp = wrapped(t, net)
        net[1].requires_grad_(True)
        if is_early:
            net[1].weight.register_post_accumulate_grad_hook(see)
        loss = ddp(inputs(t)).sum()
        if not is_early:
            net[1].weight.register_post_accumulate_grad_hook(see)
        loss.backward()
    assert seen == [1.5, 1.5]
