"""Where a backward ends, and what programs do before that: more losses, hooks, changed modules, exceptions."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline import SynclineError, UnreducedGradients
from syncline.testing import run_ranks
from syncline.transport.base import Transport

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
    return torch.full((1, width), 1.0 + t.rank)


def firsts(module: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.flatten()[0].item() for p in module.parameters()]


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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("cap_mb", [None, 1e-6])
@pytest.mark.parametrize("losses", [two_losses, parts_in_turn, evaluates_between, first_under_no_sync])
def test_backwards_over_different_parameters_are_one_step(
    losses: Callable[[Any, Tensor], None], cap_mb: float | None, size: int
) -> None:
    def rank(t: Transport) -> tuple[list[list[float | None]], int]:
        ddp = wrapped(t, TwoHeads(), bucket_cap_mb=cap_mb)
        seen = []
        for _ in range(3):
            ddp.zero_grad()
            losses(ddp, inputs(t))
            seen.append(firsts(ddp))
        ddp(inputs(t))  # on one rank, a backward that reaches only some parameters may get more until now
        return seen, ddp.last_step.step

    mean = (1 + size) / 2
    assert run_ranks(size, rank) == [([[mean, mean]] * 3, 3)] * size


NEXT: dict[str, Callable[[Any, Tensor], object]] = {
    "forward": lambda ddp, x: ddp(x),
    "optimizer": lambda ddp, _: torch.optim.SGD(ddp.parameters(), lr=0.1).step(),
    "zero_grad": lambda ddp, _: ddp.zero_grad(),
}


@pytest.mark.parametrize("following", NEXT)
@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_never_comes_is_an_error_on_every_rank_before_anything_is_lost(
    size: int, following: str
) -> None:
    def rank(t: Transport) -> tuple[Any, float]:
        ddp = wrapped(t, TwoHeads())
        x = inputs(t)
        ddp(x)[0].sum().backward()
        with pytest.raises(UnreducedGradients) as error:
            NEXT[following](ddp, x)
        two_losses(ddp, x)  # training can go on
        return error.value.missing, ddp.module.actor.weight.item()

    expected = dict.fromkeys(range(size), ("critic.weight",))
    assert run_ranks(size, rank) == [(expected, 1.0)] * size


def test_one_rank_may_have_two_losses_where_the_other_has_one() -> None:
    def rank(t: Transport) -> list[float | None]:
        ddp = wrapped(t, TwoHeads())
        if t.rank:
            two_losses(ddp, inputs(t))
        else:
            torch.cat(ddp(inputs(t))).sum().backward()
        return firsts(ddp)

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


def test_an_optimizer_of_other_parameters_may_step_between_two_losses() -> None:
    def rank(t: Transport) -> list[float | None]:
        ddp, other = wrapped(t, TwoHeads()), linear()
        action, value = ddp(inputs(t))
        action.sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        value.sum().backward()
        return firsts(ddp)

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


class ChosenHead(TwoHeads):
    def forward(self, x: Tensor, head: str) -> Tensor:  # type: ignore[override]
        return self.get_submodule(head)(x)


@pytest.mark.parametrize("width", [1, BODY])
@pytest.mark.parametrize("create_graph", [False, True])
def test_the_last_micro_batch_need_not_use_what_others_have_used(width: int, create_graph: bool) -> None:
    def rank(t: Transport) -> tuple[list[float | None], list[float | None]]:
        ddp, x = wrapped(t, ChosenHead(width)), inputs(t, width)
        with ddp.no_sync():
            for head in ("actor", "critic"):
                ddp(x, head).sum().backward()
        before = firsts(ddp)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that second derivatives are not averaged
            ddp(x, "critic").sum().backward(create_graph=create_graph)
        return before, firsts(ddp)

    (first, mean), (second, other) = run_ranks(2, rank)
    assert (first, second, mean, other) == ([1, 1], [2, 2], [1.5, 3], [1.5, 3])
    assert run_ranks(1, rank)[0] == ([1, 1], [1, 2])


# ---------------------------------------------------------------------- a forward under no_sync


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_whose_forwards_ran_under_no_sync_are_reduced_with_the_last_one(size: int) -> None:
    def rank(t: Transport) -> tuple[list[float | None], int, int]:
        ddp = wrapped(t, linear())
        before = t.statistics().total_calls
        for at in range(4):
            if at < 3:
                with ddp.no_sync():
                    loss = ddp(inputs(t)).sum()
            else:
                loss = ddp(inputs(t)).sum()
            loss.backward()
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()
        return firsts(ddp), ddp.last_step.step, t.statistics().total_calls - before

    for seen, step, _ in run_ranks(size, rank):
        assert (seen, step) == ([4 * (1 + size) / 2], 1)


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_step_of_gradients_that_no_forward_outside_of_no_sync_followed_is_a_warning(
    is_attached: bool,
) -> None:
    """The program may average by itself. With an attached optimizer, it has asked for an error."""

    def rank(t: Transport) -> float:
        ddp = wrapped(t, linear())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if is_attached:
            ddp.attach(optimizer)
        with ddp.no_sync():
            loss = ddp(inputs(t)).sum()
        loss.backward()
        if is_attached:
            with pytest.raises(SynclineError, match=r"step\(\).*: expected reduced gradients"):
                optimizer.step()
        else:
            for _ in range(2):
                optimizer.step()
        return ddp.module.weight.item()

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = run_ranks(2, rank)
    assert found == ([1.0, 1.0] if is_attached else pytest.approx([0.8, 0.6]))
    texts = [str(one.message) for one in heard]
    assert len(texts) == (0 if is_attached else 2), "one of each rank"
    assert all("SGD.step(): the gradients were not averaged" in text for text in texts)


def test_a_backward_whose_forward_ran_under_no_sync_can_be_reduced_by_the_name_that_torch_has_for_it() -> (
    None
):
    """Accelerate's `trigger_sync_in_backward` calls it."""

    def rank(t: Transport) -> list[list[float | None]]:
        ddp, seen = wrapped(t, linear()), []
        for _ in range(2):
            with ddp.no_sync():
                losses = [ddp(inputs(t)).sum() for _ in range(2)]
            losses[0].backward()
            seen.append(firsts(ddp))
            ddp.reducer.prepare_for_backward([])
            losses[1].backward()
            seen.append(firsts(ddp))
            ddp.zero_grad()
        return seen

    assert run_ranks(2, rank) == [[[1.0], [3.0]] * 2, [[2.0], [3.0]] * 2]


