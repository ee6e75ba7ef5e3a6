"""sharded=True: each rank steps its shard of the parameters, and hosts keep one copy.

Imports: errors, differences, checks, _torch, transport, session, optimizers, tensors, gradients.

attached.py   an optimizer whose parameters are this rank's shards
one_copy.py   who may write parameters of which a host has one copy, and when
optimizer.py  the step of a sharded module
part.py       a tensor of which each rank has a part
sharing.py    `share_` and `write_shared`
state.py      an optimizer's state, from torch's form to shards and back
"""
