"""The mean outer gradient of DiLoCo in the memory of the parameters: values, memory and failures. Ranks are threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from support.faulty import Fault, FaultyTransport
from syncline.strategies.execution import flat, outer_step
from syncline.transport import Transport, run_ranks

SHAPES = ((5, 7), (400,), (3, 3, 3), (0,), (), (64, 9))


def values_of(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Run:
    """One rank whose parameters are moved by hand."""

    def __init__(self, transport: Transport, strategy: Any, *, dtype: torch.dtype = torch.float32) -> None:
        module = nn.ParameterList([nn.Parameter(value.to(dtype)) for value in values_of(0)])
        self.ddp: Any = sl.DistributedDataParallel(module, process_group=transport, strategy=strategy)
        self.parameters: list[nn.Parameter] = list(self.ddp.parameters())
        self.optimizer = self.ddp.attach(torch.optim.SGD(self.parameters, lr=1.0))
        self.transport = transport

    def step(self, seed: int) -> list[Tensor]:
        """Move the parameters, and return what they are before the round."""
        moved = [p.detach().clone() for p in self.parameters]
        for parameter, gradient, value in zip(
            self.parameters, values_of(100 * seed + self.transport.rank), moved, strict=True
        ):
            parameter.grad = gradient.to(parameter.dtype)
            value -= parameter.grad
        self.optimizer.step()
        return moved

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]


def are_same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of at most 64 elements, so that the parameters have many."""
    monkeypatch.setattr(flat, "_PIECE_BYTES", 256)


def trained(transport: Transport, *, keeps: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    # The own values, of which next to nothing is mixed in, are kept until the mean is there.
    run = Run(transport, sl.DiLoCo(1, mixing=1e-300 if keeps else None), dtype=dtype)
    for seed in range(1, 4):
        run.step(seed)
    return run.values()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_has_the_bits_of_a_mean_in_memory_of_its_own(num_ranks: int) -> None:
    def program(transport: Transport) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            own = trained(transport, keeps=True, dtype=dtype)
            assert are_same(trained(transport, dtype=dtype), own), dtype

    run_ranks(num_ranks, program)


class Recording(torch.optim.SGD):
    """An outer optimizer that records where its gradients lie."""

    def __init__(self, parameters: Iterable[Tensor], found: dict[str, Any]) -> None:
        super().__init__(parameters, lr=0.7, momentum=0.9, nesterov=True)
        self.found = found

    def step(self, closure: Any = None) -> None:
        self.found["at"] = [p.grad.data_ptr() for p in self.param_groups[0]["params"] if p.numel()]
        if "error" in self.found:
            raise self.found["error"]
        super().step(closure)


@pytest.mark.parametrize("in_place_", [True, False])
def test_the_outer_gradient_lies_in_the_parameters(in_place_: bool) -> None:
    def program(transport: Transport) -> None:
        found: dict[str, Any] = {}
        run = Run(
            transport, sl.DiLoCo(1, outer=lambda p: Recording(p, found), mixing=None if in_place_ else 0.5)
        )
        run.step(1)
        here = [p.data_ptr() for p in run.parameters if p.numel()]
        assert (found["at"] == here) == in_place_
        assert all(p.grad is None for p in run.ddp.outer_optimizer.param_groups[0]["params"])

    run_ranks(2, program)


@pytest.mark.usefixtures("small_pieces")
def test_memory_for_the_pieces_is_made_once_and_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []

    class Wires(flat.Wires):
        def __init__(self, transport: Transport, tensors: Iterable[Tensor]) -> None:
            super().__init__(transport, tensors)
            self.is_first = transport.rank == 0

        def prepare(self, kinds: Any) -> None:
            super().prepare(kinds)
            if self.is_first:
                allocated.append(sum(wire.nbytes for wires in self._made.values() for wire in wires))

    monkeypatch.setattr(outer_step, "Wires", Wires)
    run_ranks(2, trained)
    assert allocated
    assert set(allocated) == {2 * 256}


def moves() -> list[list[Tensor]]:
    """The parameters of each of two ranks before their first round."""
    starts = values_of(0)
    return [
        [start - one for start, one in zip(starts, values_of(100 + rank), strict=True)] for rank in (0, 1)
    ]


@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.usefixtures("small_pieces")
def test_a_round_that_fails_leaves_no_parameter_half_averaged(call: int) -> None:
    """Each value is this rank's own or the mean of all ranks, and not an outer gradient."""

    def program(inner: Transport) -> None:
        transport = FaultyTransport(inner, [Fault(rank=1, operation="all_reduce", call=call)])
        run = Run(transport, sl.DiLoCo(1))
        with pytest.raises(sl.SynclineError):
            run.step(1)
        for value, mine, first, second in zip(run.values(), moves()[transport.rank], *moves(), strict=True):
            mean = (first + second) / 2
            assert (((value - mine).abs() < 1e-5) | ((value - mean).abs() < 1e-5)).all()

    run_ranks(2, program)


def test_an_outer_optimizer_that_fails_leaves_the_mean() -> None:
    def program(transport: Transport) -> None:
        found: dict[str, Any] = {"error": RuntimeError("no")}
        run = Run(transport, sl.DiLoCo(1, outer=lambda p: Recording(p, found)))
        with pytest.raises(RuntimeError, match="no"):
            run.step(1)
        for value, first, second in zip(run.values(), *moves(), strict=True):
            torch.testing.assert_close(value, (first + second) / 2)
        del found["error"]
        run.ddp.sync_parameters_()  # the next round is as usual

    run_ranks(2, program)


@pytest.mark.filterwarnings("error")
def test_an_outer_optimizer_that_hardly_moves_is_a_warning_and_no_other_is() -> None:
    def wrap(**outer: Any) -> None:
        sl.DistributedDataParallel(nn.Linear(2, 2), strategy=sl.DiLoCo(20, **outer))

    with pytest.warns(UserWarning, match=r"keeps 0\.10% of the mean change"):
        wrap(outer=torch.optim.SGD)
    with pytest.warns(UserWarning, match=r"keeps 2\.00% of the mean change"):
        wrap(outer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5))
    wrap()
    wrap(outer=torch.optim.Adam)
    wrap(outer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