def test_a_forward_under_no_sync_does_not_make_the_backward_of_another_forward_local() -> None:
    def rank(t: Transport) -> list[float | None]:
        ddp = wrapped(t, linear())
        with ddp.no_sync():
            ddp(inputs(t))  # for its output only
        ddp(inputs(t)).sum().backward()
        return firsts(ddp)

    assert run_ranks(2, rank) == [[1.5]] * 2


# ---------------------------------------------------------------------- hooks of the program


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("width", [1, BODY])
@pytest.mark.parametrize("as_view", [False, True])
def test_a_hook_that_steps_and_clears_works_with_the_mean(as_view: bool, width: int, is_early: bool) -> None:
    def rank(t: Transport) -> tuple[list[float], float, Any]:
        module, seen = linear(width), []
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step_now(parameter: Tensor) -> None:
            assert parameter.grad is not None
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
        return seen, round(module.weight[0, 0].item(), 5), module.weight.grad

    assert run_ranks(2, rank) == [([1.5] * 3, 0.55, None)] * 2


def test_a_hook_that_clears_runs_after_the_last_of_the_wrappers_that_reduce_its_parameter() -> None:
    def rank(t: Transport) -> tuple[list[float], Any]:
        module, seen = linear(), []
        first, second = wrapped(t, nn.Sequential(module)), wrapped(t, nn.Sequential(module))

        def clear(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.item())
            parameter.grad = None

        module.weight.register_post_accumulate_grad_hook(clear)
        for _ in range(2):
            (first(inputs(t)) + second(inputs(t))).sum().backward()
        return seen, module.weight.grad

    assert run_ranks(2, rank) == [([3.0, 3.0], None)] * 2


def test_a_hook_runs_with_local_gradients_where_nothing_is_reduced_and_can_be_removed() -> None:
    def rank(t: Transport) -> list[float]:
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
        return seen

    assert run_ranks(2, rank) == [[10.0, 1.0, 1.5], [20.0, 2.0, 1.5]]


