"""Optimizers of which each rank steps its share.

kinds.py      which of torch's optimizers treat all elements alike
state.py      an optimizer's state, from torch's ordinary form to shards and back
attached.py   one attached optimizer: its parameters are this rank's shards
sharded.py    all that a module with sharded=True needs at the step
"""
