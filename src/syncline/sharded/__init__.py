"""sharded=True: each rank steps its shard of the parameters, and each host keeps one copy.

Imports: errors, words, checks, _torch, transport, session, optimizers, tensors, gradients.

attached.py   an optimizer whose parameters are this rank's shards
optimizer.py  the step of a sharded module
part.py       tensors of which each rank has a part
sharing.py    `share_`, `write_shared`, and when ranks may write parameters that have one copy per host
state.py      an optimizer's state, from torch's format to shards and back
"""

from __future__ import annotations

from syncline.sharded.attached import AttachedShards

__all__ = ["AttachedShards"]
