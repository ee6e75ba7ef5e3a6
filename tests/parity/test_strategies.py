"""Each strategy against a few lines of plain torch in one process: the same trajectory, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from syncline.session import transport_of
from syncline.strategies.gossip import neighbours
from syncline.transport import C10dTransport, Transport, run_ranks
from syncline.transport.shared_memory import SharedMemoryTransport

NUM_STEPS = 13
LR = 0.1

# ---------------------------------------------------------------------- what is trained


def make_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    generator = torch.Generator().manual_seed(0)  # of its own: ranks may be threads
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return net


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    return net(batch(rank, step)).square().mean()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


def run(
    strategy: object, transport: Transport | None = None
) -> tuple[list[Tensor], sl.DistributedDataParallel]:
    """This rank's parameters after each step."""
    ddp = sl.DistributedDataParallel(make_net(), process_group=transport, strategy=strategy)
    rank = ddp._distributed_rank
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=LR))
    seen = []
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        seen.append(flat(ddp.module))
    return seen, ddp


# ---------------------------------------------------------------------- references, in one process


class Reference:
    """All ranks' replicas, one after the other."""

    def __init__(self, num_ranks: int) -> None:
        self.nets = [make_net() for _ in range(num_ranks)]
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=LR) for net in self.nets]

    def step(self, step: int, *, within: int = 1) -> None:
        """Make a step with gradients that are averaged among `within` ranks each."""
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            loss_of(net, rank, step).backward()
        for first in range(0, len(self.nets), within):
            worker = self.nets[first : first + within]
            for shared in zip(*(net.parameters() for net in worker), strict=True):
                mean = torch.stack([p.grad for p in shared]).mean(0)
                for p in shared:
                    p.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def values(self) -> Tensor:
        return torch.stack([flat(net) for net in self.nets])  # (num_ranks, numel)

    def write(self, values: Tensor) -> None:
        for net, row in zip(self.nets, values, strict=True):
            nn.utils.vector_to_parameters(row.clone(), net.parameters())

    def mean(self) -> Tensor:
        return self.values().mean(0).expand(len(self.nets), -1)


def reference_local_sgd(num_ranks: int, every: int, warmup: int, within: int = 1) -> Iterator[Tensor]:
    reference = Reference(num_ranks)
    for step in range(1, NUM_STEPS + 1):
        reference.step(step, within=num_ranks if step <= warmup else within)
        if step > warmup and (step - warmup) % every == 0:
            reference.write(reference.mean())
        yield reference.values()


def reference_diloco(num_ranks: int, every: int, lr: float, momentum: float, warmup: int) -> Iterator[Tensor]:
    """Nesterov, written out: v = momentum * v + g; x -= lr * (g + momentum * v)."""
    reference = Reference(num_ranks)
    common = reference.values()[0]
    velocity = torch.zeros_like(common)
    for step in range(1, NUM_STEPS + 1):
        reference.step(step, within=num_ranks if step <= warmup else 1)
        if step == warmup:
            common = reference.values()[0]
        if step > warmup and (step - warmup) % every == 0:
            gradient = common - reference.values().mean(0)
            velocity = momentum * velocity + gradient
            common = common - lr * (gradient + momentum * velocity)
            reference.write(common.expand(num_ranks, -1))
        yield reference.values()


