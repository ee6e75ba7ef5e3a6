"""`ddp.sync_parameters_()` sends nothing if the parameters are equal already. Ranks are threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.equality import hash_of, hash_of_sample
from syncline.strategies.execution import driver
from syncline.transport import Transport, run_ranks

NUMEL = 40_000
A_FEW_BYTES = 2_000
"""What the comparisons of a call may send: far less than one parameter."""


class Run:
    """One rank with parameters whose sample leaves out most values."""

    def __init__(self, transport: Transport, strategy: Any) -> None:
        module = nn.ParameterDict({name: torch.linspace(-1, 1, NUMEL) for name in "abc"})
        self.ddp: Any = sl.DistributedDataParallel(module, process_group=transport, strategy=strategy)
        self.parameters: list[Tensor] = list(self.ddp.parameters())
        self.optimizer = self.ddp.attach(torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9))
        self.transport = transport

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 0.1 + self.transport.rank)
        self.optimizer.step()

    def sync(self) -> tuple[int, list[Tensor]]:
        """Synchronize. Return the bytes that were sent, and the values."""
        before = self.transport.statistics().total_bytes
        self.ddp.sync_parameters_()
        sent = self.transport.statistics().total_bytes - before
        return sent, [p.detach().clone() for p in self.parameters]


def are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [(sl.LocalSGD(3), 2), (sl.LocalSGD(3, optimizer_state=True), 3), (sl.DiLoCo(3), 3), (sl.Manual(), 3)],
    ids=str,
)
def test_nothing_is_sent_when_all_are_equal(strategy: Any, num_ranks: int) -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, strategy)
        for p in run.parameters:  # the mean of three of these has other bits in places
            p.data.mul_(0.1).add_(0.7)
        with torch.no_grad():
            run.parameters[0][:3] = torch.tensor([torch.nan, torch.inf, -0.0])
        before = [p.detach().clone() for p in run.parameters]
        versions = [p._version for p in run.parameters]
        sent, after = run.sync()
        assert sent < A_FEW_BYTES
        assert are_same(before, after)
        assert versions == [p._version for p in run.parameters]
        assert run.ddp.last_round is None, "no round was run"

    run_ranks(num_ranks, program)


def test_a_second_call_sends_nothing() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(8, optimizer_state=True))
        run.step()
        sent, first = run.sync()
        assert sent > 6 * NUMEL * 4, "parameters and momenta"
        sent, second = run.sync()
        assert sent < A_FEW_BYTES
        assert are_same(first, second)
        run.step()
        assert run.sync()[0] > 6 * NUMEL * 4

    run_ranks(2, program)


def test_one_value_that_differs_is_averaged() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.Manual())
        for at in (0, 1, NUMEL // 2, NUMEL - 1):
            with torch.no_grad():
                run.parameters[2][at] = 1.0 + 2 * transport.rank
            sent, values = run.sync()
            assert sent > 3 * NUMEL * 4, at
            assert values[2][at] == 2.0, at

    run_ranks(2, program)


def test_state_that_differs_is_averaged_though_parameters_are_equal() -> None:
    def program(transport: Transport) -> list[float]:
        run = Run(transport, sl.LocalSGD(8, optimizer_state=True))
        run.step()
        run.sync()
        momentum = run.optimizer.state[run.parameters[0]]["momentum_buffer"]
        momentum[-1] = float(transport.rank)
        assert run.sync()[0] > 6 * NUMEL * 4
        return [momentum[-1].item()]

    assert run_ranks(2, program) == [[0.5], [0.5]]


def test_the_outer_step_is_due_though_parameters_are_equal() -> None:
    """All ranks have moved alike, so an average would change nothing, but the outer optimizer does."""

    def program(transport: Transport) -> None:
        run = Run(transport, sl.DiLoCo(8))
        for parameter in run.parameters:
            parameter.grad = torch.ones_like(parameter)
        run.optimizer.step()
        before = run.parameters[0].detach().clone()
        sent, (first, *_) = run.sync()
        assert sent > 3 * NUMEL * 4
        assert not torch.equal(before, first)
        sent, (second, *_) = run.sync()
        assert sent < A_FEW_BYTES
        assert torch.equal(first, second)

    run_ranks(2, program)


def test_values_that_a_program_made_equal_start_the_next_outer_step() -> None:
    def program(transport: Transport) -> float:
        run = Run(transport, sl.DiLoCo(1, outer=lambda p: torch.optim.SGD(p, lr=1.0)))
        run.step()
        for parameter in run.parameters:
            parameter.data.fill_(5.0)
        run.sync()
        run.step()
        return run.parameters[0][0].item()

    values = run_ranks(2, program)
    assert values[0] == values[1]
    assert 4 < values[0] < 5


def test_parameters_that_are_known_to_differ_are_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(driver, "hash_of", lambda tensors: read.append(tensors) or b"")

    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(1))  # which synchronizes after each step, without a comparison
        before = transport.statistics().total_bytes
        run.step()
        assert transport.statistics().total_bytes - before > 3 * NUMEL * 4
        run = Run(transport, sl.LocalSGD(8))
        run.step()
        run.sync()  # the sample shows the difference

    run_ranks(2, program)
    assert not read


def test_a_sync_of_equal_parameters_counts_as_a_sync() -> None:
    def program(transport: Transport) -> None:
        ddp: Any = sl.DistributedDataParallel(
            nn.Linear(2, 1), process_group=transport, strategy=sl.LocalSGD(8)
        )
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert "no parameter sync yet" in str(ddp.contract)
        for parameter in ddp.parameters():
            parameter.data.fill_(3.0)
        ddp.sync_parameters_()
        assert "after step 1" in str(ddp.contract)
        assert ddp.sync_state_dict()["rounds"]["are_equal"]

    run_ranks(2, program)


def test_buffers_are_synchronized_beside_equal_parameters() -> None:
    def program(transport: Transport) -> float:
        module = nn.BatchNorm1d(2)
        ddp: Any = sl.DistributedDataParallel(module, process_group=transport, strategy=sl.LocalSGD(8))
        assert module.running_mean is not None
        module.running_mean.fill_(1.0 + transport.rank)
        ddp.sync_parameters_()
        return float(module.running_mean[0])

    assert run_ranks(2, program) == [1.5, 1.5]


# ---------------------------------------------------------------------- the hashes


def test_a_hash_does_not_depend_on_strides() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert hash_of([x]) == hash_of([x.permute(2, 0, 1).contiguous().permute(1, 2, 0)])
    assert hash_of([x, x]) != hash_of([x])
    square = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert hash_of([square, x]) != hash_of([x, square])


def test_each_value_counts() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        x = torch.zeros(1000, dtype=dtype)
        found = {hash_of([x])}
        for at in (0, 500, 999):
            y = x.clone()
            y[at] = 1
            found.add(hash_of([y]))
        assert len(found) == 4, dtype


def test_a_sample_is_small() -> None:
    for num_tensors in (1, 15, 16, 17, 1000):
        tensors = [torch.zeros(5000) for _ in range(num_tensors)]
        found = hash_of_sample(tensors)
        for tensor in tensors:
            tensor[:2000], tensor[4000:] = 1, 1
        assert hash_of_sample(tensors) == found, "only the middle counts"
        tensors[0][2500] = 1
        assert hash_of_sample(tensors) != found, num_tensors
    assert hash_of_sample([]) == hash_of_sample([])
    empty = torch.zeros(0)
    assert hash_of_sample([empty, torch.zeros(())]) != hash_of_sample([empty, torch.ones(())])
