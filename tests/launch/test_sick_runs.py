"""Runs that are ill on purpose: the first lines of their report name the illness, and its cure works."""

from __future__ import annotations

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

pytestmark = pytest.mark.slow


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


def share(report: dict[str, Any], part: str) -> float:
    return sum(one["share"] for one in report["parts"] if one["part"] == part)


def step_us(report: dict[str, Any]) -> float:
    return float(sum(one["us"] for one in report["parts"]))


def late_us(report: dict[str, Any]) -> float:
    return float(sum(one["us"] for one in report["parts"] if one["part"] == "late"))


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


@pytest.mark.parametrize("illness", ILLNESSES)
def test_a_browser_shows_the_illness_and_its_cure_at_once(
    illness: str, tmp_path: Path, first_screen: Callable[[Path], str]
) -> None:
    if illness in LINKS:
        run_over_a_link(illness, tmp_path / "sick", LINKS[illness])
    else:
        run_here(illness, tmp_path / "sick")
    shown = first_screen(tmp_path / "sick")
    for words in ILLNESSES[illness]:
        assert words in shown


def test_a_slow_loader_on_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("slow loader", tmp_path / "sick").returncode == 0
    sick = report_of(tmp_path / "sick", capsys)
    assert "for rank 1, whose data loading" in first_lines(sick)
    assert "DataLoader(num_workers=" in first_lines(sick)
    assert share(sick, "late") > 0.2
    assert run_here("slow loader, cured", tmp_path / "cured").returncode == 0
    cured = report_of(tmp_path / "cured", capsys)
    # Its steps take some milliseconds, so on a busy machine any rank may be late by a part of them.
    assert late_us(cured) < 0.2 * late_us(sick)
    assert step_us(cured) < 0.8 * step_us(sick)


def test_tiny_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("tiny buckets", tmp_path / "sick").returncode == 0
    sick = report_of(tmp_path / "sick", capsys)
    assert "The gradients are cut into 24 buckets of" in first_lines(sick)
    assert "leave bucket_cap_mb out" in first_lines(sick)
    assert run_here("tiny buckets, cured", tmp_path / "cured").returncode == 0
    assert len(report_of(tmp_path / "cured", capsys)["buckets"]) == 1


def test_one_huge_bucket_over_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_over_a_link("one huge bucket", tmp_path / "sick", 200)
    sick = report_of(tmp_path / "sick", capsys)
    assert "with bucket_cap_mb=" in first_lines(sick)
    assert "holds 100 % of the gradients" in first_lines(sick)
    run_over_a_link("one huge bucket, cured", tmp_path / "cured", 200)
    cured = report_of(tmp_path / "cured", capsys)
    assert share(cured, "transfer") < 0.75 * share(sick, "transfer")


def test_a_slow_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_over_a_link("slow link", tmp_path / "sick", 100)
    sick = report_of(tmp_path / "sick", capsys)
    carried = re.search(r"The link between the ranks is slow: it carries ([\d.]+) MB", first_lines(sick))
    assert carried is not None
    assert 4 < float(carried[1]) <= 12.6, "100 Mbit/s, less what other programs cost"
    assert "Quantize(8)" in first_lines(sick)
    run_over_a_link("slow link, cured", tmp_path / "cured", 100)
    assert step_us(report_of(tmp_path / "cured", capsys)) < 0.6 * step_us(sick)


def test_an_unused_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("unused parameter", tmp_path / "sick").returncode == 0
    sick = first_lines(report_of(tmp_path / "sick", capsys))
    assert "2 parameters never get a gradient: head.bias, head.weight" in sick
    assert "leave find_unused_parameters out" in sick
    assert run_here("unused parameter, cured", tmp_path / "cured").returncode == 0
    assert "never" not in first_lines(report_of(tmp_path / "cured", capsys))


def test_a_rank_that_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("lost rank", tmp_path / "sick").returncode != 0
    sick = first_lines(report_of(tmp_path / "sick", capsys))
    assert "Rank 1 was lost after step 9" in sick
    assert "syncline run --resilient" in sick
    done = run_here("lost rank, cured", tmp_path / "cured", "--resilient")
    assert done.returncode == 0, done.stderr
    cured = report_of(tmp_path / "cured", capsys)
    assert "continued after" in first_lines(cured)
    assert max(int(step) for step in cured["steps"]) == 14
