"""benchmarks/strategies.py with real ranks; its data is fetched, or the test is skipped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hangs

pytestmark = pytest.mark.real

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "strategies.py"
COMMAND = [sys.executable, "-m", "syncline", "run", "-n", "2", str(PROGRAM), "--quick", "--task", "mnist"]
OPTIONS = ["--learning-rates", "0.01", "--results", "runs.jsonl", "--only"]


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    done = {
        "task": "mnist",
        "setting": "every-step",
        "strategy": "EveryStep()",
        "compression": None,
        "learning_rate": 0.01,
        "alone": 1.0,
        "seed": 0,
        "steps": 5,
        "batch_size": 2,
        "num_ranks": 2,
    }
    found = {"loss": 1.0, "accuracy": 0.5, "sent_bytes": 2e6, "seconds": 1.0, "num_parameters": 1}
    of_another_length = {**done, **found, "steps": 6, "loss": 0.0}
    results = tmp_path / "runs.jsonl"
    results.write_text("".join(json.dumps(run) + "\n" for run in (done | found, of_another_length)))
    program = hangs.run([*COMMAND, *OPTIONS, "every-step", "diloco-20-4bit"], cwd=tmp_path)
    if "could not be fetched" in program.stderr:
        pytest.skip("no digits here, and no network")
    assert program.returncode == 0, program.stderr
    assert "every-step, lr" not in program.stderr  # it was there
    *_, measured = [json.loads(line) for line in results.read_text().splitlines()]
    assert measured["setting"] == "diloco-20-4bit"
    # One meeting, by half a byte and a 128th of a scale of two bytes a parameter, and something to agree about.
    assert 0.5 < measured["sent_bytes"] / measured["num_parameters"] < 0.6
    rows = [line.removeprefix("[rank 0] ").split() for line in program.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["setting", "every-step", "diloco-20-4bit"]
    assert rows[1][1:] == ["0.01", "1.0000", "50.00%", "+0.0000", "2.00", "1.0x", "1"]