def test_hooks_of_a_backward_that_failed_do_not_run() -> None:
    def rank(t: Transport) -> list[Any]:
        ddp, seen = wrapped(t, TwoHeads()), []
        ddp.module.actor.weight.register_post_accumulate_grad_hook(seen.append)
        ddp(inputs(t))[0].sum().backward()
        with pytest.raises(UnreducedGradients):
            ddp.zero_grad()
        return seen

    assert run_ranks(2, rank) == [[], []]


@pytest.mark.parametrize("width", [1, BODY])
def test_an_optimizer_does_not_step_inside_of_a_backward(width: int) -> None:
    def rank(t: Transport) -> float:
        module = linear(width)
        ddp = wrapped(t, module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        module.register_full_backward_hook(lambda *_: optimizer.step())
        x = inputs(t, width).requires_grad_()
        with pytest.raises(SynclineError, match=r"step 1, SGD.step\(\) was called inside of a backward"):
            ddp(x).sum().backward()
        return module.weight[0, 0].item()

    assert run_ranks(2, rank) == [1.0, 1.0]


def test_parameters_may_be_written_inside_of_a_backward() -> None:
    """If the ranks write different values, the next look at the replicas tells."""

    def rank(t: Transport) -> list[float]:
        ddp = wrapped(t, TwoHeads())

        def decay(*_: object) -> None:
            with torch.no_grad():
                ddp.module.critic.weight -= 0.5

        ddp.module.critic.register_full_backward_hook(decay)
        torch.cat(ddp(inputs(t).requires_grad_())).sum().backward()
        return [ddp.module.critic.weight.item(), ddp.module.critic.weight.grad.item()]

    assert run_ranks(2, rank) == [[0.5, 1.5]] * 2


def test_gradients_that_are_removed_inside_of_a_backward_are_named() -> None:
    def rank(t: Transport) -> str:
        ddp = wrapped(t, TwoHeads())
        heads = ddp.module

        def clear(*_: object) -> None:
            heads.critic.weight.grad = None

        x = inputs(t).requires_grad_()
        action, value = ddp(x)
        value.register_hook(lambda _: None)
        value.sum().backward()
        clear()
        with pytest.raises(SynclineError) as error:
            action.sum().backward()
        return str(error.value)

    for text in run_ranks(2, rank):
        assert ".grad became None inside of the backward: critic.weight." in text


# ---------------------------------------------------------------------- parameters whose contents are swapped


def swap(parameter: nn.Parameter) -> None:
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
)
@pytest.mark.parametrize("swapped", [["actor"], ["critic"], ["actor", "critic"]])
@pytest.mark.parametrize("num_ranks_swapping", [1, 2])
def test_gradients_of_swapped_parameters_are_averaged(
    num_ranks_swapping: int, swapped: list[str], arguments: dict[str, Any]
) -> None:
    def rank(t: Transport) -> list[list[float | None]]:
        ddp = wrapped(t, TwoHeads(), **arguments)
        seen = []
        for step in range(4):
            if step in (0, 2) and t.rank < num_ranks_swapping:
                for name in swapped:
                    swap(getattr(ddp.module, name).weight)
            ddp.zero_grad()
            torch.cat(ddp(inputs(t))).sum().backward()
            seen.append(firsts(ddp))
        return seen

    assert run_ranks(2, rank) == [[[1.5, 1.5]] * 4] * 2


class Hidden:
    def __init__(self, held: tuple[Tensor, Tensor]) -> None:
        self.held = held


class HiddenHeads(TwoHeads):
    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


def test_gradients_whose_hooks_are_lost_are_looked_for_before_a_backward_waits_for_a_further_loss() -> None:
    def rank(t: Transport) -> list[float | None]:
        ddp = wrapped(t, HiddenHeads())
        ddp(inputs(t))  # announces a reduction
        for name in ("actor", "critic"):
            swap(getattr(ddp.module, name).weight)
        output = ddp(inputs(t))
        swap(ddp.module.actor.weight)
        torch.cat([ddp.module.actor(inputs(t)), output.held[1]]).sum().backward()
        return firsts(ddp)

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


def test_a_module_that_is_wrapped_anew_is_its_new_wrappers() -> None:
    """On one rank, an output keeps the former wrapper alive."""

    def rank(t: Transport) -> list[float | None]:
        module = linear()
        former = wrapped(t, module)
        kept = former(inputs(t)) if t.rank else None
        ddp = wrapped(t, module)
        ddp(inputs(t)).sum().backward()
        del kept, former
        return firsts(ddp)

    assert run_ranks(2, rank) == [[1.5]] * 2


