"""What `syncline bench --compare` and `benchmarks/compare.py` refuse to compare, and when: before a measurement."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import hangs
from syncline.tools.bench.baseline import differences, read_measurement, settings_of
from syncline.tools.bench.goals import Figure, compared, show_comparison, to_json
from syncline.tools.bench.machine import describe_machine
from syncline.tools.cli import main
from syncline.tools.launch import supervise

ROOT = Path(__file__).parents[2]

PLAN = {"sizes_bytes": [1024, 1 << 20], "models": ["0.3M"], "turn_seconds": 0.01, "num_steps": 2}

FIGURES = [Figure("all_reduce of 1 KiB: syncline / Gloo", [1.0, 1.1, 1.0])]

OPTIONS = "--sizes 1K --no-steps"
"""The options of a measurement that can be compared with the baseline."""


def write(path: Path, *, figures: object = None, **changes: object) -> Path:
    """Write a baseline that `syncline bench -n 2` has measured on this machine, with some changes of its settings."""
    settings = settings_of(num_ranks=2, machine=describe_machine(), plan=PLAN, transport="shared memory")
    rows = to_json(FIGURES) if figures is None else figures
    path.write_text(json.dumps({"figures": rows, "settings": {**settings, **changes}}))
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The plans of all measurements. None is carried out: the ranks find Gloo, and measure nothing."""
    plans: list[dict[str, Any]] = []

    def run(num_ranks: int, command: Sequence[str], *_: object, **__: object) -> int:
        plans.append(json.loads(command[-2]))
        found: dict[str, object] = {"machine": describe_machine(), "plan": plans[-1], "num_ranks": num_ranks}
        found |= {"transport": "gloo", "all_reduce": [], "steps": [], "notes": []}
        Path(command[-1]).write_text(json.dumps(found))
        return 0

    monkeypatch.setattr(supervise, "run_on_this_host", run)
    return plans


Refuse = Callable[..., None]


