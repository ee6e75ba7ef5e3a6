"""`DistributedSampler` against torch's class, and in the two points in which it differs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import DistributedSampler as TorchSampler

from syncline.data import DistributedSampler

SIZES = (0, 1, 2, 3, 7, 8, 30, 31)


def test_deals_the_same_indices_as_torch() -> None:
    wrong = []
    for size, num_replicas in itertools.product(SIZES, (1, 2, 3, 8)):
        for drop_last, shuffle in itertools.product((False, True), repeat=2):
            for rank in range(num_replicas):
                arguments = (range(size), num_replicas, rank, shuffle, 7, drop_last)
                theirs, ours = TorchSampler(*arguments), DistributedSampler(*arguments)
                for epoch in (0, 1, 5):
                    theirs.set_epoch(epoch)
                    ours.set_epoch(epoch)
                    if dealt_by(ours) != (expected := dealt_by(theirs)):
                        wrong.append(f"{arguments}, epoch {epoch}: {dealt_by(ours)}, not {expected}")
    assert not wrong, "\n".join(wrong)


def dealt_by(sampler: TorchSampler[Any] | DistributedSampler[Any]) -> tuple[object, ...]:
    return list(sampler), len(sampler), sampler.epoch, sampler.num_samples, sampler.total_size


@given(
    size=st.integers(0, 200),
    num_replicas=st.integers(1, 17),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 1000),
)
@settings(deadline=None)
def test_without_padding_every_sample_comes_exactly_once(
    size: int, num_replicas: int, shuffle: bool, seed: int, epoch: int
) -> None:
    dealt = []
    for rank in range(num_replicas):
        sampler = DistributedSampler(range(size), num_replicas, rank, shuffle=shuffle, seed=seed, pad=False)
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert len(indices) == len(sampler)
        dealt.append(indices)
    assert sorted(itertools.chain(*dealt)) == list(range(size))
    lengths = [len(indices) for indices in dealt]
    assert max(lengths) - min(lengths) <= 1


def test_padding_repeats_samples_and_is_the_default() -> None:
    dealt = Counter(index for rank in range(3) for index in DistributedSampler(range(4), 3, rank))
    assert sum(dealt.values()) == 6
    assert set(dealt) == set(range(4))


def torch_epoch(epoch: int) -> list[int]:
    sampler = TorchSampler(range(20), 2, 1)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_each_iteration_is_the_next_epoch() -> None:
    sampler = DistributedSampler(range(20), 2, 1)
    assert [list(sampler) for _ in range(3)] == [torch_epoch(0), torch_epoch(1), torch_epoch(2)]
    assert torch_epoch(0) != torch_epoch(1)


def test_set_epoch_wins_for_the_next_iteration_and_counting_goes_on_from_there() -> None:
    sampler = DistributedSampler(range(20), 2, 1)
    list(sampler)
    sampler.set_epoch(7)
    assert sampler.epoch == 7
    assert [list(sampler) for _ in range(2)] == [torch_epoch(7), torch_epoch(8)]
    assert sampler.epoch == 8
    sampler.set_epoch(8)
    assert list(sampler) == torch_epoch(8)


def test_an_iteration_that_is_broken_off_uses_up_its_epoch() -> None:
    sampler = DistributedSampler(range(20), 2, 1)
    assert next(iter(sampler)) == torch_epoch(0)[0]
    assert list(sampler) == torch_epoch(1)


def test_an_iterator_of_which_nothing_is_taken_uses_up_no_epoch() -> None:
    sampler = DistributedSampler(range(20), 2, 1)
    iter(sampler)
    assert list(sampler) == torch_epoch(0)


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.real
def test_a_data_loader_sees_one_epoch_after_the_other(num_workers: int, batch_size: int | None) -> None:
    dataset = torch.arange(20)
    loader = DataLoader(
        dataset,  # type: ignore[arg-type]  # a tensor has indices and a length
        batch_size=batch_size,
        sampler=DistributedSampler(dataset, 2, 1),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        multiprocessing_context="forkserver" if num_workers else None,
    )
    for epoch in range(3):
        assert torch.cat([batch.flatten() for batch in loader]).tolist() == torch_epoch(epoch)


def test_is_one_of_torchs_samplers() -> None:
    assert isinstance(DistributedSampler(range(3), 1, 0), TorchSampler)


def test_alone_it_deals_everything_to_this_rank() -> None:
    sampler = DistributedSampler(range(5), shuffle=False)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert list(sampler) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_replicas", "rank"), [(2, 2), (2, -1), (1, 5)])
def test_refuses_a_rank_outside_the_replicas(num_replicas: int, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank to be an integer from 0 to {num_replicas - 1}, got {rank}"):
        DistributedSampler(range(5), num_replicas, rank)


@pytest.mark.parametrize("num_replicas", [0, -1])
def test_refuses_to_deal_to_nobody(num_replicas: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {num_replicas}"):
        DistributedSampler(range(5), num_replicas, 0)


def test_refuses_to_drop_samples_that_must_all_be_seen() -> None:
    with pytest.raises(ValueError, match="expected drop_last=True or pad=False, got both"):
        DistributedSampler(range(5), 2, 0, drop_last=True, pad=False)


def test_refuses_a_stream() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    with pytest.raises(TypeError, match="expected dataset to have a length, got a Stream"):
        DistributedSampler(Stream(), 2, 0)  # type: ignore[arg-type]
