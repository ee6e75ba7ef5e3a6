"""Train on Ray actors. If one is lost, the others train on, and a new actor joins them.

Each actor is a rank. The driver holds the store, through which the actors agree on membership.

pip install ray
python examples/ray_resilient.py
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayTaskError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl

MAX_STARTS = 3  # of each actor


class Rank:
    """An actor that is a rank."""

    def train(self, variables: dict[str, str], dataset: Any, steps: int) -> tuple[int, int, float]:
        """Train. Return the number of ranks at the end, the number of steps, and the last loss."""
        os.environ.update(variables)
        sl.init()
        torch.manual_seed(0)
        sampler = sl.DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=16, sampler=sampler)
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        state = sl.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)
        loss = torch.zeros(())
        for step in sl.steps(state, until=steps, data=loader):
            with step:
                inputs, targets = step.next_batch()
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(ddp(inputs), targets)
                loss.backward()
                optimizer.step()
        size = sl.world().size
        sl.shutdown()
        return size, state.step, loss.item()


def train(num_ranks: int, dataset: Any, steps: int) -> list[tuple[int, int, float]]:
    """Train on `num_ranks` actors, each of which is started again after it was lost. Return what the actors return."""
    address = ray.util.get_node_ip_address()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    variables = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not in rank 0
        "SYNCLINE_TOKEN": secrets.token_hex(32),
    }
    running: dict[Any, int] = {}  # the rank of each call that has not returned

    def start(rank: int, **more: str) -> None:
        actor = ray.remote(Rank).options(num_cpus=1).remote()
        running[actor.train.remote(variables | {"RANK": str(rank)} | more, dataset, steps)] = rank

    for rank in range(num_ranks):
        start(rank)
    results, num_starts = [], dict.fromkeys(range(num_ranks), 1)
    while running:
        [ended], _ = ray.wait(list(running))
        rank = running.pop(ended)
        try:
            results.append(ray.get(ended))
        except RayActorError as error:  # the process has ended
            print(f"the actor of rank {rank} was lost: {type(error).__name__}", flush=True)
            num_starts[rank] += 1
            if running and num_starts[rank] <= MAX_STARTS:
                start(rank, SYNCLINE_JOINS="1")
        except RayTaskError as error:
            if not isinstance(error.cause, sl.PeerLost):  # the others ended before a new actor could join
                raise
    return results


def main() -> None:
    inputs = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    for size, steps, loss in train(2, dataset, steps=500):
        print(f"{steps} steps, at the end with {size} ranks, loss {loss:.4f}")


if __name__ == "__main__":
    main()
