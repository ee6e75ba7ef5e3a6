"""Ray actors as ranks: one is killed, the others train on, and a new actor joins them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

ray = pytest.importorskip("ray")
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 1500


class Watched(Dataset[Any]):
    """Samples. The process of rank 1 is killed in its 50th step, once. Steps are slow until a new actor has joined."""

    def __init__(self, killed: Path) -> None:
        self.killed, self.num_reads = killed, 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        import syncline as sl

        self.num_reads += 1
        if self.num_reads == 800 and sl.world().rank == 1 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if sl.world().size < 3:
            time.sleep(0.01)
        inputs = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum(dim=0, keepdim=True)


def test_a_killed_actor_is_started_again_and_joins_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import ray_resilient

    for module in (ray_resilient, sys.modules[__name__]):  # actors cannot import them
        ray.cloudpickle.register_pickle_by_value(module)
    # "local", because ray.init() would otherwise join a cluster of somebody else on this machine.
    ray.init("local", num_cpus=3, include_dashboard=False, object_store_memory=80 * 1024 * 1024)
    try:
        results = ray_resilient.train(3, Watched(tmp_path / "killed"), STEPS)
    finally:
        ray.shutdown()
    assert [(size, steps) for size, steps, _ in results] == [(3, STEPS)] * 3
    assert all(loss < 1e-3 for _, _, loss in results)
    shown = capfd.readouterr()
    assert shown.out.count("the actor of rank 1 was lost") == 1
    assert "1 process joined; the ranks, now 3" in shown.out + shown.err
