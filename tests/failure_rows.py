"""The failures that tests provoke, and the page with what a user sees of each: docs/reference/failure-matrix.md.

    python tests/failure_rows.py

A test calls `record` with what was seen, and with the time that it took. The command runs these tests, and writes the
page. `tests/docs/test_failure_matrix.py` checks that the page has every failure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import pytest

from syncline.environment import PATIENCE

E = TypeVar("E", bound=BaseException)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "failure-matrix.md"

_FILE = "SYNCLINE_FAILURE_ROWS"
"""The variable with the path of the file to which tests write their rows. Without it, they write none."""

_MOST_COLUMNS = 130


class Failure(NamedTuple):
    """A failure, and what is promised."""

    what: str
    within: str
    deadline_seconds: float


FAILURES = {
    "killed": Failure("a rank is killed", "1 s", 1.0),
    "killed elsewhere": Failure("a rank on another host is killed", "10 s", 10.0),
    "cable": Failure("the cable between two hosts is pulled", "the timeout (4 s here) + 10 s", 14.0),
    "launcher": Failure("the launcher is killed", "2 s", 2.0),
    "stopped launcher": Failure("the launcher is stopped, then a rank is lost in `sl.steps`", "20 s", 20.0),
    "exception": Failure("a rank raises an exception", "1 s", 1.0),
    "stopped": Failure("a rank is stopped (SIGSTOP, Ctrl-Z, a debugger)", "a warning after 1 s", 1.0),
    "absent": Failure("a rank does not come to a collective", "the timeout (2 s here) + 1 s", 3.0),
    "uneven": Failure("a rank has fewer batches, and ends", "5 s", 5.0),
    "other call": Failure("ranks call different functions", "5 s", 5.0),
    "model": Failure("the model differs on one rank", "before the first byte", 1.0),
    "same rank": Failure("two processes claim the same rank", "in sl.init", 5.0),
    "world size": Failure("the ranks have different world sizes", "in sl.init", 5.0),
    "port": Failure("the port of the rendezvous is in use", "in sl.init", 5.0),
    "nan": Failure("the gradients of one rank are NaN (on_nonfinite=\"raise\")", "this backward", 1.0),
    "replica": Failure("a weight changes on one rank (replica_check=)", "the next check", 1.0),
    "damaged save": Failure("a byte of the newest save is damaged", "in load", 5.0),
    "full disk": Failure("the disk is full during a save", "in save", 5.0),
    "little memory": Failure("too little shared memory (transport=\"shm\")", "in sl.init", 5.0),
    "left memory": Failure("a rank with shared memory is killed: what is left behind", "20 s", 20.0),
    "resume": Failure("a save is loaded on another number of ranks", "in load", 5.0),
    "slow": Failure("a rank is slow in each step", "50 steps (5 here)", 60.0),
}  # fmt: skip

KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "exception": "exception",
    "lost connection": "connection lost",
    "slow": "slow",
}

PLACES = (
    *(
        "construction",
        "before saving",
        "saving",
        "writing",
        "committing",
        "forward",
        "first bucket",
        "last bucket",
    ),
    *(
        "verdict",
        "optimizer",
        "after optimizer",
        "averaging",
        "agreeing",
        "meeting",
        "connecting",
        "opening lanes",
    ),
    *("handing over", "loading", "the end"),
)
"""Where a rank can be lost in `sl.steps`, in order."""

TRANSPORTS = {"shm": "shared memory", "c10d": "Gloo", "": "any"}

TESTS = (
    "tests/fault/test_loud_failures.py",
    "tests/fault/test_elastic.py",
    "tests/fault/test_hosts.py",
    "tests/fault/test_shared_memory_faults.py",
    "tests/fault/test_checkpoint_faults.py",
    "tests/unit/test_handshake.py",
    "tests/unit/test_sampler_state.py",
    "tests/launch/test_signals.py",
    "tests/launch/test_resilient.py",
)
"""The files with tests that record something."""


def record(failure: str, transport: str, sees: object, measured_seconds: float | None = None) -> None:
    """Write a row.

    Args:
        failure: a key of `FAILURES`.
        transport: a key of `TRANSPORTS`.
        sees: the error, or a text.
        measured_seconds: the time until then; None if nothing is waited for.
    """
    text = f"{type(sees).__name__}: {sees}" if isinstance(sees, BaseException) else str(sees)
    assert failure in FAILURES, failure
    assert transport in TRANSPORTS, transport
    _write(
        {
            "failure": failure,
            "transport": transport,
            "sees": text.splitlines()[0],
            "seconds": measured_seconds,
        }
    )


@contextmanager
def recorded(
    failure: str, transport: str, error: type[E], match: str | None = None
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error as `pytest.raises` does, and write a row with it and with the time until it is raised."""
    began = monotonic()
    with pytest.raises(error, match=match) as caught:
        yield caught
    record(failure, transport, caught.value, monotonic() - began)


