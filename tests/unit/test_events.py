"""Events: each thing that happens in a step is reported once, in order, and only to an observer that wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.events import OBSERVERS
from syncline.events.observer import KINDS
from syncline.transport import ThreadGroup, Transport, run_ranks


class Everything(sl.Observer):
    """An observer that keeps each event of each rank, with the name of its method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.found: list[tuple[str, Any]] = []

    def of(self, rank: int) -> list[str]:
        """The kinds of the events of a rank, in order."""
        return [kind for kind, event in self.found if rank_of(event) == rank]

    def events(self, kind: str, rank: int = 0) -> list[Any]:
        return [event for found, event in self.found if found == kind and rank_of(event) == rank]


def rank_of(event: Any) -> int:
    return event.source.rank if hasattr(event, "source") else event.rank


def keeping(kind: str) -> Callable[[Everything, Any], None]:
    def keep(self: Everything, event: Any) -> None:
        with self._lock:
            self.found.append((kind, event))

    keep.__name__ = kind
    return keep


for _kind in KINDS:
    setattr(Everything, _kind, keeping(_kind))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def train(transport: Transport, *values: float, **settings: Any) -> sl.DistributedDataParallel:
    """Train, with one value in each step."""
    ddp = sl.DistributedDataParallel(net(), process_group=transport, **settings)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for value in values or (1.0,):
        optimizer.zero_grad()
        loss = ddp(torch.full((1, 2), value + transport.rank)).square().mean()
        if torch.isfinite(loss):
            ddp.report(loss=loss)
        loss.backward()
        optimizer.step()
    return ddp


def seen_of(rank: Callable[[Transport], object], num_ranks: int = 2) -> Everything:
    """What an observer sees of a program of several ranks."""
    with Everything() as seen:
        run_ranks(num_ranks, rank)
    return seen


def test_a_step_is_reported_in_order_on_each_rank() -> None:
    seen = seen_of(lambda t: train(t, bucket_cap_mb=1e-5))
    for rank in range(2):
        kinds = seen.of(rank)
        assert kinds[0] == "forward_ended"
        assert kinds[-2:] == ["backward_ended", "optimizer_stepped"]
        assert [kinds.count(kind) for kind in KINDS[:6]] == [1, 4, 4, 4, 1, 1]
        assert seen.events("backward_ended", rank)[0].source == (rank, "Sequential")
    assert [event.parameter for event in seen.events("gradient_ready")] == [
        "1.bias", "1.weight", "0.bias", "0.weight",
    ]  # fmt: skip
    (ended,) = seen.events("backward_ended")
    assert ended.is_synchronized
    assert ended.metrics.keys() == {"loss"}
    assert [bucket for bucket, *_ in ended.buckets] == [0, 1, 2, 3]
    for _, sent, began, reduced in ended.buckets:
        assert ended.began_at <= sent <= reduced <= ended.ended_at
        assert began <= reduced
    assert ended.record().step == 1
    (forward,) = seen.events("forward_ended")
    assert forward.began_at <= forward.computed_from <= forward.ended_at <= ended.began_at
    assert "Sequential" in forward.contract().title
    (step,) = seen.events("optimizer_stepped")
    assert (step.optimizer, step.step, step.is_discarded) == ("SGD", 1, False)
    assert ended.ended_at <= step.began_at <= step.ended_at