@pytest.fixture
def refuses(measured: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Assert that `syncline bench` refuses options in one line, which has some words, before it measures."""

    def refused(options: str, *words: str) -> None:
        assert main(["bench", *options.split()]) == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        for one in words:
            assert one in line
        assert measured == [], words

    return refused


# ---------------------------------------------------------------------- two measurements


def test_a_figure_is_worse_if_it_is_worse_beyond_noise(capsys: pytest.CaptureFixture[str]) -> None:
    before = [
        Figure("slower", [1.0, 1.1, 1.0]),
        Figure("noisy", [1.0, 2.0, 3.0]),
        Figure("noisy, too", [2.0, 3.0, 4.0]),
        Figure("fewer times", [9.0, 9.5, 9.0], at_least=5.0),
        Figure("more times", [3.0, 3.5, 3.0], at_least=5.0),
        Figure("gone", [1.0, 1.0, 1.0]),
        Figure("percent", [1.0, 1.0, 1.0], form="{:+.0f} %"),
    ]
    after = [
        Figure("slower", [1.3, 1.4, 1.3]),
        Figure("noisy", [2.0, 3.0, 4.0]),
        Figure("noisy, too", [1.0, 2.0, 3.0]),
        Figure("fewer times", [6.0, 6.5, 6.0], at_least=5.0),
        Figure("more times", [6.0, 6.5, 6.0], at_least=5.0),
        Figure("percent", [3.0, 3.0, 3.0], form="{:+.0f} %"),
        Figure("new", [1.0, 1.0, 1.0]),
    ]
    text, worse = compared(before, after)
    assert worse == ["slower", "fewer times", "percent"]
    ends = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines()[1:]}
    assert ends["slower"] == ["times", "worse"]
    assert ends["noisy"][1] == ends["noisy, too"][1] == "times"
    assert (ends["more times"][1], ends["percent"]) == ("better", ["+2.0", "worse"])
    assert (ends["new"][1], ends["gone"]) == ("new", ["not", "measured"])
    assert show_comparison(Path("before"), before[:1], before[:1]) == 0
    assert capsys.readouterr().err == ""
    assert show_comparison(Path("before"), before[:1], after[:1]) == 1
    shown = capsys.readouterr()
    assert "Compared with before" in shown.out
    assert "1.30 times  worse" in shown.out
    assert shown.err == "worse by more than noise: slower\n"


# ---------------------------------------------------------------------- syncline bench --compare


def test_a_baseline_with_other_settings_is_refused_before_the_measurement(
    tmp_path: Path, refuses: Refuse
) -> None:
    path = write(tmp_path / "before.json")
    for options, words in (
        (f"-n 3 {OPTIONS}", "(ranks: expected 3, got 2)"),
        ("--sizes 1K,2K --no-steps", "(all_reduce: expected 1 KiB, 2 KiB, got 1 KiB, 1 MiB)"),
        ("--sizes 1K", "(models: expected 0.3M, 5M, got 0.3M)"),
    ):
        other = f"--compare {path}: the file was measured with other settings {words}"
        refuses(f"--compare {path} {options}", other)
    for changes in ({"processor": "8 cores of another CPU"}, {"a turn": "0.002 s of all_reduce, 1 steps"}):
        ((name, value),) = changes.items()
        refuses(f"--compare {write(path, **changes)} {OPTIONS}", f"{name}: expected", f", got {value}")
    missing = "sizes: expected 1 KiB, got none; transport: expected gloo, got none"
    assert differences({"sizes": ["1 KiB"], "transport": "gloo"}, {"sizes": []}) == missing


def test_another_transport_is_refused_when_the_ranks_have_found_theirs(
    tmp_path: Path, measured: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "before.json")
    assert main(["bench", "--compare", str(path), *OPTIONS.split()]) == 2
    shown = capsys.readouterr()
    assert "transport: expected gloo, got shared memory" in shown.err
    assert shown.out == ""
    assert [plan["transport"] for plan in measured] == ["shared memory"]


def test_a_measurement_can_be_compared_with_itself_and_a_part_measured_again(
    tmp_path: Path, measured: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "itself.json"
    assert main(["bench", "--json", str(path), *OPTIONS.split()]) == 0
    path.write_text(json.dumps({**json.loads(path.read_text()), "figures": to_json(FIGURES)}))
    assert main(["bench", "--compare", str(path), *OPTIONS.split()]) == 0
    whole = write(tmp_path / "whole.json", transport="gloo")
    assert main(["bench", "--compare", str(whole), "--rounds", "7", *OPTIONS.split()]) == 0
    assert "not measured" in capsys.readouterr().out
    assert len(measured) == 3


def test_a_broken_baseline_is_found_before_anything_is_measured(tmp_path: Path, refuses: Refuse) -> None:
    path = tmp_path / "before.json"
    refuses(f"--compare {path}", "No such file")
    for text, reason in (
        ("{", "Expecting"),
        ("{}", "expected a file that syncline bench"),
        (json.dumps({"figures": to_json(FIGURES)}), "expected the settings of the measurement"),
    ):
        path.write_text(text)
        refuses(f"--compare {path}", reason)
    for changes, reason in (
        ({"values": []}, "expected a list with a value for each round, got []"),
        ({"values": ["1.0"]}, "can only concatenate str"),
        ({"values": 1.0}, "expected a list"),
        ({"name": 3}, "expected a name, got 3"),
        ({"form": "{:d}"}, "Unknown format code"),
        ({"form": "{x}"}, "'x'"),
        ({"form": None}, "has no attribute"),
        ({"at_most": "1"}, "can only concatenate str"),
        ({"size": 3}, "unexpected keyword"),
    ):
        write(path, figures=[{**to_json(FIGURES)[0], **changes}])
        words = f"--compare {path}: expected the figures of a benchmark"
        refuses(f"--compare {path} {OPTIONS}", words, reason)


def test_the_file_of_a_calibration_is_checked_before_anything_is_measured(
    tmp_path: Path, refuses: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "syncline").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "syncline" / "machine.json"
    refuses("--calibrate", f"--calibrate {path}: expected the path of a file in a folder")


# ---------------------------------------------------------------------- make bench-compare


def compare(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the program, and return its exit status and what it has written to stdout and to stderr."""
    done = hangs.run([sys.executable, str(ROOT / "benchmarks" / "compare.py"), *map(str, arguments)])
    return done.returncode, done.stdout, done.stderr


def test_folders_are_compared_file_by_file_and_checked_before_the_measurement(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
        write(folder / "step-2.json")
    status, _, error = compare(before, after)
    assert (status, error) == (0, "")
    assert compare("--check", before, after / "not-yet")[0] == 0
    for folders, words in (
        ((before, tmp_path), "is deleted before the measurement"),
        ((before / "missing", after), "missing: expected a folder with files"),
    ):
        status, _, error = compare("--check", *folders)
        assert (status, words in error) == (2, True), words
    write(before / "step-2.json", ranks=4)
    write(before / "only-before.json", ranks=8)
    words = f"{before / 'step-2.json'} was measured with other settings: ranks: expected 2, got 4"
    status, output, error = compare(before, after)
    assert (status, output, words in error) == (2, "", True)
    write(before / "step-2.json", processor="8 cores of another CPU")
    status, _, error = compare("--check", before, after)
    assert (status, "step-2.json was measured on another machine: processor: exp" in error) == (2, True)
    (before / "step-2.json").write_text("{")
    status, _, error = compare("--check", before, after)
    assert (status, "step-2.json: Expecting" in error) == (2, True)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_checks_the_baseline_first() -> None:
    command = ["make", "--dry-run", "bench-compare", "BASELINE=old", "BENCH=new"]
    done = hangs.run(command, cwd=ROOT)
    steps = [line.partition("python ")[2] or line for line in done.stdout.splitlines()]
    wanted = ("benchmarks/compare.py --check old new", "rm -rf new", "benchmarks/compare.py old new")
    check, deletion, comparison = map(steps.index, wanted)
    assert check < deletion < comparison
    done = hangs.run(["make", "--dry-run", "bench-baseline", "BENCH=new"], cwd=ROOT)
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
    settings = {"processor": "", "quick": True, "sizes": ["5M"], "ranks": 2}
    assert {**found.settings, "processor": ""} == settings
    rounds.write_figures(argparse.Namespace(json=None), FIGURES, {})
