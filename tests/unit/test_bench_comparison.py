"""What `benchmarks/compare.py` refuses to compare, and when: before a measurement."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import pytest

import hangs
from syncline.tools.bench.results import describe_machine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import rounds
from baseline import differences, read_measurement
from goals import Figure, compared, show_comparison, to_json
from tables import processor_text

ROOT = Path(__file__).parents[2]

FIGURES = [Figure("all_reduce of 1 KiB: syncline / Gloo", [1.0, 1.1, 1.0])]


def write(path: Path, *, figures: object = None, **changes: object) -> Path:
    """Write a baseline that was measured on this machine, with some changes of its settings."""
    settings = {"ranks": 2, "processor": processor_text(describe_machine()), "sizes": ["1 KiB", "1 MiB"]}
    rows = to_json(FIGURES) if figures is None else figures
    path.write_text(json.dumps({"figures": rows, "settings": {**settings, **changes}}))
    return path


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


def test_settings_that_differ_are_named() -> None:
    expected = {"sizes": ["1 KiB"], "transport": "gloo", "ranks": 2}
    missing = "sizes: expected 1 KiB, got none; transport: expected gloo, got none"
    assert differences(expected, {"sizes": [], "ranks": 2}) == missing
    assert differences(expected, {**expected, "sizes": ["1 KiB", "1 MiB"]}) == "", "a part measured again"


def test_a_broken_baseline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    for text, reason in (
        ("{", "Expecting"),
        (json.dumps({"figures": to_json(FIGURES)}), "expected the settings of the measurement"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            read_measurement(path)
    for changes, reason in (
        ({"values": []}, r"expected a list with a value for each round, got \[\]"),
        ({"values": ["1.0"]}, "can only concatenate str"),
        ({"name": 3}, "expected a name, got 3"),
        ({"form": "{:d}"}, "Unknown format code"),
        ({"form": None}, "has no attribute"),
        ({"size": 3}, "unexpected keyword"),
    ):
        write(path, figures=[{**to_json(FIGURES)[0], **changes}])
        with pytest.raises(ValueError, match=f"expected the figures of a benchmark.*{reason}"):
            read_measurement(path)


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


def test_the_file_of_a_program_has_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    arguments = argparse.Namespace(json=path, rounds=7, quick=True, sizes=["5M"], variants=None)
    rounds.write_figures(arguments, FIGURES, {"ranks": 2}, num_ranks=2)
    assert json.loads(path.read_text())["num_ranks"] == 2
    found = read_measurement(path)
    assert found.figures == FIGURES
    settings = {"processor": "", "quick": True, "sizes": ["5M"], "ranks": 2}
    assert {**found.settings, "processor": ""} == settings
    rounds.write_figures(argparse.Namespace(json=None), FIGURES, {})
