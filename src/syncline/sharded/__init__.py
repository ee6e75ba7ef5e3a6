"""The implementation of `sharded=True`: each rank steps its shard of the parameters, and each host keeps one copy.

Imports: errors, words, checks, _torch, liveness, transport, session, optimizers, tensors, gradients.

attached.py   an attached optimizer, whose parameters are this rank's shards
methods.py    the methods of an optimizer that are replaced while its parameters are shards; steps in progress
optimizer.py  the step of a sharded module
part.py       tensors of which each rank has a part
sharing.py    `share_`, `write_shared`, and the guard that makes writers and readers of shared parameters wait
state.py      conversion of an optimizer's state between torch's format and shards
"""

from __future__ import annotations

from syncline.sharded.attached import AttachedShards

__all__ = ["AttachedShards"]
