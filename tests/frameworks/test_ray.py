"""Ray Train on a cluster of two nodes: a node is killed, and training continues on the workers that remain."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

ray = pytest.importorskip("ray")
os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # After a failure, Ray may still count the lost node, and wait this long for a worker on it.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
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
    """A dataset that logs the reads of each worker, and that stops the worker of one node at its `last` read."""

    def __init__(self, dataset: Dataset[Any], log: Path, node: str, last: int) -> None:
        self.dataset, self.log, self.node, self.last = dataset, log, node, last
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        context = ray.train.get_context()
        node = ray.get_runtime_context().get_node_id()
        with open(self.log / f"{context.get_world_size()}-{context.get_world_rank()}", "a") as file:
            file.write(json.dumps([node, index]) + "\n")
        self.num_reads += 1
        if node == self.node and self.num_reads == self.last:
            (self.log / "kill me").write_text("")  # a FIFO
            threading.Event().wait()
        return self.dataset[index]


def reads(log: Path, size: int) -> list[list[tuple[str, int]]]:
    """What each of `size` workers has read: the nodes that they ran on, and the samples."""
    return [
        [tuple(json.loads(line)) for line in (log / f"{size}-{rank}").read_text().splitlines()]
        for rank in range(size)
    ]


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
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import ray_train

    second = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    log = tmp_path / "log"
    log.mkdir()
    os.mkfifo(log / "kill me")

    def kill() -> None:
        (log / "kill me").read_text()
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    for module in (ray_train, sys.modules[__name__]):  # workers cannot import them
        ray.cloudpickle.register_pickle_by_value(module)
    # 3 workers use 48 samples a step, and an epoch is 20 steps. The node is lost in step 35, after the save of step 30.
    samples = ray_train.spirals()
    dataset = Watched(samples, log, second.node_id, last=34 * 16 + 1)
    result = ray_train.train(str(tmp_path), num_workers=(1, 3), dataset=dataset, epochs=3)

    killer.join(0)
    assert not killer.is_alive()
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
