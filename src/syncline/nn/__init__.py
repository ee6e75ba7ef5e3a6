"""Layers that compute over all ranks' samples.

sync_batch_norm.py   SyncBatchNorm: batch normalization over the batches of all ranks, on any device
"""

from __future__ import annotations

from syncline.nn.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