def test_the_layout_is_another_one_when_buckets_hold_other_parameters() -> None:
    """The buckets are laid out again after the first backward, in the order in which gradients were ready."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(3, 1), nn.Linear(2, 3)  # declared the other way round

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.first(x))
            return out

    def rank(transport: Transport) -> None:
        torch.manual_seed(0)
        ddp = sl.DistributedDataParallel(Backwards(), process_group=transport, bucket_cap_mb=1e-5)
        for step in range(4):
            ddp(torch.full((1, 2), 1.0 + step + transport.rank)).sum().backward()

    assert [event.layout for event in seen_of(rank).events("backward_ended")] == [1, 2, 2, 2]


def test_two_modules_have_two_names_and_a_backward_under_no_sync_is_not_synchronized() -> None:
    def rank(transport: Transport) -> None:
        train(transport)
        ddp = sl.DistributedDataParallel(net(), process_group=transport)
        with ddp.no_sync():
            ddp(torch.full((1, 2), 1.0 + transport.rank)).sum().backward()
        ddp(torch.full((1, 2), 1.0 + transport.rank)).sum().backward()

    ended = seen_of(rank).events("backward_ended", 1)
    assert [one.source.module for one in ended] == ["Sequential", "Sequential 2", "Sequential 2"]
    found = [(one.is_synchronized, one.step, len(one.buckets)) for one in ended]
    assert found == [(True, 1, 1), (False, 1, 0), (True, 1, 1)]


@pytest.mark.filterwarnings("ignore:.*not finite:RuntimeWarning")
def test_a_discarded_step_is_reported_as_such() -> None:
    seen = seen_of(lambda t: train(t, 1.0, float("nan"), 2.0, on_nonfinite="skip"))
    steps = seen.events("optimizer_stepped", 1)
    assert [(one.step, one.is_discarded) for one in steps] == [(1, False), (1, True), (2, False)]


def test_parameters_that_are_synced_by_a_strategy() -> None:
    seen = seen_of(lambda t: train(t, *(1.0, 2.0, 3.0, 4.0), strategy=sl.LocalSGD(2)))
    synced = seen.events("parameters_synced")
    assert [event.record.step for event in synced] == [2, 4]
    assert all(event.began_at <= event.ended_at for event in synced)
    assert not any(event.is_synchronized for event in seen.events("backward_ended"))


def test_verbs_are_reported_unless_they_fail() -> None:
    def rank(transport: Transport) -> None:
        sl.mean(1.0, group=transport)
        with pytest.raises(ValueError, match="weight"):
            sl.mean(1.0, weight=-1, group=transport)
        sl.broadcast_(torch.ones(3), group=transport)
        sl.gather(torch.ones(2), group=transport)

    assert [event.name for event in seen_of(rank).events("call_ended", 1)] == ["mean", "broadcast_", "gather"]


def test_parameters_without_a_gradient_are_named() -> None:
    def rank(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(net(), process_group=transport, find_unused_parameters=True)
        ddp.module[0](torch.ones(1, 2)).sum().backward()

    (ended,) = seen_of(rank).events("backward_ended")
    assert ended.looks_for_unused
    assert set(ended.unused) == {"1.weight", "1.bias"}


# ---------------------------------------------------------------------- replicas that differ


def write_on_one_rank(transport: Transport, ddp: sl.DistributedDataParallel) -> None:
    with torch.no_grad():
        ddp.module[0].weight.data[0, 0] += float(transport.rank == 1)


def diverge_and_train(transport: Transport, **settings: Any) -> None:
    check = sl.ReplicaCheck(every=1, **settings)
    ddp = sl.DistributedDataParallel(net(), process_group=transport, replica_check=check)
    for step in range(3):
        if step == 1:
            write_on_one_rank(transport, ddp)
        ddp(torch.full((1, 2), 1.0 + transport.rank)).sum().backward()


def test_replicas_that_differ_are_reported_before_the_error_is_raised() -> None:
    words: dict[int, str] = {}

    def rank(transport: Transport) -> None:
        with pytest.raises(sl.ReplicaDivergence) as caught:
            diverge_and_train(transport)
        words[transport.rank] = str(caught.value)

    seen = seen_of(rank, 3)
    for at in range(3):
        (found,) = seen.events("replicas_diverged", at)
        assert (found.check, found.step, found.outcome) == ("replica check of Sequential", 2, "raised")
        assert (found.tensor, found.num_differing, found.minority_ranks) == ("0.weight", 1, (1,))
        assert (found.agreed_at_step, found.words) == (1, words[at])
        assert seen.of(at).count("backward_ended") == 1  # the second one has failed


@pytest.mark.filterwarnings("ignore:.*replica check:RuntimeWarning")
def test_a_repair_is_reported_once_and_a_difference_that_stays_each_time() -> None:
    for reaction, expected in (("repair", [(2, "repaired")]), ("warn", [(2, "warned"), (3, "warned")])):
        seen = seen_of(lambda t, reaction=reaction: diverge_and_train(t, on_divergence=reaction), 3)
        for at in range(3):
            assert [(one.step, one.outcome) for one in seen.events("replicas_diverged", at)] == expected


def test_a_call_and_a_strategy_that_find_a_difference_report_it() -> None:
    def rank(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.DiLoCo(2))
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        sl.check_replicas(ddp, group=transport)
        write_on_one_rank(transport, ddp)
        with pytest.raises(sl.ReplicaDivergence):
            sl.check_replicas(ddp, group=transport)
        ddp(torch.ones(1, 2)).sum().backward()
        with pytest.raises(sl.ReplicaDivergence, match="equal start"):
            optimizer.step()

    seen = seen_of(rank)
    for at in range(2):
        call, start = seen.events("replicas_diverged", at)
        assert (call.check, call.step, call.tensor) == ("sl.check_replicas", None, "module.0.weight")
        assert call.minority_ranks == ()  # two ranks have no majority
        assert (start.tensor, start.outcome) == ("", "raised")
        assert start.check.startswith("before the first step of ")


# ---------------------------------------------------------------------- who receives what


def test_an_observer_receives_only_what_it_overrides_and_only_while_it_is_started() -> None:
    class Backwards(sl.Observer):
        steps: list[int]

        def backward_ended(self, event: Any) -> None:
            self.steps.append(event.step)

    assert all(getattr(OBSERVERS, kind) == () for kind in KINDS)
    observer = Backwards()
    observer.steps = []
    counts = {kind: int(kind == "backward_ended") for kind in KINDS}
    with observer.start():  # it is started a second time
        assert {kind: len(getattr(OBSERVERS, kind)) for kind in KINDS} == counts
        run_ranks(1, train)
    observer.stop()
    run_ranks(1, train)
    assert observer.steps == [1]
    assert OBSERVERS.backward_ended == ()


def test_two_observers_receive_the_same_event() -> None:
    with Everything() as one, Everything() as two:
        run_ranks(1, train)
    assert one.found == two.found


def test_an_error_of_an_observer_is_raised_and_names_it() -> None:
    class Broken(sl.Observer):
        def backward_ended(self, event: Any) -> None:
            raise ZeroDivisionError("a defect")

    def rank(transport: Transport) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            train(transport)
        assert "in backward_ended() of Broken" in caught.value.__notes__

    with Broken():
        run_ranks(1, rank)
    run_ranks(1, train)


def test_the_record_of_an_event_is_valid_until_the_next_backward() -> None:
    class Last(sl.Observer):
        def backward_ended(self, event: Any) -> None:
            self.event = event

    def rank(transport: Transport) -> int:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=transport)
        ddp(torch.ones(1, 2)).sum().backward()
        ddp._update_process_group(ThreadGroup(1).transport(0))
        assert ddp.last_step is None
        return observer.event.record().num_gradients

    with Last() as observer:
        assert run_ranks(1, rank) == [2]
