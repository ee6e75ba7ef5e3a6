"""The interface of compressions: a description, the encoder that it makes, and the encoder's requests to its peers.

An encoder averages one flat tensor by a generator, which yields requests to the other ranks and receives their replies.
Therefore encodings need neither a transport nor processes, and can be tested by plain calls. In a chain of encodings,
later stages answer the requests of earlier stages.
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
    """A request for the mean of `values` over all ranks, which a later stage may encode. The reply is an `Averaged`."""

    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A request for the sum of `codes` over all ranks, without further encoding. The reply is the tensor."""

    codes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A request for the two tensors of every rank. A later stage may encode `values`. The reply is a `Gathered`."""

    values: Tensor
    beside: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """A request to send row r of `rows` to each other rank r. Row s of the reply is the row received from rank s."""

    rows: Tensor


Request = Mean | Sum | Gather | AllToAll


class Averaged(NamedTuple):
    """The result of an averaging: an approximate mean over all ranks."""

    mean: Tensor
    """The mean, the same bits on all ranks."""
    lost: Tensor | None = None
    """This rank's part of the error: the mean over ranks of (values - lost) is `mean`. None stands for no error."""


class Gathered(NamedTuple):
    """The values of all ranks, in rank order, the same bits on all ranks."""

    values: Tensor
    """The values, of shape (num_ranks, numel)."""
    beside: Tensor | None
    """The other tensor of each request, of shape (num_ranks, numel of `beside`), or None."""


Averaging = Generator[Request, Any, Averaged]
"""One averaging in progress: it yields requests and receives replies. A yielded tensor must not be used again."""


# ---------------------------------------------------------------------- the layout of an encoder


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a flat tensor that is averaged repeatedly: tensors of these shapes, one after the other."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    """The type of the flat tensor during the computation: float32 or wider."""
    device: torch.device
    rank: int
    num_ranks: int

    @property
    def numels(self) -> list[int]:
        """The number of elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """The number of elements of the flat tensor."""
        return sum(self.numels)

    def flat(self, numel: int) -> Layout:
        """Return a layout of one vector of `numel` elements, otherwise equal to this layout."""
        return replace(self, shapes=((numel,),))


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors of `dtype` are encoded and averaged: float32 or wider.

    Raises:
        ValueError: `dtype` is not a real floating-point type.
    """
    if not dtype.is_floating_point:
        raise ValueError(
            f"a compression encodes real floating numbers, but got {dtype}: exclude tensors of this type (ignore=), "
            "or use no compression"
        )
    return torch.float64 if dtype is torch.float64 else torch.float32


# ---------------------------------------------------------------------- encodings


class Encoder(ABC):
    """The encoder of one compression for one flat tensor on one rank, with its state between averagings."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        """The layout of the flat tensor."""

    @abstractmethod
    def mean(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        """Average `values`, of shape (numel,), which are overwritten. With `wants_lost`, also return what was lost."""

    def means(self) -> tuple[Layout, ...]:
        """Return the layouts of the `Mean` requests of one averaging, in order. A later stage encodes these."""
        return ()

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the state of each tensor of the layout, by name. Callers may read these tensors and copy into them."""
        return [{} for _ in self.layout.shapes]


class PlainEncoder(Encoder):
    """An encoder that sends values unencoded."""

    def mean(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        averaged: Averaged = yield Mean(values)
        return averaged


def encoder_of(compression: Compression | None, layout: Layout) -> Encoder:
    """Return a new encoder of a compression; None stands for values that are sent unencoded."""
    return PlainEncoder(layout) if compression is None else compression.encoder(layout)


class Compression(ABC):
    """An encoding of flat tensors that are averaged over ranks. Subclasses are frozen dataclasses."""

    is_linear: ClassVar[bool]
    """Whether encoded forms can be added up. An all_reduce can then send them, so bytes do not grow with the ranks."""
    is_order_dependent: ClassVar[bool] = False
    """Whether the position of a value matters. Such a compression needs whole matrices: it comes first in a chain."""
    gives: ClassVar[str]
    """The form of the encoded output: "means" (fewer values, of which the compression needs the mean), "rows" (fewer
    values, which the compression needs from every rank) or "codes" (no values, so no other compression can follow)."""

    @abstractmethod
    def encoder(self, layout: Layout) -> Encoder:
        """Return an encoder for tensors of this layout."""

    @property
    def feeds_back(self) -> bool:
        """Whether what one averaging loses is added to the values of the next averaging (error feedback)."""
        return bool(getattr(self, "error_feedback", False))

    def __str__(self) -> str:
        """Return the class name with the first argument, and with other arguments that differ from their defaults."""
        first, *others = fields(self)  # type: ignore[arg-type]
        shown = [first, *(f for f in others if getattr(self, f.name) != f.default)]
        values = [(f.name, getattr(self, f.name)) for f in shown]
        inside = ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in values)
        return f"{type(self).__name__}({inside})"

    def in_words(self) -> str:
        """Return the text by which ranks compare their compressions.

        Example:
            >>> from syncline.compression import PowerSGD
            >>> PowerSGD(rank=2).in_words()
            'PowerSGD(rank=2) with error feedback'
        """
        return f"{self} with error feedback" if self.feeds_back else str(self)


class Composed(Compression):
    """A compression made of other compressions, whose properties follow from theirs."""

    @property
    @abstractmethod
    def stages(self) -> tuple[Compression, ...]:
        """The compressions that this compression is made of."""

    @property
    def is_linear(self) -> bool:  # type: ignore[override]
        return all(stage.is_linear for stage in self.stages)

    @property
    def feeds_back(self) -> bool:
        return any(stage.feeds_back for stage in self.stages)


class Codec(Compression):
    """A compression that can also encode values without averaging them, so that it can follow one that gives "rows"."""

    gives = "codes"

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode values of shape (numel,) as a flat tensor of codes, whose length depends on numel only."""

    @abstractmethod
    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode codes of shape (num_rows, n) to values of shape (num_rows, numel)."""
