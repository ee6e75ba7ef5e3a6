"""Traces that others have written: `report`, `compare` and `watch` neither wait, nor pass on what a terminal obeys."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from made_traces import MadeRank, MadeRun, rows

from syncline.tools.cli import main

NAME = "rank-{rank}.host-1.000000.trace.jsonl"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\u202e\ud800"


def made() -> list[list[list[Any]]]:
    """Return the rows of two ranks as JSON has them, with each kind of row."""
    run = MadeRun(ranks=[MadeRank(), MadeRank(forward=3000)], num_steps=6)
    texts = [rows.encode(*found) for found in run.rows()]
    ranks: list[list[list[Any]]] = [json.loads(text) for text in texts]
    last = run.rows()[0][-1]
    at = rows.time_of(last) or 0
    more = [
        rows.SyncRow("Net", 6, at, at + 5, ["parameters"], 10),
        rows.CallRow("mean", at, at + 9),
        rows.RanksRow(0, 2, 4, "rank 1 was lost", at, at + 100),
        rows.SlowRow("Net", 3, 1, "rank 1 is slow"),
        rows.DivergenceRow("replica_check", 5, "weight", 1, [1], 4, "warned", at),
        rows.PlaceRow(at, 6, "waiting in all_reduce"),
        rows.EndRow(at + 10, "ValueError: no"),
    ]
    return [found + json.loads(rows.encode(*more)) for found in ranks]


COMMANDS = [
    ["report", "{}", "--format", "text"],
    ["report", "{}", "--format", "json"],
    ["report", "{}"],
    ["report", "{}", "--format", "chrome"],
    ["compare", "{}", "{}"],
    ["watch", "{}", "--once"],
]


def assert_printed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert main([one.format(directory) for one in command]) == 0, command
        printed = capsys.readouterr()
        for text in (printed.out, printed.err):
            assert all(one.isprintable() or one in "\n\t" for one in text), (command, text)
            text.encode()


def test_names_reach_the_terminal_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of rows that are right in all else."""

    def hostile(value: Any) -> Any:
        if isinstance(value, list):
            is_row = value[:1] and isinstance(value[0], str)
            return [value[0], *map(hostile, value[1:])] if is_row else [*map(hostile, value)]
        if isinstance(value, dict):
            return {f"{key}{ESCAPES if key == 'loss' else ''}": hostile(one) for key, one in value.items()}
        return value + ESCAPES if isinstance(value, str) else value

    for rank, found in enumerate(made()):
        text = json.dumps([[one[0], *map(hostile, one[1:])] for one in found])
        (tmp_path / NAME.format(rank=rank)).write_text(text + "\n")
    assert_printed(tmp_path, capsys)
    assert "\x1b" not in (tmp_path / "report.html").read_text()


def test_lines_that_are_no_rows_and_what_is_no_regular_file_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, found in enumerate(made()):
        lines = [json.dumps(found), "[" * 200_000, "5", "{}", '[["unknown",1],5]', '[["call","mea']
        (tmp_path / NAME.format(rank=rank)).write_text("\n".join(lines))
    os.mkfifo(tmp_path / NAME.format(rank=7))
    (tmp_path / NAME.format(rank=8)).mkdir()
    for rank, target in enumerate(("/proc/kmsg", "/nowhere", "/dev/zero"), start=9):
        (tmp_path / NAME.format(rank=rank)).symlink_to(target)
    assert_printed(tmp_path, capsys)
