"""Run the tests, run again what fails, and say whether the change passes. `.ci/run` ends in it.

    python tools/gate.py [--limit SECONDS] [--seconds PART=N ...] PART=COMMAND ...

A COMMAND is a target of make that gives $(PYTEST_FLAGS) to pytest: "tests=make test-all WORKERS=2". The flags load this
file as a plugin, which records each test.

What fails is run again, alone and twice, when the other tests have ended. What passes twice is flaky: it is listed
with its first traceback, and the change passes. It is a debt: each one is repaired. All else is red, some of it at
once: more than 8 failing tests, a failing test in a file that the change touches, tests that did not all run.

The change is all since GATE_BASE, a commit; without it, since the branch has left origin/main or main; on main, since
HEAD~1, which is what main was before the last merge.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MOST_AGAIN = 8
"""So many failing tests are run again. More of them are no accident."""
FOR_STACKS = 5.0
"""Seconds for a process to print its stacks, before it is killed."""
HUNG = ("Timeout (>", "TimeoutError: no end after")
"""What pytest-timeout and tests/hangs.py say of a process that hangs."""

# ---------------------------------------------------------------------- the plugin of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--gate-record", type=Path, metavar="FILE", help="record each test, as lines of JSON")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Let a worker of xdist write what is not captured, as the stacks when it dies, to files of its own."""
    record, worker = early_config.known_args_namespace.gate_record, os.environ.get("PYTEST_XDIST_WORKER")
    for number in (1, 2) if record and worker else ():
        with open(f"{record}.{worker}.{number}", "ab") as file:
            os.dup2(file.fileno(), number)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process to which the workers report."""
    record = config.getoption("gate_record")
    if record is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(record, config))


class Recorder:
    """Writes a line at the start, one a report, and one at the end."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path = path
        paths = config.option.file_or_dir
        flags = [word for word in map(str, config.invocation_params.args) if word not in paths]
        self.write(kind="start", command=[sys.executable, "-m", "pytest", *flags])

    def write(self, **entry: object) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record what could not be imported."""
        if report.failed:
            self.write(kind="error", test=report.nodeid, text=report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the set-up, the call or the tear-down of a test, or, as all of them, the end of its worker."""
        crashed = report.when not in ("setup", "call", "teardown")
        died = crashed or any(mark in report.longreprtext for mark in HUNG)
        if died and hasattr(report, "node"):
            report.longrepr = "\n".join([str(report.longrepr), *self.stacks(report.node.gateway.id)])
        text = "\n".join([report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)])
        self.write(
            kind="test",
            test=report.nodeid,
            outcome=report.outcome,
            seconds=report.duration,
            text=text if report.failed else "",
            died=died,
            finished=report.when not in ("setup", "call"),
        )

    def stacks(self, worker: str) -> Iterator[str]:
        """Take the stacks out of the files of a worker."""
        for number in (1, 2):
            file = Path(f"{self.path}.{worker}.{number}")
            if file.exists():
                text = file.read_text(errors="replace")
                # In the first one, those of pytest-timeout follow pytest's dots.
                yield text if number == 2 else "".join(text.partition("++++")[1:])
                os.truncate(file, 0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Record how pytest ends."""
        self.write(kind="end", status=int(session.exitstatus), collected=session.testscollected)


# ---------------------------------------------------------------------- reading the record


@dataclass
class Test:
    """What is known of one test: the worst outcome, the time, and the first traceback."""

    name: str
    outcome: str = "passed"
    seconds: float = 0.0
    text: str = ""
    died: bool = False
    finished: bool = False

    def add(self, entry: dict[str, Any]) -> None:
        """Take one more report in."""
        self.outcome = max(self.outcome, entry["outcome"], key=("passed", "skipped", "failed").index)
        self.seconds += entry["seconds"]
        self.text = self.text or entry["text"]
        self.died |= entry["died"]
        self.finished |= entry["finished"]


@dataclass
class Record:
    """The tests of one run of pytest; how to run pytest like this again; and what else is wrong with the run."""

    command: list[str] = field(default_factory=list)
    tests: dict[str, Test] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def failing(self) -> list[Test]:
        """The tests that failed."""
        return [test for test in self.tests.values() if test.outcome == "failed"]


def read(path: Path, returned: int) -> Record:
    """Read what the plugin has written, of a process that returned `returned`. Trust nothing that is incomplete."""
    record, end = Record(), dict[str, Any]()
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        if entry["kind"] == "start":
            record.command = entry["command"]
        elif entry["kind"] == "error":
            record.faults.append(f"{entry['test']} was not collected: {entry['text']}")
        elif entry["kind"] == "test":
            record.tests.setdefault(entry["test"], Test(entry["test"])).add(entry)
        else:
            end = entry
    finished, status = sum(test.finished for test in record.tests.values()), end.get("status")
    if status is None:
        record.faults.append(f"pytest recorded no end, and the command returned {returned}")
    elif status not in (0, 1) or (status == 0) != (returned == 0):
        record.faults.append(f"pytest ended with status {status}, and the command returned {returned}")
    elif finished == 0 or finished < end["collected"]:
        record.faults.append(f"{finished} of {end['collected']} tests ended")
    elif status == 1 and not (record.failing or record.faults):
        record.faults.append("pytest ended with status 1, although no test failed")
    return record


# ---------------------------------------------------------------------- running


def run_part(command: str, path: Path) -> Record:
    """Run all tests of a part, and show what the workers wrote beside them."""
    # One word: before pytest knows the option, it takes a path in a word of its own for one of tests.
    flags = f"PYTEST_FLAGS=-p tools.gate --gate-record={path}"
    returned = subprocess.run([*shlex.split(command), flags], cwd=ROOT).returncode
    for file in sorted(path.parent.glob(f"{path.name}.*.2")):
        if text := file.read_text(errors="replace"):
            say(f"{file.stem} wrote:", text)
    return read(path, returned)


def run_again(record: Record, name: str, path: Path, limit: float) -> str:
    """Run one test in a process of its own. Return its outcome, or what went wrong."""
    say(f"again, alone: {name}")
    flags = ["-p", "no:cacheprovider", "--numprocesses=0", f"--gate-record={path}"]
    process = subprocess.Popen([*record.command, *flags, name], cwd=ROOT, start_new_session=True)
    try:
        returned = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # pytest has enabled faulthandler: it prints the stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FOR_STACKS)
        return f"did not end in {limit:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has left
        process.wait()
    again = read(path, returned)
    if name in again.tests:
        return again.tests[name].outcome if not again.faults else again.faults[0]
    return "not found"


def touched_files() -> set[str]:
    """Return the files of the change. Without git, or without the commit before, there are none."""

    def git(*words: str) -> str:
        with contextlib.suppress(OSError):
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
            return done.stdout.strip() if done.returncode == 0 else ""
        return ""

    left = (git("merge-base", "HEAD", branch) for branch in ("origin/main", "main"))
    bases = (os.environ.get("GATE_BASE"), *(base for base in left if base != git("rev-parse", "HEAD")))
    base = next(filter(None, bases), "HEAD~1")
    files = set(git("diff", "--name-only", "--relative", "-z", base, "--").split("\0")) - {""}
    say(f"the change: {len(files)} files since {base}")
    return files


def reasons(failing: list[Test], touched: set[str]) -> list[str]:
    """Return why these failing tests are not run again."""
    own = [test.name for test in failing if test.name.partition("::")[0] in touched]
    found = [f"{name} failed, in a file that the change touches" for name in own]
    if len(failing) > MOST_AGAIN:
        found.append(f"{len(failing)} tests failed, and at most {MOST_AGAIN} are run again")
    return found


def say(*lines: str) -> None:
    """Print at once, whatever the characters: other processes print to the same place."""
    print("\n".join(lines).encode(errors="backslashreplace").decode(), flush=True)


def main() -> None:
    """Run the parts and again what failed in them, and print what CI reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", metavar="PART=COMMAND")
    parser.add_argument("--seconds", action="append", default=[], metavar="PART=N", help="of an earlier part")
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="for a test that runs again"
    )
    arguments = parser.parse_args()
    seconds = {name: float(value) for name, _, value in (word.partition("=") for word in arguments.seconds)}
    touched, records, red, flaky = touched_files(), list[Record](), list[str](), list[Test]()
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        for name, _, command in (word.partition("=") for word in arguments.parts):
            begun = time.monotonic()
            records.append(run_part(command, Path(folder) / name))
            seconds[name] = time.monotonic() - begun
            failing = [(record, test) for record in records for test in record.failing]
            red = [*records[-1].faults, *reasons([test for _, test in failing], touched)]
            if red:
                break
        begun = time.monotonic()
        for place, (record, test) in enumerate([] if red else failing):
            paths = [Path(folder) / f"again-{place}-{time_}" for time_ in (1, 2)]
            outcomes = (run_again(record, test.name, path, arguments.limit) for path in paths)
            worse = next((outcome for outcome in outcomes if outcome != "passed"), None)
            if worse is None:
                flaky.append(test)
            else:
                red.append(f"{test.name} failed, and when it ran again: {worse}")
        seconds["again"] = time.monotonic() - begun

    tests = [test for record in records for test in record.tests.values()]
    passed, skipped = (sum(test.outcome == outcome for test in tests) for outcome in ("passed", "skipped"))
    # A run that is not sound has failed, even if no test has.
    failed = len(failing) - len(flaky) + len(records[-1].faults)
    say("", f"{passed + len(flaky)} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    for test in sorted(flaky, key=lambda test: not test.died):
        say("", f"flaky, a debt: {test.name}" + (", which died or hung" if test.died else ""), test.text)
    say("", "the slowest tests:")
    for test in sorted(tests, key=lambda test: -test.seconds)[:20]:
        say(f"{test.seconds:8.1f} s  {test.name}")
    say("", "the parts: " + ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()))
    for reason in red:
        say(f"RED: {reason}")
    raise SystemExit(1 if red else 0)


if __name__ == "__main__":
    main()
