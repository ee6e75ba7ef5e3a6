"""A hundred bits that flip in the memory of a running job, and what becomes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EVERY = 8


def test_a_hundred_flipped_bits(tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/mem"):
        pytest.skip("there is no /proc/PID/mem")
    program = Path(__file__).with_name("flipped_bits.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), "100", "0"], capture_output=True, text=True, timeout=240
    )
    if "PermissionError" in done.stderr:
        pytest.skip("may not write into the memory of a child")
    # The job ends with sl.check_replicas(state), so what was not found has left no trace.
    assert done.returncode == 0, done.stderr[-3000:]
    flips = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(flips) == 100
    parameters = [flip for flip in flips if flip["kind"] == "parameter"]
    # The last places of a number may be rounded away by the optimizer's step, before their turn.
    parameters = [flip for flip in parameters if flip["found_at"] is not None or flip["bit"] > 1]
    late = [
        {key: value for key, value in flip.items() if key != "told"}
        for flip in parameters
        if flip["found_at"] is None or flip["found_at"] > flip["flipped_until"] + EVERY
    ]
    assert not late, "each bit of a parameter is found within so many steps"
    for flip in parameters:
        text = flip["told"][0]
        assert f"rank {flip['rank']}" in text.split("In the minority: ")[1], text
    named = [flip for flip in parameters if f"\n  {flip['name']}, element" in flip["told"][0]]
    assert len(named) >= 0.9 * len(parameters), (
        "by the name of its tensor, unless more came of it than is shown"
    )
    state = [flip for flip in flips if flip["kind"] == "state"]
    found = [flip for flip in state if flip["found_at"] is not None]
    assert found, "of those in an optimizer's state some are found"
