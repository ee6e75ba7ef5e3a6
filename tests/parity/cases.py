"""Small models and batches for parity tests, shared by ranks as threads and ranks as processes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from syncline import DistributedDataParallel

NUM_STEPS = 10


class ConvNet(nn.Module):
    """A CNN with BatchNorm; in eval statistics it has no coupling between samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.out = nn.Linear(6 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        return self.out(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1))


class TinyGPT(nn.Module):
    """One causal block over an embedding, with weights tied between embedding and head where asked."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Embedding(6, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.down(F.gelu(self.up(x))))


class MixedDtypes(nn.Module):
    """Two dtypes, so two buckets at least."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, dtype=torch.float32)
        self.second = nn.Linear(10, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.float())).double())


class Net(nn.Module):
    """Three layers, of which the middle one is large enough for a bucket of its own under a small cap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(6, 150), nn.Linear(150, 150), nn.Linear(150, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def batch(step: int, num_features: int = 6) -> Tensor:
    """This rank's, where ranks are processes."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(5, num_features, generator=generator)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    rtol: float
    atol: float


def _images(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 8, 8, generator=g), torch.randint(5, (n,), generator=g)


def _tokens(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (n, 6), generator=g), torch.randint(11, (n, 6), generator=g)


def _vectors(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 6, generator=g), torch.randint(5, (n,), generator=g)


# Why these tolerances: N ranks add the same numbers as one process, in another order. In fp32 one addition is off by
# up to 2**-24 = 6e-8 relative to the largest partial sum; a gradient here sums some hundred terms, of mixed sign, over
# several layers, and ten steps of SGD with momentum carry it on: 1e-5 relative leaves two orders over the error of one
# sum and is a hundred times below the effect of one sample lost (1 / 24). In fp64 the same argument gives 1e-13.
F32 = {"rtol": 1e-5, "atol": 2e-6}
F64 = {"rtol": 1e-11, "atol": 1e-13}
CASES: dict[str, Case] = {
    "cnn": Case(lambda: ConvNet().eval(), _images, **F32),
    "gpt": Case(lambda: TinyGPT(tied=False), _tokens, **F32),
    "tied": Case(lambda: TinyGPT(tied=True), _tokens, **F32),
    "tied, fp64": Case(lambda: TinyGPT(tied=True).double(), _tokens, **F64),
    "mixed dtypes": Case(MixedDtypes, _vectors, **F32),
}


_LOCK = threading.Lock()


def build(name: str) -> nn.Module:
    """The same model on every call; torch's seed is global, and ranks may be threads."""
    with _LOCK:
        torch.manual_seed(1234)
        return CASES[name].build()


def batch_of(name: str, *, step: int, rank: int, num_samples: int) -> tuple[Tensor, Tensor]:
    return CASES[name].batch(num_samples, torch.Generator().manual_seed(1000 * step + rank))


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


State = list[tuple[list[Tensor], list[Tensor]]]


def snapshot(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and parameters, copied."""
    parameters = list(module.parameters())
    return [p.grad.clone() for p in parameters if p.grad is not None], [
        p.detach().clone() for p in parameters
    ]


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def train_synchronized(
    name: str, group: Any, *, rank: int, samples: Callable[[int, int], int], counted: bool, **wrap: Any
) -> State:
    """Gradients and parameters of NUM_STEPS synchronized steps on one rank.

    `samples(step, rank)` is the local batch size. `counted` uses normalize_by with the number of targets;
    otherwise the local mean is averaged, which equals the global mean for equal batches.
    """
    module = copy.deepcopy(build(name))
    ddp = DistributedDataParallel(module, process_group=group, **wrap)
    optimizer = optimizer_for(module)
    states = []
    for step in range(NUM_STEPS):
        x, y = batch_of(name, step=step, rank=rank, num_samples=samples(step, rank))
        optimizer.zero_grad()
        if counted:
            with ddp.normalize_by(y.numel()):
                summed_loss(ddp(x), y).backward()
        else:
            (summed_loss(ddp(x), y) / y.numel()).backward()
        optimizer.step()
        states.append(snapshot(module))
    return states


def train_alone(name: str, *, num_ranks: int, samples: Callable[[int, int], int]) -> State:
    """The same steps in one process, on the concatenated batch."""
    module = build(name)
    optimizer = optimizer_for(module)
    states = []
    for step in range(NUM_STEPS):
        batches = [batch_of(name, step=step, rank=r, num_samples=samples(step, r)) for r in range(num_ranks)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        (summed_loss(module(x), y) / y.numel()).backward()
        optimizer.step()
        states.append(snapshot(module))
    return states


def assert_close(name: str, actual: State, expected: State) -> None:
    case = CASES[name]
    for step, (ours, reference) in enumerate(zip(actual, expected, strict=True)):
        for kind, mine, theirs in zip(("gradient", "parameter"), ours, reference, strict=True):
            assert len(mine) == len(theirs)
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                torch.testing.assert_close(
                    a,
                    b,
                    rtol=case.rtol,
                    atol=case.atol,
                    msg=lambda m, s=step, k=kind, i=i: f"step {s}, {k} {i}: {m}",
                )


def assert_same_bits(first: State, second: State) -> None:
    for ours, theirs in zip(first, second, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
