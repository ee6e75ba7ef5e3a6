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
from syncline.debug.diagnosis import first_difference
from syncline.debug.examination import restorer_of_run
from syncline.debug.recording import Recording, named_leaves, values_of

NUMBERS = itertools.count()


def part(name: str, forward: Callable[..., Tensor], **members: Any) -> nn.Module:
    """A module of a class of this name, with these parts and attributes."""
    module: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    for key, value in members.items():
        setattr(module, key, value)
    return module


def count_itself(self: Any, x: Tensor) -> Tensor:
    self.num_calls += 1
    return x * self.num_calls


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + next(NUMBERS)


def skip(self: Any, x: Tensor) -> Tensor:
    """What comes next is the end of its own forward."""
    x = self.one(x)
    return self.other(x) if next(NUMBERS) % 2 else x  # type: ignore[no-any-return]


def two_parts() -> dict[str, nn.Module]:
    return {"one": nn.ReLU(), "other": nn.ReLU()}


def drawing(generator: Any) -> nn.Module:
    def draw(self: Any, x: Tensor) -> Tensor:
        if isinstance(self.generator, torch.Generator):
            return x + torch.rand(x.shape, generator=self.generator)
        return x + self.generator.random()

    return part("Draws", draw, generator=generator)


def net_with(part: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Tanh(), part)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), inner, nn.Linear(4, 1))


def step_of(net: nn.Module) -> Callable[[], Tensor]:
    x = torch.arange(15.0).view(5, 3)

    def step() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()
        return loss

    return step


ANOTHER, CALLS = "returns another output for equal inputs", "other modules are called, in 3.1 "

CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "counts globally": (
        lambda: part("Counts", lambda self, x: x + next(NUMBERS)),
        f"{ANOTHER} (rank 0: sum ",
        "global",
    ),
    "counts itself": (
        lambda: part("Counts", count_itself, num_calls=0), ANOTHER, "its attribute num_calls went from "
    ),
    "torch's generator": (
        lambda: drawing(torch.Generator()), ANOTHER, "its attribute generator went from a torch.Generator"
    ),
    "numpy's generator": (
        lambda: drawing(np.random.default_rng(0)), ANOTHER, "its attribute generator went from a numpy.random.Gen"
    ),
    "Python's generator": (
        lambda: drawing(random.Random(0)), ANOTHER, "its attribute generator went from a random.Random"
    ),
    "noisy in backward": (
        lambda: part("Noisy", lambda self, x: NoisyGradient.apply(x)),
        "returns another gradient of its input",
        "a kernel that is not deterministic",
    ),
    "its own forward is to blame, not the module that it calls": (
        lambda: part("Feeds", lambda self, x: self.one(x + next(NUMBERS)), **two_parts()),
        "input [0] of 3.1.one (ReLU) differs, although everything before was equal",
        "global",
    ),
    "takes turns": (
        lambda: part("Turns", lambda self, x: (self.one if next(NUMBERS) % 2 else self.other)(x), **two_parts()),
        f"{CALLS}(Turns)",
        "global",
    ),
    "skips": (lambda: part("Skips", skip, **two_parts()), f"{CALLS}(Skips)", "global"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_module_is_named_with_its_cause(name: str) -> None:
    made, what, cause = CASES[name]
    net = net_with(made())
    report = sl.debug.compare_replicas(step_of(net), net)
    first = report.findings[0]
    assert not report.agrees
    assert (first.module, first.ranks) == ("3.1", (0,))
    assert what in first.what
    assert cause in " ".join(first.causes)
    assert what in " ".join(str(report).split())


def test_a_function_that_differs_by_itself_is_not_blamed_on_a_module() -> None:
    net = nn.Linear(1, 1)
    batches = iter(torch.arange(40.0).view(20, 2, 1))
    first = sl.debug.compare_replicas(lambda: net(next(batches)).sum().backward(), net).findings[0]
    assert "computed in the function itself" in first.what
    assert first.module == ""
    assert "iterator" in first.causes[0]
    first = sl.debug.compare_replicas(lambda: (net(torch.ones(1, 1)) + next(NUMBERS)).sum(), net).findings[0]
    assert "the result of the function differs, although all modules and gradients agree" in first.what


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
        values_of(named_leaves([*net.parameters(), *net.buffers(), *gradients])),
        values_of(named_leaves([[*entries.values()] for entries in optimizer.state.values()])),
        [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups],
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
    report = sl.debug.compare_replicas(step, state)
    assert report.agrees
    assert "7 calls of 6 modules, 6 gradients" in report.checked[0]
    assert everything(net, optimizer) == before
    assert all(a.grad is b for a, b in zip(net.parameters(), objects, strict=True))
    assert scheduler.state_dict() == schedule
    assert not net["forks"].part._forward_hooks
    assert not net["forks"].part._forward_pre_hooks


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
        sl.debug.compare_replicas(step, net)
    assert net.weight.item() == before
    assert net.weight.grad is None


def test_misuse() -> None:
    net = nn.Linear(1, 1)
    for arguments, text in (
        ({"module": net, "inputs": [1]}, "expected inputs to be a tuple"),
        ({"module": 3}, "expected module to be a Module or a TrainState, got a int"),
        ({"module": nn.LazyLinear(1)}, "Call `forward` to initialize the parameters"),
    ):
        with pytest.raises((TypeError, RuntimeError), match=text):
            sl.debug.compare_replicas(lambda *_: None, **arguments)  # type: ignore[arg-type]


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


def test_checkpoints_run_their_forwards_again() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3))
    head = nn.Linear(3, 3)
    for use_reentrant in (True, False):

        def step(use_reentrant: bool = use_reentrant) -> None:
            x = head(torch.ones(2, 3))
            torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=use_reentrant).sum().backward()

        assert sl.debug.compare_replicas(step, nn.ModuleList([inner, head])).agrees


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
    assert sl.debug.compare_replicas(lambda: net(ids)[0].to_dense().sum().backward(), net).agrees


