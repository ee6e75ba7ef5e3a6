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
from support.inside import replica_of, set_clock
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


class Sluggish(nn.Linear):
    """A linear layer whose forward takes a given time."""

    def __init__(self, clock: FakeTime, forward_seconds: float, width: int = 1) -> None:
        super().__init__(2, width)
        self._clock, self._forward_seconds = clock, forward_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.seconds += self._forward_seconds
        return super().forward(x)


def trained(
    t: Transport,
    clock: FakeTime,
    *,
    data: float = 0.002,
    update: float = 0.001,
    attach: bool = True,
    forward: float = 0.010,
    num_steps: int = 10,
    width: int = 1,
) -> sl.DistributedDataParallel:
    """Return a wrapper after steps whose phases take the given seconds. They are enough for a judgement."""
    ddp = sl.DistributedDataParallel(Sluggish(clock, forward, width), process_group=t)
    set_clock(ddp, clock.perf_counter)
    optimizer = torch.optim.SGD(ddp.parameters())
    if attach:
        ddp.attach(optimizer)
    for _ in range(num_steps):
        clock.seconds += data
        ddp(torch.randn(1, 2)).sum().backward()
        clock.seconds += update
        optimizer.step()
    return ddp


def said(ddp: sl.DistributedDataParallel) -> str:
    return " ".join(ddp.explain().split())


def test_every_rank_names_the_rank_whose_data_came_late(clock: FakeTime) -> None:
    def rank(t: Transport) -> tuple[Any, str]:
        ddp = trained(t, clock, data=0.041 if t.rank == 1 else 0.002)
        return ddp.last_step.timing, said(ddp)

    (here, text), (there, text_there) = run_ranks(2, rank)
    assert here.of_ranks == there.of_ranks
    assert here.late == there.late
    assert (here.late.rank, here.late.phase) == (1, "data")
    assert here.late.late_seconds == pytest.approx(0.039, abs=1e-5)
    assert (here.late.phase_seconds, here.late.usual_seconds) == pytest.approx((0.041, 0.002), abs=1e-5)
    assert here.of_ranks[0].update_seconds == pytest.approx(0.001, abs=1e-5)
    assert text.endswith(
        "Rank 1 was late by 39.0 ms: from its optimizer step to its forward, where data is loaded, it took 41.0 ms, "
        "against 2.0 ms on the other rank. This rank waited 0.0 ms in a step of 13.0 ms (0%)."
    )
    assert "Rank 1 was late by 39.0 ms: " in text_there


def test_the_phase_that_made_a_rank_late_is_named(clock: FakeTime) -> None:
    rows: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"forward": 0.050}, "its forward and loss took 50.0 ms, against 10.0 ms on the median"),
        (
            {},
            {"update": 0.050},
            "its gradients and its optimizer step took 50.0 ms, against 1.0 ms on the median",
        ),
        # Without an attached optimizer, its step counts as part of the time before the forward.
        (
            {"attach": False, "update": 0.0},
            {"update": 0.050},
            "from its backward to its forward, where data is loaded, it took 52.0 ms, against 2.0 ms",
        ),
    ]
    for usual, late, words in rows:
        for text in run_ranks(
            3,
            lambda t, usual=usual, late=late: said(
                trained(t, clock, **(usual | (late if t.rank == 2 else {})))
            ),
        ):
            assert "Rank 2 was late by " in text
            assert words in text


@pytest.mark.parametrize(
    ("num_steps", "wait", "times", "words"),
    [
        (2, 0.0, {}, "Too few steps to judge."),
        (10, 0.0, {"forward": 0.0004, "data": 0.0}, "Too short a step to judge."),
        (2, 0.0, {"forward": 0.0004, "data": 0.0}, "Too few steps and too short a step to judge."),
        (10, 0.0004, {}, "This rank waited 0.4 ms in a step of 13.4 ms (3%), so there is nothing to gain."),
    ],
)
def test_what_is_too_little_to_judge_or_to_gain_says_so(
    clock: FakeTime, num_steps: int, wait: float, times: dict[str, float], words: str
) -> None:
    def rank(t: Transport) -> str:
        clock.seconds_per_wait = wait
        return said(trained(t, clock, num_steps=num_steps, **times))

    for text in run_ranks(2, rank):
        assert text.endswith(words)


