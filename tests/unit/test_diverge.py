"""Replicas that drift apart on purpose: nothing is synchronized behind the user's back. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.transport import Transport, run_ranks

MEETINGS: dict[str, Callable[[sl.DistributedDataParallel, Transport], object]] = {
    "average_": lambda ddp, transport: sl.average_(ddp, group=transport),
    "broadcast_": lambda ddp, transport: sl.broadcast_(ddp, group=transport),
    "broadcast_, async": lambda ddp, transport: sl.broadcast_(ddp, group=transport, async_op=True).wait(),
    "average_ of the module inside": lambda ddp, transport: sl.average_(ddp.module, group=transport),
    "keep_best_": lambda ddp, transport: sl.keep_best_(ddp, float(transport.rank), group=transport),
    "average_ of all parameters": lambda ddp, transport: sl.average_(list(ddp.parameters()), group=transport),
}


def net() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(0)  # of its own: ranks are threads
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def wrapped(transport: Transport) -> tuple[sl.DistributedDataParallel, torch.optim.Optimizer]:
    ddp = sl.DistributedDataParallel(net(), process_group=transport)
    return ddp, ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))


def step(ddp: sl.DistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()


@torch.no_grad()
def perturb(module: nn.Module, rank: int, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(rank)
    for parameter in module.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator)


def assert_has_to_meet(ddp: sl.DistributedDataParallel, rank: int) -> None:
    with pytest.raises(sl.SynclineError, match="have not been made equal since"):
        ddp(batch(rank))


def test_nothing_is_sent_inside_and_the_group_cannot_change() -> None:
    def program(transport: Transport) -> None:
        ddp, optimizer = wrapped(transport)
        step(ddp, optimizer, batch(transport.rank))
        with sl.diverge(ddp):
            before = transport.statistics().total_calls
            for number in range(2 + transport.rank):  # as often as each rank likes
                step(ddp, optimizer, batch(transport.rank, number))
            assert transport.statistics().total_calls == before
            assert "sl.diverge lets the replicas drift apart" in " ".join(ddp.explain().split())
            with pytest.raises(ValueError, match=r"not possible inside of sl\.diverge"):
                ddp._update_process_group(transport)
        with pytest.raises(sl.ReplicaDivergence):
            sl.check_replicas(ddp, group=transport)
        sl.average_(ddp, group=transport)
        sl.average_(optimizer, group=transport)
        ddp._update_process_group(transport)
        step(ddp, optimizer, batch(transport.rank))
        sl.check_replicas(list(ddp.parameters()), group=transport)

    run_ranks(2, program)


def test_a_forward_before_they_have_met_is_an_error_on_every_rank() -> None:
    def program(transport: Transport) -> None:
        ddp, optimizer = wrapped(transport)
        loaded = {key: value.clone() for key, value in ddp.state_dict().items()}
        with sl.diverge(ddp):
            perturb(ddp, transport.rank)
            sl.average_(ddp, group=transport)  # no meeting: the replicas drift on
            perturb(ddp, transport.rank)
        before = [p.clone() for p in ddp.parameters()]
        assert_has_to_meet(ddp, transport.rank)
        unchanged = zip(before, ddp.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in unchanged), "nothing was repaired"
        with torch.no_grad():
            ddp(batch(transport.rank))  # to evaluate each by itself is what it is for
        sl.average_(ddp.module[0], group=transport)  # only a part
        assert_has_to_meet(ddp, transport.rank)
        ddp.load_state_dict(loaded)
        sl.check_replicas(ddp, group=transport)  # they are found equal
        step(ddp, optimizer, batch(transport.rank))

    run_ranks(2, program)


@pytest.mark.parametrize("how", MEETINGS)
def test_after_a_meeting_training_goes_on(how: str) -> None:
    def program(transport: Transport) -> None:
        ddp, optimizer = wrapped(transport)
        step(ddp, optimizer, batch(transport.rank))
        with sl.diverge(ddp):
            perturb(ddp, transport.rank)
            step(ddp, optimizer, batch(transport.rank))
        MEETINGS[how](ddp, transport)
        sl.average_(optimizer, group=transport)
        step(ddp, optimizer, batch(transport.rank, 1))
        ddp.eval()
        with torch.no_grad():
            ddp(batch(transport.rank))  # which makes the buffers equal, too
        sl.check_replicas([*ddp.parameters(), *ddp.buffers()], group=transport)

    run_ranks(3, program)


def test_it_does_not_nest_and_says_what_it_cannot_take() -> None:
    ddp = sl.DistributedDataParallel(net())
    with sl.diverge(ddp), pytest.raises(ValueError, match="end that block first"), sl.diverge(ddp.module):
        pass
    with pytest.raises(TypeError, match="expected module to be a torch"), sl.diverge([]):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="only a part of a wrapped module"), sl.diverge(ddp.module[0]):
        pass
    sharded = sl.DistributedDataParallel(net(), sharded=True)
    with pytest.raises(ValueError, match="the ranks use one copy"), sl.diverge(sharded):
        pass
    with sl.diverge(net()):
        pass
    with sl.diverge(ddp):
        perturb(ddp, 1)
    ddp(batch(0))  # alone there is no other rank to meet


def test_containers_are_entered_in_one_order_and_the_first_forward_of_all_may_be_inside() -> None:
    def program(transport: Transport) -> None:
        (a, _), (b, optimizer) = wrapped(transport), wrapped(transport)
        with sl.diverge(nn.ModuleDict({"b": b, "a": a})):
            before = transport.statistics().total_calls
            if transport.rank:
                step(b, optimizer, batch(transport.rank))
            assert transport.statistics().total_calls == before
        sl.average_(b, group=transport)

    run_ranks(2, program)


def test_a_strategy_rests_inside() -> None:
    def program(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.LocalSGD(2))
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        step(ddp, optimizer, batch(transport.rank))
        with sl.diverge(ddp):
            for number in range(5):
                step(ddp, optimizer, batch(transport.rank, number))
            assert ddp.last_round is None
        assert_has_to_meet(ddp, transport.rank)
        sl.average_(ddp, group=transport)
        step(ddp, optimizer, batch(transport.rank, 9))
        sl.check_replicas(ddp, group=transport)
        assert ddp.last_round is not None
        assert ddp.last_round.step == 2

    run_ranks(2, program)


# ---------------------------------------------------------------------- the recipe of docs/guides/strategies.md


@pytest.mark.parametrize("how", ["plain", "weighted", "best"])
def test_mutation_and_ensembles(how: str) -> None:
    """Replicas perturb their weights after each meeting, drift, and are ensembled; what a round learns is kept."""

    def program(transport: Transport) -> tuple[float, float]:
        ddp, optimizer = wrapped(transport)
        x = batch(17)
        y = x.sum(1, keepdim=True)

        def loss() -> Tensor:
            return (ddp(x) - y).square().mean()

        with torch.no_grad():
            first = loss().item()
        for _ in range(12):
            with sl.diverge(ddp):
                if transport.rank:  # rank 0 stays as it is
                    perturb(ddp, transport.rank, scale=0.02)
                for _ in range(3):
                    optimizer.zero_grad()
                    loss().backward()
                    optimizer.step()
                with torch.no_grad():
                    score = loss().item()
            if how == "best":
                sl.keep_best_(ddp, score, mode="min", group=transport)
            else:
                sl.average_(ddp, weight=1.0 if how == "plain" else 1.0 / score, group=transport)
            sl.broadcast_(optimizer, group=transport)
            sl.check_replicas(ddp, group=transport)
        with torch.no_grad():
            return first, loss().item()

    for first, last in run_ranks(3, program):
        assert last < 0.2 * first


def test_buffers_that_are_switched_off_in_the_block_stay_off() -> None:
    def rank(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(nn.BatchNorm1d(1), process_group=transport)
        with sl.diverge(ddp):
            assert not ddp.will_sync_module_buffers()
            ddp.forward_sync_buffers = False
        assert not ddp.will_sync_module_buffers()

    run_ranks(2, rank)
