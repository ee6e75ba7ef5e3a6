"""The table of what benchmarks/strategies.py measures. Edit it: a setting that has changed is measured anew.

Learning rates are the peak of the schedule, each the best of what was tried for that setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import syncline as sl
from syncline.compression import Cast, Chain, Compression, PowerSGD, Quantize, TopK
from syncline.strategy import Strategy

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
    gpt: float
    """The GPT's peak learning rate."""
    mnist: float = 0.006
    """The CNN's."""
    strategy: Strategy[Any] = EVERY_STEP
    compression: Compression | None = None
    """Of gradients, where the strategy averages any."""

    def learning_rate(self, task: str) -> float:
        """By the task's name."""
        return {"gpt": self.gpt, "mnist": self.mnist}[task]


OUTER = nesterov(0.7, 0.8)
OUTER_WARM = nesterov(1.0, 0.5)

SETTINGS = (
    Setting(name=BAR, gpt=0.008),
    # fewer meetings
    Setting(name="local-8", gpt=0.008, strategy=sl.LocalSGD(8)),
    Setting(name="local-16", gpt=0.008, strategy=sl.LocalSGD(16)),
    Setting(name="diloco-20", gpt=0.008, strategy=sl.DiLoCo(20, outer=OUTER)),
    Setting(name="diloco-50", gpt=0.008, strategy=sl.DiLoCo(50, outer=OUTER)),
    Setting(name="diloco-20-4bit", gpt=0.008, strategy=sl.DiLoCo(20, outer=OUTER, compression=Quantize(4))),
    Setting(
        name="streaming-30-4bit",
        gpt=0.008,
        strategy=sl.DiLoCo(30, outer=OUTER, fragments=3, delay=2, compression=Quantize(4)),
    ),
    # the same, after a synchronous start whose gradients travel in 4 bits
    Setting(
        name="diloco-20-warm",
        gpt=0.008,
        strategy=sl.DiLoCo(20, outer=OUTER_WARM, warmup=60),
        compression=Quantize(4),
    ),
    Setting(
        name="diloco-30-4bit-warm",
        gpt=0.008,
        strategy=sl.DiLoCo(30, outer=OUTER_WARM, compression=Quantize(4), warmup=60),
        compression=Quantize(4),
    ),
    # fewer bytes of gradients
    Setting(name="powersgd-2", gpt=0.008, compression=PowerSGD(2)),
    Setting(name="powersgd-4", gpt=0.008, compression=PowerSGD(4)),
    Setting(name="powersgd-2-bf16", gpt=0.008, compression=Chain(PowerSGD(2), Cast())),
    Setting(name="powersgd-4-bf16", gpt=0.008, compression=Chain(PowerSGD(4), Cast())),
    Setting(name="bf16", gpt=0.008, compression=Cast()),
    Setting(name="int8", gpt=0.008, compression=Quantize(8)),
    Setting(name="4-bit", gpt=0.008, compression=Quantize(4)),
    Setting(name="topk-1%", gpt=0.008, compression=TopK(0.01)),
    Setting(name="topk-1%-int8", gpt=0.008, compression=Chain(TopK(0.01), Quantize(8))),
    # no collective at all
    Setting(name="gossip", gpt=0.008, strategy=sl.Gossip("exponential")),
    Setting(name="server-2", gpt=0.008, strategy=sl.ParameterServer(staleness=2)),
)
