"""Compressions that are made of other compressions.

`Chain` encodes the output of one compression by the next. `After` uses one compression for the first averagings, and
another one for the rest of the training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from syncline.checks import checked_count, store, suggests_arguments
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
    encoder_of,
)

_GIVES = {
    "means": "fewer values, which are averaged",
    "rows": "fewer values, which are gathered",
    "codes": "codes, not values",
}


@dataclass(frozen=True, init=False, repr=False)
class Chain(Composed):
    """A sequence of compressions. Each compression encodes the output of the compression before it.

    Two examples are `Chain(PowerSGD(2), Cast())` and `Chain(TopK(0.01), Quantize(8))`. If any stage uses error
    feedback, the error of all stages together is added to the next values before the first stage. This takes memory for
    one copy of the values, for any number of stages.

    Args:
        stages: two or more compressions. Any other compression may follow PowerSGD. Only compressions that encode
            values without averaging them (Cast, Quantize) may follow TopK. No compression may follow Cast or Quantize.

    Raises:
        TypeError: a stage is not a compression.
        ValueError: there are fewer than two stages, or a stage cannot follow the stage before it.

    Examples:
        >>> from syncline.compression import Cast, PowerSGD, Quantize
        >>> Chain(PowerSGD(2), Cast()).in_words()
        'Chain(PowerSGD(rank=2), Cast(dtype=bfloat16)) with error feedback'
        >>> Chain(Quantize(8), Cast())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Cast(dtype=bfloat16) cannot follow Quantize(bits=8), whose output is codes, not values. ...
    """

    stages: tuple[Compression, ...]
    """The stages of the chain. There are at least two, and none of them is a chain."""

    def __init__(self, *stages: Compression) -> None:
        flat: list[Compression] = []
        for stage in stages:
            if not isinstance(stage, Compression):
                raise TypeError(
                    f"Chain: expected stages to be compressions such as Quantize(8), got {stage!r}"
                )
            flat += stage.stages if isinstance(stage, Chain) else [stage]
        if len(flat) < 2:
            raise ValueError(
                f"sl.compression.Chain: expected two or more compressions as `stages`, got {len(flat)}. A single "
                "compression needs no Chain"
            )
        for before, after in pairwise(flat):
            _check_order(before, after)
        store(self, stages=tuple(flat))

    @property
    def is_order_dependent(self) -> bool:  # type: ignore[override]
        return self.stages[0].is_order_dependent

    @property
    def gives(self) -> str:  # type: ignore[override]
        return self.stages[-1].gives

    def encoder(self, layout: Layout) -> Encoder:
        return _ChainEncoder(self.stages, layout)

    def __str__(self) -> str:
        return f"Chain({', '.join(map(str, self.stages))})"


def _check_order(stage: Compression, after: Compression) -> None:
    """Raise ValueError if the compression `after` cannot encode the output of `stage`."""
    if stage.gives == "codes":
        why, remedy = _GIVES["codes"], f"{type(stage).__name__} can only be the last stage"
    elif after.is_order_dependent:
        why = f"{_GIVES[stage.gives]} and no longer form whole matrices"
        remedy = f"{type(after).__name__} can only be the first stage"
    elif stage.gives == "rows" and not isinstance(after, Codec):
        why, remedy = _GIVES["rows"], f"Only Cast or Quantize can follow {type(stage).__name__}"
    else:
        return
    raise ValueError(f"{after} cannot follow {stage}, whose output is {why}. {remedy}")


class _ChainEncoder(Encoder):
    """The encoder of a chain.

    It runs the encoder of the first stage. The later stages encode the values in the requests of that encoder.
    """

    def __init__(self, stages: tuple[Compression, ...], layout: Layout) -> None:
        super().__init__(layout)
        self._first = stages[0].encoder(layout)
        rest = stages[1] if len(stages) == 2 else Chain(*stages[1:])
        self._of_means = [rest.encoder(inner) for inner in self._first.means()]
        self._of_rows = rest if isinstance(rest, Codec) else None

    def memory_of(self, index: int) -> dict[str, Tensor]:
        return self._first.memory_of(index)

    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        stage = self._first.mean(values, residual=residual, lost=lost)
        encoders = iter(self._of_means)
        reply: Any = None
        while True:
            try:
                request = stage.send(reply)
            except StopIteration as ended:
                mean: Tensor = ended.value
                return mean
            if isinstance(request, Mean):
                lost_later = None if lost is None else torch.empty_like(request.values)
                later = next(encoders).mean(request.values, residual=None, lost=lost_later)
                reply = Averaged((yield from later), lost_later)
            elif isinstance(request, Gather) and self._of_rows is not None:
                codes = yield Gather(self._of_rows.encode(request.values), request.beside)
                numel, dtype = request.values.numel(), request.values.dtype
                reply = Gathered(self._of_rows.decode(codes.values, numel, dtype), codes.beside)
            else:
                reply = yield request


@suggests_arguments
@dataclass(frozen=True, repr=False)
class After(Composed):
    """A compression that runs one compression for the first averagings, and a second one for all later averagings.

    `sl.compression.After(400, PowerSGD(4), before=Quantize(4))` averages 400 times by Quantize(4), and then by
    PowerSGD(4).

    Early gradients are large, change fast, and matter more than later ones, so a coarse approximation of them does more
    harm than good. Therefore training with `PowerSGD` usually starts with exact averages. torch's hook has the argument
    `start_powerSGD_iter` for the same purpose. With error feedback, the error of the last averaging by the first
    compression is added to the values of the first averaging by the second compression.

    Args:
        num_averagings: the number of averagings by the first compression. If gradients are averaged once per optimizer
            step, this is a number of steps.
        then: the second compression, for all later averagings.
        before: the first compression; None to send the first averagings without compression.

    Raises:
        ValueError: `num_averagings` is below 1.
        TypeError: `num_averagings` is not an integer, or `then` or `before` is not a compression, or is itself an
            instance of `sl.compression.After`.

    Examples:
        >>> from syncline.compression import PowerSGD, Quantize
        >>> print(After(400, PowerSGD(4), before=Quantize(4)))
        After(400, PowerSGD(rank=4), before=Quantize(bits=4))
    """

    num_averagings: int
    then: Compression
    before: Compression | None = field(default=None, kw_only=True)
    stages: tuple[Compression, ...] = field(init=False, compare=False)

    # An After cannot be in a chain: the form of its output would change during training, and one of its two
    # compressions may need whole matrices. These two values make Chain refuse it.
    is_order_dependent = True
    gives = "codes"

    def __post_init__(self) -> None:
        store(self, num_averagings=checked_count("num_averagings", self.num_averagings, at_least=1))
        for name, stage in (("then", self.then), ("before", self.before)):
            is_missing = stage is None and name == "before"
            if not is_missing and (not isinstance(stage, Compression) or isinstance(stage, After)):
                raise TypeError(
                    f"sl.compression.After: expected {name} to be a compression other than After, got {stage!r}"
                )
        store(self, stages=(self.then,) if self.before is None else (self.then, self.before))

    def encoder(self, layout: Layout) -> Encoder:
        return _AfterEncoder(self, layout)

    def __str__(self) -> str:
        before = "" if self.before is None else f", before={self.before}"
        return f"After({self.num_averagings}, {self.then}{before})"


class _AfterEncoder(Encoder):
    """The encoder of `sl.compression.After`. After `num_averagings` averagings, it changes to the second encoder."""

    def __init__(self, after: After, layout: Layout) -> None:
        super().__init__(layout)
        self._num_averagings = after.num_averagings
        self._then = encoder_of(after.then, layout)
        self._before = encoder_of(after.before, layout)
        # A tensor, so that it is saved and loaded with the others. On the CPU, because it is read in each averaging.
        self._count = torch.zeros((), dtype=torch.int64, device="cpu")

    def memory_of(self, index: int) -> dict[str, Tensor]:
        before = self._before.memory_of(index)
        return (
            self._then.memory_of(index)
            | {"num_averagings": self._count}
            | {f"before_{name}": tensor for name, tensor in before.items()}
        )

    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        encoder = self._before if self._count.item() < self._num_averagings else self._then
        self._count += 1
        return encoder.mean(values, residual=residual, lost=lost)
