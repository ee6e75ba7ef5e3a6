"""Which ranks are slow over many steps: by plain data; then in the wrapper, by clocks that the tests set."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_devices import fake
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import syncline as sl
from support.inside import replica_of, set_clock
from syncline.gradients.reduction import Reduction
from syncline.gradients.step_times import Measured, encoded
from syncline.gradients.stragglers import (
    MIN_LATE_SECONDS,
    StragglerRule,
    Stragglers,
    mean_times,
    slow_ranks,
)
from syncline.records import PHASES, StragglerRecord
from syncline.transport import Transport, run_ranks

RULE = StragglerRule(factor=2.0, num_steps=10)
NONE = bytes(16)


def step_of(*totals: float | None, phase: int = 1) -> list[float]:
    """The digits of a step in which each rank works for the given seconds, all in one phase."""
    return [
        digit
        for total in totals
        for digit in (NONE if total is None else encoded([total * (at == phase) for at in range(4)]))
    ]


def followed(
    steps: Sequence[list[float]], rule: StragglerRule = RULE
) -> tuple[Stragglers, list[StragglerRecord]]:
    """Return the stragglers after these steps, and all that have been reported."""
    stragglers = Stragglers()
    stragglers.use(rule)
    return stragglers, [one for number, step in enumerate(steps, 1) for one in stragglers.add(step, number)]


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_means_of_sums_of_digits_are_the_means_of_the_times(
    num_ranks: int, num_steps: int, data: st.DataObject
) -> None:
    seconds = st.lists(st.floats(0, 100), min_size=4, max_size=4)
    steps = data.draw(
        st.lists(
            st.lists(seconds, min_size=num_ranks, max_size=num_ranks), min_size=num_steps, max_size=num_steps
        )
    )
    found = mean_times([[digit for rank in step for digit in encoded(rank)] for step in steps])
    for rank, times in enumerate(found):
        expected = [sum(step[rank][phase] for step in steps) / num_steps for phase in range(4)]
        assert times == pytest.approx(expected, abs=2e-6)


def test_a_rank_that_lacks_the_times_of_one_step_is_not_compared() -> None:
    assert mean_times([step_of(0.1, 0.1), step_of(None, 0.1)])[0] is None
    assert mean_times([step_of(0.1, 0.0), step_of(0.1, 0.0)])[1] == pytest.approx((0, 0, 0, 0))
    _, reported = followed([step_of(0.1, 0.1, 0.5 if number % 2 else None) for number in range(40)])
    assert not reported


totals = st.lists(st.floats(0.001, 10), min_size=2, max_size=9)


@given(totals, st.floats(1.01, 10), st.floats(1, 1000), st.randoms())
def test_slow_ranks_are_slower_than_half_of_the_ranks_in_any_order_and_on_any_machine(
    times: list[float], factor: float, by: float, random: Any
) -> None:
    slow = slow_ranks([(one,) for one in times], factor)
    assert 2 * len(slow) <= len(times)
    for rank in slow:
        assert sum(times[rank] >= factor * other for other in times) >= len(times) / 2
        assert all(times[rank] > one for other, one in enumerate(times) if other not in slow)
    order = list(range(len(times)))
    random.shuffle(order)
    assert {order[rank] for rank in slow_ranks([(times[at],) for at in order], factor)} == slow
    assert slow <= slow_ranks([(one * by,) for one in times], factor * (1 - 1e-9))
    assert not slow_ranks([(one * MIN_LATE_SECONDS / 20,) for one in times], 1.01), "all differ by too little"


@settings(max_examples=10)
@given(st.lists(st.lists(st.floats(0.050, 0.099), min_size=3, max_size=3), min_size=20, max_size=20))
def test_noise_below_the_factor_makes_no_straggler(steps: list[list[float]]) -> None:
    stragglers, reported = followed([step_of(*step) for step in steps])
    assert not reported
    assert not stragglers.records


@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 3), st.integers(1, 30), st.integers(5, 33))
def test_a_slow_rank_is_reported_once_within_a_window_with_its_phase(
    num_ranks: int, rank: int, phase: int, begin: int, num_steps: int
) -> None:
    rank %= num_ranks
    rule = StragglerRule(num_steps=num_steps)
    usual, slow = [0.010] * num_ranks, [0.010] * num_ranks
    slow[rank] = 0.041
    steps = [step_of(*usual, phase=phase)] * begin + [step_of(*slow, phase=phase)] * 4 * (num_steps + 4)
    stragglers, reported = followed(steps, rule)
    [record] = reported
    window = 5 * rule.steps_per_part
    assert (record.rank, record.phase, record.num_steps) == (rank, PHASES[phase], window)
    assert record.phase_seconds == pytest.approx(0.041, abs=0.0045)  # less if the first part began before
    assert record.usual_seconds == pytest.approx(0.010, abs=2e-6)
    assert record.late_seconds == pytest.approx(record.phase_seconds - record.usual_seconds, abs=4e-6)
    assert begin < record.from_step <= begin + window + rule.steps_per_part
    assert stragglers.present == stragglers.records == [record]


@given(st.integers(0, 39), st.floats(1, 60))
def test_one_long_pause_makes_no_straggler(at: int, pause: float) -> None:
    """Such as a save, which only rank 0 writes."""
    steps = [step_of(0.010, 0.010, 0.010)] * 40
    steps[at] = step_of(pause, 0.010, 0.010)
    assert not followed(steps)[1]


def test_a_pause_in_each_part_makes_a_straggler() -> None:
    """Such as a DataLoader with four workers, which lets its rank wait for each fourth batch."""
    steps = [step_of(0.160 if number % 4 == 0 else 0.0, 0.010) for number in range(100)]
    [record] = followed(steps, StragglerRule(num_steps=40))[1]
    assert record.rank == 0
    assert record.phase_seconds == pytest.approx(0.040, rel=0.3)


def test_it_is_over_after_a_window_without_a_slow_part_and_can_begin_again() -> None:
    slow, usual = [step_of(0.05, 0.01)], [step_of(0.01, 0.01)]
    stragglers, reported = followed(slow * 10 + (usual * 4 + slow * 2) * 5)
    assert len(reported) == 1, "it is slow now and then, so it is the same straggler"
    for number in range(41, 51):
        stragglers.add(*usual, number)
    assert stragglers.present == []
    [record] = stragglers.records
    assert (record.from_step, record.to_step) == (10, 50)
    assert [one.from_step for number in range(51, 71) for one in stragglers.add(*slow, number)] == [60]
    assert [one.to_step for one in stragglers.records] == [50, None]


def test_the_slowest_comes_first_and_old_records_are_dropped() -> None:
    stragglers, _ = followed([step_of(0.03, 0.01, 0.05, 0.01)] * 10)
    assert [one.rank for one in stragglers.present] == [2, 0]
    records = stragglers.records
    stragglers.use(RULE)  # after a change of the group
    assert (stragglers.rule, stragglers.records, stragglers.present) == (RULE, records, [])
    for number in range(110):
        for _ in range(10):
            stragglers.add(step_of(*[0.01] * 4), number)
        for _ in range(10):
            stragglers.add(step_of(0.05, *[0.01] * 3), number)
    assert len(stragglers.records) == 100
    assert stragglers.records[-1].from_step == 109


# ---------------------------------------------------------------------- in the wrapper


def train(t: Transport, num_steps: int, **late: float) -> sl.DistributedDataParallel:
    """Train by a clock that stands still unless it is moved here. No rank ever waits."""
    seconds = 0.0
    ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
    set_clock(ddp, lambda: seconds, has_waits=False)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters()))
    for _ in range(num_steps):
        seconds += 0.003 + late.get("data", 0.0) * (t.rank == 1)
        out = ddp(torch.randn(1, 2))
        seconds += 0.010 + late.get("forward", 0.0) * (t.rank == 1)
        out.sum().backward()
        optimizer.step()
    return ddp


@pytest.mark.parametrize(
    ("phase", "words"), [("data", "its data loading"), ("forward", "its forward and loss took 48.0 ms")]
)
def test_rank_0_warns_once_and_all_ranks_record_the_same(phase: str, words: str) -> None:
    def rank(t: Transport) -> sl.Statistics:
        ddp = train(t, 56, **{phase: 0.038})
        assert "slow" not in str(ddp.statistics() - ddp.statistics())
        return ddp.statistics()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_ranks(3, rank)
    [text] = [str(one.message) for one in caught if "is slow" in str(one.message)]
    assert text.startswith("step 51: rank 1 is slow: over the last 50 steps, ")
    assert words in text
    assert text.endswith("all ranks wait 38.0 ms a step")
    assert found[0].stragglers == found[1].stragglers == found[2].stragglers
    [record] = found[0].stragglers
    assert (record.rank, record.phase, record.from_step, record.to_step) == (1, phase, 51, None)
    assert repr(record) == f"<StragglerRecord: rank 1 by 38.0 ms a step, {phase}, step 51 to now>"
    shown = str(found[0] - sl.Statistics())
    assert "step 51: rank 1 is slow: over the last 50 steps" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_without_a_straggler_nothing_is_said() -> None:
    assert all(run_ranks(3, lambda t: train(t, 60).statistics().stragglers == ()))


@pytest.mark.parametrize("is_on_device", [False, True])
def test_ranks_are_not_compared_by_their_processes_if_devices_work(is_on_device: bool) -> None:
    """A process that waits for its device may wait for other ranks there, so its times do not say which is slow."""
    tensor = torch.ones(1)
    stragglers, _ = followed([step_of(0.1, 0.01)] * 9)
    reduction: Any = SimpleNamespace(
        clock=SimpleNamespace(end_step=lambda: Measured(0.1, 0.0, step_of(0.1, 0.01))),
        parameters=[fake(tensor) if is_on_device else tensor],
        state=SimpleNamespace(stragglers=stragglers),
        transport=SimpleNamespace(rank=1),
    )
    assert Reduction.end_step(reduction, 10) is not None
    assert bool(stragglers.present) == (not is_on_device)


# ---------------------------------------------------------------------- in sl.steps


def state_of_one_rank() -> sl.TrainState:
    ddp = sl.DistributedDataParallel(nn.Linear(2, 1))
    return sl.TrainState(model=ddp, optimizer=torch.optim.SGD(ddp.parameters()))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"on_straggler": "evcit"}, "one of 'warn', 'evict', got 'evcit': did you mean 'evict'?"),
        ({"on_straggler": True}, "expected on_straggler to be one of 'warn', 'evict', got True"),
        ({"straggler_factor": 1}, "straggler_factor to be a finite number above 1, got 1"),
        ({"straggler_steps": 4}, "straggler_steps to be an integer of at least 5, got 4"),
    ],
)
def test_wrong_arguments_of_the_loop_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        sl.steps(state_of_one_rank(), 1, **arguments)


def test_the_rule_of_a_loop_ends_with_it() -> None:
    state = state_of_one_rank()
    stragglers = replica_of(state.named["model"]).gradients.state.stragglers
    for step in sl.steps(state, 1, on_straggler=None, straggler_factor=3, straggler_steps=7):
        with step:
            assert stragglers.rule == StragglerRule(factor=3, num_steps=7, warns=False)
    assert stragglers.rule == StragglerRule()
