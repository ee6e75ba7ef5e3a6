"""After: one compression to begin with, another for the rest of the training."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.compression.base import Averaging, Composed, Compression, Encoder, Layout, plain_mean
from syncline.given import checked_count, store

__all__ = ["After"]


@dataclass(frozen=True)
class After(Composed):
    """A compression that begins after some averagings: `After(400, PowerSGD(4), before=Quantize(4))`.

    Early gradients are large, change fast, and decide more than those to come: what is approximated coarsely then
    costs more than it saves. So `PowerSGD` is usually switched on late ("deferring", as torch's
    `start_powerSGD_iter` does by keeping the first steps exact). With error feedback, what was lost before the
    switch is fed back after it.

    Args:
        num_averagings: how often the mean is formed by `before`; steps of the optimizer, where gradients are averaged
            once a step.
        then: the compression from there on.
        before: the one up to there; None: values travel as they are.

    Raises:
        ValueError: `num_averagings` below 1.
        TypeError: `num_averagings` is no integer; one of the two is no compression, or is an `After`.

    Example:
        >>> from syncline.compression import PowerSGD, Quantize
        >>> print(After(400, PowerSGD(4), before=Quantize(4)))
        After(400, PowerSGD(rank=4), before=Quantize(bits=4))
    """

    num_averagings: int
    then: Compression
    before: Compression | None = field(default=None, kw_only=True)

    # What it gives changes in the middle, and where values stand may matter for one of the two: so it stands alone.
    is_order_dependent = True
    gives = "codes"

    def __post_init__(self) -> None:
        store(self, num_averagings=checked_count("num_averagings", self.num_averagings, at_least=1))
        for name, stage in (("then", self.then), ("before", self.before)):
            if stage is None and name == "before":
                continue
            if not isinstance(stage, Compression) or isinstance(stage, After):
                raise TypeError(f"expected {name} to be a compression other than After, got {stage!r}")

    @property
    def stages(self) -> tuple[Compression, ...]:
        return (self.then,) if self.before is None else (self.then, self.before)

    def encoder(self, layout: Layout) -> Encoder:
        return _AfterEncoder(self, layout)

    def __str__(self) -> str:
        before = "" if self.before is None else f", before={self.before}"
        return f"After({self.num_averagings}, {self.then}{before})"


class _AfterEncoder(Encoder):
    """Counts, and asks one encoder or the other."""

    def __init__(self, after: After, layout: Layout) -> None:
        super().__init__(layout)
        self._num_averagings = after.num_averagings
        self._then = after.then.encoder(layout)
        self._before = None if after.before is None else after.before.encoder(layout)
        # A tensor, because it is saved and loaded beside the others; never on the device, for it is read each time.
        self._count = torch.zeros((), dtype=torch.int64)

    def memory(self) -> list[dict[str, Tensor]]:
        kept = [dict(tensors) for tensors in self._then.memory()]
        for tensors in kept:
            tensors["num_averagings"] = self._count
        if self._before is not None:
            for tensors, before in zip(kept, self._before.memory(), strict=True):
                tensors.update((f"before_{name}", tensor) for name, tensor in before.items())
        return kept

    def mean(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        is_before = self._count.item() < self._num_averagings
        self._count += 1
        if not is_before:
            return self._then.mean(values, wants_lost=wants_lost)
        if self._before is not None:
            return self._before.mean(values, wants_lost=wants_lost)
        return plain_mean(values)