def record_in_steps(place: str, kind: str, transport: str, seconds: float) -> None:
    """Write a row of a rank that was lost in `sl.steps`.

    Args:
        place: where, one of `PLACES`.
        kind: how, a key of `KINDS`.
        transport: a key of `TRANSPORTS`.
        seconds: the time from the failure to the next step of the other ranks.
    """
    assert place in PLACES, place
    _write({"place": place, "kind": kind, "transport": transport, "seconds": seconds})


def _write(row: dict[str, Any]) -> None:
    path = os.environ.get(_FILE)
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


# ---------------------------------------------------------------------- the page


def page_of(rows: Iterable[dict[str, Any]]) -> str:
    """Return the page."""
    failures: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    in_steps: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "place" in row:
            in_steps[row["place"], row["kind"]][row["transport"]].append(row["seconds"])
        else:
            failures[row["failure"], row["transport"]].append(row)
    lines = []
    for key, failure in FAILURES.items():
        for transport, name in TRANSPORTS.items():
            found = failures.get((key, transport), ())
            if found:
                seconds = [row["seconds"] for row in found if row["seconds"] is not None]
                measured = _seconds(max(seconds)) if seconds else "-"
                lines.append(
                    f"| {failure.what} | {name} | {_shown(found[0]['sees'])} | {failure.within} | {measured} |"
                )
    steps = []
    for place in PLACES:
        cells = [_cell(in_steps.get((place, kind), {})) for kind in KINDS]
        if any(cells):
            steps.append(f"| {place} | " + " | ".join(cell or "-" for cell in cells) + " |")
    num_runs = sum(len(times) for cell in in_steps.values() for times in cell.values())
    heads = " | ".join(KINDS.values())
    return _TEXT.format(
        rows="\n".join(lines),
        steps="\n".join(steps),
        heads=heads,
        rules="|---" * (1 + len(KINDS)) + "|",
        num_runs=num_runs,
    )


def _cell(times: dict[str, list[float]]) -> str:
    return ", ".join(
        f"{_seconds(max(times[transport]))} ({TRANSPORTS[transport]})"
        for transport in TRANSPORTS
        if transport in times
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _shown(text: str) -> str:
    text = re.sub(r"/tmp/[^ ]*/(?=save-)", "", text)
    if len(text) > _MOST_COLUMNS:
        text = f"{text[:60]} ... {text[60 - _MOST_COLUMNS :]}"
    text = text.replace("|", "/").replace("`", "'")
    return f"`{text}`"


_TEXT = """# Failure matrix

You can look up here what a program sees of each failure, within which time, and which time was measured.

`make failure-matrix` runs the tests that provoke these failures, and writes this page. Each time is the slowest of all
runs of the tests, on a machine that did other work as well. An error is shown by its first line.

| Failure | Transport | What the other ranks see | Promised within | Measured |
|---|---|---|---|---|
{rows}

## In `sl.steps`

If a rank is lost in [`sl.steps`](../guides/lost-ranks.md), the others train on. The table has the time from the failure
until all others have made a step in their new group: the slowest of {num_runs} runs with 2 to 4 ranks, in which rank 0
or another rank is lost. After each run, the weights are those of the same steps without a failure, bit for bit, and no
sample was lost or used twice.

- *SIGSTOP*: the others wait for the timeout of `sl.init`, here 4 s, and then for `patience`, here 0.5 s. The stopped
  rank gets `PeerLost` when it continues.
- *exception*: of one rank. The same exception on another rank in the same step ends the job.
- *connection lost*: one rank sees an error, and no rank ends. All ranks train on.
- *slow*: the rank works for longer than `patience` in one step. It is not lost. The time is that until the next step.
- *construction*: the rank is lost before `sl.steps` begins. The others end with an error that names it.

| Place of the failure | {heads} |
{rules}
{steps}
"""


def main() -> None:
    """The command."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *sys.argv[1:]]
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ, _FILE: str(path), PATIENCE: "1"}
        ).returncode
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    PAGE.write_text(page_of(rows))
    late = [
        row
        for row in rows
        if "failure" in row and (row["seconds"] or 0) > FAILURES[row["failure"]].deadline_seconds
    ]
    for row in late:
        print(f"later than promised: {row}")
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows")
    sys.exit(code or bool(late))


if __name__ == "__main__":
    main()
