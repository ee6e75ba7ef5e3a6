"""A step on several ranks: what differs between them is named, the same on each, and what may differ is a note."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import syncline as sl
from syncline.debug import Finding, Report


def made(part: nn.Module | None = None, *, p: float = 0.5) -> nn.Sequential:
    """The same net on all ranks; random numbers afterwards are each rank's own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(p), part or nn.Tanh(), nn.Linear(4, 2))
    torch.manual_seed(1 + dist.get_rank())
    return net


def batch(seed: int = 0) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))


def step_of(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()
        return loss

    return step


def told_alike(report: Report) -> Report:
    """The report, the same on every rank."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(report))
    assert texts == [texts[0]] * len(texts)
    return report


def noted(report: Report, text: str) -> bool:
    return any(text in note for note in report.notes)


def asked(net: nn.Module, *args: Any, step: Callable[..., Any] | None = None, **settings: Any) -> Report:
    """The report on a step with these inputs, the same on every rank."""
    settings = {"inputs": args} | settings if args else settings
    return told_alike(sl.debug.compare_replicas(step or step_of(net), net, **settings))


def the_finding(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", ["plain", "torch", "syncline"])
def test_a_clean_step_agrees_and_nothing_is_changed_by_asking(wrap: str) -> None:
    net: nn.Module = made()
    if wrap != "plain":
        net = TorchDDP(net) if wrap == "torch" else sl.DistributedDataParallel(net)
    x = batch(dist.get_rank())
    step = step_of(net)
    before = [tensor.clone() for tensor in (*net.parameters(), *net.buffers())]
    chance = torch.get_rng_state()
    report = told_alike(sl.debug.compare_replicas(step, net, inputs=(x,)))
    assert report.agrees, report
    assert any("rank 0's buffers and inputs and the same random numbers" in one for one in report.checked)
    assert any("6 gradients after they were reduced" in one for one in report.checked) == (wrap != "plain")
    assert noted(report, "random numbers are drawn, as in dropout. Each rank draws its own")
    assert all(map(torch.equal, before, (*net.parameters(), *net.buffers())))
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), chance)
    step(x)  # training goes on
    if wrap != "plain":
        sl.check_replicas([parameter.grad for parameter in net.parameters()])


@pytest.mark.ranks(2)
def test_training_with_residuals_goes_on_as_if_it_had_not_been_asked() -> None:
    def trained(asks: bool) -> list[float]:
        ddp = sl.DistributedDataParallel(made(), compression=sl.compression.TopK(0.3))
        optimizer = torch.optim.AdamW(ddp.parameters())
        losses = []
        for number in range(3):
            optimizer.zero_grad()
            if asks:
                assert sl.debug.compare_replicas(step_of(ddp), ddp, inputs=(batch(number),)).agrees
            losses.append(step_of(ddp)(batch(number)).item())
            optimizer.step()
        return losses

    assert trained(asks=True) == trained(asks=False)


# ---------------------------------------------------------------------- what is a disagreement


@pytest.mark.ranks(3)
def test_a_parameter_that_differs_is_named_with_its_rank() -> None:
    net = made()
    if dist.get_rank() == 1:
        with torch.no_grad():
            net[4].weight.view(torch.int32)[0, 1] ^= 1
    finding = the_finding(asked(net, batch()))
    assert finding.what.startswith(
        "between ranks (ranks 0, 2 | rank 1): 4.weight differs before the run (sum "
    )
    assert (finding.module, finding.kind, finding.ranks) == ("4", "Linear", (1,))
    assert "sl.broadcast_(module)" in finding.causes[0]


class Counts(nn.Module):
    numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return x + (next(self.numbers) if dist.get_rank() == 1 else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_is_not_deterministic_on_one_rank_is_named_on_all(is_wrapped: bool) -> None:
    bare = made(Counts())
    report = asked(sl.DistributedDataParallel(bare) if is_wrapped else bare, batch())
    (named,) = [finding for finding in report.findings if finding.module == "3"]
    assert (named.kind, named.ranks) == ("Counts", (1,))
    assert "rank 1, two runs from the same state: 3 (Counts) returns another output" in named.what
    assert noted(report, "not compared, because they already differ between runs on one rank")
    others = [finding for finding in report.findings if finding.module != "3"]
    if is_wrapped:  # rank 0's gradients are means, of which rank 1's share differs
        assert [finding.ranks for finding in others] == [(0,)]
        assert "another rank's own gradient differs" in others[0].causes[0]
    else:
        assert others == []


class Scales(nn.Module):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class FeelsThreads(nn.Module):
    """Adds up in an order that depends on the number of threads, as kernels may."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * torch.get_num_threads()


@pytest.mark.ranks(2)
def test_an_attribute_a_mode_or_a_number_of_threads_that_differs_is_the_cause() -> None:
    scales = Scales()
    scales.scale = 1.0 + dist.get_rank()
    finding = the_finding(asked(made(scales), batch()))
    assert (finding.module, finding.ranks) == ("3", (1,))
    assert "returns another output for equal inputs (sum " in finding.what
    assert finding.causes == ("its attribute scale differs: 1.0 (rank 0), 2.0 (rank 1)",)
    net = made()
    net[1].train(dist.get_rank() == 0)
    finding = the_finding(asked(net, batch()))
    assert finding.module == "1"
    assert finding.causes[0].startswith("its attribute training differs: True (rank 0), False (rank 1)")
    net, before = nn.Sequential(nn.Tanh(), FeelsThreads()), torch.get_num_threads()
    torch.set_num_threads(1 + dist.get_rank())
    try:
        report = told_alike(sl.debug.compare_replicas(net, net, inputs=(batch(),)))
    finally:
        torch.set_num_threads(before)
    finding = the_finding(report)
    assert (finding.module, finding.causes) == ("1", ("threads: 1 (rank 0), 2 (rank 1)",))
    assert "threads: 1 (rank 0), 2 (rank 1)" in str(report)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 + dist.get_rank())


class AnotherBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoisyGradient.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = nn.Tanh(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return (self.seldom if dist.get_rank() else self.often)(x)  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
def test_backward_and_branches_of_one_rank() -> None:
    gradient = (
        "3 (AnotherBackward) returns another gradient of its input [0] in backward, for equal gradients"
    )
    for part, what in (
        (AnotherBackward, gradient),
        (Branches, "other modules are called, in 3 (Branches)"),
    ):
        finding = the_finding(asked(made(part()), batch()))
        assert what in finding.what
        assert finding.module == "3"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [TorchDDP, sl.DistributedDataParallel])
def test_gradients_that_were_not_reduced_are_named(wrap: Callable[[nn.Module], Any]) -> None:
    ddp = wrap(made())

    def step(x: Tensor) -> None:
        with ddp.no_sync():
            step_of(ddp)(x)

    finding = the_finding(asked(ddp, batch(dist.get_rank()), step=step))
    assert "6 of 6 gradients differ" in finding.what
    assert "The first of them is that of 0.weight" in finding.what
    assert "no_sync()" in finding.causes[0]


# ---------------------------------------------------------------------- what is a note


@pytest.mark.ranks(2)
def test_the_same_seed_and_the_same_batch_are_notes() -> None:
    net = made()
    torch.manual_seed(5)
    x = batch()
    report = told_alike(sl.debug.compare_replicas(lambda: step_of(net)(x), net))
    assert noted(report, "all ranks were given the same batch")
    assert "2 ranks, no disagreement, but all ranks were given the same batch" in str(report).splitlines()[0]
    assert noted(report, "All ranks draw the same ones (the same dropout masks)")


@pytest.mark.ranks(2)
def test_other_data_are_a_note() -> None:
    net = sl.DistributedDataParallel(made())
    x = batch(dist.get_rank())
    report = told_alike(sl.debug.compare_replicas(lambda: step_of(net)(x), net))
    assert noted(report, "the ranks have different data, as they should")
    assert "no disagreement, but the ranks' results for their own data were not compared" in report.verdict
    finding = the_finding(asked(net, batch(), step=lambda _: step_of(net)(x)))
    assert "input [0] of Sequential differs" in finding.what
    assert "computed in the function itself" in finding.what
    assert finding.causes[0].startswith("the function takes other data in each run or on each rank")


@pytest.mark.ranks(2)
def test_inputs_of_other_shapes_are_rank_0s_for_the_comparison() -> None:
    net = made()
    x = batch()[: 4 + dist.get_rank()]

    def step(x: Tensor, scale: float) -> Tensor:
        return step_of(net)(x * scale)

    report = asked(net, x, 2.0, step=step)
    assert any("rank 0's buffers and inputs" in one for one in report.checked)
    report = asked(net, x, float(dist.get_rank()), step=step)
    assert noted(report, "of plain values (the same on all ranks)")
    assert "the ranks' results for their own data were not compared" in report.verdict


@pytest.mark.ranks(2)
def test_buffers_of_each_rank_and_replicas_that_drift_on_purpose_are_no_disagreement() -> None:
    net = made()
    net(batch(dist.get_rank()))
    assert asked(net, batch()).agrees
    assert float(net[1].num_batches_tracked) == 1
    ddp = sl.DistributedDataParallel(made(), strategy=sl.LocalSGD(4))
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    step_of(ddp)(batch(dist.get_rank()))
    optimizer.step()
    report = told_alike(sl.debug.compare_replicas(step_of(ddp), ddp, inputs=(batch(dist.get_rank()),)))
    assert noted(report, "under strategy=LocalSGD(every=4) replicas are allowed to differ")
    assert "but ranks were not compared with one another" in report.verdict


# ---------------------------------------------------------------------- errors


def fails_on_rank_1(net: nn.Module) -> None:
    net(batch())
    if dist.get_rank() == 1:
        raise ValueError("not on this one")


@pytest.mark.ranks(2)
def test_ranks_that_ask_for_different_things_or_fail_are_told_alike() -> None:
    net = made()
    with pytest.raises(sl.ContractMismatch, match="passes inputs"):
        sl.debug.compare_replicas(lambda *_: None, net, inputs=(batch(),) if dist.get_rank() else None)
    with pytest.raises(ValueError, match=r"rank 1: the function, at .* raised ValueError: not on this one"):
        sl.debug.compare_replicas(lambda: fails_on_rank_1(net), net)
    sl.debug.compare_replicas(step_of(net), net, inputs=(batch(),))
    ddp = sl.DistributedDataParallel(made(), sharded=True)
    with pytest.raises(ValueError, match="with sharded=True no rank has all gradients"):
        sl.debug.compare_replicas(step_of(ddp), ddp, inputs=(batch(),))
