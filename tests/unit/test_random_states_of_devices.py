"""Random states of several GPUs, in checkpoints and in `sl.steps`, with a faked torch.cuda."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import syncline as sl


def test_a_step_that_is_made_again_draws_the_same_numbers_on_each_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = torch.tensor([[10, 20]], dtype=torch.uint8).T  # how many numbers each GPU has drawn, as its state

    def set_rng_state(state: Tensor, device: int) -> None:
        drawn[device] = state

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(drawn.clone()))
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_rng_state)
    ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    with pytest.raises(sl.PeerLost, match="simulated"):  # this rank is the only one, so the loop ends
        for step in sl.steps(state, until=3):
            with step:
                drawn += 1
                ddp(torch.ones(4, 2)).sum().backward()
                if step.number == 2:
                    raise sl.PeerLost("simulated")
                optimizer.step()
    assert drawn.flatten().tolist() == [11, 21]  # as the first step has left them
