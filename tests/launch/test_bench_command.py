"""`syncline bench` with real ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hangs

pytestmark = pytest.mark.real

COMMAND = [sys.executable, "-m", "syncline", "bench", "-n", "2"]


def test_a_quick_measurement(tmp_path: Path) -> None:
    done = hangs.run([*COMMAND, "--quick", "--sizes", "1K,64K", "--json", "measured.json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:5] == ["2", "ranks", "x", "1", "thread"]
    assert {"1K", "64K", "sharded"} <= {line[0] for line in lines if line}
    found = json.loads((tmp_path / "measured.json").read_text())
    assert list(found["all_reduce_seconds"]) == ["1K", "64K"]
    for rounds in (*found["all_reduce_seconds"].values(), *found["step_seconds"].values()):
        assert {"syncline", "gloo", "copy"} <= set(rounds) or {"syncline", "not synchronized"} <= set(rounds)
        for seconds in rounds.values():
            assert len(seconds) == 3
            assert min(seconds) > 0


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
            assert "all_reduce of 64K" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            output, error = hangs.communicate(process)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert output == ""
    assert "Traceback" not in error
