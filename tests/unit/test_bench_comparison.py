"""What `syncline bench --compare` and `benchmarks/compare.py` refuse to compare, and when: before a measurement."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import hangs
from syncline.tools.bench.baseline import differences, read_measurement, settings_of
from syncline.tools.bench.goals import Figure, to_json
from syncline.tools.bench.machine import describe_machine
from syncline.tools.cli import main
from syncline.tools.launch import supervise

ROOT = Path(__file__).parents[2]

PLAN = {"sizes_bytes": [1024, 1 << 20], "models": ["0.3M"], "turn_seconds": 0.01, "num_steps": 2}

FIGURES = [Figure("all_reduce of 1 KiB: syncline / Gloo", [1.0, 1.1, 1.0])]

OPTIONS = ["--sizes", "1K", "--no-steps"]
"""The options of a measurement that can be compared with the baseline."""


def write(path: Path, *, figures: object = None, **changes: object) -> Path:
    """Write a baseline that `syncline bench -n 2` has measured on this machine, with some changes of its settings."""
    settings = settings_of(num_ranks=2, machine=describe_machine(), plan=PLAN, transport="shared memory")
    rows = to_json(FIGURES) if figures is None else figures
    path.write_text(json.dumps({"figures": rows, "settings": {**settings, **changes}}))
    return path


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The plans of all measurements. None is carried out: the ranks find Gloo, and measure nothing."""
    plans: list[dict[str, Any]] = []

    def run(num_ranks: int, command: Sequence[str], *_: object, **__: object) -> int:
        plan = json.loads(command[-2])
        plans.append(plan)
        empty = {"all_reduce": [], "steps": [], "notes": []}
        found = {
            "machine": describe_machine(),
            "plan": plan,
            "num_ranks": num_ranks,
            "transport": "gloo",
            **empty,
        }
        Path(command[-1]).write_text(json.dumps(found))
        return 0

    monkeypatch.setattr(supervise, "run_on_this_host", run)
    return plans


# ---------------------------------------------------------------------- syncline bench --compare


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "3", *OPTIONS], "ranks: expected 3, got 2"),
        (["--sizes", "1K,2K", "--no-steps"], "all_reduce: expected 1 KiB, 2 KiB, got 1 KiB, 1 MiB"),
        (["--sizes", "1K"], "models: expected 0.3M, 5M, got 0.3M"),
    ],
)
def test_other_options_than_those_of_the_baseline_are_refused_before_the_measurement(
    options: list[str],
    words: str,
    tmp_path: Path,
    measured: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "before.json")
    assert main(["bench", "--compare", str(path), *options]) == 2
    error = capsys.readouterr().err
    assert f"--compare {path}: the file was measured with other settings ({words})" in error
    assert len(error.splitlines()) == 1
    assert measured == []


@pytest.mark.parametrize(
    "changes",
    [{"processor": "8 cores of another CPU"}, {"a turn": "0.002 s of all_reduce, 1 training steps"}],
)
def test_a_baseline_of_another_machine_or_of_quick_is_refused(
    changes: dict[str, str],
    tmp_path: Path,
    measured: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "before.json", **changes)
    assert main(["bench", "--compare", str(path), *OPTIONS]) == 2
    ((name, value),) = changes.items()
    error = capsys.readouterr().err
    assert f"{name}: expected" in error
    assert f", got {value}" in error
    assert measured == []


def test_another_transport_is_refused_when_the_ranks_have_found_theirs(
    tmp_path: Path, measured: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "before.json")
    assert main(["bench", "--compare", str(path), *OPTIONS]) == 2
    shown = capsys.readouterr()
    assert "transport: expected gloo, got shared memory" in shown.err
    assert shown.out == ""
    assert [plan["transport"] for plan in measured] == ["shared memory"]


def test_a_part_of_the_baseline_can_be_measured_again(
    tmp_path: Path, measured: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "before.json", transport="gloo")
    assert main(["bench", "--compare", str(path), "--rounds", "7", *OPTIONS]) == 0
    assert "not measured" in capsys.readouterr().out
    assert len(measured) == 1


