"""Loaders and datasets that have the place in the data themselves: saved in the middle of an epoch, gone on exactly."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import syncline as sl
from syncline.transport import Transport, run_ranks

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
# It calls what later versions of torch do not want to be called.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers that only come one after the other; split by worker; knows its place."""

    def __init__(self) -> None:
        self.next_number = 0

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.next_number < 11:
            self.next_number += 1
            yield (self.next_number - 1) * step + first
        self.next_number = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next_number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_number = state["next"]


LOADERS: dict[str, Callable[[int], Any]] = {
    "torchdata's sampler": lambda num_workers: stateful(
        Numbers(),
        num_workers,
        sampler=torchdata.sampler.RandomSampler(Numbers(), generator=generator()),
        generator=generator(),
    ),
    "stream": lambda num_workers: stateful(Stream(), num_workers, generator=generator()),
    "our sampler": lambda num_workers: stateful(
        Numbers(), num_workers, sampler=sl.DistributedSampler(Numbers(), 1, 0, seed=3)
    ),
}


def stateful(dataset: Any, num_workers: int, **how: Any) -> Any:
    return torchdata.StatefulDataLoader(dataset, batch_size=3, num_workers=num_workers, **how)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def trained(
    state: sl.TrainState,
    loader: Any,
    directory: Path,
    last: int,
    used: Callable[[Any], Any],
    named: bool = False,
) -> list[Any]:
    """Train from the last save there to a step, and save; return what `used` says of each batch."""
    checkpointer = sl.Checkpointer(directory)
    checkpointer.load(state)
    steps = []
    while state.step < last:
        for batch in loader:
            steps.append(used(batch))
            state.commit(*[len(batch)] * named)
            if state.step == last:
                break
    checkpointer.save(state)
    return steps


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.real
def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(kind: str, tmp_path: Path) -> None:
    def run(num_workers: int, directory: Path, last: int) -> list[Any]:
        """What each step used and drew."""
        torch.manual_seed(0)
        loader, net = LOADERS[kind](num_workers), nn.Dropout()
        state = sl.TrainState(model=net, sampler=loader)
        return trained(
            state, loader, directory, last, lambda batch: (batch.tolist(), net(torch.ones(8)).sum().item())
        )

    for num_workers, stops in ((0, (1, 5, 7, 8, 9, 15, 16)), (2, (5, 8))):
        whole = run(num_workers, tmp_path / f"{num_workers}", 20)
        if kind != "stream":
            seen = Counter(itertools.chain.from_iterable(batch for batch, _ in whole[:16]))
            assert seen == Counter(2 * list(range(22)))
        for stop in stops:
            directory = tmp_path / f"{num_workers} {stop}"
            parts = run(num_workers, directory, stop) + run(num_workers, directory, 20)
            assert parts == whole, f"{num_workers} workers, stopped after step {stop}"


def test_a_stream_that_knows_its_place_is_named_itself(tmp_path: Path) -> None:
    def run(directory: Path, last: int) -> list[list[int]]:
        stream = Stream()
        loader = DataLoader(stream, batch_size=3, generator=generator())
        return trained(sl.TrainState(stream=stream), loader, directory, last, torch.Tensor.tolist)

    assert run(tmp_path / "cut", 2) + run(tmp_path / "cut", 7) == run(tmp_path / "whole", 7)


def test_of_a_sampler_that_is_named_the_loader_is_as_any_other(tmp_path: Path) -> None:
    def run(directory: Path, last: int) -> list[list[int]]:
        sampler = sl.DistributedSampler(Numbers(), 1, 0)
        loader = stateful(Numbers(), 2, sampler=sampler)
        state = sl.TrainState(sampler=sampler)
        return trained(state, loader, directory, last, torch.Tensor.tolist, named=True)

    assert run(tmp_path / "cut", 5) + run(tmp_path / "cut", 20) == run(tmp_path / "whole", 20)


def test_another_number_of_ranks_goes_on_with_what_is_left() -> None:
    def loader_of(num_ranks: int, rank: int) -> Any:
        return stateful(Numbers(), 0, sampler=sl.DistributedSampler(Numbers(), num_ranks, rank))

    used: list[int] = []
    for rank in range(2):
        loader = loader_of(2, rank)
        for batch in itertools.islice(loader, 2):
            used += batch.tolist()
        state = loader.state_dict()
    assert len(used) == 12
    for rank in range(5):
        loader = loader_of(5, rank)
        loader.load_state_dict(state)
        for batch in loader:
            used += batch.tolist()
    assert Counter(used) == Counter(range(22))


def test_one_place_has_one_owner() -> None:
    sampler = sl.DistributedSampler(Numbers(), 1, 0)
    loader = stateful(Numbers(), 0, sampler=sampler)
    with pytest.raises(ValueError, match="sampler and loader have the same DistributedSampler"):
        sl.TrainState(sampler=sampler, loader=loader)


def test_an_evaluation_without_duplicates_is_the_plain_mean() -> None:
    values = torch.randn(22, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def program(transport: Transport) -> float:
        sampler = sl.DistributedSampler(Numbers(), transport.size, transport.rank, shuffle=False, pad=False)
        mine = values[list(sampler)]
        return float(sl.mean(mine.mean(), weight=len(mine), group=transport))

    for num_ranks in (2, 3, 5):
        assert run_ranks(num_ranks, program) == pytest.approx([values.mean().item()] * num_ranks, rel=1e-14)
