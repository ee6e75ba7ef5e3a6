"""A rank that dies, fails or stops sending under a strategy: the others are told who, wherever they wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from meeting import end_by_sigkill
from support.cases import case
from syncline.transport import C10dTransport, Transport, run_ranks
from syncline.transport.shared_memory import SharedMemoryTransport

STRATEGIES = [
    sl.LocalSGD(2),
    sl.DiLoCo(4, fragments=2, delay=1, compression=sl.compression.Quantize(4)),
    sl.Gossip("ring"),
    sl.ParameterServer(1),
]


def train(transport: Transport | None, strategy: Any, num_steps: int, *, before_step: Any) -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(40, 30), process_group=transport, strategy=strategy)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for step in range(1, num_steps + 1):
        before_step(step)
        optimizer.zero_grad()
        ddp(torch.ones(2, 40)).square().mean().backward()
        optimizer.step()


def test_a_rank_that_raises_is_quoted_to_the_others() -> None:
    def before_step(transport: Transport, step: int) -> None:
        if transport.rank == 1 and step == 6:
            raise ArithmeticError("out of luck")

    for strategy in STRATEGIES:
        told: dict[int, BaseException] = {}

        def program(
            transport: Transport, strategy: Any = strategy, told: dict[int, BaseException] = told
        ) -> None:
            try:
                train(transport, strategy, 40, before_step=lambda step: before_step(transport, step))
            except BaseException as error:
                told[transport.rank] = error
                raise

        with case(strategy), pytest.raises(ArithmeticError, match="out of luck"):
            run_ranks(3, program)
        for rank in (0, 2):
            assert isinstance(told[rank], sl.PeerFailed), strategy
            assert "out of luck" in str(told[rank]), strategy


def test_a_rank_that_makes_fewer_steps_is_named() -> None:
    def program(transport: Transport) -> None:
        train(transport, sl.LocalSGD(2), 4 + 2 * transport.rank, before_step=lambda step: None)

    with pytest.raises(sl.UnevenInputs, match="rank 0"):
        run_ranks(2, program)


@pytest.mark.ranks(3, killed=[2])
@pytest.mark.parametrize(
    ("engine", "strategy"),
    [*zip(("gloo", "shared memory") * 2, STRATEGIES, strict=True), ("shared memory", STRATEGIES[2])],
    ids=str,
)
def test_a_rank_that_is_killed_is_named(engine: str, strategy: Any) -> None:
    beneath = C10dTransport(timeout_seconds=3000)  # who waits so long hangs
    transport = beneath if engine == "gloo" else SharedMemoryTransport.over(beneath)

    def before_step(step: int) -> None:
        if transport.rank == 2 and step == 6:
            end_by_sigkill()

    with pytest.raises(sl.SynclineError) as caught:
        train(transport, strategy, 400, before_step=before_step)
    assert "rank 2" in str(caught.value)
