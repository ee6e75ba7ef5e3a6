"""sharded=True: each rank steps its shard of the parameters, and each host keeps one copy.

Imports: errors, differences, checks, _torch, transport, session, optimizers, tensors, gradients.

attached.py   an optimizer whose parameters are this rank's shards
one_copy.py   when ranks may write parameters that have one copy per host
optimizer.py  the step of a sharded module
part.py       tensors of which each rank has a part
sharing.py    `share_` and `write_shared`
state.py      an optimizer's state, from torch's format to shards and back
"""

from __future__ import annotations

from syncline.sharded.attached import AttachedShards

__all__ = ["AttachedShards"]
