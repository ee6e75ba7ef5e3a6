"""Options of gradient synchronization: the arguments that hooks and buckets need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from syncline.gradients.bucket_plan import BucketCaps

__all__ = ["GradientOptions", "OnNonFinite"]


OnNonFinite = Literal["ignore", "raise", "skip", "zero"]
"""The policies for gradients that are not finite, see `riders/nonfinite.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOptions:
    """The options of gradient synchronization; equal on all ranks."""

    caps: BucketCaps
    """The maximum sizes of buckets."""
    as_bucket_view: bool
    """Whether `.grad` is a view of the bucket after a backward, not a tensor of its own."""
    allow_unused: bool
    """Whether a parameter without a gradient counts as zero instead of being an error."""
    skip_unused: bool = False
    """Whether buckets of parameters that no rank uses are not sent; ranks exchange their use when a backward begins."""
    static_graph: bool = False
    """Whether every backward gives each parameter as many gradients as the first one did."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which floating-point gradients are summed; None for each parameter's own dtype."""
    sparse: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sparse."""
    delayed: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sent last."""
    sharded: bool = False
    """Whether each rank reduces only its shard of every bucket, and steps the optimizer for that shard."""
    compares_replicas: bool = False
    """Whether fingerprints of replicas are sent with the gradients."""
    on_nonfinite: OnNonFinite = "ignore"
    """The policy of all ranks if a gradient of one of them is not finite."""