def test_what_was_added_and_replaced_is_put_back() -> None:
    net = nn.Linear(1, 1)
    weight = net.weight
    restore = restorer_of_run([net])
    net.register_buffer("late", torch.ones(1))
    net.weight = nn.Parameter(torch.zeros(1, 1))
    net.bias.requires_grad_(False)
    restore()
    assert net.weight is weight
    assert [name for name, _ in net.named_buffers()] == []
    assert net.bias.requires_grad


def test_how_values_differ() -> None:
    nan = torch.nan
    for one, other, text in (
        (torch.tensor([0.0, 0.5]), torch.tensor([0.0, 3]), "sum 0.5 | sum 3"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "sum 0 | sum 0"),
        (torch.tensor([nan]), torch.tensor([2.0]), "sum nan | sum 2"),
        (torch.tensor([True]), torch.tensor([False]), "sum 1 | sum 0"),
        (torch.tensor([1j]), torch.tensor([2j]), "sum 0+1j | sum 0+2j"),
        (torch.tensor([0.0]), torch.tensor([0.0, 0]), "(1,) torch.float32 | (2,) torch.float32"),
        (
            torch.zeros(1, dtype=torch.float4_e2m1fn_x2),
            torch.ones(1),
            "(1,) torch.float4_e2m1fn_x2 | (1,) torch.float32",
        ),
        (1.5, "mean", "float | str"),
        ("sum", "mean", "'sum' | 'mean'"),
    ):
        recordings = [Recording({}), Recording({})]
        for recording, value in zip(recordings, (one, other), strict=True):
            recording.finish(value, {}, are_own=True)
        found = first_difference([recording.events for recording in recordings], [])
        assert found is not None
        assert (found.stage, found.amounts) == ("result", text)


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
