"""The pure cores of strategies: no tensor, no transport."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import syncline as sl
from syncline.strategies.actions import (
    Action,
    Adopt,
    AdvanceOuter,
    Average,
    AverageBuffers,
    Await,
    Close,
    Message,
    Push,
    ReceiveOuter,
    ReduceGradients,
    RestartOuter,
    SendOuter,
    Update,
)
from syncline.strategies.base import Progress, Spec, Strategy
from syncline.strategies.diloco import plan_fragments
from syncline.strategies.gossip import neighbours

SPEC = Spec(rank=0, num_ranks=4, hosts=(0, 0, 1, 1), sizes_numel=(10, 20, 30, 40))

counts = st.integers(1, 12)


def walk(
    strategy: Strategy[Any], num_steps: int, spec: Spec = SPEC
) -> list[tuple[tuple[Action, ...], tuple[Action, ...]]]:
    """For each step what its backward and what its end wanted done."""
    state = strategy.init(spec)
    found = []
    for step in range(1, num_steps + 1):
        backward = strategy.at_backward(state, Progress(step=step - 1))
        assert backward == strategy.at_backward(state, Progress(step=step - 1)), "micro-batches decide alike"
        state, actions = strategy.at_step(state, Progress(step=step))
        found.append((backward, actions))
    return found


def states_of(strategy: Strategy[Any], num_ranks: int) -> list[Any]:
    specs = (
        replace(SPEC, rank=rank, num_ranks=num_ranks, hosts=(0,) * num_ranks) for rank in range(num_ranks)
    )
    return [strategy.init(spec) for spec in specs]


# ---------------------------------------------------------------------- local SGD


@given(every=counts, warmup=st.integers(0, 12), num_steps=st.integers(0, 40))
def test_local_sgd_meets_every_so_many_steps_after_its_warmup(
    every: int, warmup: int, num_steps: int
) -> None:
    for step, (backward, actions) in enumerate(walk(sl.LocalSGD(every, warmup), num_steps), start=1):
        if step <= warmup:
            assert (backward, actions) == ((ReduceGradients("all"),), (AverageBuffers(),))
        else:
            is_due = (step - warmup) % every == 0
            assert (backward, actions) == ((), (Average(),) if is_due else ())


@given(every=counts, warmup=st.integers(0, 12))
def test_workers_reduce_in_every_step_and_meet_in_every_step_of_the_warmup(every: int, warmup: int) -> None:
    strategy = sl.LocalSGD(every, warmup, every_step_within="host")
    for step, (backward, actions) in enumerate(walk(strategy, 30), start=1):
        assert backward == (ReduceGradients("worker"),)
        is_due = step <= warmup or (step - warmup) % every == 0
        assert actions == ((Average(),) if is_due else ())


# ---------------------------------------------------------------------- DiLoCo


@st.composite
def dilocos(draw: st.DrawFn) -> sl.DiLoCo:
    every = draw(counts)
    return sl.DiLoCo(
        every,
        fragments=draw(st.integers(1, min(every, 4))),
        delay=draw(st.integers(0, every - 1)),
        warmup=draw(st.integers(0, 9)),
    )


@given(strategy=dilocos(), num_steps=st.integers(0, 60))
def test_each_fragment_is_sent_every_so_many_steps_and_received_after_the_delay(
    strategy: sl.DiLoCo, num_steps: int
) -> None:
    sent: dict[int, list[int]] = {f: [] for f in range(strategy.fragments)}
    received: dict[int, list[int]] = {f: [] for f in range(strategy.fragments)}
    under_way: set[int] = set()
    for step, (backward, actions) in enumerate(walk(strategy, num_steps), start=1):
        assert backward == ((ReduceGradients("all"),) if step <= strategy.warmup else ())
        assert (RestartOuter() in actions) == (step == strategy.warmup)
        for action in actions:
            if isinstance(action, SendOuter):
                assert action.fragment not in under_way
                under_way.add(action.fragment)
                sent[action.fragment].append(step)
            elif isinstance(action, AdvanceOuter):
                assert action.fragment in under_way
            elif isinstance(action, ReceiveOuter):
                under_way.remove(action.fragment)
                received[action.fragment].append(step)
    for fragment, steps in sent.items():
        assert all(step > strategy.warmup for step in steps)
        assert all(b - a == strategy.every for a, b in pairwise(steps))
        if num_steps >= strategy.warmup + strategy.every:
            assert steps, "every fragment has had its turn"
        assert received[fragment] == [s + strategy.delay for s in steps if s + strategy.delay <= num_steps]


@given(strategy=dilocos(), num_steps=st.integers(1, 40))
def test_a_meeting_out_of_turn_receives_what_is_under_way_and_a_second_takes_no_outer_step(
    strategy: sl.DiLoCo, num_steps: int
) -> None:
    now = Progress(step=num_steps)
    state = strategy.init(SPEC)
    for step in range(1, num_steps + 1):
        state, _ = strategy.at_step(state, Progress(step=step))
    before = [fragment for fragment, _ in state.under_way]
    if state.equal_at == num_steps:  # all have met at this step already
        assert not before
    else:
        state, actions = strategy.at_sync(state, now)
        received = [action for action in actions if isinstance(action, ReceiveOuter)]
        assert [action.fragment for action in received] == before + list(range(strategy.fragments))
        assert all(action.mixing == 0 for action in received[len(before) :]), "all ranks end equal"
        assert state.under_way == ()
    assert strategy.at_sync(state, now) == (state, (Average(), RestartOuter()))


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=20), data=st.data())
def test_fragments_hold_each_parameter_once_and_in_order(sizes: list[int], data: st.DataObject) -> None:
    num = data.draw(st.integers(1, len(sizes)))
    fragments = plan_fragments(sizes, num)
    assert [i for fragment in fragments for i in fragment] == list(range(len(sizes)))
    assert len(fragments) == num
    assert all(fragments)
    largest = max(sum(sizes[i] for i in fragment) for fragment in fragments)
    assert largest < sum(sizes) / num + max(sizes)


# ---------------------------------------------------------------------- gossip


@given(
    topology=st.sampled_from(["ring", "exponential", "pairs"]),
    num_ranks=st.integers(1, 17),
    round=st.integers(0, 50),
    seed=st.integers(0, 5),
)
def test_nobody_sends_to_itself_or_twice(topology: Any, num_ranks: int, round: int, seed: int) -> None:
    edges = neighbours(topology, num_ranks, round, seed)
    assert len(edges) == num_ranks
    for rank, targets in enumerate(edges):
        assert rank not in targets
        assert len(set(targets)) == len(targets)
        assert all(0 <= target < num_ranks for target in targets)
    num_idle = sum(not targets for targets in edges)
    assert num_idle == (1 if num_ranks == 1 or (topology == "pairs" and num_ranks % 2) else 0)


@given(topology=st.sampled_from(["ring", "exponential", "pairs"]), num_ranks=st.integers(2, 9))
def test_what_one_rank_sends_another_expects(topology: Any, num_ranks: int) -> None:
    strategy = sl.Gossip(topology)
    states = states_of(strategy, num_ranks)
    for step in range(1, 10):
        pushes: list[Push] = []
        for rank in range(num_ranks):
            states[rank], actions = strategy.at_step(states[rank], Progress(step=step))
            pushes += [action for action in actions if isinstance(action, Push)] or [Push((), ())]
        sent = {(rank, target) for rank, push in enumerate(pushes) for target in push.to}
        assert sent == {(source, rank) for rank, push in enumerate(pushes) for source in push.sources}


@given(num_ranks=st.integers(2, 16))
def test_after_a_cycle_of_the_exponential_graph_everybody_has_heard_of_everybody(num_ranks: int) -> None:
    known = [{rank} for rank in range(num_ranks)]
    for round in range((num_ranks - 1).bit_length()):
        edges = neighbours("exponential", num_ranks, round)
        now = [set(heard) for heard in known]
        for rank, targets in enumerate(edges):
            for target in targets:
                now[target] |= known[rank]
        known = now
    assert all(len(heard) == num_ranks for heard in known)


# ---------------------------------------------------------------------- parameter server


@settings(max_examples=60)
@given(
    num_ranks=st.integers(2, 4),
    staleness=st.integers(0, 3),
    num_steps=st.integers(1, 8),
    seed=st.integers(0, 10_000),
)
def test_the_server_is_never_staler_than_it_says_and_never_stuck(
    num_ranks: int, staleness: int, num_steps: int, seed: int
) -> None:
    """Ranks step and messages arrive in a random order; an Await holds its rank back."""
    chance, ranks = random.Random(seed), range(num_ranks)
    strategy = sl.ParameterServer(staleness)
    states = states_of(strategy, num_ranks)
    steps, waits, is_meeting = ([start] * num_ranks for start in (0, False, False))
    mail: list[list[list[Message]]] = [[[] for _ in range(2 * num_ranks)] for _ in ranks]
    closed = [[0] * num_ranks for _ in ranks]  # [rank][shard], as the actions say

    def carry_out(rank: int, decision: tuple[Any, tuple[Action, ...]]) -> None:
        states[rank], actions = decision
        waits[rank] = Await() in actions
        for action in actions:
            if isinstance(action, Update | Close):
                is_update = isinstance(action, Update)
                message = Message("update" if is_update else "values", rank, action.clock)
                for other in set(ranks) - {rank}:
                    mail[other][2 * rank + is_update].append(message)
            if isinstance(action, Close):
                assert action.clock == closed[rank][rank] + 1
                closed[rank][rank] = action.clock
            if isinstance(action, Adopt):
                closed[rank][action.shard] = action.clock

    for _ in range(10_000):
        movable = [(rank, "mail") for rank in ranks if waits[rank] and any(mail[rank])]
        free = [rank for rank in ranks if not waits[rank] and not is_meeting[rank]]
        movable += [(rank, "step" if steps[rank] < num_steps else "meet") for rank in free]
        if not movable:
            break
        rank, what = chance.choice(movable)
        inbox = []
        for queue in mail[rank]:
            # As in the driver: what is of a later step than this rank's own is not looked for yet.
            while queue and queue[0].clock <= steps[rank] and (what == "mail" or chance.random() < 0.5):
                inbox.append(queue.pop(0))
        steps[rank] += what == "step"
        now = Progress(step=steps[rank])
        if what == "meet":
            is_meeting[rank] = True
            carry_out(rank, strategy.at_sync(states[rank], now))
        if what == "step" or inbox:
            carry_out(rank, strategy.at_step(states[rank], now, inbox))
        assert waits[rank] or steps[rank] - min(closed[rank]) <= staleness
    assert steps == [num_steps] * num_ranks, "nobody is stuck"
    assert is_meeting == [True] * num_ranks
    assert closed == [[num_steps] * num_ranks] * num_ranks, "after the meeting all know all"


# ---------------------------------------------------------------------- what they have in common

STRATEGIES: list[Strategy[Any]] = [
    sl.EveryStep(),
    sl.Manual(),
    sl.LocalSGD(3, warmup=2, optimizer_state=True),
    sl.DiLoCo(4, fragments=3, delay=2),
    sl.DiLoCo(4, every_step_within=2, warmup=3),
    sl.Gossip("pairs", every=2, weight=0.5, seed=9),
    sl.ParameterServer(2),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_states_go_through_json_rules_are_words_and_one_rank_does_not_wait(strategy: Strategy[Any]) -> None:
    state = strategy.init(SPEC)
    for step in range(1, 12):
        saved = json.loads(json.dumps(state._asdict()))
        assert strategy.state_from(saved, SPEC) == state
        state, _ = strategy.at_step(strategy.state_from(saved, SPEC), Progress(step=step))
    rules = strategy.rules(SPEC)
    assert rules.parameters.when
    assert rules.parameters.drift_allowed
    assert (rules.parameters.how is None) == rules.parameters.when.startswith("never"), "nothing is sent"
    assert rules.at_step
    if strategy.workers(SPEC) is None:
        alone = Spec(rank=0, num_ranks=1, hosts=(0,), sizes_numel=(1, 2, 3))
        for _, actions in walk(strategy, 12, alone):
            assert not any(isinstance(action, Await | Push | Update | Average) for action in actions)


def test_ranks_compare_strategies_as_they_are_written() -> None:
    assert str(sl.LocalSGD(8)) == "LocalSGD(every=8)"
    assert str(sl.Gossip("ring")) == "Gossip(topology='ring')"
    outer = partial(torch.optim.SGD, lr=0.5)
    assert str(sl.DiLoCo(8, outer=outer, delay=2)) == "DiLoCo(every=8, outer=SGD(lr=0.5), delay=2)"
    assert "test_ranks_compare" in str(sl.DiLoCo(8, outer=lambda p: torch.optim.SGD(p, lr=1)))
    weighted = sl.Gossip("ring", weight=2.0).rules(SPEC).strategy
    assert weighted == "Gossip(topology='ring')", "weights may differ"


REFUSED: list[tuple[Any, str]] = [
    (lambda: sl.LocalSGD(0), "every to be an integer of at least 1, got 0"),
    (lambda: sl.LocalSGD(2.0), "every to be an integer of at least 1, got 2.0"),  # type: ignore[arg-type]
    (lambda: sl.LocalSGD(2, warmup=-1), "warmup to be an integer of at least 0"),
    (lambda: sl.LocalSGD(2, every_step_within="node"), "or None, got 'node'"),  # type: ignore[arg-type]
    (lambda: sl.DiLoCo(4, fragments=5), "fragments to be at most every=4, got fragments=5"),
    (lambda: sl.DiLoCo(4, delay=4), "delay to be below every=4"),
    (lambda: sl.DiLoCo(4, mixing=1.0), "mixing to be a finite number of at least 0 and below 1, got 1.0"),
    (lambda: sl.DiLoCo(4, outer=0.7), "outer to be a function that makes an optimizer"),  # type: ignore[arg-type]
    (lambda: sl.DiLoCo(4, compression="4bit"), "compression to be None or a compression such as"),
    (lambda: sl.DiLoCo(4, compression=sl.compression.Quantize), "or a compression such as sl.compression."),
    (lambda: sl.Gossip("star"), "topology to be one of 'ring', 'exponential', 'pairs', got 'star'"),  # type: ignore[arg-type]
    (lambda: sl.Gossip("ring", weight=0), "weight to be a finite number above 0, got 0"),
    (lambda: sl.Gossip("ring", weight=float("nan")), "weight to be a finite number above 0, got nan"),
    (lambda: sl.ParameterServer(-1), "staleness to be an integer of at least 0"),
    (lambda: sl.DiLoCo(9, fragments=5).init(SPEC), "between 1 and 4 fragments"),
    (
        lambda: sl.LocalSGD(2, every_step_within=3).workers(SPEC),
        "divides the 4 ranks into equal groups, got 3",
    ),
]


def test_arguments_that_cannot_be_are_refused() -> None:
    for make, expected in REFUSED:
        with pytest.raises((TypeError, ValueError)) as refusal:
            make()
        assert expected in str(refusal.value)
