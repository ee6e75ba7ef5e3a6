"""Lightning's Trainer on two ranks under our strategy: the same bits as under Lightning's own, and our options."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launched import found_by, python

pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs of the program, started by Lightning's own launcher."""
    return found_by("lightning_program.py", tmp_path_factory.mktemp("runs"))


SAME = (
    "plain",
    "batch norm",
    "accumulate and clip",
    "clip by value",
    "bf16",
    "unused parameters",
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
        assert ours["has state"] is ours["begins anew after fit"] is (name == "DiLoCo, resume")


def test_shards_are_clipped_by_the_norm_of_all_gradients(found: dict[str, Any]) -> None:
    ours, plain = (found[name]["syncline"] for name in ("sharded", "accumulate and clip"))
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert ours["values"][1] == pytest.approx(plain["values"][1], rel=1e-6)


def test_batch_norm_is_synchronized_on_the_cpu(found: dict[str, Any]) -> None:
    ours = found["sync batch norm"]["syncline"]
    assert ours["values"][0] == ours["values"][1]
    assert ours["values"][0] == pytest.approx(ours["one process"], rel=1e-5, abs=1e-6)
    local = found["batch norm"]["syncline"]["values"]
    assert local[0] != local[1]  # without it, each rank has the statistics of its own last batch


@pytest.mark.parametrize("name", ["LocalSGD", "compression", "replica check"])
def test_options_of_the_wrapper_are_options_of_the_strategy(found: dict[str, Any], name: str) -> None:
    ours, plain = found[name]["syncline"], found["plain"]["syncline"]
    assert ours["values"][0] == ours["values"][1]  # local steps, too, end with a parameter sync
    assert (ours["losses"] == plain["losses"]) is (name == "replica check")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=0.1)


def test_parameters_without_a_gradient_are_named(found: dict[str, Any]) -> None:
    ours = found["unused parameters, not announced"]["syncline"]
    assert "unused.weight" in ours["error"]
    assert "syncline_find_unused_parameters_true" in ours["notes"][0]


FAILING = """
import sys, time
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning_program import Net, data, trainer
import syncline.frameworks.lightning

# It looks every 5 s, and would kill rank 0 once rank 1 has ended. Here the ranks have to end by themselves.
subprocess_script._launch_process_observer = lambda processes: None

class Fails(Net):
    def training_step(self, batch, index):
        if self.global_rank == int(sys.argv[1]) and index == 2:
            print("time", time.time(), flush=True)
            raise RuntimeError(f"no more on rank {self.global_rank}")
        return super().training_step(batch, index)

if __name__ == "__main__":
    for strategy in sys.argv[2:]:
        try:
            trainer(strategy).fit(Fails(), data())
        except Exception as error:
            print("time", time.time(), flush=True)
            if strategy == "syncline":
                raise
            print(strategy, error)
"""


def run_failing(tmp_path: Path, rank: int, *strategies: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{FAILING}")
    return python(program, str(rank), *strategies)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_all_ranks(tmp_path: Path, rank: int) -> None:
    done = run_failing(tmp_path, rank, "syncline")
    times = [float(text) for text in re.findall(r"time ([0-9.]+)", done.stdout)]
    assert len(times) == 3  # of the exception, and of the end of fit() on each rank
    assert max(times) - min(times) < 20  # at most 0.1 s on a quiet machine
    assert done.returncode != 0
    assert f"RuntimeError: no more on rank {rank}" in done.stderr
    assert "PeerFailed" in done.stderr


def test_an_exception_ends_ranks_that_are_forked_or_spawned(tmp_path: Path) -> None:
    done = run_failing(tmp_path, 1, "syncline_fork", "syncline_spawn")
    assert done.returncode == 0, done.stderr
    # torch shows the error of one rank, and ends the others: of rank 1, or of rank 0, which names rank 1 as lost.
    forked, spawned = re.split("^syncline_spawn ", done.stdout, flags=re.M)
    for shown in (forked, spawned):
        assert "RuntimeError: no more on rank 1" in shown or re.search(
            r"Peer(Failed|Lost).*rank 1", shown, re.S
        ), shown
