"""The interface of compressions: a description, the encoder that it makes, and the encoder's requests to its peers.

Averaging one flat tensor is a generator: it yields requests and receives replies. Therefore encodings need neither a
transport nor processes, and can be tested by plain calls. In a chain, later stages answer the requests of earlier ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

# ---------------------------------------------------------------------- requests of an encoder to its peers


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A request for the mean of `values` over all ranks. The reply is an `Averaged`. A later stage may encode it."""

    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A request for the sum of `codes` over all ranks, without further encoding. The reply is the tensor."""

    codes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A request for every rank's `values`, which a later stage may encode, and `beside`. The reply is a `Gathered`."""

    values: Tensor
    beside: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """A request to send row r of `rows` to rank r. Row s of the reply is from rank s. The own row is not sent."""

    rows: Tensor


Request = Mean | Sum | Gather | AllToAll


class Averaged(NamedTuple):
    """An approximate mean over all ranks."""

    mean: Tensor
    """The mean, the same bits on all ranks."""
    lost: Tensor | None = None
    """This rank's part of the error: the mean over ranks of (values - lost) is `mean`. None: no error."""


class Gathered(NamedTuple):
    """The values of all ranks, in rank order, the same bits on all ranks."""

    values: Tensor
    """The values, of shape (num_ranks, numel)."""
    beside: Tensor | None
    """The tensors that travelled beside the values, of shape (num_ranks, numel of `beside`)."""


Averaging = Generator[Request, Any, Averaged]
"""One averaging in progress: it yields requests and receives replies. Yielded tensors must not be used again."""


def plain_mean(values: Tensor) -> Averaging:
    """Average values without encoding."""
    averaged: Averaged = yield Mean(values)
    return averaged


# ---------------------------------------------------------------------- the layout of an encoder


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one flat tensor that is averaged repeatedly: tensors of some shapes, one after the other."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    """The type for computation: float32 or float64."""
    device: torch.device
    rank: int
    num_ranks: int

    @property
    def numels(self) -> list[int]:
        """Number of elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Number of elements of the flat tensor."""
        return sum(self.numels)

    def flat(self, numel: int) -> Layout:
        """Return this layout with one vector of `numel` elements in place of the tensors."""
        return replace(self, shapes=((numel,),))


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors of `dtype` are encoded and averaged: float32 or wider.

    Raises:
        ValueError: `dtype` is not a real floating-point type.
    """
    if not dtype.is_floating_point:
        raise ValueError(
            f"expected tensors of real floating numbers to compress, got {dtype}: leave them out (ignore=), or use no "
            "compression"
        )
    return torch.float64 if dtype is torch.float64 else torch.float32


# ---------------------------------------------------------------------- encodings


class Encoder(ABC):
    """The encoder of one compression for one flat tensor on one rank, with its state between averagings.

    Args:
        layout: the layout of the flat tensor.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @abstractmethod
    def mean(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        """Average `values`, of shape (numel,), which are consumed; with `wants_lost` also return what was lost."""

    def means(self) -> tuple[Layout, ...]:
        """Return the layouts of the `Mean` requests of one averaging, in order; a later stage encodes these."""
        return ()

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the state of each tensor of the layout, by name. Callers may read these tensors and copy into them."""
        return [{} for _ in self.layout.shapes]


class Compression(ABC):
    """An encoding of flat tensors that are averaged over ranks: a frozen dataclass that compares by its values."""

    is_lossy: ClassVar[bool] = True
    """Whether the mean may differ from that of the values by more than rounding."""
    is_linear: ClassVar[bool]
    """Whether encoded forms can be added up, so that an all_reduce can carry them and bytes do not grow with ranks."""
    is_order_dependent: ClassVar[bool] = False
    """Whether the position of a value matters. Such a compression needs whole weight matrices, so it comes first."""
    gives: ClassVar[str]
    """The form of its output: "means" (fewer values, whose mean it needs), "rows" (fewer values, which it needs from
    every rank) or "codes" (not values, so that no other compression can follow)."""

    @abstractmethod
    def encoder(self, layout: Layout) -> Encoder:
        """Return an encoder for tensors of this layout."""

    @property
    def feeds_back(self) -> bool:
        """Whether losses are added to the next values (error feedback)."""
        return bool(getattr(self, "error_feedback", False))

    def __str__(self) -> str:
        """Return the type with its first value, and with the others that differ from their default."""
        first, *others = fields(self)  # type: ignore[arg-type]
        shown = [first, *(f for f in others if getattr(self, f.name) != f.default)]
        values = [(f.name, getattr(self, f.name)) for f in shown]
        inside = ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in values)
        return f"{type(self).__name__}({inside})"

    def in_words(self) -> str:
        """Return the text form, by which ranks compare their compressions.

        Example:
            >>> from syncline.compression import PowerSGD
            >>> PowerSGD(rank=2).in_words()
            'PowerSGD(rank=2) with error feedback'
        """
        return f"{self} with error feedback" if self.feeds_back else str(self)


class Composed(Compression):
    """A compression made of others, with the properties that follow from theirs."""

    @property
    @abstractmethod
    def stages(self) -> tuple[Compression, ...]:
        """The compressions that it is made of."""

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
    """A compression that can also encode values without averaging them, so that it can follow one with "rows"."""

    gives = "codes"

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Return values of shape (numel,) as a flat tensor of codes, whose length depends on numel only."""

    @abstractmethod
    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return codes of shape (rows, n) as values of shape (rows, numel)."""
