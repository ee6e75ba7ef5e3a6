"""The interface of compressions: the settings of a compression, its encoder, and the requests of the encoder.

An encoder averages one flat tensor by a generator, which yields requests to the other ranks and receives the replies.
Therefore an encoder needs neither a transport nor processes, and can be tested by plain calls. In a chain of
compressions, later stages answer the requests of earlier stages.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from syncline.words import shortened

# ---------------------------------------------------------------------- requests of an encoder to its peers


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A request for the mean of `values` over all ranks. The reply is an `Averaged`.

    In a chain of compressions, the next stage can encode the values, so that the mean is approximate.
    """

    values: Tensor
    meanwhile: Callable[[], None] | None = None
    """Work of the encoder that can be done while the values are sent, if the reply will have no `lost`.

    Without a call, the encoder does this work after the reply."""


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A request for the sum of `codes` over all ranks, without further encoding. The reply is the summed tensor."""

    codes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A request for the tensor `values` of every rank, and for the tensor `beside` if it is not None.

    The reply is a `Gathered`. In a chain of compressions, the next stage can encode `values`, but not `beside`.
    """

    values: Tensor
    beside: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """A request to send row r of `rows` to each other rank r. Row s of the reply is the row received from rank s."""

    rows: Tensor


Request = Mean | Sum | Gather | AllToAll


class Averaged(NamedTuple):
    """The reply to a `Mean` request: an exact or approximate mean over all ranks."""

    mean: Tensor
    """The mean. It has the same bits on all ranks."""
    lost: Tensor | None = None
    """This rank's part of the error: `mean` is the mean over ranks of (values - lost).

    None if there is no error, or if the encoder that has made the request does not want this tensor."""


class Gathered(NamedTuple):
    """The reply to a `Gather` request: the tensors of all ranks. They have the same bits on all ranks."""

    values: Tensor
    """The values of the ranks, in rank order, of shape (num_ranks, numel of `Gather.values`)."""
    beside: Tensor | None
    """The second tensors of the ranks, of shape (num_ranks, numel of `Gather.beside`).

    None if the request had no second tensor."""


Averaging = Generator[Request, Any, Tensor]
"""A generator that runs one averaging: it yields requests, receives the replies, and returns the mean.

After the generator has yielded a tensor in a request, the generator must not use this tensor again."""


# ---------------------------------------------------------------------- the layout of an encoder


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a flat tensor, which contains the elements of several tensors one after the other."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    """The dtype of the flat tensor while it is encoded: float32 or wider."""
    device: torch.device
    rank: int
    num_ranks: int

    @property
    def numels(self) -> list[int]:
        """The number of elements of each tensor in the flat tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """The number of elements of the flat tensor."""
        return sum(self.numels)

    def flat(self, numel: int) -> Layout:
        """Return a copy of this layout whose only tensor is a vector of `numel` elements."""
        return replace(self, shapes=((numel,),))


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of dtype `dtype` are encoded and averaged: float64 for float64, else float32.

    Raises:
        ValueError: `dtype` is not a real floating-point type.
    """
    if not dtype.is_floating_point:
        raise ValueError(
            f"a compression can encode only real floating-point numbers, but got {dtype}. Exclude tensors of this type "
            "(argument ignore= of sl.DistributedDataParallel), or use no compression"
        )
    return torch.float64 if dtype is torch.float64 else torch.float32


# ---------------------------------------------------------------------- encodings


class Encoder(ABC):
    """An encoder, which averages one flat tensor on one rank by a compression, and keeps state between averagings."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        """The layout of the flat tensor."""

    @abstractmethod
    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        """Return a generator that averages the tensor `values` over all ranks.

        Args:
            values: this rank's values, of shape (numel,). They are overwritten, and the mean may use their memory.
            residual: a tensor that is added to the values before they are encoded, or None. If it is given, so is
                `lost`.
            lost: memory for this rank's part of the error, or None if the error is not needed. It may be `residual`
                itself. The mean is the mean over ranks of (values + residual - lost). Where the error is not finite, it
                counts as zero, so that a value that has overflowed is not added to later values.
        """

    def means(self) -> tuple[Layout, ...]:
        """Return the layout of each `Mean` request in one averaging, in the order of the requests.

        In a chain of compressions, the next stage makes one encoder per layout.
        """
        return ()

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the state of each tensor of the layout; see `memory_of`."""
        return [self.memory_of(index) for index in range(len(self.layout.shapes))]

    def memory_of(self, index: int) -> dict[str, Tensor]:
        """Return the state of one tensor of the layout, as a dict of tensors. It is empty if there is no state.

        Callers can read these tensors. They can also copy values into them, to restore a state.

        Args:
            index: the index of the tensor in the layout.
        """
        return {}


