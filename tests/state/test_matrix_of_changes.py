"""Ways to train, times changes in the middle of a training: the result is that of a plain calculation, bit for bit.

A change is a layer that is added, a smaller or larger group of ranks, a loss of a rank at each operation in turn, or a
save that another number of ranks resumes. The calculation (`Plain`) has one process and uses nothing of Syncline. It
adds up the same numbers in the same order. The ranks are threads, and `sl.steps` is that of the product.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from support.faulty import Fault
from support.regroup import Job, Killed, Process, dies_at
from syncline.transport import Transport, run_ranks

EVERY, RATIO = 2, 0.25


# ---------------------------------------------------------------------- ways to train


@dataclass(frozen=True)
class Way:
    """A way to train, as the product and the plain calculation read it."""

    wrapping: Callable[[], dict[str, Any]] = dict
    num_micro: int = 1
    by_items: bool = False
    uses_side: Callable[[int, int], bool] = lambda step, rank: True
    momentum: float = 0.5
    sync: str = ""
    """How replicas that drift sync."""
    keeps_residuals: bool = False


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, nesterov=True)


WAYS = {
    "plain": Way(),
    "unused": Way(
        lambda: {"find_unused_parameters": True},
        uses_side=lambda step, rank: step % 3 > 0 and rank == step % 2,
    ),
    "static graph": Way(lambda: {"static_graph": True}, uses_side=lambda step, rank: False),
    "sharded": Way(lambda: {"sharded": True}, momentum=0.0),
    "LocalSGD": Way(lambda: {"strategy": sl.LocalSGD(EVERY)}, sync="mean"),
    "DiLoCo": Way(lambda: {"strategy": sl.DiLoCo(EVERY, outer=outer)}, sync="outer step"),
    "compression": Way(lambda: {"compression": sl.compression.TopK(RATIO)}, keeps_residuals=True),
    "replica check": Way(lambda: {"replica_check": sl.ReplicaCheck(every=1, on_divergence="raise")}),
    "normalize_by": Way(by_items=True),
    "no_sync": Way(num_micro=2),
}


class Net(nn.Module):
    """A net with a part that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(3, 2)
        self.body = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
        for number, parameter in enumerate(self.parameters()):
            parameter.data.copy_(numbers(parameter.shape, number))

    def grow(self) -> nn.Module:
        layer = nn.Linear(2, 2)
        for number, parameter in enumerate(layer.parameters()):
            parameter.data.copy_(numbers(parameter.shape, 10 + number))
        self.body.append(layer)
        return layer

    def forward(self, x: Tensor, uses_side: bool) -> Tensor:
        out: Tensor = self.body(x)
        return out + 3 * self.side(x) if uses_side else out  # not twice the same gradient


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


def num_items(rank: int) -> int:
    return 1 + rank


def loss_of(way: Way, module: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    batch = numbers((num_items(rank), 3), 1000 + 100 * step + 10 * rank + micro)
    squares: Tensor = module(batch, way.uses_side(step, rank)).square()
    return squares.mean(1).sum() if way.by_items else squares.mean()


def net_of(way: Way, *, is_grown: bool) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=2**-5, momentum=way.momentum)
    if is_grown:
        grow(net, optimizer)
    return net, optimizer


def grow(net: Any, optimizer: torch.optim.Optimizer) -> None:
    if len(net.body) == 3:
        optimizer.add_param_group({"params": list(net.grow().parameters())})


# ---------------------------------------------------------------------- changes


@dataclass(frozen=True)
class Change:
    """A training in which something changes."""

    size: int
    """The number of ranks at the beginning."""
    grows_in: int = 0
    """The step in which a layer is added; 0 for none."""
    lost: tuple[str, int] | None = None
    """A process that is lost, and the step in which it is, before it has sent anything."""
    lets_in: int = 0
    """The step after which a process joins; 0 for none. Replicas that drift let it in at the next sync."""
    steps: int = 6

    def losses(self, way: Way) -> dict[str, float]:
        """Return when the others notice each loss: before a step, at its sync (+ 0.25), or after it (+ 0.5).

        After a join that follows it, it is + 0.75.
        """
        return {
            name: math.ceil(step / EVERY) * EVERY + 0.25 if way.sync else step
            for name, step in ([self.lost] if self.lost else [])
        }


