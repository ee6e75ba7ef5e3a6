"""Lightning's Trainer on two ranks under our strategy: the same bits as under Lightning's own, and our options."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

HERE = Path(__file__).parent
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("SLURM", "PMI", "OMPI")) and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
}


def run(*command: str | Path, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=ENVIRONMENT,
        cwd=HERE,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs of the program, started by Lightning's own launcher."""
    folder = tmp_path_factory.mktemp("runs")
    done = run("lightning_program.py", folder)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return results


SAME = (
    "plain",
    "batch norm",
    "accumulate and clip",
    "clip by value",
    "bf16",
    "gan",
    "gan, static graph",
    "uneven",
)


@pytest.mark.parametrize("name", [*SAME, "evaluate", "resume"])
def test_it_computes_the_same_bits_as_lightnings_own_strategy(found: dict[str, Any], name: str) -> None:
    theirs, ours = found[name]["ddp"], found[name]["syncline"]
    assert theirs.pop("wrappers", ["torch.nn.parallel.distributed"]) == ["torch.nn.parallel.distributed"]
    assert ours.pop("wrappers", ["syncline.ddp.wrapper"]) == ["syncline.ddp.wrapper"]
    assert ours == theirs
    if "values" in ours and name != "batch norm":  # the statistics of the last batch are those of the rank
        assert ours["values"][0] == ours["values"][1]


def test_a_resumed_run_computes_the_same_bits(found: dict[str, Any]) -> None:
    for name in ("resume", "sharded, resume", "DiLoCo, resume"):
        ours = found[name]["syncline"]
        assert (ours["halves"], ours["halves values"]) == (ours["whole"], ours["whole values"])
        assert ours["has state"] is (name == "DiLoCo, resume")


def test_shards_are_clipped_by_the_norm_of_all_gradients(found: dict[str, Any]) -> None:
    ours, plain = (found[name]["syncline"] for name in ("sharded", "accumulate and clip"))
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert ours["values"][1] == pytest.approx(plain["values"][1], rel=1e-6)


def test_batch_norm_is_synchronized_on_the_cpu(found: dict[str, Any]) -> None:
    ours = found["sync batch norm"]["syncline"]
    assert ours["values"][0] == ours["values"][1]
    local = found["batch norm"]["syncline"]
    assert (
        local["values"][0] != local["values"][1]
    )  # without it, each rank has the statistics of its own last batch


@pytest.mark.parametrize("name", ["LocalSGD", "compression", "replica check"])
def test_options_of_the_wrapper_are_options_of_the_strategy(found: dict[str, Any], name: str) -> None:
    ours, plain = found[name]["syncline"], found["plain"]["syncline"]
    assert ours["values"][0] == ours["values"][1]  # local steps, too, end with a parameter sync
    assert (ours["losses"] == plain["losses"]) is (name == "replica check")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=0.1)


def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    done = run("-m", "torch.distributed.run", "--nproc-per-node=2", "lightning_program.py", tmp_path, "plain")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "found.json").read_text())["plain"]
    assert results["syncline"]["losses"] == results["ddp"]["losses"]


FAILING = """
import os, sys, time, lightning as L, torch
from lightning_program import Net, data, trainer
import syncline.frameworks.lightning

class Fails(Net):
    def training_step(self, batch, index):
        if self.global_rank == int(sys.argv[1]) and index == 2:
            print("raised at", time.time(), flush=True)
            raise RuntimeError(f"no more on rank {self.global_rank}")
        return super().training_step(batch, index)

if __name__ == "__main__":
    trainer(sys.argv[2]).fit(Fails(), data())
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["syncline", "syncline_spawn", "syncline_fork"])
def test_an_exception_on_one_rank_ends_all_ranks(tmp_path: Path, rank: int, strategy: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r})\n{FAILING}")
    done = run(program, str(rank), strategy)
    ended = time.time()
    raised = float(re.search(r"raised at ([0-9.]+)", done.stdout)[1])  # type: ignore[index]
    assert ended - raised < 30  # on a busy machine; Lightning looks after its processes every five seconds
    assert done.returncode != 0
    assert f"RuntimeError: no more on rank {rank}" in done.stderr
    if strategy == "syncline":  # the other launchers show one rank's error, and end the others
        assert "PeerFailed" in done.stderr
