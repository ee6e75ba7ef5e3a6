"""From whatever a user names to flat pieces, and back: what verbs, buffers and checkpoints share.

Imports: checks, trees, _torch, transport, optimizers.

broadcasting.py  broadcast many tensors in few collectives
packing.py       which tensors travel alone and which are packed: a pure function of sizes
reduction.py     reduce many tensors in few collectives
targets.py       the tensors of a target, by name
"""
