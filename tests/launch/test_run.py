"""`syncline run` with real processes. The programs import no torch unless they need it, to stay fast."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.cli import main

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "syncline.cli", "run"]
TIMEOUT_SECONDS = 60


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Writes a program and runs it on two processes; returns what came out."""

    def run_program(code: str, *arguments: str, options: tuple[str, ...] = ("-n", "2")) -> object:
        program = tmp_path / "program.py"
        program.write_text(code)
        return subprocess.run(
            [*COMMAND, *options, str(program), *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            cwd=tmp_path,
            env=clean_environment(),
            check=False,
        )

    return run_program  # type: ignore[return-value]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


# ---------------------------------------------------------------------- refused before anything starts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "missing.py"], "no script missing.py"),
        (["-n", "2", "progam.py"], "did you mean program.py"),
        (["-n", "2", "."], "is a directory"),
        (["-n", "0", "program.py"], "-n 0: expected at least 1 process"),
        (["-n", "-3", "program.py"], "-n -3: expected at least 1 process"),
        (["-n", "many", "program.py"], "-n many: expected a number from 1"),
        (["-n", "2"], "no script given"),
        (["--nod-rank", "1", "program.py"], "did you mean --node-rank"),
        (["--nnodes", "0", "program.py"], "--nnodes 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_port_in_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["run", "-n", "2", "--master-port", str(port), "program.py"]) == 2
    assert f"port {port} (--master-port) is in use" in capsys.readouterr().err


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    assert "did you mean run?" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "syncline COMMAND" in capsys.readouterr().out


# ---------------------------------------------------------------------- what the program sees


def test_arguments_variables_and_prefixes(run: Run) -> None:
    done = run(
        "import os, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:], __name__, sys.path[0])\n",
        "--",
        "--epochs",
        "2",
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split("] ")[0] for line in lines] == ["[rank 0", "[rank 1"]
    for rank, line in enumerate(lines):
        assert line.startswith(f"[rank {rank}] {rank} 2 ['--epochs', '2'] __main__ /")
    assert done.stderr == ""


def test_two_jobs_at_once_do_not_collide(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import syncline as sl\nprint(sl.init(timeout=60).size)\nsl.barrier()\n")
    jobs = [
        subprocess.Popen(
            [*COMMAND, "-n", "2", str(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        for _ in range(2)
    ]
    for job in jobs:
        output, error = job.communicate(timeout=TIMEOUT_SECONDS)
        assert job.returncode == 0, error
        assert sorted(output.splitlines()) == ["[rank 0] 2", "[rank 1] 2"]


JOINED = (
    "import syncline as sl\n"
    "world = sl.init(timeout=60)\n"
    "print('mean', sl.mean(float(world.rank)), 'of', world.size)\n"
)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["-m", "syncline.cli", "run", "-n", "2"], ["mean 0.5 of 2"] * 2),
        (["-m", "torch.distributed.run", "--nproc-per-node", "2"], ["mean 0.5 of 2"] * 2),
        ([], ["mean 0.0 of 1"]),
    ],
    ids=["syncline run", "torchrun", "python"],
)
def test_one_program_starts_three_ways(command: list[str], expected: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(JOINED)
    done = subprocess.run(
        [sys.executable, *command, str(program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split("] ")[-1] for line in done.stdout.splitlines()] == expected


# ---------------------------------------------------------------------- failures


def test_the_last_thing_shown_is_the_traceback_of_the_rank_that_failed_first(run: Run) -> None:
    """Rank 0 fails because rank 1 did; it is rank 1's error that helps."""
    done = run(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    open('failed', 'w').close()\n"
        "    raise ValueError('the cause')\n"
        "while not os.path.exists('failed'):\n"
        "    time.sleep(0.001)\n"
        "time.sleep(0.02)\n"
        "raise ConnectionError('the consequence')\n"
    )
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("syncline run:") :]
    assert "rank 1" in last.splitlines()[0]
    assert "exit code 1" in last.splitlines()[0]
    assert "Traceback (most recent call last)" in last
    assert last.rstrip().endswith("ValueError: the cause")
    assert "ChildFailedError" not in done.stderr


@pytest.mark.parametrize(("leave", "code", "words"), [("3", 3, "exit code 3"), ("'no data'", 1, "no data")])
def test_sys_exit_in_a_worker_keeps_its_code_and_message(run: Run, leave: str, code: int, words: str) -> None:
    done = run(f"import sys\nsys.exit({leave})\n")
    assert done.returncode == code
    assert words in done.stderr


def test_a_worker_that_is_killed_is_named_with_its_signal(run: Run) -> None:
    done = run(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1" in done.stderr
    assert "SIGKILL" in done.stderr


def test_a_syntax_error_is_shown(run: Run) -> None:
    done = run("def f(:\n")
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------------- signals, and nobody left behind

WAITS = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('told to end', flush=True), sys.exit(0)))\n"
    "print('pid', os.getpid(), flush=True)\n"
    "time.sleep(60)\n"
)


def started(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A job whose two workers have printed their pids."""
    program = tmp_path / "program.py"
    program.write_text(WAITS)
    job = subprocess.Popen(
        [*COMMAND, "-n", "2", str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert job.stdout is not None
    return job, [int(job.stdout.readline().split()[-1]) for _ in range(2)]


def wait_until_gone(pids: list[int], *, deadline_seconds: float) -> float:
    """Seconds until none of the processes is running."""
    start = time.monotonic()
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() - start < deadline_seconds, f"still running: {pids}"
        time.sleep(0.01)
    return time.monotonic() - start


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_launcher_reaches_the_workers(tmp_path: Path, number: signal.Signals) -> None:
    job, pids = started(tmp_path)
    job.send_signal(number)
    output, error = job.communicate(timeout=TIMEOUT_SECONDS)
    assert job.returncode == 128 + number
    if number == signal.SIGTERM:
        assert output.count("told to end") == 2
        assert "Traceback" not in error
    wait_until_gone(pids, deadline_seconds=2)


def test_workers_end_within_two_seconds_when_the_launcher_is_killed(tmp_path: Path) -> None:
    job, pids = started(tmp_path)
    job.kill()
    job.communicate(timeout=TIMEOUT_SECONDS)
    wait_until_gone(pids, deadline_seconds=2)