def test_a_measurement_can_be_compared_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "before.json"
    assert main(["bench", "--json", str(path), *OPTIONS]) == 0
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "figures": to_json(FIGURES)}))
    assert main(["bench", "--compare", str(path), *OPTIONS]) == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("{}", "expected a file that syncline bench"),
        (json.dumps({"figures": to_json(FIGURES)}), "expected the settings of the measurement"),
    ],
)
def test_a_broken_baseline_is_found_before_anything_is_measured(
    text: str | None,
    reason: str,
    tmp_path: Path,
    measured: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "before.json"
    if text is not None:
        path.write_text(text)
    assert main(["bench", "--compare", str(path)]) == 2
    assert reason in capsys.readouterr().err
    assert measured == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"values": []}, "expected a list with a value for each round, got []"),
        ({"values": ["1.0"]}, "can only concatenate str"),
        ({"values": 1.0}, "expected a list"),
        ({"name": 3}, "expected a name, got 3"),
        ({"form": "{:d}"}, "Unknown format code"),
        ({"form": "{x}"}, "'x'"),
        ({"form": None}, "has no attribute"),
        ({"at_most": "1"}, "can only concatenate str"),
        ({"size": 3}, "unexpected keyword"),
    ],
)
def test_a_broken_figure_is_found_before_anything_is_measured(
    changes: dict[str, object],
    reason: str,
    tmp_path: Path,
    measured: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "before.json", figures=[{**to_json(FIGURES)[0], **changes}])
    assert main(["bench", "--compare", str(path), *OPTIONS]) == 2
    error = capsys.readouterr().err
    assert f"--compare {path}: expected the figures of a benchmark" in error
    assert reason in error
    assert measured == []


def test_the_file_of_a_calibration_is_checked_before_anything_is_measured(
    tmp_path: Path,
    measured: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "syncline").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "--calibrate"]) == 2
    path = tmp_path / "syncline" / "machine.json"
    assert f"--calibrate {path}: expected the path of a file in a folder" in capsys.readouterr().err
    assert measured == []


def test_differences_name_every_setting() -> None:
    expected = {"ranks": 4, "sizes": ["1 KiB"], "models": [], "transport": "gloo"}
    assert differences(expected, expected) == ""
    assert differences(expected, {"ranks": 2, "sizes": [], "models": ["5M"]}) == (
        "ranks: expected 4, got 2; sizes: expected 1 KiB, got none; transport: expected gloo, got none"
    )


# ---------------------------------------------------------------------- make bench-compare


def compare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), *map(str, arguments)]
    return hangs.run(command)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A baseline and a measurement with the same settings, and with the same figures."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "step-2.json")
    return tmp_path / "before", tmp_path / "after"


def test_folders_are_compared_file_by_file(folders: tuple[Path, Path]) -> None:
    before, after = folders
    done = compare(before, after)
    assert (done.returncode, done.stderr) == (0, "")
    write(before / "step-2.json", ranks=4)
    write(before / "only-before.json", ranks=8)
    done = compare(before, after)
    assert done.returncode == 2
    assert (
        f"{before / 'step-2.json'} was measured with other settings: ranks: expected 2, got 4" in done.stderr
    )
    assert done.stdout == ""


def test_a_baseline_is_checked_before_the_measurement(folders: tuple[Path, Path]) -> None:
    before, after = folders
    assert compare("--check", before, after / "not-yet").returncode == 0
    done = compare("--check", before, before.parent)
    assert done.returncode == 2
    assert "is deleted before the measurement" in done.stderr
    write(before / "step-2.json", processor="8 cores of another CPU")
    done = compare("--check", before, after)
    assert done.returncode == 2
    assert "step-2.json was measured on another machine: processor: expected" in done.stderr
    (before / "step-2.json").write_text("{")
    done = compare("--check", before, after)
    assert done.returncode == 2
    assert "step-2.json: Expecting" in done.stderr
    done = compare("--check", before / "missing", after)
    assert done.returncode == 2
    assert "missing: expected a folder with files" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_checks_the_baseline_first() -> None:
    command = ["make", "--dry-run", "bench-compare", "BASELINE=old", "BENCH=new"]
    done = hangs.run(command, cwd=ROOT)
    steps = [line.partition("python ")[2] or line for line in done.stdout.splitlines()]
    check, deletion, comparison = (
        steps.index(step)
        for step in (
            "benchmarks/compare.py --check old new",
            "rm -rf new",
            "benchmarks/compare.py old new",
        )
    )
    assert check < deletion < comparison
    command = ["make", "--dry-run", "bench-baseline", "BENCH=new"]
    done = hangs.run(command, cwd=ROOT)
    assert done.returncode == 2
    assert "expected BASELINE=new, got BENCH=new" in done.stderr


def test_the_file_of_a_program_has_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    rounds = pytest.importorskip("rounds")
    path = tmp_path / "new" / "figures.json"
    arguments = argparse.Namespace(json=path, rounds=7, quick=True, sizes=["5M"], variants=None)
    rounds.write_figures(arguments, FIGURES, {"ranks": 2}, num_ranks=2)
    assert json.loads(path.read_text())["num_ranks"] == 2
    found = read_measurement(path)
    assert found.figures == FIGURES
    assert {**found.settings, "processor": ""} == {
        "processor": "",
        "quick": True,
        "sizes": ["5M"],
        "ranks": 2,
    }
    rounds.write_figures(argparse.Namespace(json=None), FIGURES, {})
