"""StatefulDataLoader of torchdata, saved in mid-epoch by sl.Checkpointer: the same steps as without a break."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata.stateful_dataloader")

from launched import ROOT, launch
from torchdata.nodes import Batcher, Loader, SamplerWrapper

import syncline as sl

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "recipes" / "torchdata.md"


def test_the_example_resumes(tmp_path: Path) -> None:
    program, directory = EXAMPLES / "torchdata_resume.py", ("--directory", str(tmp_path))
    assert "ran 5 steps" in launch("syncline run", program, *directory, "--steps", "5")
    assert "ran 3 steps, until step 8" in launch("torchrun", program, *directory, "--steps", "8")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stop", [5, 7, 10])  # 7 steps are an epoch
def test_a_resumed_run_has_the_losses_of_the_whole_run(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from torchdata_resume import train

    whole = train(tmp_path / "whole", num_steps=18)
    assert len(set(whole)) == 18
    first = train(tmp_path / "parts", num_steps=stop)
    assert first + train(tmp_path / "parts", num_steps=18) == whole


def node_loader() -> Loader[list[int]]:
    """The loader of the page."""
    (block,) = re.findall(r"```python\n(import torch.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    loader: Loader[list[int]] = names["loader"]
    return loader


def read(loader: Loader[list[int]], state: sl.TrainState, until: int) -> list[list[int]]:
    batches = []
    while state.step < until:
        for batch in loader:
            batches.append(batch)
            state.commit()
            if state.step == until:
                break
    return batches


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stop", [2, 5, 7])  # 5 steps are an epoch
@pytest.mark.parametrize("before", ["new", "asked", "saved", "iterated", "loaded"])
def test_a_loader_of_nodes_resumes_whatever_was_done_with_it_before(
    before: str, stop: int, tmp_path: Path
) -> None:
    loader = node_loader()
    whole = read(loader, sl.TrainState(sampler=loader), 12)
    loader = node_loader()
    state = sl.TrainState(sampler=loader)
    first = read(loader, state, stop)
    with sl.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state)
        loader = node_loader()
        state = sl.TrainState(sampler=loader)
        if before == "asked":
            loader.state_dict()
        elif before == "saved":
            with sl.Checkpointer(tmp_path / "other") as other:
                other.save(state)
        elif before == "iterated":
            next(iter(loader))
        elif before == "loaded":
            checkpointer.load(state)
        assert checkpointer.load(state) == stop
        checkpointer.save(state, step=stop)  # it saves the position that was loaded
        checkpointer.load(state)
    assert first + read(loader, state, 12) == whole


def test_a_loader_of_nodes_with_a_sampler_of_syncline_is_refused() -> None:
    loader = Loader(Batcher(SamplerWrapper(sl.DistributedSampler(range(8))), batch_size=2))
    with pytest.raises(
        ValueError, match=r"sampler is a torchdata\.nodes\.Loader with an sl\.DistributedSampler"
    ):
        sl.TrainState(sampler=loader)
