"""tools/gate.py: what fails is run again, alone; what is no accident, or not sound, is red."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hangs

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTEST_", "MAKE", "MFLAGS", "GATE_", "GIT_"))
}

MAKEFILE = """
tests:
	{variables} {python} -m pytest -p xdist {flags} $(PYTEST_FLAGS)
"""
HEAD = """
import os, signal, threading
import pytest

def run(name="runs"):
    with open(name, "a") as file:
        file.write(".")
    return os.path.getsize(name)

def test_good():
    pass
"""
FLAKY = "def test_flaky(): assert run() > 1"
DIES = "def test_dies():\n    if run('deaths') == 1:\n        os.kill(os.getpid(), signal.SIGABRT)"
# It counts before the limit of the test begins.
HANGS = "RUN = run()\ndef test_hangs():\n    if RUN == 1:\n        threading.Event().wait()"

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def project(folder: Path, tests: str, *, flags: str = "", variables: str = "", conftest: str = "") -> None:
    """A folder with the gate and with tests, of which `run()` counts the runs."""
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools/gate.py", folder / "tools")
    makefile = MAKEFILE.format(python=sys.executable, flags=flags, variables=variables)
    (folder / "Makefile").write_text(makefile)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(f"{HEAD}\n{tests}\n")


def gate(folder: Path, *options: str, command: str = "make tests", **variables: str) -> tuple[int, str, str]:
    """How the gate ends, the line for CI, and everything that was printed."""
    done = hangs.run(
        [sys.executable, "tools/gate.py", "--seconds", "set-up=7", *options, f"tests={command}"],
        cwd=folder,
        # No plugins but xdist: they cost half of the time.
        env={
            **OUTSIDE,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
            **variables,
        },
        stderr=subprocess.STDOUT,
    )
    lines = re.findall(r"^\d+ passed, \d+ failed(?:, \d+ skipped)?$", done.stdout, re.M)
    assert len(lines) == 1, done.stdout
    return done.returncode, lines[0], done.stdout


def runs(folder: Path) -> int:
    return (folder / "runs").stat().st_size


@needs_make
def test_what_passes_is_green(tmp_path: Path) -> None:
    project(tmp_path, "def test_skipped(): pytest.skip('not here')", flags="-n 2")
    code, line, printed = gate(tmp_path)
    assert (code, line) == (0, "1 passed, 0 failed, 1 skipped")
    assert "the slowest tests:\n     0.0 s  test_it.py::test_" in printed
    assert re.search(r"^the parts: set-up 7 s, tests \d+ s, again 0 s$", printed, re.M)


@needs_make
def test_what_passes_twice_alone_is_flaky(tmp_path: Path) -> None:
    project(tmp_path, FLAKY)
    code, line, printed = gate(tmp_path)
    assert (code, line) == (0, "2 passed, 0 failed")
    assert "flaky, a debt: test_it.py::test_flaky\n" in printed
    assert "assert 1 > 1" in printed.partition("flaky, a debt")[2]
    assert runs(tmp_path) == 3


@needs_make
@pytest.mark.parametrize(
    ("test", "times", "text"),
    [
        ("run(); assert False", 2, "when it ran again: failed"),
        ("assert run() == 2", 3, "when it ran again: failed"),
        ("run() == 1 or pytest.skip('no more'); assert False", 2, "when it ran again: skipped"),
    ],
    ids=["always", "first and third", "skipped then"],
)
def test_what_fails_or_is_skipped_once_more_is_red(test: str, times: int, text: str, tmp_path: Path) -> None:
    project(tmp_path, f"def test_bad(): {test}")
    code, line, printed = gate(tmp_path)
    assert (code, line) == (1, "1 passed, 1 failed")
    assert text in printed.partition("RED: test_it.py::test_bad failed, and ")[2]
    assert runs(tmp_path) == times


@needs_make
def test_what_is_not_found_again_is_red(tmp_path: Path) -> None:
    project(tmp_path, "if not os.path.exists('runs'):\n    def test_gone(): assert run() > 1")
    code, line, printed = gate(tmp_path)
    assert (code, line) == (1, "1 passed, 1 failed")
    assert "RED: test_it.py::test_gone failed, and when it ran again: not found" in printed


@needs_make
def test_a_death_is_listed_first_with_its_stack(tmp_path: Path) -> None:
    project(tmp_path, f"{FLAKY}\n{DIES}", flags="-n 1")
    code, line, printed = gate(tmp_path)
    assert (code, line) == (0, "3 passed, 0 failed")
    _, death, other = printed.split("flaky, a debt: ")
    assert death.startswith("test_it.py::test_dies, which died or hung\n")
    assert "worker 'gw0' crashed" in death
    assert "Fatal Python error: Aborted" in death
    assert "in test_dies" in death
    assert other.startswith("test_it.py::test_flaky\n")


@needs_make
def test_a_hang_is_listed_with_its_stack(tmp_path: Path) -> None:
    # The limit is of the first run only. The others may take their time.
    limit = "PYTEST_ADDOPTS='-o faulthandler_timeout=0.2 -o faulthandler_exit_on_timeout=1 -k hangs'"
    project(tmp_path, HANGS, flags="-n 1", variables=limit)
    code, line, printed = gate(tmp_path)
    assert (code, line) == (0, "1 passed, 0 failed")
    assert (
        "in test_hangs" in printed.partition("flaky, a debt: test_it.py::test_hangs, which died or hung")[2]
    )


@needs_make
def test_what_hangs_when_it_runs_again_is_red(tmp_path: Path) -> None:
    project(tmp_path, "def test_hangs():\n    assert run() > 1\n    threading.Event().wait()")
    code, line, printed = gate(tmp_path, "--limit", "1")
    assert (code, line) == (1, "1 passed, 1 failed")
    assert "RED: test_it.py::test_hangs failed, and when it ran again: did not end in 1 s" in printed


@needs_make
def test_many_failures_are_red_at_once(tmp_path: Path) -> None:
    project(tmp_path, "@pytest.mark.parametrize('n', range(9))\ndef test_bad(n): assert run() > 9")
    code, line, printed = gate(tmp_path)
    assert (code, line) == (1, "1 passed, 9 failed")
    assert "RED: 9 tests failed, and at most 8 are run again" in printed
    assert runs(tmp_path) == 9


@needs_make
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tests": "import nothing"}, "test_it.py was not collected: ImportError"),
        ({"flags": "-n 1", "tests": "import nothing"}, "test_it.py was not collected: ImportError"),
        ({"flags": "-k nothing"}, "pytest ended with status 5, and the command returned 2"),
        ({"tests": "def test_exit(): pytest.exit('now')"}, "pytest ended with status 2"),
        ({"tests": "def test_ends(): os._exit(0)"}, "pytest recorded no end, and the command returned 0"),
        ({"flags": "--collect-only"}, "0 of 1 tests ended"),
        (
            {"conftest": "def pytest_sessionfinish(session): session.exitstatus = 1"},
            "pytest ended with status 1, although no test failed",
        ),
        (
            {"conftest": "import atexit, os; atexit.register(os._exit, 3)"},
            "pytest ended with status 0, and the command returned 2",
        ),
    ],
)
def test_a_run_that_is_not_sound_is_red(options: dict[str, str], text: str, tmp_path: Path) -> None:
    project(tmp_path, **{"tests": "", **options})
    code, line, printed = gate(tmp_path)
    assert code == 1
    assert ", 0 failed" not in line
    assert f"\nRED: {text}" in printed


def test_a_command_that_records_nothing_is_red(tmp_path: Path) -> None:
    project(tmp_path, "")
    code, line, printed = gate(tmp_path, command="true")
    assert (code, line) == (1, "0 passed, 1 failed")
    assert "RED: pytest recorded no end, and the command returned 0" in printed


# ---------------------------------------------------------------------- the change


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = hangs.run(["git", *identity, *words], cwd=folder, env=OUTSIDE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(folder: Path, name: str) -> str:
    """Commit a file. Return the commit."""
    (folder / name).write_text("")
    git(folder, "add", name)
    git(folder, "commit", "--quiet", "--message", name)
    return git(folder, "rev-parse", "HEAD")


@needs_make
@needs_git
def test_what_fails_in_a_file_of_the_change_is_red_at_once(tmp_path: Path) -> None:
    project(tmp_path, FLAKY)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path, "first")
    git(tmp_path, "add", "test_it.py")
    commit(tmp_path, "second")
    code, line, printed = gate(tmp_path)
    assert (code, line) == (1, "1 passed, 1 failed")
    assert "RED: test_it.py::test_flaky failed, in a file that the change touches" in printed
    assert runs(tmp_path) == 1


@needs_git
def test_the_change_is_all_since_the_last_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("gate")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.delenv("GATE_BASE", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    assert module.touched_files() == set()  # there is no repository
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    first = commit(tmp_path, "first")
    assert module.touched_files() == set()  # there is nothing to compare with
    commit(tmp_path, "second")
    commit(tmp_path, "third")
    assert module.touched_files() == {"third"}
    git(tmp_path, "switch", "--quiet", "--create", "branch")
    commit(tmp_path, "fourth")
    commit(tmp_path, "fifth in words")
    assert module.touched_files() == {"fourth", "fifth in words"}
    git(tmp_path, "switch", "--quiet", "main")
    git(tmp_path, "merge", "--quiet", "--no-ff", "branch")
    assert module.touched_files() == {"fourth", "fifth in words"}
    monkeypatch.setenv("GATE_BASE", first)
    assert module.touched_files() == {"second", "third", "fourth", "fifth in words"}
    monkeypatch.setenv("PATH", "")
    assert module.touched_files() == set()  # there is no git


@needs_make
def test_the_targets_take_the_flags_of_the_gate() -> None:
    parts = re.findall(r'"\w+=(make [^"]*)"', (ROOT / ".ci/run").read_text())
    assert len(parts) == 2
    for part in parts:
        command = [*part.split(), "--dry-run", "PYTEST_FLAGS=--of-the-gate"]
        done = hangs.run(command, cwd=ROOT, env=OUTSIDE)
        [line] = [line for line in done.stdout.splitlines() if " -m pytest " in line]
        assert " --of-the-gate" in line
