"""Which rank was late, and what synchronization cost: in the record of a step, and in the last line of `explain`."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.ddp.conclusion import concluded
from syncline.records import RankTimes, StepTiming
from syncline.transport import Transport, run_ranks


class FakeTime(threading.local):
    """A clock for each rank, as ranks are threads. It stands still unless a test moves it."""

    seconds = 0.0
    seconds_per_wait = 0.0
    is_waiting = False

    def perf_counter(self) -> float:
        return self.seconds

    def perf_counter_around_waits(self) -> float:
        """Return the time. It is called before and after a wait; the wait takes `seconds_per_wait`."""
        self.is_waiting = not self.is_waiting
        if not self.is_waiting:
            self.seconds += self.seconds_per_wait
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    around = SimpleNamespace(perf_counter=fake.perf_counter_around_waits)
    monkeypatch.setattr("syncline.transport.work.time", around)
    monkeypatch.setattr("syncline.gradients.bucket.time", SimpleNamespace(perf_counter=fake.perf_counter))
    return fake


class Sluggish(nn.Module):
    """A linear layer whose forward and backward take a given time."""

    def __init__(self, clock: FakeTime, forward: float, backward: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self._clock, self._forward, self._backward = clock, forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.seconds += self._forward
        out: torch.Tensor = self.layer(x)
        # The gradient of the bias is ready before the gradient of the weight; see `Reducer.begin`.
        self.layer.bias.register_post_accumulate_grad_hook(self._slow)
        return out

    def _slow(self, _: object) -> None:
        self._clock.seconds, self._backward = self._clock.seconds + self._backward, 0.0


def trained(
    t: Transport,
    clock: FakeTime,
    *,
    data: float = 0.002,
    update: float = 0.001,
    attach: bool = True,
    num_steps: int = 10,
    **times: float,
) -> sl.DistributedDataParallel:
    """Return a wrapper after steps whose phases take the given seconds. They are enough for a judgement."""
    module = Sluggish(clock, times.get("forward", 0.010), times.get("backward", 0.0))
    ddp = sl.DistributedDataParallel(module, process_group=t)
    ddp._replica.gradients.reduction.clock.now = clock.perf_counter
    optimizer = torch.optim.SGD(ddp.parameters())
    if attach:
        ddp.attach(optimizer)
    for _ in range(num_steps):
        clock.seconds += data
        ddp(torch.randn(1, 2)).sum().backward()
        clock.seconds += update
        optimizer.step()
    return ddp


def test_every_rank_names_the_rank_whose_data_came_late(clock: FakeTime) -> None:
    def rank(t: Transport) -> tuple[Any, str]:
        ddp = trained(t, clock, data=0.041 if t.rank == 1 else 0.002)
        return ddp.last_step.timing, ddp.explain().splitlines()[-2:]

    (here, said), (there, said_there) = run_ranks(2, rank)
    assert here.of_ranks == there.of_ranks
    assert here.late == there.late
    assert (here.late.rank, here.late.phase) == (1, "data")
    assert here.late.late_seconds == pytest.approx(0.039, abs=1e-5)
    assert (here.late.phase_seconds, here.late.usual_seconds) == pytest.approx((0.041, 0.002), abs=1e-5)
    assert here.of_ranks[0].update_seconds == pytest.approx(0.001, abs=1e-5)
    assert " ".join(said) == (
        "Rank 1 was late by 39.0 ms: from its optimizer step to its forward, where data is loaded, it took 41.0 ms, "
        "against 2.0 ms on the other rank. This rank waited 0.0 ms in a step of 13.0 ms (0%)."
    )
    assert " ".join(said_there).startswith("Rank 1 was late by 39.0 ms: ")


@pytest.mark.parametrize(
    ("num_steps", "times", "words"),
    [
        (2, {}, "Too few steps to judge."),
        (10, {"forward": 0.0004, "data": 0.0}, "Too short a step to judge."),
        (2, {"forward": 0.0004, "data": 0.0}, "Too few steps and too short a step to judge."),
        (10, {}, "so there is nothing to gain."),
    ],
)
def test_what_is_too_little_to_judge_says_so(
    clock: FakeTime, num_steps: int, times: dict[str, float], words: str
) -> None:
    def rank(t: Transport) -> str:
        return " ".join(trained(t, clock, num_steps=num_steps, **times).explain().split())

    for text in run_ranks(2, rank):
        assert text.endswith(words)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("forward", "its forward and loss took 50.0 ms, against 10.0 ms"),
        ("update", "its gradients and its optimizer step took 50.0 ms, against 1.0 ms"),
    ],
)
def test_the_phase_that_made_a_rank_late_is_named(clock: FakeTime, phase: str, words: str) -> None:
    def rank(t: Transport) -> str:
        return trained(t, clock, **({phase: 0.050} if t.rank == 2 else {})).explain()

    for text in run_ranks(3, rank):
        joined = " ".join(text.splitlines()[-3:])
        assert "Rank 2 was late by " in joined
        assert f"{words} on the median of the other 2 ranks" in joined


def test_without_an_attached_optimizer_its_step_counts_as_part_of_the_time_before_the_forward(
    clock: FakeTime,
) -> None:
    def rank(t: Transport) -> str:
        ddp = trained(t, clock, update=0.030 if t.rank else 0.0, attach=False)
        assert ddp.last_step.timing.of_ranks[1].update_seconds == 0
        return " ".join(ddp.explain().splitlines()[-3:])

    for text in run_ranks(2, rank):
        assert "Rank 1 was late by 30.0 ms: from its backward to its forward, where data is loaded" in text


def test_waits_without_a_late_rank_are_blamed_on_the_link(
    clock: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.ddp.conclusion._SLOWEST_LINK", 1000.0)

    def rank(t: Transport) -> tuple[Any, str]:
        clock.seconds_per_wait = 0.006
        ddp = trained(t, clock)
        return ddp.last_step.timing, " ".join(ddp.explain().splitlines()[-3:])

    for timing, text in run_ranks(2, rank):
        assert timing.late is None
        assert timing.waited_seconds == pytest.approx(0.006, abs=1e-4)
        assert timing.step_seconds == pytest.approx(0.001 + 0.002 + 0.010 + 0.006, abs=1e-4)
        assert "This rank waited 6.0 ms in a step of 19.0 ms (32%), 6.0 ms of it for bucket 0. " in text
        assert "try a compression, or smaller buckets" in text


def test_waits_that_are_too_long_for_what_was_sent_are_blamed_on_the_host(clock: FakeTime) -> None:
    def rank(t: Transport) -> str:
        clock.seconds_per_wait = 0.006
        return " ".join(trained(t, clock).explain().splitlines()[-3:])

    for text in run_ranks(2, rank):
        assert "6.0 ms of it for bucket 0. No rank was late enough to explain this, and " in text
        assert "are sent in less time. So the process of another rank was probably not running" in text


def test_short_waits_are_not_worth_an_effort(clock: FakeTime) -> None:
    def rank(t: Transport) -> str:
        clock.seconds_per_wait = 0.0004
        return trained(t, clock).explain().splitlines()[-1]

    expected = "This rank waited 0.4 ms in a step of 13.4 ms (3%), so there is nothing to gain."
    assert run_ranks(2, rank) == [expected] * 2


def test_before_the_second_step_and_without_sync_nothing_is_claimed() -> None:
    def rank(t: Transport) -> list[str]:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        said = [ddp.explain()]
        for _ in range(2):
            ddp(torch.randn(1, 2)).sum().backward()
            said.append(ddp.explain())
            assert (ddp.last_step.timing is None) == (len(said) == 2)
        with ddp.no_sync():
            ddp(torch.randn(1, 2)).sum().backward()
        assert ddp.last_step.timing is None
        return [text.splitlines()[-1] for text in (*said[:2], ddp.explain())]

    planned, first, local = run_ranks(2, rank)[0]
    assert planned == "No step has run yet. After two steps, this line says what synchronization costs."
    assert (
        first == "This was the first step. From the next step on, this line says what synchronization costs."
    )
    assert local == "This backward sent nothing, so no rank waited for its gradients."
    alone = sl.DistributedDataParallel(nn.Linear(2, 1))
    assert alone.explain().endswith("There is one rank, so synchronization costs nothing.")


def test_the_work_between_two_backwards_after_one_forward_belongs_to_the_loss(clock: FakeTime) -> None:
    def rank(t: Transport) -> tuple[Any, str]:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        ddp._replica.gradients.reduction.clock.now = clock.perf_counter
        out = ddp(torch.randn(1, 2))
        out.sum().backward(retain_graph=True)
        clock.seconds += 0.030 if t.rank else 0.010
        (out * 2).sum().backward()
        return ddp.last_step.timing.late, " ".join(ddp.explain().splitlines()[-3:])

    for late, text in run_ranks(2, rank):
        assert (late.rank, late.phase) == (1, "forward")
        assert "its forward and loss took 30.0 ms, against 10.0 ms" in text


def test_a_step_of_several_micro_batches_has_the_times_of_all(clock: FakeTime) -> None:
    def rank(t: Transport) -> Any:
        ddp = sl.DistributedDataParallel(Sluggish(clock, 0.010, 0.0), process_group=t)
        ddp._replica.gradients.reduction.clock.now = clock.perf_counter
        for _ in range(2):
            with ddp.no_sync():
                clock.seconds += 0.030 if t.rank else 0.010
                ddp(torch.randn(1, 2)).sum().backward()
            with torch.no_grad():
                ddp(torch.randn(1, 2))
            clock.seconds += 0.002
            ddp(torch.randn(1, 2)).sum().backward()
        return ddp.last_step.timing

    for timing in run_ranks(2, rank):
        assert (timing.late.rank, timing.late.phase) == (1, "data")
        here = timing.of_ranks[1]
        # The forward without gradients runs between two micro-batches, as data is loaded there.
        assert (here.data_seconds, here.forward_seconds) == pytest.approx((0.042, 0.020), abs=1e-5)


def test_the_waits_of_another_thread_do_not_break_a_backward(clock: FakeTime) -> None:
    def rank(t: Transport) -> Any:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        ddp(torch.randn(1, 2)).sum().backward()
        t.counts.waited_seconds += 5.0
        t.counts.in_background().waited_seconds += 5.0  # a checkpoint is written on such a lane
        ddp(torch.randn(1, 2)).sum().backward()
        return ddp.last_step.timing

    for timing in run_ranks(2, rank):
        assert timing.waited_seconds == pytest.approx(5.0, abs=1e-3)
        assert all(0 <= times.total_seconds < 1 for times in timing.of_ranks)


def test_on_a_device_nothing_is_claimed() -> None:
    def rank(t: Transport) -> str:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        for _ in range(2):
            ddp(torch.randn(1, 2)).sum().backward()
        replica = ddp._replica
        return concluded(replica.plan, replace(replica.evidence(), device="cuda"))

    assert all("these times do not show what synchronization costs" in text for text in run_ranks(2, rank))


@pytest.mark.parametrize(
    "options",
    [
        {"sharded": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {"compression": sl.compression.Cast()},
        {"gradient_as_bucket_view": True, "on_nonfinite": "zero"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_the_times_travel_with_every_kind_of_bucket(options: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype.is_complex and (options.get("sharded") or "compression" in options or "on_nonfinite" in options):
        pytest.skip("complex gradients are not supported there")

    def rank(t: Transport) -> tuple[Any, ...]:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1, dtype=dtype), process_group=t, **options)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.randn(1, 2, dtype=dtype)).abs().sum().backward()
        return ddp.last_step.timing.of_ranks

    seen = run_ranks(3, rank)
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 3
    assert all(0 < times.total_seconds < 60 for times in seen[0])


@pytest.mark.ranks(2)
def test_a_rank_without_inputs_reports_no_times() -> None:
    ddp, rank = sl.DistributedDataParallel(nn.Linear(2, 1)), sl.world().rank
    with ddp.join():
        for _ in range(1 if rank else 3):
            ddp(torch.randn(1, 2)).sum().backward()
    if rank == 0:
        timing = ddp.last_step.timing
        assert timing.of_ranks[0] is not None
        assert timing.of_ranks[1] is None
        assert timing.late is None


def times(total: float) -> RankTimes:
    return RankTimes(update_seconds=0, data_seconds=0, forward_seconds=total, backward_seconds=0)


@pytest.mark.parametrize(
    ("totals", "late"),
    [
        ([0.010, 0.010], None),
        ([0.010, 0.0104], None),  # less than 0.5 ms and 5 %
        ([0.100, 0.104], None),
        ([0.100, 0.106], 1),
        ([0.030, 0.010, 0.010], 0),
        ([0.030, None, 0.010], 0),
        ([None, 0.010], None),
        ([], None),
    ],
)
def test_a_rank_is_late_if_it_worked_longer_than_the_median_of_the_others(
    totals: list[float | None], late: int | None
) -> None:
    timing = StepTiming(
        step_seconds=1.0,
        waited_seconds=0.0,
        of_ranks=tuple(None if total is None else times(total) for total in totals),
    )
    assert (None if timing.late is None else timing.late.rank) == late
