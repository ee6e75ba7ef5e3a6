"""`syncline run --live` with real processes, on a terminal and without one."""

from __future__ import annotations

import os
import signal
import sys
import termios
from pathlib import Path

import pytest

import hangs
from forks import Forks, Process
from support.states import wait_until
from terminals import SeenTerminal

TRAINS = """
import os, sys, time
import torch
import syncline as sl

rank = sl.init().rank
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
for step in range(3):
    ddp(torch.ones(4, 2)).sum().backward()
print(f"rank {rank} has made {step + 1} steps, {sys.stdout.isatty()}")
"""

HANGS = f"""{TRAINS}
if rank == 1:
    def load():
        time.sleep(1000)
    load()
ddp(torch.ones(4, 2)).sum().backward()
"""


def started(forks: Forks, tmp_path: Path, code: str, *options: str, terminal: SeenTerminal) -> Process:
    (tmp_path / "program.py").write_text(code)
    # A folder of its own for temporary files: nothing may be left in it.
    (tmp_path / "temporary").mkdir()
    return forks.launch(
        tmp_path,
        *("-n", "2", "--live", *options, "program.py"),
        terminal=terminal.name,
        variables={"TMPDIR": str(tmp_path / "temporary")},
    )


def assert_restored(terminal: SeenTerminal, tmp_path: Path) -> None:
    """The terminal is as it was, and the temporary trace is deleted."""
    assert termios.tcgetattr(terminal.fd) == terminal.modes
    wait_until(lambda: not list((tmp_path / "temporary").glob("syncline_*")))  # the guardian may delete it


def test_the_output_stays_and_the_picture_disappears(forks: Forks, tmp_path: Path) -> None:
    with SeenTerminal() as terminal:
        launcher = started(forks, tmp_path, TRAINS, terminal=terminal)
        terminal.wait_for("--- the ranks ---", "before its first step")
        assert launcher.wait().returncode == 0
        *lines, last = terminal.lines()
        assert sorted(lines) == [f"[rank {rank}] rank {rank} has made 3 steps, False" for rank in range(2)]
        assert last == ""
        assert_restored(terminal, tmp_path)


def test_the_failure_report_is_the_last_thing_shown(forks: Forks, tmp_path: Path) -> None:
    code = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('bad')\n"
    with SeenTerminal() as terminal:
        launcher = started(forks, tmp_path, code, "--trace", "kept", terminal=terminal)
        assert launcher.wait().returncode == 1
        text = "\n".join(terminal.lines())
        report = text[text.index("syncline run:") :]
        assert report.startswith("syncline run: rank 1 ")
        assert "ValueError: bad\n" in text[: text.index("syncline run:")]
        assert "\n" not in report.rstrip()
        assert "--- the ranks" not in text
        assert_restored(terminal, tmp_path)
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_of_a_run_that_hangs_it_says_where_each_rank_is(
    number: signal.Signals, forks: Forks, tmp_path: Path
) -> None:
    with SeenTerminal() as terminal:
        launcher = started(forks, tmp_path, HANGS, "--shutdown-timeout", "1", terminal=terminal)
        terminal.wait_for("step 4, backward, bucket 0, waiting", "No rank has made progress for")
        os.kill(launcher.pid, number)
        done = launcher.wait()
        assert done.returncode == (-number if number == signal.SIGKILL else 128 + number)
        lines = terminal.lines()
        text = " ".join(" ".join(lines).split())
        assert "step 4, backward, bucket 0, waiting in all_reduce(sum)" in text
        assert "in load" in text
        assert "Waiting for others: rank 0. Not waiting, so look there: rank 1." in text
        assert lines[-1] == ""  # the cursor is below the picture
        if number != signal.SIGKILL:
            assert lines[-2] == f"syncline run: stopped by {number.name}, all ranks on this host have ended"
        assert_restored(terminal, tmp_path)


def test_what_is_redirected_has_the_lines_of_the_ranks_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    with SeenTerminal() as terminal:
        with (tmp_path / "out").open("wb") as out:
            command = [sys.executable, "-m", "syncline", "run", "-n", "2", "--live", "program.py"]
            done = hangs.run(command, cwd=tmp_path, stdout=out, stderr=terminal.fd)
        assert done.returncode == 0
        assert sorted(terminal.lines()) == ["", "[rank 0] err", "[rank 1] err"]
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["[rank 0] out", "[rank 1] out"]


def test_without_a_terminal_it_says_so_once_and_runs_as_without_it(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    done = forks.launch(tmp_path, "-n", "2", "--live", "program.py").wait()
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] False", "[rank 1] False"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("syncline run: --live needs a terminal")


def test_a_terminal_that_cannot_move_its_cursor(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('line')\n")
    with SeenTerminal() as terminal:
        launcher = forks.launch(
            tmp_path, "-n", "1", "--live", "program.py", terminal=terminal.name, variables={"TERM": "dumb"}
        )
        assert launcher.wait().returncode == 0
        first, *others = terminal.lines()
        assert first.startswith("syncline run: --live needs a terminal")
        assert "line" in others
