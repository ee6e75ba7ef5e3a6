"""What ranks print becomes whole lines with the rank's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from syncline.launch.output import Forwarder, Lines


def fed(*parts: bytes, now: float = 0.0) -> list[bytes]:
    lines = Lines()
    return [line for part in parts for line in lines.feed(part, now)] + lines.finish()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((b"a\nb\n",), [b"a", b"b"]),
        ((b"a", b"b\n"), [b"ab"]),
        ((b"a\n\n", b"b"), [b"a", b"", b"b"]),
        ((b"a\r\nb\r", b"\n"), [b"a", b"b"]),
        ((b"\xff\xfe\n",), [b"\xff\xfe"]),
        ((), []),
    ],
)
def test_lines_are_whole(parts: tuple[bytes, ...], expected: list[bytes]) -> None:
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
    forwarder = Forwarder()
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
    forwarder = Forwarder()
    tail = forwarder.add(tmp_path / "0", to_fd=write_fd, prefix="")
    forwarder.start()
    with open(tmp_path / "0", "w") as pipe:
        pipe.write("more than a pipe holds\n" * 10_000)
    forwarder.stop()
    os.close(write_fd)
    assert tail[-1] == b"more than a pipe holds"