def reference_streaming(
    num_ranks: int, every: int, delay: int, mixing: float | None, lr: float
) -> Iterator[Tensor]:
    """Two fragments: the first weight meets at every / 2, the rest at every; outer is plain SGD."""
    reference = Reference(num_ranks)
    cut = 3 * 4  # 12 and 14 elements
    spans = {every // 2: slice(0, cut), every: slice(cut, None)}
    common = reference.values()[0]
    under_way: dict[int, tuple[slice, Tensor, Tensor]] = {}
    for step in range(1, NUM_STEPS + 1):
        reference.step(step)
        if step in under_way:
            span, gradient, sent = under_way.pop(step)
            common[span] -= lr * gradient
            values = reference.values()
            if mixing is None:
                values[:, span] += common[span] - sent
            else:
                values[:, span] = mixing * values[:, span] + (1 - mixing) * common[span]
            reference.write(values)
        for first, span in spans.items():
            if step >= first and (step - first) % every == 0:
                values = reference.values()[:, span]
                under_way[step + delay] = (span, common[span] - values.mean(0), values)
        yield reference.values()


def reference_gossip(num_ranks: int, topology: str, every: int, weights: list[float]) -> Iterator[Tensor]:
    """x is mixed by a matrix whose columns sum to 1, and so is w; z = x / w is what is trained, and x gets what it
    learns, times the rank's own weight."""
    reference = Reference(num_ranks)
    own = torch.tensor(weights, dtype=torch.float64)
    w, round = own.clone(), 0
    x = w[:, None] * reference.values()
    before = reference.values()
    for step in range(1, NUM_STEPS + 1):
        reference.step(step)
        x, before = x + own[:, None] * (reference.values() - before), reference.values()
        if step % every == 0:
            mixing = torch.zeros(num_ranks, num_ranks, dtype=torch.float64)
            for source, targets in enumerate(neighbours(topology, num_ranks, round, 3)):
                for target in (source, *targets):
                    mixing[target, source] = 1 / (1 + len(targets))
            x, w, round = mixing @ x, mixing @ w, round + 1
            reference.write(x / w[:, None])
            before = reference.values()
        yield reference.values()


def assert_follows(reference: Iterator[Tensor], ranks: list[list[Tensor]]) -> None:
    for step, expected in enumerate(reference):
        for rank, seen in enumerate(ranks):
            torch.testing.assert_close(seen[step], expected[rank], rtol=1e-10, atol=1e-12)


CASES: dict[str, tuple[Callable[[int], object], Callable[[int], Iterator[Tensor]]]] = {
    "local SGD": (lambda rank: sl.LocalSGD(3), lambda n: reference_local_sgd(n, 3, 0)),
    "local SGD with warm-up": (lambda rank: sl.LocalSGD(4, warmup=3), lambda n: reference_local_sgd(n, 4, 3)),
    "local SGD, two ranks a worker": (
        lambda rank: sl.LocalSGD(3, every_step_within=2),
        lambda n: reference_local_sgd(n, 3, 0, 2),
    ),
    "local SGD with warm-up, two ranks a worker": (
        lambda rank: sl.LocalSGD(4, warmup=3, every_step_within=2),
        lambda n: reference_local_sgd(n, 4, 3, 2),
    ),
    "DiLoCo with a long warm-up, two ranks a worker": (
        lambda rank: sl.DiLoCo(8, warmup=NUM_STEPS, every_step_within=2),
        lambda n: reference_local_sgd(n, 1, NUM_STEPS),
    ),
    "DiLoCo": (lambda rank: sl.DiLoCo(4), lambda n: reference_diloco(n, 4, 0.7, 0.9, 0)),
    "DiLoCo with warm-up": (
        lambda rank: sl.DiLoCo(3, warmup=2, outer=lambda p: torch.optim.SGD(p, lr=0.5)),
        lambda n: reference_diloco(n, 3, 0.5, 0.0, 2),
    ),
    "streaming DiLoCo": (
        lambda rank: sl.DiLoCo(
            4, fragments=2, delay=1, mixing=0.25, outer=lambda p: torch.optim.SGD(p, lr=0.8)
        ),
        lambda n: reference_streaming(n, 4, 1, 0.25, 0.8),
    ),
    "streaming DiLoCo, long delay": (
        lambda rank: sl.DiLoCo(4, fragments=2, delay=3, outer=lambda p: torch.optim.SGD(p, lr=0.8)),
        lambda n: reference_streaming(n, 4, 3, None, 0.8),
    ),
    "gossip on a ring": (lambda rank: sl.Gossip("ring"), lambda n: reference_gossip(n, "ring", 1, [1.0] * n)),
    "gossip, exponential, weighted": (
        lambda rank: sl.Gossip("exponential", every=2, weight=1.0 + rank),
        lambda n: reference_gossip(n, "exponential", 2, [1.0 + rank for rank in range(n)]),
    ),
    "gossip in pairs": (
        lambda rank: sl.Gossip("pairs", seed=3),
        lambda n: reference_gossip(n, "pairs", 1, [1.0] * n),
    ),
    "parameter server, no staleness": (
        lambda rank: sl.ParameterServer(0),
        lambda n: reference_local_sgd(n, 1, 0),
    ),
}


def engine_of(name: str) -> Transport:
    transport = C10dTransport() if name == "gloo" else SharedMemoryTransport.over(C10dTransport())
    assert transport.name == name
    return transport


def test_golden_trajectories() -> None:
    for name, (strategy, reference) in CASES.items():
        for num_ranks in (2, 4) if "two ranks" in name else (2, 3, 4):
            ranks = run_ranks(num_ranks, lambda t, strategy=strategy: run(strategy(t.rank), t)[0])
            with case(name, num_ranks):
                assert_follows(reference(num_ranks), ranks)


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("engine", ["gloo", "shared memory"])
@pytest.mark.real
def test_golden_trajectories_in_processes(engine: str) -> None:
    transport = engine_of(engine)
    for name, (strategy, reference) in CASES.items():
        if "two ranks" in name:
            continue
        seen, ddp = run(strategy(transport.rank), transport)
        with case(name):
            assert_follows((values[[transport.rank]] for values in reference(3)), [seen])
        ddp.sync_parameters_()
        sl.check_replicas(ddp.module, group=transport)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("engine", "staleness"), [("gloo", 1), ("shared memory", 3)])
def test_a_stale_server_in_processes_ends_where_all_updates_lead(engine: str, staleness: int) -> None:
    """With gradients that do not depend on the parameters, the end does not depend on who was when where."""
    transport = engine_of(engine)
    module = nn.Linear(50, 30, bias=False).double()
    nn.init.zeros_(module.weight)
    ddp = sl.DistributedDataParallel(module, process_group=transport, strategy=sl.ParameterServer(staleness))
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for step in range(30):
        optimizer.zero_grad()
        for _ in range(1 + 5 * (step % 3 == transport.rank)):  # each is slow at times
            loss = ddp(torch.full((1, 50), transport.rank + step, dtype=torch.float64)).sum()
        loss.backward()
        optimizer.step()
    ddp.sync_parameters_()
    sl.check_replicas(module, group=transport)
    expected = -0.1 * sum(step + 1.0 for step in range(30))
    torch.testing.assert_close(module.weight.detach(), torch.full_like(module.weight, expected))


def test_alone_diloco_is_lookahead() -> None:
    before = transport_of(None).statistics()  # one transport serves all that is done alone
    seen, ddp = run(sl.DiLoCo(4))
    assert_follows(reference_diloco(1, 4, 0.7, 0.9, 0), [seen])
    assert (ddp.statistics() - before).total_bytes == 0
