"""Compressions made of others.

`Chain` encodes the output of one compression by the next. `After` uses one compression at first and another for the
rest of the training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncline.checks import checked_count, store
from syncline.compression.base import (
    Averaged,
    Averaging,
    Codec,
    Composed,
    Compression,
    Encoder,
    Gather,
    Gathered,
    Layout,
    Mean,
    plain_mean,
)

_GIVES = {
    "means": "fewer values to be averaged",
    "rows": "values to be gathered",
    "codes": "codes, which are not values",
}


class Chain(Composed):
    """A sequence of compressions: `Chain(PowerSGD(2), Cast())`, `Chain(TopK(0.01), Quantize(8))`.

    If any stage uses error feedback, the loss of all stages together is fed back before the first. This takes one copy
    of the values, however many stages there are.

    Args:
        stages: two or more compressions. PowerSGD may be followed by any other. TopK may be followed by one that
            encodes values without averaging them (Cast, Quantize). These may not be followed by any.

    Raises:
        TypeError: a stage is not a compression.
        ValueError: the stages cannot follow one another.

    Example:
        >>> from syncline.compression import Cast, PowerSGD, Quantize
        >>> Chain(PowerSGD(2), Cast()).in_words()
        'Chain(PowerSGD(rank=2), Cast(dtype=bfloat16)) with error feedback'
        >>> Chain(Quantize(8), Cast())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Cast(dtype=bfloat16) cannot follow Quantize(bits=8), which gives codes, which are not values: ...
    """

    def __init__(self, *stages: Compression) -> None:
        flat: list[Compression] = []
        for stage in stages:
            if not isinstance(stage, Compression):
                raise TypeError(f"expected stages to be compressions, got {stage!r}")
            flat += stage.stages if isinstance(stage, Chain) else [stage]
        if len(flat) < 2:
            raise ValueError(f"expected stages to be two or more compressions, got {len(flat)}: use it alone")
        for position in range(1, len(flat)):
            _check_that_it_follows(flat[position], flat[position - 1])
        self._stages = tuple(flat)

    @property
    def stages(self) -> tuple[Compression, ...]:
        """The stages, at least two, none of them a chain."""
        return self._stages

    @property
    def is_order_dependent(self) -> bool:  # type: ignore[override]
        return self.stages[0].is_order_dependent

    @property
    def gives(self) -> str:  # type: ignore[override]
        return self.stages[-1].gives

    def encoder(self, layout: Layout) -> Encoder:
        return _ChainEncoder(self.stages, layout)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash((Chain, self.stages))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.stages))})"

    def __str__(self) -> str:
        return f"Chain({', '.join(map(str, self.stages))})"


def _check_that_it_follows(stage: Compression, before: Compression) -> None:
    if before.gives == "codes":
        why, remedy = _GIVES["codes"], f"{type(before).__name__} comes last"
    elif stage.is_order_dependent:
        why = f"{_GIVES[before.gives]} that no longer stand in whole matrices"
        remedy = f"{type(stage).__name__} comes first"
    elif before.gives == "rows" and not isinstance(stage, Codec):
        why, remedy = _GIVES["rows"], f"after {type(before).__name__} only Cast or Quantize can come"
    else:
        return
    raise ValueError(f"{stage} cannot follow {before}, which gives {why}: {remedy}")


class _ChainEncoder(Encoder):
    """Runs the first stage's generator, and answers its requests for means or values with the rest of the chain."""

    def __init__(self, stages: tuple[Compression, ...], layout: Layout) -> None:
        super().__init__(layout)
        self._first = stages[0].encoder(layout)
        rest = stages[1] if len(stages) == 2 else Chain(*stages[1:])
        self._of_means = [rest.encoder(inner) for inner in self._first.means()]
        self._of_rows = rest if isinstance(rest, Codec) else None

    def memory(self) -> list[dict[str, Tensor]]:
        return self._first.memory()

    def mean(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        stage = self._first.mean(values, wants_lost=wants_lost)
        encoders = iter(self._of_means)
        reply: Any = None
        while True:
            try:
                request = stage.send(reply)
            except StopIteration as ended:
                averaged: Averaged = ended.value
                return averaged
            if isinstance(request, Mean):
                reply = yield from next(encoders).mean(request.values, wants_lost=wants_lost)
            elif isinstance(request, Gather) and self._of_rows is not None:
                codes = yield Gather(self._of_rows.encode(request.values), request.beside)
                numel, dtype = request.values.numel(), request.values.dtype
                reply = Gathered(self._of_rows.decode(codes.values, numel, dtype), codes.beside)
            else:
                reply = yield request


@dataclass(frozen=True)
class After(Composed):
    """A compression that starts after some averagings: `After(400, PowerSGD(4), before=Quantize(4))`.

    Early gradients are large, change fast, and matter more than later ones, so a coarse approximation of them costs
    more than it saves. Therefore `PowerSGD` is usually switched on late ("deferring"; torch's `start_powerSGD_iter`
    does this by keeping the first steps exact). With error feedback, what was lost before the switch is fed back after
    it.

    Args:
        num_averagings: number of averagings by `before`. This is a number of optimizer steps if gradients are averaged
            once per step.
        then: the compression after that.
        before: the compression up to there; None for no compression.

    Raises:
        ValueError: `num_averagings` is below 1.
        TypeError: `num_averagings` is not an integer; or `then` or `before` is not a compression, or is an `After`.

    Example:
        >>> from syncline.compression import PowerSGD, Quantize
        >>> print(After(400, PowerSGD(4), before=Quantize(4)))
        After(400, PowerSGD(rank=4), before=Quantize(bits=4))
    """

    num_averagings: int
    then: Compression
    before: Compression | None = field(default=None, kw_only=True)

    # In a chain the form of its output would change during training, and one of the two may need whole matrices.
    # These settings keep it out of chains.
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
    """Sends the first averages through `before`, or unencoded without it, and later ones through `then`."""

    def __init__(self, after: After, layout: Layout) -> None:
        super().__init__(layout)
        self._num_averagings = after.num_averagings
        self._then = after.then.encoder(layout)
        self._before = None if after.before is None else after.before.encoder(layout)
        # A tensor, so that it is saved and loaded with the others. On the CPU, because it is read in each averaging.
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