class PlainEncoder(Encoder):
    """An encoder that averages values without compression."""

    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        if residual is not None:
            values.add_(residual)
        averaged: Averaged = yield Mean(values)
        if lost is not None:
            set_lost(lost, averaged.lost)
        return averaged.mean


def total_of(values: Tensor, residual: Tensor | None, lost: Tensor | None) -> Tensor:
    """Return the sum of values and residual, in the memory of `lost`, so that the memory of `values` is free.

    If `lost` is None, there is no residual, and the values themselves are returned.
    """
    if lost is None:
        return values
    return lost.copy_(values) if residual is None else torch.add(residual, values, out=lost)


def set_lost(lost: Tensor, error: Tensor | None) -> None:
    """Write an error into `lost`, with zeros for elements that are not finite. None stands for no error."""
    if error is None:
        lost.zero_()
    else:
        torch.nan_to_num(error, 0.0, 0.0, 0.0, out=lost)


def pairwise_sums(terms: Tensor) -> Tensor:
    """Return the sums over the last dimension, whose size is a power of two. The dimension is kept with size 1.

    The order of the additions depends only on the size. torch.sum has another order, and so other bits, on each kind of
    processor.
    """
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms


def encoder_of(compression: Compression | None, layout: Layout) -> Encoder:
    """Return a new encoder of a compression. With None, the encoder averages values without compression."""
    return PlainEncoder(layout) if compression is None else compression.encoder(layout)


class Compression(ABC):
    """A compression of flat tensors that are averaged over ranks. Subclasses are frozen dataclasses."""

    sends_little: ClassVar[bool] = False
    """Whether a bucket is sent in so few bytes that a few large buckets are faster than many small ones.

    Then the time of a step depends more on the number of messages than on their bytes."""
    is_order_dependent: ClassVar[bool] = False
    """Whether the result depends on the order of the values, so that the compression must be first in a chain."""
    gives: ClassVar[str]
    """The form of the encoded output, which determines the compressions that can follow in a chain.

    - "means": fewer values, whose mean over ranks the compression needs
    - "rows": fewer values, which the compression needs from every rank
    - "codes": codes, which are not values, so no compression can follow"""

    @abstractmethod
    def encoder(self, layout: Layout) -> Encoder:
        """Return a new encoder for a flat tensor of this layout."""

    @property
    def feeds_back(self) -> bool:
        """Whether error feedback is used: the error of one averaging is added to the values of the next averaging."""
        return bool(getattr(self, "error_feedback", False))

    def __repr__(self) -> str:
        return shortened(str(self))

    def __str__(self) -> str:
        """Return the compression as an expression, without arguments that have their default values.

        The first argument is always included.
        """
        first, *others = fields(self)  # type: ignore[arg-type]
        shown = [first, *(f for f in others if getattr(self, f.name) != f.default)]
        values = [(f.name, getattr(self, f.name)) for f in shown]
        inside = ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in values)
        return f"{type(self).__name__}({inside})"

    def in_words(self) -> str:
        """Return the compression as a text.

        Ranks compare their texts to check that all ranks use the same compression.

        Examples:
            >>> from syncline.compression import PowerSGD
            >>> PowerSGD(rank=2).in_words()
            'PowerSGD(rank=2) with error feedback'
        """
        return f"{self} with error feedback" if self.feeds_back else str(self)


class Composed(Compression):
    """A compression that is made of other compressions, and derives its properties from them."""

    stages: tuple[Compression, ...]
    """The compressions that this compression is made of."""

    @property
    def sends_little(self) -> bool:  # type: ignore[override]
        return any(stage.sends_little for stage in self.stages)

    @property
    def feeds_back(self) -> bool:
        return any(stage.feeds_back for stage in self.stages)


class Codec(Compression):
    """A compression that can also encode values without averaging them.

    Therefore it can follow a compression whose output is gathered from all ranks (`gives = "rows"`), such as TopK.
    """

    gives = "codes"

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode values of shape (numel,) as a flat tensor of codes. The number of codes depends only on numel."""

    @abstractmethod
    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode rows of codes, each of which `encode` returned. Return values of shape (num_rows, numel).

        Args:
            codes: codes of shape (num_rows, length of the codes of one row).
            numel: the number of values of each row.
            dtype: the dtype of the returned values.
        """
