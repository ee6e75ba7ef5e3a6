"""Traces that others have written: whatever their files say, `report`, `compare` and `watch` print it or refuse it.

None of them waits, raises, or passes on what a terminal would obey. The seeds are fixed.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from made_traces import MadeRank, MadeRun, rows

from support.cases import case
from syncline.tools.cli import main

NAME = "rank-{rank}.host-1.000000.trace.jsonl"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\u202e\ud800"
VALUES: list[Any] = [
    None, True, -1, 0, 2**40, 2**63, 10**400, -(2**70), 1.5, float("nan"), float("inf"), "", "x" * 1000, ESCAPES,
    [], [[]], {}, {"a": []}, [1, 2], [[0, 1, 2, 3]], [[2, 1, ["n"]]], {ESCAPES: ESCAPES}, {"rows": 5}, {"rows": [{}]},
]  # fmt: skip


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


def mutate(rng: random.Random, value: Any) -> Any:
    """Change one value anywhere inside of a list or dict."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        how = rng.random()
        if how < 0.1:
            return value[:at] + value[at + 1 :]
        if how < 0.2:
            return [*value[:at], value[at], *value[at:]]
        return [*value[:at], mutate(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice([*value])
        return {**value, key: mutate(rng, value[key])}
    return rng.choice(VALUES)


def written(directory: Path, rng: random.Random) -> None:
    for rank, found in enumerate(made()):
        for _ in range(rng.randint(1, 4)):
            found = mutate(rng, found) if rng.random() < 0.9 else found
            if not isinstance(found, list):
                break
        lines = [json.dumps([one]).encode() for one in found] if isinstance(found, list) else [b"5"]
        if lines and rng.random() < 0.3:
            lines[rng.randrange(len(lines))] = rng.choice([b"[" * 200_000, b"\xff\x00", b'[["call', b"{}"])
        (directory / NAME.format(rank=rank)).write_bytes(b"\n".join(lines) + b"\n")


COMMANDS = [
    ["report", "{}", "--format", "text"],
    ["report", "{}", "--format", "json"],
    ["report", "{}"],
    ["report", "{}", "--format", "chrome"],
    ["compare", "{}", "{}"],
    ["watch", "{}", "--once"],
]


def assert_printed_or_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    codes = []
    for command in COMMANDS:
        codes.append(main([one.format(directory) for one in command]))
        printed = capsys.readouterr()
        for text in (printed.out, printed.err):
            assert all(one.isprintable() or one in "\n\t" for one in text), (command, text)
            text.encode()
    assert set(codes) <= {0, 2}
    return codes


def test_whatever_a_trace_says_it_is_printed_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(40):
        directory = tmp_path / f"seed-{seed}"
        directory.mkdir()
        written(directory, random.Random(seed))
        with case("seed", seed):
            assert_printed_or_refused(directory, capsys)


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
    assert assert_printed_or_refused(tmp_path, capsys) == [0] * len(COMMANDS)
    assert "\x1b" not in (tmp_path / "report.html").read_text()


def test_what_is_no_regular_file_is_left_out_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, found in enumerate(made()):
        (tmp_path / NAME.format(rank=rank)).write_text(json.dumps(found) + "\n")
    os.mkfifo(tmp_path / NAME.format(rank=7))
    (tmp_path / NAME.format(rank=8)).mkdir()
    for rank, target in enumerate(("/proc/kmsg", "/nowhere", "/dev/zero"), start=9):
        (tmp_path / NAME.format(rank=rank)).symlink_to(target)
    assert assert_printed_or_refused(tmp_path, capsys) == [0] * len(COMMANDS)
