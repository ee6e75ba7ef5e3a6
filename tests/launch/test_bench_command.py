"""`syncline bench` with real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hangs

pytestmark = pytest.mark.real

COMMAND = [sys.executable, "-m", "syncline", "bench", "-n", "2"]


def test_a_quick_measurement(tmp_path: Path) -> None:
    options = ["--quick", "--sizes", "1K,64K", "--no-steps", "--json", "measured.json"]
    done = hangs.run([*COMMAND, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:5] == ["2", "ranks", "x", "1", "thread"]
    assert ["1", "KiB", "64", "KiB"] in lines
    summary = json.loads((tmp_path / "measured.json").read_text())
    assert [row["payload_bytes"] for row in summary["all_reduce"]] == [1024, 65536]
    for row in summary["all_reduce"]:
        assert {"syncline", "gloo", "copy"} <= set(row["engines"])
        for figures in row["engines"].values():
            assert len(figures["rounds_seconds"]) == 3
            assert min(figures["rounds_seconds"]) > 0


def test_another_transport_than_that_of_the_baseline_is_not_measured(tmp_path: Path) -> None:
    options = ["--sizes", "1K", "--no-steps", "--rounds", "2"]
    first = hangs.run([*COMMAND, *options, "--json", "before.json"], cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = hangs.run(
        [*COMMAND, *options, "--compare", "before.json"],
        cwd=tmp_path,
        env={**os.environ, "SYNCLINE_TRANSPORT": "c10d"},
    )
    assert second.returncode == 2, second.stderr
    assert "transport: expected gloo, got shared memory" in second.stderr
    assert "all_reduce of 1 KiB" not in second.stderr
    assert second.stdout == ""


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "--sizes", "64K", "--rounds", "100000", "--no-steps"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "syncline bench: starting 2 ranks\n"
            assert "all_reduce of 64 KiB" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            output, error = hangs.communicate(process)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert output == ""
    assert "Traceback" not in error