@pytest.mark.parametrize("swapped", [["actor"], ["critic"], ["actor", "critic"]])
def test_hooks_of_swapped_parameters_are_back_after_the_next_forward(swapped: list[str]) -> None:
    def rank(t: Transport) -> tuple[list[float | None], int]:
        ddp = wrapped(t, HiddenHeads())
        for name in swapped:
            swap(getattr(ddp.module, name).weight)
        output, seen = ddp(inputs(t)), []
        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        torch.cat(output.held).sum().backward()
        return firsts(ddp), len(seen)

    assert run_ranks(2, rank) == [([1.5, 1.5], 2)] * 2


def test_a_step_of_other_parameters_does_not_use_up_a_backward() -> None:
    def rank(t: Transport) -> float:
        ddp, other = wrapped(t, linear()), linear()
        optimizer, others = (torch.optim.SGD(module.parameters(), lr=1.0) for module in (ddp, other))
        ddp(inputs(t)).sum().backward()
        others.step()
        copied = nn.Parameter(ddp.module.weight.detach().clone())
        copied.grad = ddp.module.weight.grad
        torch.utils.swap_tensors(ddp.module.weight, copied)
        optimizer.step()
        return ddp.module.weight.item()

    assert run_ranks(2, rank) == [-0.5] * 2


def test_a_wrapper_whose_hooks_another_one_has_registered_again_has_not_lost_them() -> None:
    def rank(t: Transport) -> list[float | None]:
        inner = linear()
        outer = nn.Sequential(inner, linear())
        _first, second = wrapped(t, inner), wrapped(t, outer)
        optimizer = torch.optim.SGD(outer.parameters(), lr=1.0)
        torch.utils.swap_tensors(inner.weight, nn.Parameter(inner.weight.detach().clone()))
        second(inputs(t)).sum().backward()
        found = firsts(outer)
        optimizer.step()
        return found

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


def test_a_converted_module_is_followed_with_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)

    def rank(t: Transport) -> list[float | None]:
        ddp = wrapped(t, linear())
        ddp.double()
        ddp(inputs(t).double()).sum().backward()
        ddp.load_state_dict(copy.deepcopy(ddp.state_dict()))
        ddp(inputs(t).double()).sum().backward()
        return firsts(ddp)

    assert run_ranks(2, rank) == [[1.5]] * 2  # a swap drops what was in .grad


# ---------------------------------------------------------------------- backwards that were interrupted


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("in the program's backward")


@pytest.mark.parametrize("cap_mb", [None, 1e-6])
def test_an_optimizer_does_not_step_after_a_backward_that_an_exception_interrupted(
    cap_mb: float | None,
) -> None:
    def rank(t: Transport) -> float:
        last = linear()
        ddp = wrapped(t, nn.Sequential(linear(), last), bucket_cap_mb=cap_mb)
        with pytest.raises(KeyError):
            last(Fails.apply(ddp.module[0](inputs(t)))).sum().backward()
        with pytest.raises(
            SynclineError, match=r"step 1, backward: SGD.step\(\) began before this backward had ended"
        ):
            torch.optim.SGD(ddp.parameters(), lr=0.1).step()
        return last.weight.item()

    assert run_ranks(2, rank) == [1.0, 1.0]


# ---------------------------------------------------------------------- a wrapper that is dropped before the backward


@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_an_output_keeps_its_wrapper_until_its_backward_has_ended(arguments: dict[str, Any]) -> None:
    def program(t: Transport) -> weakref.ref[Any]:
        module = linear()
        ddp = wrapped(t, module, **arguments)
        replica = weakref.ref(ddp._replica)
        loss = ddp(inputs(t)).sum()
        del ddp
        gc.collect()
        loss.backward()
        assert firsts(module) == [1.5]
        return replica

    replicas = run_ranks(2, program)
    gc.collect()
    assert [replica() for replica in replicas] == [None, None]


