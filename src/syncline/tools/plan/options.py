"""The options of a plan: strategies, compressions, bucket sizes, sharding (data only)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

CAPS_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0)
"""The values of `bucket_cap_mb` that are compared."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A compression, as far as its bytes are concerned."""

    code: str
    """How a user makes it: "Quantize(4)"."""
    kind: Literal["narrow", "codes", "pairs", "factors"]
    """How it is sent: narrower values in an all_reduce, codes, the largest values with indices, or two thin factors."""
    bits: float = 32.0
    """The bits of each value, with its part of the scales."""
    ratio: float = 1.0
    """The part of the values that is sent, of "pairs"."""
    rank: int = 0
    """The rank of the factors."""


_SCALE_BITS = 16 / 128
"""A scale of 16 bits for 128 values."""

CODECS = (
    Codec(code="Cast()", kind="narrow", bits=16),
    Codec(code="Quantize(8)", kind="codes", bits=8 + _SCALE_BITS),
    Codec(code="Quantize(4)", kind="codes", bits=4 + _SCALE_BITS),
    Codec(code="Quantize(2)", kind="codes", bits=2 + _SCALE_BITS),
    Codec(code="PowerSGD(4)", kind="factors", rank=4),
    Codec(code="PowerSGD(2)", kind="factors", rank=2),
    Codec(code="TopK(0.01)", kind="pairs", bits=64, ratio=0.01),
)
"""The compressions that are compared, from the one that changes a training least to the one that changes it most."""


def codec_of(code: str) -> Codec:
    """Return the compression that is made by this text, such as "Quantize(4)"."""
    return next(one for one in CODECS if one.code == code)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to synchronize."""

    strategy: Literal["EveryStep", "LocalSGD", "DiLoCo"] = "EveryStep"
    every: int = 1
    """The number of steps from one synchronization to the next one."""
    compression: Codec | None = None
    sharded: bool = False
    cap_mb: float | None = None
    """The value of `bucket_cap_mb`; None for the automatic one."""

    @property
    def is_exact(self) -> bool:
        """Whether the training is the one of torch's class."""
        return self.strategy == "EveryStep" and self.compression is None

    @property
    def code(self) -> str:
        """The arguments of `sl.DistributedDataParallel` that choose this option.

        Examples:
            >>> Option(strategy="DiLoCo", every=20, compression=codec_of("Quantize(4)")).code
            'strategy=sl.DiLoCo(20, compression=sl.compression.Quantize(4))'
            >>> Option(cap_mb=2.0).code, Option().code
            ('bucket_cap_mb=2', '')
        """
        encoded = "" if self.compression is None else f"compression=sl.compression.{self.compression.code}"
        parts = []
        if self.strategy == "DiLoCo":
            parts.append(f"strategy=sl.DiLoCo({', '.join(filter(None, [str(self.every), encoded]))})")
        elif self.strategy == "LocalSGD":
            parts.append(f"strategy=sl.LocalSGD({self.every})")
        elif encoded:
            parts.append(encoded)
        if self.sharded:
            parts.append("sharded=True")
        if self.cap_mb is not None:
            parts.append(f"bucket_cap_mb={self.cap_mb:g}")
        return ", ".join(parts)

    @property
    def words(self) -> str:
        """A short name for tables."""
        words = self.code
        for word in ("strategy=", "compression=", "sl.compression.", "sl."):
            words = words.replace(word, "")
        return words or "the defaults"


KINDS = (
    Option(),
    Option(sharded=True),
    *(Option(compression=codec) for codec in CODECS),
    Option(strategy="LocalSGD", every=8),
    Option(strategy="DiLoCo", every=20),
    Option(strategy="DiLoCo", every=20, compression=codec_of("Quantize(4)")),
)
"""All options without bucket sizes, from those that change a training least to those that change it most."""


def with_caps(option: Option) -> list[Option]:
    """Return the option with each bucket size, the automatic one first. A strategy that sends no gradients has none."""
    if option.strategy != "EveryStep":
        return [option]
    return [replace(option, cap_mb=cap) for cap in (None, *CAPS_MB)]
