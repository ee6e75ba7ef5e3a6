"""The table of what benchmarks/strategies.py measures. Edit it: a setting that has changed is measured anew.

Learning rates are the peak of the schedule, each the best of what was tried for that setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import syncline as sl
from syncline.compression import After, Cast, Chain, Compression, PowerSGD, Quantize, TopK
from syncline.strategies import Strategy

__all__ = ["BAR", "SETTINGS", "Setting"]

BAR = "every-step"
EVERY_STEP = sl.EveryStep()

OuterFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def nesterov(learning_rate: float, momentum: float) -> OuterFactory:
    """DiLoCo's outer optimizer."""
    return partial(torch.optim.SGD, lr=learning_rate, momentum=momentum, nesterov=True)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to synchronize."""

    name: str
    gpt: float = 0.006
    """The GPT's peak learning rate."""
    python: float = 0.006
    """The GPT's, on Python code."""
    mnist: float = 0.006
    """The CNN's."""
    strategy: Strategy[Any] = EVERY_STEP
    compression: Compression | None = None
    """Of gradients, where the strategy averages any."""
    alone: float = 1.0
    """What the learning rate is multiplied by from the end of the warm-up on, when ranks step alone."""
    decay: float | None = None
    """What 1 - beta1 of AdamW is multiplied by when ranks step alone. None: the betas stay as they are."""

    def learning_rate(self, task: str) -> float:
        """By the task's name."""
        return {"gpt": self.gpt, "python": self.python, "mnist": self.mnist}[task]

    @property
    def num_together(self) -> int:
        """Steps of the synchronous warm-up."""
        return getattr(self.strategy, "warmup", 0)

    def factor(self, step: int) -> float:
        """Of the learning rate at `step`, from 0."""
        return 1.0 if step < self.num_together else self.alone

    def betas(self, beta1: float, beta2: float, num_ranks: int) -> tuple[float, float]:
        """AdamW's when ranks step alone. A rank then sees one n-th of the samples in a step, so that its second moments
        average over n times the steps, and over the same number of samples as before."""
        if self.decay is None:
            return beta1, beta2
        return 1 - self.decay * (1 - beta1), beta2 ** (1 / num_ranks)


OUTER_RATE = 0.7
AVERAGE = partial(torch.optim.SGD, lr=1.0)
"""With this as its outer optimizer DiLoCo is local SGD, whose averages can be encoded."""
DOUBLE = 2.0
"""Four ranks that step alone see gradients of twice the noise, so Adam's steps have half the signal; and what they
learn is averaged, which takes half the noise out. Twice the learning rate makes up for both."""


def diloco(
    every: int, bits: Literal[8, 4, 2] | None, *, momentum: float = 0.8, warmup: int = 0, **how: Any
) -> sl.DiLoCo:
    """Outer gradients of so many bits; None: as they are."""
    compression = Quantize(bits) if bits else None
    return sl.DiLoCo(
        every, outer=nesterov(OUTER_RATE, momentum), compression=compression, warmup=warmup, **how
    )


WARM: tuple[tuple[int, Literal[8, 4, 2], int, float, float], ...] = (
    (10, 4, 400, 0.8, 0.012),  # steps, bits, warm-up, outer momentum, the CNN's rate: 23 times fewer bytes
    (11, 4, 100, 0.8, 0.006),  # 51
    (16, 2, 18, 0.75, 0.006),  # 203
    (21, 2, 42, 0.8, 0.006),  # 201
)

SETTINGS = (
    Setting(name=BAR, mnist=0.012),
    # every step, fewer bits
    Setting(name="bf16", compression=Cast()),
    Setting(name="int8", compression=Quantize(8)),
    Setting(name="4-bit", compression=Quantize(4)),
    Setting(name="2-bit", compression=Quantize(2)),
    # fewer meetings
    Setting(name="local-8", strategy=sl.LocalSGD(8), alone=DOUBLE),
    Setting(
        name="local-8-4bit-warm-440",
        strategy=sl.DiLoCo(8, outer=AVERAGE, compression=Quantize(4), warmup=440),
        compression=Quantize(4),
        alone=DOUBLE,
    ),
    Setting(name="diloco-20", strategy=diloco(20, None)),
    Setting(name="diloco-50", strategy=diloco(50, None)),
    Setting(name="diloco-20-4bit", strategy=diloco(20, 4)),
    # a synchronous start whose gradients travel encoded, then outer gradients in as many bits
    *(
        Setting(
            name=f"diloco-{every}-{bits}bit-warm-{warmup}",
            strategy=diloco(every, bits, momentum=momentum, warmup=warmup),
            compression=Quantize(bits),
            mnist=mnist,
        )
        for every, bits, warmup, momentum, mnist in WARM
    ),
    # the shortest start, with what suits ranks that step alone: a higher rate, less momentum, a longer memory
    Setting(
        name="diloco-14-2bit-warm-5",
        mnist=0.012,
        strategy=diloco(14, 2, warmup=5),
        compression=Quantize(2),
        alone=2**0.5,
        decay=5,
    ),
    # the same in fragments, whose averages travel while the ranks go on
    Setting(
        name="streaming-24-2bit-warm-42",
        strategy=diloco(24, 2, warmup=42, fragments=4, delay=2),
        compression=Quantize(2),
    ),
    # low-rank gradients
    Setting(name="powersgd-4-bf16", gpt=0.008, compression=Chain(PowerSGD(4), Cast())),
    Setting(
        name="powersgd-4-int8-after-400",
        compression=After(400, Chain(PowerSGD(4), Quantize(8)), before=Quantize(4)),
    ),
    # few values
    Setting(name="topk-1%-int8", compression=Chain(TopK(0.01), Quantize(8))),
    # no collective at all
    Setting(name="gossip-8", strategy=sl.Gossip("exponential", every=8), alone=DOUBLE),
    Setting(name="server-2", strategy=sl.ParameterServer(staleness=2)),
)
