"""TensorBoard and Weights & Biases get the numbers of the records: the files that they have written are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forks import Forks

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

PROGRAM = Path(__file__).parents[2] / "examples" / "log_metrics.py"
NAMES = {
    *("loss", "total/bytes"),
    *(f"backward/{name}" for name in ("duration_seconds", "waited_seconds", "payload_bytes")),
}


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]
    }


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline run: blocks of 32 kB with LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, records, parts = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def test_both_loggers_have_the_means_of_all_ranks(forks: Forks, tmp_path: Path) -> None:
    line = ["-n", 2, PROGRAM, "--", "--steps", 20, "--directory", tmp_path / "logs"]
    done = forks.launch(tmp_path, *line, warm_ranks=True).wait()
    assert done.returncode == 0, done.stderr

    scalars = tensorboard_scalars(tmp_path / "logs")
    assert scalars.keys() == NAMES
    assert [step for step, _ in scalars["loss"]] == [*range(1, 21)]
    assert scalars["loss"][-1][1] < scalars["loss"][0][1]
    assert min(value for _, value in scalars["backward/payload_bytes"]) > 0

    (run,) = (tmp_path / "logs").glob("wandb/offline-run-*/*.wandb")
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(run)
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["loss"] for row in rows] == pytest.approx([value for _, value in scalars["loss"]])
    assert rows[-1].keys() >= NAMES
