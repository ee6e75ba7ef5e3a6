"""EvolutionStrategy on real processes: the same bits as alone, and a peer that fails is told to all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from syncline.transport import ThreadGroup


def model() -> nn.Sequential:
    g = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    for p in module.parameters():
        nn.init.normal_(p, generator=g)
    return module


def loss(module: nn.Module) -> Tensor:
    return (module(torch.linspace(-1, 1, 40).view(8, 5)) - 1).square().mean()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_processes_take_the_steps_of_one_and_all_know_if_a_loss_function_fails(transport: str) -> None:
    sl.init(transport)
    module = model()
    if dist.get_rank() == 1:
        nn.init.zeros_(module[0].weight)  # construction makes it rank 0's
    strategy = sl.EvolutionStrategy(module, 0.1, 0.05, population=32, seed=3, optimizer=torch.optim.Adam)
    before = strategy.statistics()
    records = [strategy.step(loss) for _ in range(3)]
    moved = strategy.statistics() - before

    alone = model()
    reference = sl.EvolutionStrategy(
        alone, 0.1, 0.05, 32, 3, optimizer=torch.optim.Adam, group=ThreadGroup(1).transport(0)
    )
    assert records == [reference.step(loss) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), alone.parameters(), strict=True))
    assert moved.num_calls == {"all_gather": 6}
    assert moved.payload_bytes == {"all_gather": 3 * 3 * (105 + 12 * 8)}  # 6, 5 and 5 pairs

    def loss_fn(module: nn.Module) -> Tensor:
        if dist.get_rank() == 0:
            raise OSError("the simulator is gone")
        return loss(module)

    with pytest.raises(sl.PeerFailed if dist.get_rank() else OSError, match="the simulator is gone"):
        strategy.step(loss_fn)
    assert strategy.step(loss).step == 4
