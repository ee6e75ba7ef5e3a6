"""Conversion between a user's target and flat pieces, for verbs, buffers and checkpoints.

Imports: checks, trees, _torch, transport, optimizers.

broadcasting.py  broadcast many tensors in few collectives
packing.py       which tensors are sent alone and which are packed: a pure function of sizes
reduction.py     reduce many tensors in few collectives
targets.py       the tensors of a target, by name
"""
