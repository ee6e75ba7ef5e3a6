"""Bits that flip in the memory of a running job, and what becomes of them; hundreds of them are in `make soak`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forks import Forks

NUM_FLIPS = 10


@pytest.mark.real
def test_flipped_bits_are_found(tmp_path: Path, forks: Forks) -> None:
    if not os.path.exists("/proc/self/mem"):
        pytest.skip("there is no /proc/PID/mem")
    program = Path(__file__).with_name("flipped_bits.py")
    done = forks.start(tmp_path, program, tmp_path, NUM_FLIPS, 0).wait()
    if "PermissionError" in done.stderr:
        pytest.skip("may not write into the memory of a child")
    # The job ends with sl.check_replicas(state), so what was not found has left no trace; the program judges the rest.
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert kinds == ["parameter", "state"] * (NUM_FLIPS // 2)
