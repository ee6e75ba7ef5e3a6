"""What an encoding is: a description, an encoder that it makes, and the requests by which an encoder talks to peers.

Averaging one flat tensor is a generator: it yields requests and is sent replies, so encodings know neither transport
nor rank processes, and are tested by plain calls. In a chain, later stages answer what earlier ones yield.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AllToAll",
    "Averaged",
    "Averaging",
    "Codec",
    "Composed",
    "Compression",
    "Encoder",
    "Gather",
    "Gathered",
    "Layout",
    "Mean",
    "Request",
    "Sum",
    "computing_dtype",
    "plain_mean",
]


# ---------------------------------------------------------------------- what an encoder asks of its peers


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """The mean of `values` over all ranks; the reply is an `Averaged`. A later stage may encode it."""

    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """The sum of `codes` over all ranks, as they are; the reply is the tensor."""

    codes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Every rank's `values`, which a later stage may encode, and what travels beside them; the reply is `Gathered`."""

    values: Tensor
    beside: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Row r of `rows` goes to rank r; the reply has the row from rank s in row s. One's own row is not sent."""

    rows: Tensor


Request = Mean | Sum | Gather | AllToAll


class Averaged(NamedTuple):
    """The mean of something over all ranks, as far as it came through."""

    mean: Tensor
    """The same bits on all ranks."""
    lost: Tensor | None = None
    """This rank's part of what did not come through: mean over ranks of (values - lost) is `mean`. None: nothing."""


class Gathered(NamedTuple):
    """What all ranks gave, in rank order, the same bits on all ranks."""

    values: Tensor
    """(num_ranks, numel)"""
    beside: Tensor | None
    """(num_ranks, numel of it)"""


Averaging = Generator[Request, Any, Averaged]
"""One averaging under way: it yields requests and is sent their replies. Tensors that are yielded are given away."""


def plain_mean(values: Tensor) -> Averaging:
    """The mean of values that travel as they are."""
    averaged: Averaged = yield Mean(values)
    return averaged


# ---------------------------------------------------------------------- what an encoder is made for


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One flat tensor that is averaged again and again: tensors of some shapes, one behind the other."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    """What is computed in: float32 or float64."""
    device: torch.device
    rank: int
    num_ranks: int

    @property
    def numels(self) -> list[int]:
        """Elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return sum(self.numels)

    def flat(self, numel: int) -> Layout:
        """One vector in the place of the tensors."""
        return replace(self, shapes=((numel,),))


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what tensors of a dtype are encoded and averaged: float32 at least.

    Raises:
        ValueError: there is no mean of it, or none that could be encoded.
    """
    if not dtype.is_floating_point:
        raise ValueError(
            f"expected tensors of real floating numbers to compress, got {dtype}: leave them out (ignore=), or use no "
            "compression"
        )
    return torch.float64 if dtype is torch.float64 else torch.float32


# ---------------------------------------------------------------------- encodings


class Encoder(ABC):
    """One compression at work on one flat tensor, on one rank, with what it keeps from one averaging to the next.

    Args:
        layout: what it is made for.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @abstractmethod
    def mean(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        """Average `values`, of shape (numel,), which are given away; `wants_lost`: say also what was lost."""

    def means(self) -> tuple[Layout, ...]:
        """What its `Mean` requests ask for in one averaging, in order: for these a later stage is made."""
        return ()

    def memory(self) -> list[dict[str, Tensor]]:
        """What it keeps of each tensor of the layout, by name; to be read and to be copied into."""
        return [{} for _ in self.layout.shapes]


class Compression(ABC):
    """How a flat tensor is encoded to be averaged over ranks: a frozen dataclass, equal to others of its values."""

    is_lossy: ClassVar[bool] = True
    """Whether the mean may differ from that of the values by more than rounding."""
    is_linear: ClassVar[bool]
    """Whether encoded forms can be added up, so that an all_reduce carries them and bytes do not grow with ranks."""
    is_order_dependent: ClassVar[bool] = False
    """Whether it matters where a value stands: it needs whole weight matrices, so nothing may come before it."""
    gives: ClassVar[str]
    """What it makes of values: "means" (fewer values, of which it needs the mean), "rows" (fewer values, of which it
    needs every rank's) or "codes" (no values: nothing can follow)."""

    @abstractmethod
    def encoder(self, layout: Layout) -> Encoder:
        """What encodes tensors of this layout."""

    @property
    def feeds_back(self) -> bool:
        """Whether what was lost is added to what is averaged next."""
        return bool(getattr(self, "error_feedback", False))

    def __str__(self) -> str:
        """The first of its values, and those that are not the default."""
        first, *others = fields(self)  # type: ignore[arg-type]
        shown = [first, *(f for f in others if getattr(self, f.name) != f.default)]
        values = [(f.name, getattr(self, f.name)) for f in shown]
        inside = ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in values)
        return f"{type(self).__name__}({inside})"

    def in_words(self) -> str:
        """For the contract, by which ranks compare what they were given.

        Example:
            >>> from syncline.compression import PowerSGD
            >>> PowerSGD(rank=2).in_words()
            'PowerSGD(rank=2) with error feedback'
        """
        return f"{self} with error feedback" if self.feeds_back else str(self)


class Composed(Compression):
    """A compression that is made of others, and what follows from theirs."""

    @property
    @abstractmethod
    def stages(self) -> tuple[Compression, ...]:
        """What it is made of."""

    @property
    def is_lossy(self) -> bool:  # type: ignore[override]
        return any(stage.is_lossy for stage in self.stages)

    @property
    def is_linear(self) -> bool:  # type: ignore[override]
        return all(stage.is_linear for stage in self.stages)

    @property
    def feeds_back(self) -> bool:
        return any(stage.feeds_back for stage in self.stages)


class Codec(Compression):
    """A compression that can also encode values without averaging them, so that it can follow one that gives rows."""

    gives = "codes"

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Values of shape (numel,) as a flat tensor of codes, of a length that depends on numel alone."""

    @abstractmethod
    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Codes of shape (rows, n) as values of shape (rows, numel)."""
