"""Runs that are ill on purpose: the first lines of their report name the illness and its cure.

How much faster a cured run is, benchmarks/slow_steps.py measures. Here, a cure is tried if it changes more than times.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hangs
from syncline.tools.cli import main
from virtual_hosts import hosts_or_skip, outputs_of

PROGRAM = Path(__file__).with_name("sick_program.py")

pytestmark = pytest.mark.real


def run_here(illness: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "syncline", "run", "-n", "2", *options, str(PROGRAM), illness]
    return hangs.run([*command, str(directory)])


def run_over_a_link(illness: str, directory: Path, megabits_per_second: float) -> None:
    with hosts_or_skip(megabits_per_second=megabits_per_second) as hosts:
        hosts.start([sys.executable, str(PROGRAM), illness, str(directory)], on="ab")
        for code, _, errors in outputs_of(hosts):
            assert code == 0, errors


def report_of(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["report", str(directory), "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def first_screen(browser: Any, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[Path], str]]:
    """A function that returns the findings that a browser of 1280 x 900 pixels shows of a report, before it scrolls."""
    pages = []

    def shown(directory: Path) -> str:
        assert main(["report", str(directory)]) == 0
        made = browser.new_page(viewport={"width": 1280, "height": 900})
        pages.append(made)
        made.goto((directory / "report.html").as_uri())
        made.wait_for_selector("html[data-ready=true]")
        found: str = made.evaluate(
            "[...document.querySelectorAll('#findings .finding')]"
            ".filter(one => one.getBoundingClientRect().bottom <= innerHeight)"
            ".map(one => one.textContent.replace(/\\s+/g, ' ')).join('\\n')"
        )
        return found

    yield shown
    for made in pages:
        made.close()


def first_lines(report: dict[str, Any]) -> str:
    """What the first screen says: the first findings, with their cures."""
    return "\n".join(" ".join(one.values()) for one in report["findings"][:4])


ILLNESSES = {
    "slow loader": ("for rank 1, whose data loading", "DataLoader(num_workers="),
    "tiny buckets": ("The gradients are cut into 24 buckets of", "leave bucket_cap_mb out"),
    "one huge bucket": ("holds 100 % of the gradients", "with bucket_cap_mb="),
    "slow link": ("The link between the ranks is slow: it carries ", "Quantize(8)"),
    "unused parameter": (
        "2 parameters never get a gradient: head.bias, head.weight",
        "leave find_unused_parameters out",
    ),
    "lost rank": ("Rank 1 was lost after step 9", "syncline run --resilient"),
}
"""What the report of each illness says, and the cure that it names."""

LINKS = {"one huge bucket": 200.0, "slow link": 100.0}
"""The bandwidths of the runs over a link, in Mbit/s."""


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the directory of the traces of a run with an illness. Each runs once."""

    @functools.cache
    def directory_of(illness: str) -> Path:
        directory = tmp_path_factory.mktemp("run") / "sick"
        if illness in LINKS:
            run_over_a_link(illness, directory, LINKS[illness])
        else:
            done = run_here(illness, directory)
            assert (done.returncode == 0) == (illness != "lost rank"), done.stderr
        return directory

    return directory_of


@pytest.mark.parametrize("illness", ILLNESSES)
def test_the_first_lines_name_the_illness_and_its_cure(
    illness: str, sick: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = first_lines(report_of(sick(illness), capsys))
    for words in ILLNESSES[illness]:
        assert words in shown


@pytest.mark.parametrize("illness", ILLNESSES)
def test_a_browser_shows_the_illness_and_its_cure_at_once(
    illness: str, sick: Callable[[str], Path], first_screen: Callable[[Path], str]
) -> None:
    shown = first_screen(sick(illness))
    for words in ILLNESSES[illness]:
        assert words in shown


def test_a_link_is_not_said_to_carry_more_than_it_can(
    sick: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = first_lines(report_of(sick("slow link"), capsys))
    carried = re.search(r"The link between the ranks is slow: it carries ([\d.]+) MB", shown)
    assert carried is not None
    assert float(carried[1]) <= 12.6, "100 Mbit/s"


def test_the_cure_of_tiny_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("tiny buckets, cured", tmp_path / "cured").returncode == 0
    assert len(report_of(tmp_path / "cured", capsys)["buckets"]) == 1


def test_the_cure_of_an_unused_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("unused parameter, cured", tmp_path / "cured").returncode == 0
    assert "never" not in first_lines(report_of(tmp_path / "cured", capsys))


def test_the_cure_of_a_lost_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here("lost rank, cured", tmp_path / "cured", "--resilient")
    assert done.returncode == 0, done.stderr
    cured = report_of(tmp_path / "cured", capsys)
    assert "continued after" in first_lines(cured)
    assert max(int(step) for step in cured["steps"]) == 14
