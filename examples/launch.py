"""Train on two ranks from a plain script, without a launcher: `python examples/launch.py`."""

from __future__ import annotations

import torch

import syncline as sl


def train(num_steps: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Train on this rank's part of the data. Each rank is a process of its own."""
    world = sl.init()
    generator = torch.Generator().manual_seed(world.rank)  # other data on each rank
    torch.manual_seed(0)
    ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loss = torch.zeros(())
    for _ in range(num_steps):
        x = torch.randn(32, 2, generator=generator)
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean_loss = sl.mean(loss.item())  # over all ranks
    print(f"rank {world.rank} has trained on its own data")
    return mean_loss, ddp.module.state_dict()


if __name__ == "__main__":
    loss, state = sl.launch(train, ranks=2, args=(100,))
    print(f"loss {loss:.2e}, weight {state['weight'].tolist()}")