@pytest.mark.parametrize(
    ("width", "words"),
    [(10_000, "try a compression, or smaller buckets"), (1, "another rank was probably not running")],
)
def test_waits_without_a_late_rank_are_blamed_on_the_link_or_on_the_host(
    clock: FakeTime, width: int, words: str
) -> None:
    def rank(t: Transport) -> tuple[Any, str]:
        clock.seconds_per_wait = 0.006
        ddp = trained(t, clock, width=width)
        return ddp.last_step.timing, said(ddp)

    for timing, text in run_ranks(2, rank):
        assert timing.late is None
        assert timing.waited_seconds == pytest.approx(0.006, abs=1e-4)
        assert timing.step_seconds == pytest.approx(0.001 + 0.002 + 0.010 + 0.006, abs=1e-4)
        assert "This rank waited 6.0 ms in a step of 19.0 ms (32%), 6.0 ms of it for bucket 0. " in text
        assert words in text


def test_before_the_second_step_without_sync_and_on_a_device_nothing_is_claimed() -> None:
    def rank(t: Transport) -> list[str]:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        texts = [said(ddp)]
        for step in (1, 2):
            ddp(torch.randn(1, 2)).sum().backward()
            texts.append(said(ddp))
            assert (ddp.last_step.timing is None) == (step == 1)
        replica = replica_of(ddp)
        texts[2] = concluded(replica.plan, replace(replica.evidence(), device="cuda"))
        with ddp.no_sync():
            ddp(torch.randn(1, 2)).sum().backward()
        assert ddp.last_step.timing is None
        return [*texts, said(ddp)]

    words = ("No step has run yet.", "This was the first step.", "do not show what synch", "sent nothing")
    for text, expected in zip(run_ranks(2, rank)[0], words, strict=True):
        assert expected in text
    alone = sl.DistributedDataParallel(nn.Linear(2, 1))
    assert alone.explain().endswith("There is one rank, so synchronization costs nothing.")


def test_the_work_between_two_backwards_after_one_forward_belongs_to_the_loss(clock: FakeTime) -> None:
    def rank(t: Transport) -> Any:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        set_clock(ddp, clock.perf_counter)
        out = ddp(torch.randn(1, 2))
        out.sum().backward(retain_graph=True)
        clock.seconds += 0.030 if t.rank else 0.010
        (out * 2).sum().backward()
        return ddp.last_step.timing.late

    for late in run_ranks(2, rank):
        assert (late.rank, late.phase) == (1, "forward")
        assert (late.phase_seconds, late.usual_seconds) == pytest.approx((0.030, 0.010), abs=1e-5)


def test_a_step_of_several_micro_batches_has_the_times_of_all(clock: FakeTime) -> None:
    def rank(t: Transport) -> Any:
        ddp = sl.DistributedDataParallel(Sluggish(clock, 0.010), process_group=t)
        set_clock(ddp, clock.perf_counter)
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


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"sharded": True}, torch.float32),
        ({"find_unused_parameters": True}, torch.complex64),
        ({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, torch.bfloat16),
        ({"compression": sl.compression.Cast()}, torch.float32),
        ({"gradient_as_bucket_view": True, "on_nonfinite": "zero"}, torch.bfloat16),
    ],
    ids=str,
)
def test_the_times_travel_with_every_kind_of_bucket(options: dict[str, Any], dtype: torch.dtype) -> None:
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


def test_a_rank_is_late_if_it_worked_longer_than_the_median_of_the_others() -> None:
    rows: list[tuple[list[float | None], int | None]] = [
        ([0.010, 0.010], None),
        ([0.010, 0.0104], None),  # less than 0.5 ms and 5 %
        ([0.100, 0.104], None),
        ([0.100, 0.106], 1),
        ([0.030, 0.010, 0.010], 0),
        ([0.030, None, 0.010], 0),
        ([None, 0.010], None),
        ([], None),
    ]
    none = {"update_seconds": 0.0, "data_seconds": 0.0, "backward_seconds": 0.0}
    for totals, late in rows:
        of_ranks = tuple(None if one is None else RankTimes(forward_seconds=one, **none) for one in totals)
        found = StepTiming(step_seconds=1.0, waited_seconds=0.0, of_ranks=of_ranks).late
        assert (None if found is None else found.rank) == late, totals
