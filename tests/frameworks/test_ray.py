"""Ray Train on a cluster of two nodes: one is killed, or added, and training continues on fewer or more workers."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import Dataset

ray = pytest.importorskip("ray")
os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # After a failure, Ray may still count the lost node, and wait this long for a worker on it.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
}

from ray.cluster_utils import Cluster  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
STORE_BYTES = 80 * 1024 * 1024  # of Ray's object store on each node
HEAD = {
    "num_cpus": 2,
    "object_store_memory": STORE_BYTES,
    "include_dashboard": False,
    "_system_config": {"health_check_period_ms": 1000, "prestart_worker_first_driver": False},
}


class Watched(Dataset[Any]):
    """A dataset that logs the reads of each worker, and that stops workers at their `last` read.

    They are those of a group of `size` workers, on one node, or on all if `node` is None.
    """

    def __init__(self, dataset: Dataset[Any], log: Path, *, size: int, node: str | None, last: int) -> None:
        self.dataset, self.log, self.size, self.node, self.last = dataset, log, size, node, last
        self.num_reads = 0
        log.mkdir()

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        context = ray.train.get_context()
        node = ray.get_runtime_context().get_node_id()
        with open(self.log / f"{context.get_world_size()}-{context.get_world_rank()}", "a") as file:
            file.write(json.dumps([node, index]) + "\n")
        self.num_reads += 1
        is_meant = context.get_world_size() == self.size and self.node in (node, None)
        if is_meant and self.num_reads == self.last:
            (self.log / "stopped").touch()
            threading.Event().wait(180)
            raise TimeoutError("expected a change of the cluster, which ends this worker")
        return self.dataset[index]


def reads(log: Path, size: int) -> list[list[tuple[str, int]]]:
    """What each of `size` workers has read: the nodes that they ran on, and the samples."""
    return [
        [tuple(json.loads(line)) for line in (log / f"{size}-{rank}").read_text().splitlines()]
        for rank in range(size)
    ]


def train_and_change(train: Callable[[], Any], log: Path, change: Callable[[], object]) -> Any:
    """Train, and change the cluster when a worker has stopped. Return the result of the training."""
    with ThreadPoolExecutor(1) as pool:  # a node ends with the thread that has added it
        training = pool.submit(train)
        while not (log / "stopped").exists() and not training.done():
            time.sleep(0.02)
        change()
        return training.result()


@pytest.fixture
def ray_train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import ray_train

    for module in (ray_train, sys.modules[__name__]):  # workers cannot import them
        ray.cloudpickle.register_pickle_by_value(module)
    return ray_train


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        ray.init(address=found.address, log_to_driver=True)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def test_a_killed_node_is_survived(
    cluster: Cluster, ray_train: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    second = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    log = tmp_path / "log"
    # 3 workers use 48 samples a step, and an epoch is 20 steps. The node is lost in step 35, after the save of step 30.
    samples = ray_train.spirals()
    dataset = Watched(samples, log, size=3, node=second.node_id, last=34 * 16 + 1)
    result = train_and_change(
        lambda: ray_train.train(str(tmp_path), num_workers=(1, 3), dataset=dataset, epochs=3),
        log,
        lambda: cluster.remove_node(second, allow_graceful=False),
    )

    before, after = reads(log, 3), reads(log, 2)
    assert len({node for worker in before for node, _ in worker}) == 2
    assert second.node_id not in {node for worker in after for node, _ in worker}
    # What counts: 30 steps before, and all that was read after. Each epoch has each sample once.
    used = [[index for _, index in worker[: 30 * 16]] for worker in before]
    first = Counter(index for worker in used for index in worker[:320])
    assert first == Counter(range(len(samples)))
    # The rest of the second epoch: 480 samples for 2 workers, in 15 steps.
    second_epoch = [worker[320:] for worker in used] + [
        [index for _, index in worker[:240]] for worker in after
    ]
    assert Counter(index for worker in second_epoch for index in worker) == Counter(range(len(samples)))
    third = Counter(index for worker in after for _, index in worker[240:])
    assert third == Counter(range(len(samples)))
    assert result.metrics["step"] == 30 + 15 + 30 - 5
    assert result.metrics["workers"] == 2
    assert result.metrics["loss"] < 0.3
    shown = capfd.readouterr()
    assert "2 workers start at step 30" in shown.out
    assert "PeerLost" in shown.out + shown.err


def test_a_node_that_is_added_is_used(
    cluster: Cluster,
    ray_train: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    every_second = partial(ray_train.ScalingConfig, elastic_resize_monitor_interval_s=1)  # not every minute
    monkeypatch.setattr(ray_train, "ScalingConfig", every_second)
    log = tmp_path / "log"
    # 2 workers use 32 samples a step. They stop in step 15, after the save of step 10, with 672 samples left in the
    # epoch: 14 steps of 3 workers.
    samples = ray_train.spirals(992)
    dataset = Watched(samples, log, size=2, node=None, last=14 * 16 + 1)
    result = train_and_change(
        lambda: ray_train.train(str(tmp_path), num_workers=(1, 3), dataset=dataset, epochs=1),
        log,
        lambda: cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES),
    )

    before, after = reads(log, 2), reads(log, 3)
    assert len({node for worker in before for node, _ in worker}) == 1
    assert len({node for worker in after for node, _ in worker}) == 2
    used = [index for worker in before for _, index in worker[: 10 * 16]]
    used += [index for worker in after for _, index in worker]
    assert Counter(used) == Counter(range(len(samples)))
    assert result.metrics["step"] == 20
    assert result.metrics["workers"] == 3
    assert "3 workers start at step 10" in capfd.readouterr().out
