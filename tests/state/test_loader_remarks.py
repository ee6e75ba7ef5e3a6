"""DataLoaders and streams by which a run that resumes would differ are named, once, at a save."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import syncline as sl
from support.cases import case
from syncline.transport import Transport, run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Knows its place, as long as it is read in this process."""

    def __init__(self) -> None:
        self.place = {"next": torch.tensor(0)}

    def __iter__(self) -> Iterator[int]:
        while self.place["next"] < 24:
            self.place["next"] += 1
            yield int(self.place["next"])
        self.place["next"].zero_()

    def state_dict(self) -> dict[str, Any]:
        return self.place  # not a copy of it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state


def said(directory: Path, state: sl.TrainState, loader: Any, *, named: int | None) -> list[str]:
    """What is warned of when a run of five steps is saved at every one, and once more."""
    checkpointer = sl.Checkpointer(directory)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        batches = iter(loader)
        for _ in range(5):
            next(batches)
            state.commit(*[named] * (named is not None))
            checkpointer.save(state)
        checkpointer.save(state)
    return [str(one.message) for one in warned if "fork" not in str(one.message)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_a_stream(tmp_path: Path) -> None:
    streams: dict[str, tuple[dict[str, Any], list[str]]] = {
        "alone": ({"generator": generator()}, []),
        "chance": ({}, ["a DataLoader of Stream (0 workers) draws from torch's global generator whenever"]),
        "workers": (
            {"generator": generator(), "num_workers": 1},
            ["the position of data (Stream) has not changed in 3 steps"],
        ),
    }
    for kind, (how, expected) in streams.items():
        stream = Stream()
        loader = DataLoader(stream, batch_size=2, **how)
        found = said(tmp_path / kind, sl.TrainState(data=stream), loader, named=None)
        with case(kind, found):
            for text, start in zip(found, expected, strict=True):
                assert text.startswith(start)
        del loader
        gc.collect()  # or it would be looked at for the next one, too


def test_a_loader_with_a_sampler(tmp_path: Path) -> None:
    stay = {"num_workers": 1, "persistent_workers": True}
    sampled: dict[str, tuple[dict[str, Any], bool]] = {
        "in this process": ({}, False),
        "workers": ({"num_workers": 1}, False),
        "workers that stay": (stay, True),
        "with a generator": ({**stay, "generator": generator()}, False),
    }
    for kind, (how, is_said) in sampled.items():
        sampler = sl.DistributedSampler(Numbers(), 1, 0)
        loader = DataLoader(Numbers(), batch_size=2, sampler=sampler, **how)
        found = said(tmp_path / kind, sl.TrainState(sampler=sampler), loader, named=2)
        expected = "DataLoader of Numbers (1 worker) draws from torch's global generator once per run"
        with case(kind, found):
            assert len(found) == is_said
            assert all(expected in text for text in found)
        del loader
        gc.collect()


def test_a_loader_with_a_place_of_its_own(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    for how, is_said in (({}, True), ({"generator": generator()}, False)):
        loader = torchdata.StatefulDataLoader(Stream(), batch_size=2, **how)
        found = said(tmp_path / str(is_said), sl.TrainState(sampler=loader), loader, named=None)
        assert len([text for text in found if "set_vital" not in text]) == is_said
        del loader


def test_that_of_a_validation_is_named_too_and_on_rank_0_alone(tmp_path: Path) -> None:
    loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True)

    def program(t: Transport) -> None:
        checkpointer = sl.Checkpointer(tmp_path, group=t)
        checkpointer.save(sl.TrainState(model=torch.nn.Linear(2, 1)), step=1)

    with pytest.warns(RuntimeWarning, match="draws from torch's global generator once") as warned:
        run_ranks(2, program)
    assert len(warned) == 1
    del loader