CHANGES = {
    "layer": Change(2, grows_in=3),
    "smaller": Change(3, lost=("1", 3)),
    "to one": Change(2, lost=("0", 4)),
    "layer and smaller": Change(3, grows_in=3, lost=("1", 3)),
    "larger": Change(2, lets_in=3),
    "from one": Change(1, lets_in=3),
}

UNCHANGED = (
    "under a strategy, the copies and counts of the parameters are those of the module that was wrapped"
)
FIXED = "the bounds of the shards, and the groups of the optimizer that has them, are fixed"
OTHERWISE: dict[tuple[str, str], tuple[set[str], type[Exception], str]] = {
    ("layer", "sharded"): ({"0", "1"}, ValueError, FIXED),
    ("layer", "LocalSGD"): ({"0", "1"}, ValueError, UNCHANGED),
    ("layer", "DiLoCo"): ({"0", "1"}, ValueError, UNCHANGED),
    ("layer and smaller", "sharded"): ({"0", "2"}, ValueError, FIXED),
    ("layer and smaller", "LocalSGD"): ({"0", "2"}, ValueError, UNCHANGED),
    ("layer and smaller", "DiLoCo"): ({"0", "2"}, ValueError, UNCHANGED),
    ("larger", "sharded"): ({"2"}, ValueError, "a process that joins has no shards; the others train on"),
    ("from one", "sharded"): (
        {"1"},
        ValueError,
        "a process that joins has no shards; the other one trains on",
    ),
}
"""For a change and a way: the processes that end with an error, its class, and why. The others are as calculated."""


# ---------------------------------------------------------------------- the plain calculation


