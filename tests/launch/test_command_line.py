"""What all commands do alike: numbers have bounds, files are looked at before work, lost output is an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.unit.made_traces import MadeRank, MadeRun, rows

import hangs
from syncline.tools.cli import main
from syncline.tools.launch.display import Writer

HUGE = "99999999999"

NUMBERS = [
    "run -n {} program.py",
    "run -n 2 --max-restarts {} program.py",
    "run --monitor-interval {} program.py",
    "run --monitor-interval nan program.py",
    "run --shutdown-timeout {} program.py",
    "run --shutdown-timeout -1 program.py",
    "run --nnodes {} program.py",
    "run --node-rank {} program.py",
    "run --master-port {} program.py",
    "explain -n {} program.py",
    "explain --step {} program.py",
    "doctor -n {} program.py",
    "doctor --step {} program.py",
    "plan -n {} --tune program.py",
    "plan --steps {} --tune program.py",
    "plan --rounds {} --tune program.py",
    "plan --vary size=1,inf --tune program.py",
    "plan --parameters 1e300 --compute 1s",
    "plan --parameters 1M --compute 0s",
    "plan --parameters 1M --compute {}s",
    "plan --parameters 1M --compute 1s -n {}",
    "plan --parameters 1M --compute 1s --cores {}",
    "plan --parameters 1M --compute 1s --memory 1e300",
    "plan --parameters 1M --compute 1s --bandwidth 1Gbit --hosts {}",
    "plan --parameters 1M --compute 1s --hosts 2 --bandwidth {}Tbit",
    "plan --parameters 1M --compute 1s --hosts 2 --bandwidth 1Gbit --latency {}s",
    "bench -n {}",
    "bench --rounds {}",
    "bench --sizes {}G",
    "watch --every 1e400 .",
]


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is refused, and return its one line."""
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    (message,) = err.splitlines()
    return message


@pytest.mark.parametrize("line", NUMBERS)
def test_numbers_have_bounds(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    message = refused(line.format(HUGE), capsys)
    assert "expected" in message or "need about" in message


FILES = [
    "run {}",
    "explain {}",
    "doctor {}",
    "plan --tune {}",
    "plan {}:build",
    "plan --trace {}",
    "plan --parameters 1M --compute 1s --machine {}",
    "report {}",
    "compare {} {}",
    "watch --once {}",
    "bench --compare {}",
]


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "binary", "a" * 5000])
@pytest.mark.parametrize("line", FILES)
def test_a_file_may_be_anything(
    line: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\xff")
    monkeypatch.chdir(tmp_path)
    assert kind[:9] in refused(line.replace("{}", kind), capsys)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The trace of a run of two ranks."""
    for rank, recorded in enumerate(MadeRun(ranks=[MadeRank(), MadeRank()]).rows()):
        path = tmp_path / f"rank-{rank:05d}.host.{100 + rank}.000000.trace.jsonl"
        path.write_bytes(b"".join(rows.encode(row) for row in recorded))
    return tmp_path


def test_a_report_needs_a_file_that_can_be_written(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(trace / "pipe")
    assert "no process reads this pipe" in refused(f"report {trace} --out {trace / 'pipe'}", capsys)
    assert "Is a directory" in refused(f"report {trace} --out {trace}", capsys)
    assert "No space left" in refused(f"report {trace} --out /dev/full", capsys)


@pytest.mark.parametrize("line", ["report {}", "report {} --format chrome"])
def test_a_link_in_the_folder_of_a_trace_is_not_followed(
    line: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    target.mkdir() if "chrome" in line else target.write_text("of the user")
    (trace / ("chrome" if "chrome" in line else "report.html")).symlink_to(target)
    assert "it is a link" in refused(line.format(trace), capsys)
    assert target.is_dir() or target.read_text() == "of the user"


@pytest.mark.parametrize(
    "line", ["--help", "run --help", "--version", "report {} --format json", "run --no-python echo hello"]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_lost_is_an_error(line: str, unbuffered: str, trace: Path) -> None:
    command = [sys.executable, "-m", "syncline", *line.format(trace).split()]
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = hangs.run(command, env=variables, stdout=full)
    assert done.returncode == 74
    (message,) = done.stderr.splitlines()
    assert "could not be written: No space left on device" in message


@pytest.mark.parametrize("line", ["--help", "report {} --format json"])
def test_a_reader_that_has_left_is_no_news(line: str, trace: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "syncline", *line.format(trace).split()]
    done = hangs.run(command, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_stdout_is_an_error_and_a_closed_stderr_is_not() -> None:
    command = f"{sys.executable} -m syncline --version"
    done = hangs.run(f"{command} >&-", shell=True)
    assert (done.returncode, done.stderr) == (
        74,
        "syncline: the output could not be written: Bad file descriptor\n",
    )
    done = hangs.run(f"{command} 2>&-", shell=True)
    assert done.returncode == 0
    assert done.stdout.startswith("syncline ")


def test_the_lines_of_ranks_end_at_a_full_disk_but_their_job_does_not() -> None:
    writer = Writer()
    with open("/dev/full", "wb", buffering=0) as full:
        writer.write(full.fileno(), b"one\n")
        writer.write(full.fileno(), b"two\n")
    assert writer.failure is not None
    assert writer.failure.strerror == "No space left on device"


@pytest.mark.parametrize(
    "line",
    [
        "plan --parameters 1M --compute 1s --bandwidth 1Gbit",
        "plan --parameters 1M --compute 1s --hosts 1 --latency 1ms",
        "plan --trace {} --bandwidth 1Gbit",
        "plan --parameters 1M --compute 1s --engine gloo -n 1",
        "plan --parameters 1M --compute 1s --engine nccl --cores 4",
        "watch --once --every 2 {}",
        "run --node-rank 1 {}/program.py",
    ],
)
def test_an_option_without_effect_is_refused(
    line: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace / "program.py").write_text("")
    message = refused(line.format(trace), capsys)
    assert any(option in message for option in line.split() if option.startswith("--"))
