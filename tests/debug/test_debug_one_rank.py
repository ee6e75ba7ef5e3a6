"""A step computed twice in one process: the module that makes it differ is named, with what was seen of the cause."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.debug.run_state import Subject
from syncline.debug.values import how_they_differ, values_of


class CountsGlobally(nn.Module):
    numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return x + next(self.numbers)


class CountsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x * self.num_calls


class DrawsFromItsOwn(nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.generator, torch.Generator):
            return x + torch.rand(x.shape, generator=self.generator)
        return x + self.generator.random()


class ReadsBeforeItWrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[0] = 1
        # New memory may hold anything, NaN too. Here it holds zeros, so that two runs agree, unless torch fills it.
        if not torch.are_deterministic_algorithms_enabled():
            y[1:] = 0
        return x + y


class _NoisyBackward(torch.autograd.Function):
    numbers = itertools.count()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + next(_NoisyBackward.numbers)


class NoisyInBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _NoisyBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class FeedsNoise(nn.Module):
    """Its own forward is to blame, not the module that it calls."""

    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + next(self.numbers))  # type: ignore[no-any-return]


class TakesTurns(nn.Module):
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        part = self.one if next(self.numbers) % 2 else self.other
        return part(x)  # type: ignore[no-any-return]


class Skips(nn.Module):
    """Calls its last part or does not: what comes next is the end of its own forward."""

    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if next(self.numbers) % 2 else x


def net_with(part: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Sequential(nn.Tanh(), part), nn.Linear(4, 1)
    )


def step_of(net: nn.Module) -> Callable[[], Tensor]:
    x = torch.arange(15.0).view(5, 3)

    def step() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize(
    ("part", "module", "what", "cause"),
    [
        (
            CountsGlobally,
            "3.1",
            "returns another output for equal inputs: 20 of 20 elements differ, by up to 1",
            "global",
        ),
        (
            CountsItself,
            "3.1",
            "returns another output for equal inputs",
            "its attribute num_calls went from ",
        ),
        (
            lambda: DrawsFromItsOwn(torch.Generator()),
            "3.1",
            "returns another output",
            "its attribute generator is a torch.Generator",
        ),
        (
            lambda: DrawsFromItsOwn(np.random.default_rng(0)),
            "3.1",
            "returns another output",
            "its attribute generator is a numpy.random.Generator",
        ),
        (
            lambda: DrawsFromItsOwn(random.Random(0)),
            "3.1",
            "returns another output",
            "its attribute generator is a random.Random",
        ),
        (ReadsBeforeItWrites, "3.1", "depends on memory that was never written", "torch.empty"),
        (
            NoisyInBackward,
            "3.1",
            "returns another gradient of its input",
            "a kernel that is not deterministic",
        ),
        (
            FeedsNoise,
            "3.1",
            "input [0] of 3.1.inner (ReLU) differs, although everything before was equal",
            "global",
        ),
        (TakesTurns, "3.1", "other modules are called, in the forward of 3.1 (TakesTurns)", "global"),
        (Skips, "3.1", "other modules are called, in the forward of 3.1 (Skips)", "global"),
    ],
)
@pytest.mark.parametrize("is_handed_over", [True, False])
def test_the_module_is_named_with_its_cause(
    part: Callable[[], nn.Module], module: str, what: str, cause: str, is_handed_over: bool
) -> None:
    net = net_with(part())
    with pytest.raises(sl.debug.Disagreement) as caught:
        sl.debug.assert_replicas_agree(step_of(net), net if is_handed_over else None)
    first = caught.value.report.findings[0]
    assert (first.module, first.ranks) == (module, (0,))
    assert what in first.what
    assert cause in " ".join(first.causes)
    assert " ".join(what.split()) in " ".join(str(caught.value).split())


def test_a_function_that_takes_the_next_batch_each_time_is_told_so() -> None:
    net = nn.Linear(1, 1)
    batches = iter(torch.arange(40.0).view(20, 2, 1))
    report = sl.debug.compare_replicas(lambda: net(next(batches)).sum().backward())
    assert "computed in the function itself" in report.findings[0].what
    assert report.findings[0].module == ""
    assert "iterator" in report.findings[0].causes[0]


def test_a_loss_that_is_not_deterministic_is_not_blamed_on_a_module() -> None:
    net, numbers = nn.Linear(1, 1), itertools.count()
    report = sl.debug.compare_replicas(lambda: (net(torch.ones(1, 1)) + next(numbers)).sum(), net)
    assert (
        "the result of the function differs, although all modules and gradients agree"
        in report.findings[0].what
    )


class Forks(nn.Module):
    """Draws from every generator there is, changes buffers, calls a part twice."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Tensor]:
        self.count = self.count + 1  # another object
        noise = random.random() + np.random.rand() + torch.rand(3)
        return {"y": self.norm(self.part(self.part(x) * scale).relu_()) + noise}


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    gradients = [parameter.grad for parameter in net.parameters()]
    return (
        values_of([*net.parameters(), *net.buffers(), *gradients]),
        values_of([entry for entries in optimizer.state.values() for entry in entries.values()]),
        [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
        [module.training for module in net.modules()],
        (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
    )


def test_nothing_is_changed_by_asking() -> None:
    net = nn.ModuleDict({"forks": Forks(), "norm": nn.BatchNorm1d(3)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = sl.TrainState(model=net, optimizer=optimizer, scheduler=scheduler)
    x = torch.randn(4, 3)

    def step() -> Tensor:
        loss: Tensor = net["norm"](net["forks"](x, scale=0.5)["y"]).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        net.eval()
        return loss

    step()
    net.train()
    before, objects = everything(net, optimizer), [parameter.grad for parameter in net.parameters()]
    schedule = copy.deepcopy(scheduler.state_dict())
    report = sl.debug.assert_replicas_agree(step, state)
    assert report.agrees
    assert "7 calls of 6 modules, 6 gradients" in report.checked[0]
    assert everything(net, optimizer) == before
    assert all(a.grad is b for a, b in zip(net.parameters(), objects, strict=True))
    assert scheduler.state_dict() == schedule
    assert not net["forks"].part._forward_hooks
    assert not net["forks"].part._forward_pre_hooks


def test_training_goes_on_as_if_it_had_not_been_asked() -> None:
    def trained(asks: bool) -> list[float]:
        torch.manual_seed(1)
        net = net_with(nn.ReLU())
        optimizer = torch.optim.AdamW(net.parameters())
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            if asks:
                sl.debug.assert_replicas_agree(step_of(net))
            losses.append(step_of(net)().item())
            optimizer.step()
        return losses

    assert trained(asks=True) == trained(asks=False)


def test_an_optimizer_that_is_not_known_may_not_step() -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.weight.item()

    def step() -> None:
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(
        ValueError, match=r"steps an optimizer of class SGD that was not passed here.*sl\.TrainState"
    ):
        sl.debug.assert_replicas_agree(step, net)
    assert net.weight.item() == before
    assert net.weight.grad is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"repeats": 1}, ValueError, "expected repeats to be an integer of at least 2, got 1"),
        ({"inputs": [1]}, TypeError, "expected inputs to be a tuple"),
        ({"module": 3}, TypeError, "expected module to be a Module or a TrainState, got a int"),
    ],
)
def test_misuse(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        sl.debug.compare_replicas(lambda *_: None, **arguments)


def test_a_function_without_modules_is_refused() -> None:
    with pytest.raises(ValueError, match="the function calls no module"):
        sl.debug.compare_replicas(lambda: None)


def test_what_the_function_raises_is_raised_and_everything_put_back() -> None:
    net = nn.BatchNorm1d(2)

    def step() -> None:
        net(torch.randn(3, 2))
        raise KeyError("no such thing")

    state = torch.get_rng_state()
    with pytest.raises(sl.SynclineError, match="KeyError: 'no such thing'"):
        sl.debug.compare_replicas(step, net)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.num_batches_tracked == 0


def test_settings_of_torch_are_as_they_were() -> None:
    settings: Any = torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory)
    sl.debug.assert_replicas_agree(step_of(net_with(nn.ReLU())))
    assert (torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory) == before


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_run_their_forwards_again(use_reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3))
    head = nn.Linear(3, 3)

    def step() -> None:
        y = torch.utils.checkpoint.checkpoint(inner, head(torch.ones(2, 3)), use_reentrant=use_reentrant)
        y.sum().backward()

    assert sl.debug.assert_replicas_agree(step).agrees


