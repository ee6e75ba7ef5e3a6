"""Conversion between a user's target and flat pieces, for verbs, buffers and checkpoints.

Imports: checks, trees, _torch, transport, optimizers.

broadcasting.py  broadcast many tensors in few collectives
in_flight.py     send pieces one after the other, with a bound on the memory for copies
packing.py       which tensors are sent alone and which are packed: a pure function of sizes
reduction.py     reduce many tensors in few collectives
targets.py       the tensors of a target, by name
"""

from __future__ import annotations

from syncline.tensors.reduction import ReductionPlan, TensorReducer
from syncline.tensors.targets import walk

__all__ = ["ReductionPlan", "TensorReducer", "walk"]