# ---------------------------------------------------------------------- modules that change, shared parameters


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("width", [1, 128])
@pytest.mark.parametrize("as_view", [False, True])
def test_a_wrapper_that_gets_a_parameter_of_another_one_reduces_it_with_that_one(
    as_view: bool, width: int, is_last: bool
) -> None:
    """The first wrapper knows of the parameter only in the backward in which both reduce it."""

    def rank(t: Transport) -> list[list[float | None]]:
        layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        for layer in layers:
            nn.init.eye_(layer.weight)
        own, other, shared = layers
        shared.requires_grad_(False)
        order = 1 if is_last else -1
        first = wrapped(t, nn.Sequential(*[own, shared][::order]), gradient_as_bucket_view=as_view)
        shared.requires_grad_(True)
        second = wrapped(t, nn.Sequential(*[other, shared][::order]), gradient_as_bucket_view=as_view)
        found = []
        for _ in range(3):
            (first(inputs(t, width)) + second(inputs(t, width))).sum().backward()
            found.append(firsts(layers))
            for layer in layers:
                nn.init.zeros_(layer.weight.grad)
        return found

    assert run_ranks(2, rank) == [[[1.5, 1.5, 3.0]] * 3] * 2


def test_a_module_that_is_put_back_before_a_backward_is_trained() -> None:
    def rank(t: Transport) -> list[float | None]:
        layers = [linear(), linear()]
        former = nn.Sequential(*layers)
        ddp = wrapped(t, former)
        ddp.module = nn.Sequential(linear(), linear())
        ddp(inputs(t))
        ddp.module = former
        ddp(inputs(t)).sum().backward()
        return firsts(nn.ModuleList(layers))

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


def test_a_module_with_the_same_parameters_takes_the_place_of_one_that_had_others() -> None:
    def rank(t: Transport) -> list[float | None]:
        layers = [linear(), linear()]
        ddp = wrapped(t, nn.Sequential(*layers))
        ddp.module = nn.Sequential(*layers, linear())
        ddp(inputs(t))
        ddp.module = nn.Sequential(*layers)
        ddp(inputs(t)).sum().backward()
        return firsts(nn.ModuleList(layers))

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("has_run", [False, True])
def test_a_layer_that_takes_the_place_of_one_that_was_deleted_is_trained(has_run: bool) -> None:
    """To delete a layer, `nn.Sequential` makes a new table of layers."""

    def rank(t: Transport) -> list[float | None]:
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
        return firsts(net)

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


class Mixed(nn.Module):
    """Each layer has a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x.to(self.first.weight.dtype))
        found: Tensor = self.last(hidden.to(self.last.weight.dtype))
        return found


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("name", ["first", "last"])
def test_gradients_of_a_layer_that_is_converted_alone_are_not_rounded(
    name: str, arguments: dict[str, Any]
) -> None:
    def rank(t: Transport) -> list[float | None]:
        ddp = wrapped(t, Mixed().bfloat16(), **arguments)
        ddp.module.get_submodule(name).double()
        ddp.module.last.weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
        ddp.module.first.weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
        ddp(inputs(t)).sum().backward()
        return firsts(ddp.module.get_submodule(name))

    assert run_ranks(2, rank) == [[1.5 * (1 + 2**-20)]] * 2


def repeated(ddp: Any, x: Tensor) -> None:
    loss = ddp(x).sum() / 2
    loss.backward(retain_graph=True)
    loss.backward()


def called_directly(ddp: Any, x: Tensor) -> None:
    ddp.module(x).sum().backward()


@pytest.mark.parametrize("step", [repeated, called_directly])
def test_a_wrapper_of_a_larger_module_leaves_backwards_alone_that_bring_it_a_part_of_its_gradients(
    step: Callable[[Any, Tensor], None],
) -> None:
    def rank(t: Transport) -> list[float | None]:
        inner = linear()
        ddp = wrapped(t, inner)
        larger = wrapped(t, nn.Sequential(inner, linear()))
        step(ddp, inputs(t))
        return firsts(larger)

    assert run_ranks(2, rank) == [[1.5, None]] * 2


@pytest.mark.parametrize("is_early", [False, True])
def test_a_hook_on_a_parameter_that_the_wrapper_does_not_know_yet_sees_the_mean(is_early: bool) -> None:
    """Its gradient is the first one of the backward."""

    def rank(t: Transport) -> list[float]:
        net, seen = nn.Sequential(linear(), linear()), []
        net[1].requires_grad_(False)
        ddp = wrapped(t, net)
        net[1].requires_grad_(True)
        if is_early:
            net[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        loss = ddp(inputs(t)).sum()
        if not is_early:
            net[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        loss.backward()
        return seen

    assert run_ranks(2, rank) == [[1.5]] * 2
