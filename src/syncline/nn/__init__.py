"""Layers that compute over the samples of all ranks.

Imports: checks, _torch, transport, session.

sync_batch_norm.py  batch normalization over the batches of all ranks
"""

from __future__ import annotations

from syncline.nn.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
