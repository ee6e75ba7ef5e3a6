"""What all commands do alike: numbers have bounds, files are looked at before work, lost output is an error."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from pathlib import Path

import pytest
from tests.unit.made_traces import MadeRank, MadeRun, rows

import hangs
from forks import Forks
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
]


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is refused, and return its one line."""
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    (message,) = err.splitlines()
    return message


def test_numbers_have_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for line in NUMBERS:
        message = refused(line.format(HUGE), capsys)
        assert "expected" in message or "need about" in message, line


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
]


def test_a_file_may_be_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\xff")
    monkeypatch.chdir(tmp_path)
    for kind, line in itertools.product(("missing", "folder", "pipe", "binary", "a" * 5000), FILES):
        assert kind[:9] in refused(line.replace("{}", kind), capsys), line


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


def test_a_link_in_the_folder_of_a_trace_is_not_followed(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace / "of the user").write_text("kept")
    (trace / "folder of the user").mkdir()
    (trace / "report.html").symlink_to(trace / "of the user")
    (trace / "chrome").symlink_to(trace / "folder of the user")
    assert "it is a link" in refused(f"report {trace}", capsys)
    assert "it is a link" in refused(f"report {trace} --format chrome", capsys)
    assert (trace / "of the user").read_text() == "kept"
    assert not list((trace / "folder of the user").iterdir())


def code_with_stdout(stream: io.TextIOWrapper, line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process whose stdout is this stream, and return its exit code."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        code = main(line.split())
    with contextlib.suppress(OSError):
        stream.close()
    return code


def test_output_that_is_lost_is_an_error(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ("--help", "run --help", "--version", f"report {trace} --format json"):
        for is_unbuffered in (False, True):
            full = io.TextIOWrapper(
                io.FileIO("/dev/full", "w") if is_unbuffered else open("/dev/full", "wb"),  # noqa: SIM115
                write_through=is_unbuffered,
            )
            assert code_with_stdout(full, line, monkeypatch) == 74, line
            (message,) = capsys.readouterr().err.splitlines()
            assert "could not be written: No space left on device" in message, line


def test_a_reader_that_has_left_is_no_news(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ("--help", f"report {trace} --format json"):
        reader, writer = os.pipe()
        os.close(reader)
        assert code_with_stdout(open(writer, "w"), line, monkeypatch) == 141, line  # noqa: SIM115
        assert capsys.readouterr().err == "", line


def test_a_process_whose_output_is_lost_says_so_once(trace: Path) -> None:
    """Python, which would try again at its end, has nothing to add."""
    report = f"report {trace} --format json"
    for line, code, said in (
        (f"{report} >/dev/full", 74, "No space left on device"),
        ("--version >&-", 74, "Bad file descriptor"),
        ("--version 2>&-", 0, ""),
    ):
        done = hangs.run(f"{sys.executable} -m syncline {line}", shell=True)
        assert (done.returncode, done.stdout.startswith("syncline ")) == (code, code == 0), line
        assert [text.partition("could not be written: ")[2] for text in done.stderr.splitlines()] == (
            [said] if said else []
        ), line
    reader, writer = os.pipe()
    os.close(reader)
    done = hangs.run([sys.executable, "-m", "syncline", *report.split()], stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


LAUNCHER = """
import os, sys
from syncline.tools.cli import main

os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.exit(main(["run", "--no-python", "echo", "hello"]))
"""


def test_lines_of_ranks_that_are_lost_are_an_error(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    done = forks.start(tmp_path, tmp_path / "launcher.py").wait()
    assert done.returncode == 74
    (message,) = done.stderr.splitlines()
    assert message.endswith("could not be written: No space left on device")


def test_the_lines_of_ranks_end_at_a_full_disk_but_their_job_does_not() -> None:
    writer = Writer()
    with open("/dev/full", "wb", buffering=0) as full:
        writer.write(full.fileno(), b"one\n")
        writer.write(full.fileno(), b"two\n")
    assert writer.failure is not None
    assert writer.failure.strerror == "No space left on device"


WITHOUT_EFFECT = [
    "plan --parameters 1M --compute 1s --bandwidth 1Gbit",
    "plan --parameters 1M --compute 1s --hosts 1 --latency 1ms",
    "plan --trace {} --bandwidth 1Gbit",
    "plan --parameters 1M --compute 1s --engine gloo -n 1",
    "plan --parameters 1M --compute 1s --engine nccl --cores 4",
    "run --node-rank 1 {}/program.py",
]


def test_an_option_without_effect_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trace / "program.py").write_text("")
    for line in WITHOUT_EFFECT:
        message = refused(line.format(trace), capsys)
        assert any(option in message for option in line.split() if option.startswith("--")), line


def test_the_examples_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "examples"
    assert main(["examples", str(folder)]) == 0
    names = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert names >= {"mnist_cnn.py", "notebook.ipynb", "slurm/ranks.sbatch", "kubernetes/jobset.yaml"}
    assert f"wrote {len(names) + 1} files into {folder}" in capsys.readouterr().out  # and Dockerfile
    assert "has accelerate_train.py already" in refused(f"examples {folder}", capsys)