def test_sparse_gradients_tied_weights_and_outputs_of_other_kinds() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True)
            self.out = nn.Linear(3, 5, bias=False)
            self.tied = self.out

        def forward(self, ids: Tensor) -> tuple[Tensor, Any]:
            x = self.table(ids)
            return self.tied(self.out(x)[..., :3]).to_sparse(), object()

    net = Net()
    ids = torch.tensor([0, 3])
    assert sl.debug.assert_replicas_agree(lambda: net(ids)[0].to_dense().sum().backward(), net).agrees


def test_the_subject_puts_back_what_was_added_and_replaced() -> None:
    net = nn.Linear(1, 1)
    weight = net.weight
    subject = Subject([net])
    net.register_buffer("late", torch.ones(1))
    net.weight = nn.Parameter(torch.zeros(1, 1))
    net.bias.requires_grad_(False)
    subject.restore()
    assert net.weight is weight
    assert [name for name, _ in net.named_buffers()] == []
    assert net.bias.requires_grad


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (
            torch.zeros(2, 2),
            torch.tensor([[0.0, 0], [0, 3]]),
            "1 of 4 elements differs, by up to 3; the first at [1, 1]",
        ),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "only in the sign of a zero"),
        (torch.tensor([torch.nan, 1]), torch.tensor([torch.nan, 2]), "1 of 2 elements differs, by up to 1"),
        (
            torch.tensor([torch.nan]),
            torch.tensor([2.0]),
            "1 of 1 element differs; the first at [0]: nan and 2",
        ),
        (torch.tensor([True]), torch.tensor([False]), "1 of 1 element differs, by up to 1"),
        (torch.tensor([1j]), torch.tensor([2j]), "by up to 1"),
        (torch.tensor(1), torch.tensor(3), "1 of 1 element differs, by up to 2; the first at []: 1 and 3"),
        (torch.zeros(1), torch.zeros(2), "(1,) torch.float32 and (2,) torch.float32"),
    ],
)
def test_how_tensors_differ(one: Tensor, other: Tensor, text: str) -> None:
    assert text in how_they_differ(one, other)


def test_ranks_that_keep_values_of_their_own_data_have_found_the_same() -> None:
    class Keeping(nn.Module):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x if self.last is None else x + self.last
            return self.last

    def causes(value: float) -> tuple[str, ...]:
        x = torch.full((2,), value)
        keeping = Keeping()
        (finding,) = sl.debug.compare_replicas(keeping, keeping, inputs=(x,)).findings
        return finding.causes

    assert causes(1.0) == causes(2.0)
    assert "its attribute last went from nothing to a tensor (2,) torch.float32." in causes(1.0)[0]
