"""Which samples each rank sees, in which order.

Imports: checks, session.

sampler.py  DistributedSampler
"""

from __future__ import annotations

from syncline.data.sampler import DistributedSampler

__all__ = ["DistributedSampler"]
