"""Chain: what one compression would send is encoded by the next."""

from __future__ import annotations

from typing import Any

from torch import Tensor

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
)

__all__ = ["Chain"]

_GIVES = {
    "means": "fewer values to be averaged",
    "rows": "values to be gathered",
    "codes": "codes, which are not values",
}


class Chain(Composed):
    """Compressions one behind the other: `Chain(PowerSGD(2), Cast())`, `Chain(TopK(0.01), Quantize(8))`.

    What all stages together lose is fed back before the first, if any of them asks for it: one copy of the values is
    kept, however many stages there are.

    Args:
        stages: two or more compressions. After PowerSGD any other may follow; after TopK one that encodes values
            without averaging them (Cast, Quantize); after these nothing.

    Raises:
        TypeError: a stage is no compression.
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
            raise ValueError(
                f"expected stages to be two or more compressions, got {len(flat)}: use it by itself"
            )
        for position in range(1, len(flat)):
            _check_that_it_follows(flat[position], flat[position - 1])
        self._stages = tuple(flat)

    @property
    def stages(self) -> tuple[Compression, ...]:
        """At least two, none of them a chain."""
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
    """The first stage's generator runs; where it asks for a mean or for values, the rest of the chain answers."""

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
