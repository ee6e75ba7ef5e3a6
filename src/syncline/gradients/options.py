"""How gradients are synchronized: the part of the arguments that hooks and buckets need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from syncline.gradients.bucket_plan import BucketCaps

__all__ = ["GradientOptions", "OnNonFinite"]


OnNonFinite = Literal["ignore", "raise", "skip", "zero"]
"""What becomes of gradients that are not finite, see `nonfinite.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOptions:
    """How gradients are synchronized; equal on all ranks."""

    caps: BucketCaps
    """How large buckets may grow."""
    as_bucket_view: bool
    """After the backward `.grad` is a view of the bucket, not a tensor of its own."""
    allow_unused: bool
    """A parameter without gradient counts as zero instead of being an error."""
    skip_unused: bool = False
    """Buckets of parameters that no rank uses are not sent; the ranks tell each other at the start of backward."""
    static_graph: bool = False
    """Which parameters get a gradient, and how often in one backward, is learnt in the first and stays."""
    reduce_dtype: torch.dtype | None = None
    """What floating gradients are added up in; None means each in its own type."""
    sparse: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sparse."""
    delayed: frozenset[str] = frozenset()
    """Names of the parameters whose gradients travel last."""
    sharded: bool = False
    """Each rank reduces its share of every bucket, and steps the optimizer for it."""
    compares_replicas: bool = False
    """Fingerprints of replicas travel with the gradients."""
    on_nonfinite: OnNonFinite = "ignore"
    """What all ranks do where a gradient of one of them is not finite."""