class One:
    """One replica of the plain calculation."""

    def __init__(self, way: Way, *, is_grown: bool = False) -> None:
        self.net, self.optimizer = net_of(way, is_grown=is_grown)
        self.owed = torch.zeros(0)

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of equal-sized tensors, in their order."""
    return sum(tensors[1:], tensors[0].clone()) / len(tensors)


class Plain:
    """The training without Syncline, in one process."""

    def __init__(self, way: Way, size: int) -> None:
        self.way = way
        self.ones = {str(number): One(way) for number in range(size)}
        self.common = [nn.Parameter(value) for value in One(way).values()]
        self.outer = outer(self.common)

    def step(self, number: int) -> None:
        way, ones = self.way, list(self.ones.values())
        for rank, one in enumerate(ones):
            one.optimizer.zero_grad()
            for micro in range(way.num_micro):
                loss_of(way, one.net, number, rank, micro).backward()
        if not way.sync:
            self._reduce(ones)
        for one in ones:
            one.optimizer.step()

    def _reduce(self, ones: list[One]) -> None:
        if self.way.keeps_residuals and len(ones) > 1:
            self._reduce_largest(ones)
            return
        scale = 1.0 if self.way.by_items else 1.0 / len(ones)
        for column in zip(*(one.net.parameters() for one in ones), strict=True):
            if any(p.grad is not None for p in column):
                grads = [torch.zeros_like(p) if p.grad is None else p.grad * scale for p in column]
                total = sum(grads[1:], grads[0])
                for p in column:
                    p.grad = (
                        total / sum(map(num_items, range(len(ones)))) if self.way.by_items else total.clone()
                    )

    def _reduce_largest(self, ones: list[One]) -> None:
        """Only the largest values of each rank count. The others are added to those of the next step."""
        mean = torch.zeros(())
        for one in ones:
            flat = torch.cat([p.grad.flatten() for p in one.net.parameters()])
            flat[: len(one.owed)] += one.owed  # the parameters of a new layer come last
            sent, places = torch.zeros_like(flat), flat.abs().topk(math.ceil(RATIO * len(flat))).indices
            sent[places] = flat[places]
            one.owed, mean = flat - sent, mean + sent / len(ones)
        for one in ones:
            for p, part in zip(
                one.net.parameters(), mean.split([p.numel() for p in one.net.parameters()]), strict=True
            ):
                p.grad = part.view_as(p).clone()

    def sync(self, *, is_equal: bool = False) -> None:
        """Make the replicas equal; `is_equal` if they have not stepped since the last time."""
        columns = list(zip(*(one.values() for one in self.ones.values()), strict=True))
        if self.way.sync == "outer step" and not is_equal:
            for common, column in zip(self.common, columns, strict=True):
                common.grad = mean_of([common.detach() - value for value in column])
            self.outer.step()
            found = [common.detach() for common in self.common]
        else:
            found = list(map(mean_of, columns))
            for common, value in zip(self.common, found, strict=True):
                common.data.copy_(value)
        for one in self.ones.values():
            for parameter, value in zip(one.net.parameters(), found, strict=True):
                parameter.data.copy_(value)

    def join(self, name: str, *, is_equal: bool) -> None:
        self.ones[name] = self._copy_of(next(iter(self.ones.values())))
        if self.way.sync:
            self.sync(is_equal=is_equal)

    def _copy_of(self, one: One) -> One:
        made = One(self.way, is_grown=len(one.net.body) > 3)
        made.net.load_state_dict(one.net.state_dict())
        made.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        return made

    def values(self) -> dict[str, list[Tensor]]:
        return {name: one.values() for name, one in self.ones.items()}

    def resume(self, size: int) -> None:
        """Go on with another number of replicas. What is owed is the mean. New replicas are as the first one."""
        ones = list(self.ones.values())
        self.ones = {name: self._copy_of(self.ones.get(name, ones[0])) for name in map(str, range(size))}
        for one in self.ones.values():
            one.owed = mean_of([former.owed for former in ones])


@cache
def plainly(way: Way, change: Change, *, losses: tuple[tuple[str, float], ...]) -> dict[str, list[Tensor]]:
    """Return the parameters of each process that is left."""
    plain, joining = Plain(way, change.size), [str(change.size)] if change.lets_in else []

    def lose(up_to: float) -> None:
        for name, place in losses:
            if place <= up_to:
                plain.ones.pop(name, None)

    for number in range(1, change.steps + 1):
        lose(number)
        if number == change.grows_in:
            for one in plain.ones.values():
                grow(one.net, one.optimizer)
        plain.step(number)
        syncs = bool(way.sync) and number % EVERY == 0
        lose(number + 0.25)
        if syncs:
            plain.sync()
        lose(number + 0.5)
        # A rank that is alone lets others in at once.
        if joining and number >= change.lets_in and (syncs or not way.sync or len(plain.ones) == 1):
            plain.join(joining.pop(), is_equal=syncs)
        lose(number + 0.75)
    return plain.values()


# ---------------------------------------------------------------------- the same with Syncline


def made(way: Way, transport: Transport, *, is_grown: bool = False) -> sl.TrainState:
    net, optimizer = net_of(way, is_grown=is_grown)
    ddp = sl.DistributedDataParallel(net, process_group=transport, **way.wrapping())
    return sl.TrainState(model=ddp, optimizer=ddp.attach(optimizer))


def make_step(way: Way, state: sl.TrainState, step: int, rank: int, *, grows: bool) -> None:
    ddp, optimizer = state.named["model"], state.named["optimizer"]
    optimizer.zero_grad()
    block: AbstractContextManager[None] = ddp.normalize_by(num_items(rank)) if way.by_items else nullcontext()
    with block:
        if grows:
            grow(ddp.module, optimizer)
        for micro in range(way.num_micro):
            with ddp.no_sync() if micro < way.num_micro - 1 else nullcontext():
                loss_of(way, ddp, step, rank, micro).backward()
    optimizer.step()


def values_of(state: sl.TrainState) -> list[Tensor]:
    return [p.detach().clone() for p in state.named["model"].module.parameters()]


def train(process: Process, way: Way, change: Change, begun: dict[str, int]) -> list[Tensor]:
    """Train as one process of a job. Write into `begun` which step it has begun last."""
    state = made(way, process.transport)
    for step in sl.steps(state, until=change.steps):
        with step:
            begun[process.name] = step.number
            if (process.name, step.number) == change.lost:
                raise Killed("as planned")
            if step.number == change.lets_in:
                process.let_newcomers_in()
            make_step(
                way, state, step.number, process.transport.rank, grows=0 < change.grows_in <= step.number
            )
    return values_of(state)


def run(
    way: Way, change: Change, *faults: Fault, generation: int = 0
) -> tuple[dict[str, Any], dict[str, int]]:
    """Run a job. Return the outcomes of the processes that were not killed as planned, and the last step of each."""
    begun: dict[str, int] = {}
    job = Job(change.size, num_joining=bool(change.lets_in), faults={generation: faults})
    outcomes = job.run(lambda process: train(process, way, change, begun))
    planned = change.lost[0] if change.lost else ""
    return {name: outcome for name, outcome in outcomes.items() if name != planned}, begun


def is_equal(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> bool:
    return found.keys() == expected.keys() and all(
        len(mine) == len(expected[name]) and all(map(torch.equal, mine, expected[name]))
        for name, mine in found.items()
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_leaves_the_result_of_a_plain_calculation(change: str, way: str) -> None:
    outcomes, _ = run(WAYS[way], CHANGES[change])
    names, kind, _ = OTHERWISE.get((change, way), (set[str](), Exception, ""))
    errors = {name: outcomes.pop(name) for name in [*outcomes] if isinstance(outcomes[name], Exception)}
    assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(names, kind)
    if outcomes:
        done = replace(CHANGES[change], lets_in=0) if names else CHANGES[change]
        losses = tuple(done.losses(WAYS[way]).items())
        assert is_equal(outcomes, plainly(WAYS[way], done, losses=losses))


IN_CHANGES = {
    "layer": (Change(3, grows_in=2, steps=4), 0, ()),
    "smaller": (Change(4, lost=("3", 2), steps=4), 1, ()),
    "larger": (Change(2, lets_in=2, steps=4), 1, ("send", "recv")),
}
"""The changes, in which generation of ranks another rank is lost, and which operations it has beside the usual ones."""

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "barrier")


@pytest.mark.parametrize(
    ("change", "way"), [pair for pair in itertools.product(IN_CHANGES, WAYS) if pair not in OTHERWISE]
)
def test_a_loss_at_each_operation_during_a_change(change: str, way: str) -> None:
    """The step in which it happens counts for all ranks, or it is made without the lost rank."""
    (what, generation, more), how, num_losses = IN_CHANGES[change], WAYS[way], 0
    for operation in (*OPERATIONS, *more):
        for call in itertools.count():
            outcomes, begun = run(how, what, dies_at(1, operation, call), generation=generation)
            lost = [name for name, outcome in outcomes.items() if isinstance(outcome, Killed)]
            if not lost:
                break
            [name] = lost
            if name not in begun:
                continue  # in the constructor: nothing is to be saved
            del outcomes[name]
            num_losses += 1
            places = [begun[name] + part for part in (0.0, 0.25, 0.5, 0.75)]
            losses = what.losses(how).items()
            with case(operation, call, f"in step {begun[name]}", outcomes):
                assert any(
                    is_equal(outcomes, plainly(how, what, losses=(*losses, (name, place))))
                    for place in places
                )
    assert num_losses > 3


@pytest.mark.filterwarnings("ignore:save-:RuntimeWarning")  # whose optimizers others load, as it should be
@pytest.mark.parametrize("way", WAYS)
def test_another_number_of_ranks_resumes(way: str, tmp_path: Path) -> None:
    how = replace(WAYS[way], momentum=0.5)

    def life(t: Transport, folder: Path, *, is_grown: bool, grows: bool) -> dict[str, Any]:
        state = made(how, t, is_grown=is_grown)
        with sl.Checkpointer(folder, group=t, stop_signals=()) as checkpointer:
            checkpointer.load(state)
            for _ in range(EVERY):
                step = state.step + 1
                make_step(how, state, step, t.rank, grows=grows and step == EVERY)
                state.commit()
            checkpointer.save(state)
        return {str(t.rank): values_of(state)}

    for grows in (False,) if ("layer", way) in OTHERWISE else (False, True):
        plain = Plain(how, 2)
        for number, size in enumerate((2, 4, 1, 3)):
            is_grown, folder = grows and number > 0, tmp_path / str(grows)
            found = run_ranks(size, lambda t, f=folder, i=is_grown, g=grows: life(t, f, is_grown=i, grows=g))  # type: ignore[misc]
            plain.resume(size)
            for step in range(EVERY * number + 1, EVERY * (number + 1) + 1):
                if grows and step == EVERY:
                    for one in plain.ones.values():
                        grow(one.net, one.optimizer)
                plain.step(step)
            if how.sync:
                plain.sync()
            with case(f"the life on {size} ranks", grows):
                assert is_equal({k: v for one in found for k, v in one.items()}, plain.values())
