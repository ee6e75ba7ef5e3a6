"""A run that is killed at any step and started again ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("resumable.py")
NUM_STEPS = 21
"""Three epochs of 7 steps each, so some places are in the middle of an epoch."""


def run(folder: Path, strategy: str, *, killed_at: int = -1, killed_rank: int = 0) -> int:
    command = [sys.executable, "-m", "syncline.cli", "run", "-n", "2", str(PROGRAM)]
    arguments = [folder / "saves", folder / "report", strategy, NUM_STEPS]
    if killed_at >= 0:
        arguments.append(f"SIGKILL@{killed_at}@{killed_rank}")
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode == 0) == (killed_at < 0), done.stderr
    return done.returncode


def report_of(folder: Path) -> dict[str, str]:
    """Loss by step, and the weights; what was reported twice is the same both times."""
    found: dict[str, str] = {}
    for line in (folder / "report").read_text().splitlines():
        what, value = line.split()
        assert found.setdefault(what, value) == value, f"{what} is another the second time"
    return found


@pytest.mark.parametrize(
    ("strategy", "killed_at"),
    [("every-step", (5, 18)), ("diloco-4bit", (10,)), ("int8", (14,)), ("sharded", (9,))],
)
def test_a_killed_run_goes_on_where_it_was_saved(
    strategy: str, killed_at: tuple[int, ...], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run(whole, strategy)
    for life, step in enumerate(killed_at):
        run(killed, strategy, killed_at=step, killed_rank=1 - life % 2)
    run(killed, strategy)
    expected = report_of(whole)
    assert len(expected) == NUM_STEPS + 1
    assert report_of(killed) == expected
