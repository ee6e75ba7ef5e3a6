"""The distribution of samples over ranks, and their order.

Imports: checks, session.

sampler.py  DistributedSampler
"""

from __future__ import annotations

from syncline.data.sampler import DistributedSampler

__all__ = ["DistributedSampler"]
