"""The tensors of a user's target (module, optimizer or tensors), and collectives over many tensors.

Imports: checks, trees, _torch, transport, optimizers.

broadcasting.py  broadcast many tensors in few collectives
gathering.py     gather bytes of unequal lengths
in_flight.py     send pieces one after the other, with a bound on the memory for packed copies
packing.py       decide which tensors are sent alone and which are packed
reduction.py     reduce many tensors in few collectives
targets.py       find the tensors of a target, by name; views of their memory
"""

from __future__ import annotations

from syncline.tensors.reduction import ReductionPlan, TensorReducer
from syncline.tensors.targets import walk

__all__ = ["ReductionPlan", "TensorReducer", "walk"]
