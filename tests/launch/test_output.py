"""What ranks print becomes whole lines with the rank's name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from syncline.session import record_failure
from syncline.tools.launch.display import Display, DisplayOfRank0
from syncline.tools.launch.failures import ErrorRecord, Failure
from syncline.tools.launch.output import Forwarder, Lines, RankLogs


def fed(*parts: bytes, now: float = 0.0) -> list[bytes]:
    lines = Lines()
    return [line for part in parts for line in lines.feed(part, now)] + lines.finish()


def test_lines_are_whole() -> None:
    for parts, expected in {
        (b"a\nb\n",): [b"a", b"b"],
        (b"a", b"b\n"): [b"ab"],
        (b"a\n\n", b"b"): [b"a", b"", b"b"],
        (b"a\r\nb\r", b"\n"): [b"a", b"b"],
        (b"\xff\xfe\n",): [b"\xff\xfe"],
        (): [],
    }.items():
        assert fed(*parts) == expected


def test_a_progress_bar_is_a_line_now_and_then_and_when_it_is_done() -> None:
    lines = Lines()
    shown = [line for second in range(1, 13) for line in lines.feed(b"\r%d %%" % second, now=1000.0 + second)]
    assert shown == [b"1 %", b"6 %", b"11 %"]
    assert lines.feed(b"\r100 %\n", now=1013.0) == [b"100 %"]


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    lines = Lines()
    assert lines.feed(b"x" * (1 << 20), now=0.0) == []
    assert len(lines.feed(b"x", now=0.0)[0]) == (1 << 20) + 1
    assert lines.finish() == []


def test_pipes_are_copied_to_the_terminal_with_a_prefix_and_to_a_file_without(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    forwarder = Forwarder(Display())
    kept = tmp_path / "kept.log"
    tails = [
        forwarder.add(
            tmp_path / f"{rank}", to_fd=write_fd, prefix=f"[rank {rank}] ", copy=None if rank else kept
        )
        for rank in range(2)
    ]
    forwarder.start()
    for rank in range(2):
        # Opened and closed more than once, as by a rank and what it starts.
        for text in (f"hello {rank}\npar", "tial"):
            with open(tmp_path / f"{rank}", "w") as pipe:
                pipe.write(text)
    forwarder.stop()
    os.close(write_fd)
    with open(read_fd) as output:
        lines = output.read().splitlines()
    assert sorted(lines) == [
        f"[rank {rank}] {text}" for rank in range(2) for text in (f"hello {rank}", "partial")
    ]
    assert [list(tail) for tail in tails] == [[f"hello {rank}".encode(), b"partial"] for rank in range(2)]
    assert kept.read_text() == "hello 0\npartial"


def test_ranks_are_not_held_up_when_nobody_reads_the_output_any_more(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    forwarder = Forwarder(Display())
    tail = forwarder.add(tmp_path / "0", to_fd=write_fd, prefix="")
    forwarder.start()
    with open(tmp_path / "0", "w") as pipe:
        pipe.write("more than a pipe holds\n" * 10_000)
    forwarder.stop()
    os.close(write_fd)
    assert tail[-1] == b"more than a pipe holds"


def test_a_restart_names_the_rank_that_failed_and_not_one_that_met_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = RankLogs(scratch=tmp_path, keep_in=None, prefix="", display=Display())
    envs = {
        local_rank: {
            "RANK": str(local_rank + 4),
            "TORCHELASTIC_RESTART_COUNT": "1",
            "TORCHELASTIC_MAX_RESTARTS": "3",
        }
        for local_rank in range(3)
    }
    files = logs.reify(envs).error_files
    record_failure(
        RuntimeError("PeerLost: rank 5: its process has ended\nand more"), files[0], brief="Traceback"
    )
    logs.note_ended({1: (71, -signal.SIGKILL), 0: (70, 1)})
    logs.note_ended({1: (71, -signal.SIGKILL), 0: (70, 1), 2: (72, -signal.SIGTERM)})
    files = logs.reify(envs).error_files
    record_failure(ValueError("the data\nof step 3"), files[2], brief="Traceback")
    logs.reify(envs)
    logs.reify(envs)
    logs.stop()
    assert capsys.readouterr().err.splitlines() == [
        f"syncline run: starting all ranks again ({why}); restart 1 of at most 3"
        for why in (
            "rank 5 was killed by SIGKILL (signal 9), exit code 137",
            "rank 6 failed with exit code 1: ValueError: the data",
            "a rank has ended",
        )
    ]


def test_of_the_output_of_rank_0_only_an_error_of_another_rank_has_not_been_seen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: True)  # to which rank 0 would write directly
    logs = RankLogs(scratch=tmp_path, keep_in=None, prefix="", display=DisplayOfRank0())
    places = logs.reify({rank: {"RANK": str(rank)} for rank in range(2)})
    for rank in range(2):
        for pipe in (places.stdouts[rank], places.stderrs[rank]):
            Path(pipe).write_text(f"ValueError: seen by rank {'zero' if rank == 0 else 'one'}\n")
    logs.stop()
    printed = capfd.readouterr()
    assert printed.out == printed.err == "ValueError: seen by rank zero\n"
    assert logs.stderr_tail(1) == ["ValueError: seen by rank one"]
    crashes = [Failure(rank=rank, pid=1, return_code=-signal.SIGSEGV, record=None) for rank in range(2)]
    assert [logs.has_shown(crash) for crash in crashes] == [True, False]
    errors = [
        Failure(rank=1, pid=1, return_code=1, record=record(f"ValueError: seen by rank {by}"))
        for by in ("zero", "one")
    ]
    assert [logs.has_shown(error) for error in errors] == [True, False]


def record(text: str) -> ErrorRecord:
    return ErrorRecord(summary=text, traceback=text, time_ns=1, exit_code=1)
