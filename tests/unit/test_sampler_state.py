"""The place of a `DistributedSampler`: each sample once in an epoch, whoever goes on, on however many ranks."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from failure_rows import record
from support.cases import case
from syncline import TrainState
from syncline.data import DistributedSampler


def samplers(size: int, num_ranks: int, **how: Any) -> list[DistributedSampler]:
    return [DistributedSampler(range(size), num_ranks, rank, **how) for rank in range(num_ranks)]


def resumed(state: Any, size: int, num_ranks: int, **how: Any) -> list[DistributedSampler]:
    found = samplers(size, num_ranks, **how)
    for sampler in found:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return found


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 60),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    tail=st.sampled_from([{"pad": False}, {"pad": True}, {"drop_last": True}]),
    lives=st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1)), max_size=4),
    last_num_ranks=st.integers(1, 5),
)
def test_every_sample_comes_once_in_an_epoch_whoever_goes_on(
    size: int,
    seed: int,
    shuffle: bool,
    tail: dict[str, bool],
    lives: list[tuple[int, float]],
    last_num_ranks: int,
) -> None:
    how: Any = {"seed": seed, "shuffle": shuffle, **tail}
    used: Counter[int] = Counter()
    state: Any = samplers(size, 1, **how)[0].state_dict()
    for num_ranks, share in [*lives, (last_num_ranks, 1.0)]:
        ranks = resumed(state, size, num_ranks, **how)
        left = size - used.total()
        dealt = [list(sampler) for sampler in ranks]
        most = max(map(len, dealt))
        num_steps = most if share == 1 else int(share * most)
        for sampler, indices in zip(ranks, dealt, strict=True):
            taken = indices[:num_steps]
            used.update(taken)
            sampler.advance(len(taken))
        if num_steps == most:
            break
        state = ranks[0].state_dict()
        # Where ranks have unequal shares, they are at one place until the last step.
        assert all(sampler.state_dict() == state for sampler in ranks)
        assert state["used"] == used.total()
    dropped = left % num_ranks if "drop_last" in tail else 0
    repeated = -left % num_ranks if tail.get("pad") else 0
    assert len(used) == size - dropped
    assert used.total() == size - dropped + repeated
    if most:
        assert (ranks[0].state_dict()["epoch"], ranks[0].state_dict()["used"]) == (1, 0)
        for rank, sampler in enumerate(ranks):  # the others, too, or they have nothing left
            last = sampler.state_dict()
            assert last["epoch"] == 1 or not list(resumed(last, size, num_ranks, **how)[rank])
    record("resume", "", "nothing: each sample comes once in the epoch, and the model is the same")


def test_as_many_ranks_go_on_as_if_nothing_had_happened() -> None:
    def epochs(sampler: DistributedSampler) -> Iterator[int]:
        return itertools.chain.from_iterable(sampler for _ in range(4))

    hows: list[Any] = [{"pad": False}, {"pad": True}, {"drop_last": True}]
    for how, num_steps, rank in itertools.product(hows, (0, 1, 3, 8, 9, 20), range(3)):
        whole, first, second = (DistributedSampler(range(25), 3, rank, **how) for _ in range(3))
        indices = list(epochs(whole))
        for taken, _ in enumerate(epochs(first)):
            if taken == num_steps:
                break
            first.advance(1)
        second.load_state_dict(first.state_dict())
        rest = list(epochs(second))
        assert rest[: len(indices) - num_steps] == indices[num_steps:], (how, num_steps, rank)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def test_what_workers_have_fetched_ahead_is_not_lost() -> None:
    def loader_of(sampler: DistributedSampler) -> DataLoader[int]:
        how: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
        return DataLoader(Numbers(), batch_size=4, sampler=sampler, **how)

    sampler = DistributedSampler(Numbers(), 1, 0)
    state = TrainState(sampler=sampler)
    loader = loader_of(sampler)
    seen: list[int] = []
    for epoch in range(2):
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            state.commit(len(batch))
            if epoch == 1 and number == 3:
                break
    saved = state.state_dict()
    assert (saved["sampler"]["epoch"], saved["sampler"]["used"]) == (1, 16)
    other = DistributedSampler(Numbers(), 1, 0)
    TrainState(sampler=other).load_state_dict(saved)
    for batch in loader_of(other):
        seen += batch.tolist()
    assert Counter(seen) == Counter(2 * list(range(40)))


def test_set_epoch_goes_on_in_the_epoch_that_was_loaded_and_begins_others() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    whole = [list(sampler), list(sampler)]
    sampler.advance(4)
    state = sampler.state_dict()
    assert (state["epoch"], state["used"]) == (1, 4)
    other = DistributedSampler(range(10), 1, 0)
    list(other)  # who uses nothing stays where the epoch began
    assert (other.state_dict()["epoch"], other.state_dict()["used"]) == (0, 0)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.epoch == 1
    other.set_epoch(1)
    assert list(other) == whole[1][4:]
    other.set_epoch(1)
    assert list(other) == whole[1], "asked for again, an epoch begins at its beginning"
    other.load_state_dict(state)
    other.set_epoch(0)
    assert [list(other), list(other)] == whole


def test_more_than_is_left_is_refused() -> None:
    sampler = DistributedSampler(range(10), 2, 1)
    list(sampler)
    text = "expected num_samples from 0 to 5, the number of samples that rank 1 has left in epoch 0"
    with pytest.raises(ValueError, match=text):
        sampler.advance(6)


def test_the_place_of_another_order_is_refused() -> None:
    state = DistributedSampler(range(10), 1, 0).state_dict()
    others: list[tuple[Any, str]] = [
        ({"dataset": range(11)}, r"num_samples=10 \(this sampler has 11\)"),
        ({"seed": 1}, r"seed=0 \(this sampler has 1\)"),
        ({"shuffle": False}, r"shuffle=True \(this sampler has False\)"),
    ]
    for other, text in others:
        sampler = DistributedSampler(**{"dataset": range(10), "num_replicas": 1, "rank": 0} | other)
        with case(other), pytest.raises(ValueError, match=text):
            sampler.load_state_dict(state)


def test_a_step_says_how_many_samples_it_took() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    state, without = TrainState(sampler=sampler), TrainState()
    list(sampler)
    with pytest.raises(TypeError, match=r"expected commit\(num_samples\)"):
        state.commit()
    with pytest.raises(ValueError, match="rank 0 has left in epoch 0, got 11"):
        state.commit(11)
    with pytest.raises(TypeError, match=r"got commit\(4\), but without a sampler"):
        without.commit(4)
    assert (state.step, without.step) == (0, 0)
    state.commit(3)
    without.commit()
    assert (state.step, without.step, sampler.state_dict()["used"]) == (1, 1, 3)


def test_what_was_dealt_before_a_place_was_loaded_does_not_count() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    state = TrainState(sampler=sampler)
    under_way = iter(sampler)
    next(under_way)
    state.commit(1)
    state.load_state_dict(state.state_dict())
    next(under_way)
    with pytest.raises(ValueError, match=r"a position was loaded \(epoch 0, after 1 samples of all ranks\)"):
        state.commit(1)
    assert state.step == 1
    next(iter(sampler))
    state.commit(1)
    assert sampler.state_dict()["used"] == 2


def test_a_sampler_by_another_name_would_stay_where_it_is() -> None:
    text = "expected the DistributedSampler under the name sampler, got it under the name data"
    with pytest.raises(TypeError, match=text):
        TrainState(data=DistributedSampler(range(10), 1, 0))
    others: Any = {"sampler": DistributedSampler(range(10), 1, 0), "test": DistributedSampler(range(4), 1, 0)}
    assert TrainState(**others).named == others


def used_by(sampler: DistributedSampler, number: int) -> list[int]:
    """Use some samples of this rank, one by one, over as many epochs as needed."""
    found: list[int] = []
    while len(found) < number:
        for index in sampler:
            sampler.advance(1)
            found.append(index)
            if len(found) == number:
                break
    return found


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(6, 40),
    nums_ranks=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_after_losses_no_sample_of_an_epoch_is_left_out_or_comes_again(
    size: int, nums_ranks: list[int], seed: int, data: st.DataObject
) -> None:
    """Ranks use unequal numbers of samples before the ranks change, over one epoch or two."""
    ranks = samplers(size, nums_ranks[0], seed=seed, pad=False)
    stand: list[int] = []
    for num_ranks in nums_ranks[1:]:
        used: dict[int, tuple[int, int]] = {}
        for rank, sampler in enumerate(ranks):
            stand += used_by(sampler, data.draw(st.integers(0, size // len(ranks))))
            used[rank] = sampler._where()
        place = json.loads(json.dumps(ranks[0]._place_after(used)))
        ranks = samplers(size, num_ranks, seed=seed, pad=False)
        for rank, sampler in enumerate(ranks):
            sampler._deal_from(place, num_ranks, [rank])
    counts = Counter([*stand, *(index for sampler in ranks for index in sampler)])
    assert len({counts[index] for index in range(size)}) == 1
