"""A transport that fails in the middle of a step: every rank gets a named error, and no rank goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.faulty import Fault, FaultyTransport
from syncline import CollectiveTimeout, PeerLost, SynclineError
from syncline import DistributedDataParallel as DDP
from syncline.transport import Transport, run_ranks


def train(t: Transport, num_steps: int) -> tuple[int, list[SynclineError]]:
    """Steps done, and the errors of the first failing step and of the one after it."""
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(3, 2), process_group=t)
    errors: list[SynclineError] = []
    for step in range(num_steps):
        try:
            ddp.zero_grad()
            ddp(torch.ones(1, 3)).sum().backward()
        except SynclineError as error:
            errors.append(error)
            with pytest.raises(SynclineError) as again:
                ddp(torch.ones(1, 3)).sum().backward()
            errors.append(again.value)
            return step, errors
    return num_steps, errors


def test_a_collective_that_fails_is_a_named_error_on_every_rank() -> None:
    # The first line of a timeout is about the late ranks.
    kinds: list[tuple[type[SynclineError], int]] = [(PeerLost, 0), (CollectiveTimeout, 1)]
    for kind, in_line in kinds:
        fault = Fault(rank=1, operation="all_reduce", step=3, error=kind)
        ended = run_ranks(2, lambda t, fault=fault: train(FaultyTransport(t, [fault]), 5))
        for own_rank, (steps, errors) in enumerate(ended):
            assert steps == 2
            first, again = errors
            text, where = str(first), f"rank {own_rank}, step 3, backward, bucket 0 ("
            if own_rank == 1:
                assert isinstance(first, kind)
                assert text.splitlines()[in_line].startswith(where)
            assert all(words in text for words in (where, "weight", "bias"))
            assert "step 3" in str(again), "the module stays broken and says where"


def test_without_faults_training_goes_on() -> None:
    results = run_ranks(2, lambda t: train(FaultyTransport(t, []), 5))
    assert [steps for steps, _ in results] == [5, 5]
