"""StatefulDataLoader of torchdata, saved in mid-epoch by sl.Checkpointer: the same steps as without a break."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchdata.stateful_dataloader")

from launched import ROOT, launch

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("launcher", ["syncline run", "torchrun"])
def test_the_example_resumes(launcher: str, tmp_path: Path) -> None:
    program = EXAMPLES / "torchdata_resume.py"
    assert "ran 5 steps" in launch(launcher, program, "--directory", str(tmp_path), "--steps", "5")
    assert "ran 3 steps, until step 8" in launch(
        launcher, program, "--directory", str(tmp_path), "--steps", "8"
    )


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
