"""A run that is killed at any step and started again ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from forks import Forks

PROGRAM = Path(__file__).with_name("resumable.py")
NUM_STEPS = 21
"""Three epochs of 7 steps each, so some places are in the middle of an epoch."""


def arguments(folder: Path, strategy: str, *events: str) -> list[object]:
    return [folder / "saves", folder / "report", strategy, NUM_STEPS, *events]


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
    strategy: str, killed_at: tuple[int, ...], tmp_path: Path, forks: Forks
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()

    def run(folder: Path, *events: str) -> list[int]:
        codes, printed = forks.run(2, PROGRAM, *arguments(folder, strategy, *events))
        assert any(codes) == bool(printed), printed
        return codes

    assert run(whole) == [0, 0]
    for life, step in enumerate(killed_at):
        victim = 1 - life % 2
        codes = run(killed, f"SIGKILL@{step}@{victim}")
        assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 1)
    assert run(killed) == [0, 0]
    expected = report_of(whole)
    assert len(expected) == NUM_STEPS + 1
    assert report_of(killed) == expected


def test_a_run_of_the_launcher_that_is_killed_goes_on(tmp_path: Path, forks: Forks) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    line = ["-n", "2", PROGRAM, *arguments(killed, "every-step", "SIGKILL@10@0")]
    done = forks.launch(tmp_path, *line, warm_ranks=True).wait()
    assert done.returncode, done.stderr
    for folder in (whole, killed):
        assert forks.run(2, PROGRAM, *arguments(folder, "every-step")) == ([0, 0], "")
    assert report_of(killed) == report_of(whole)
