"""Strategies: pure descriptions of when and how parameters sync. `syncline.strategies.execution` carries them out.

Imports: errors, words, checks, records, contract, user_code, events, _torch, liveness, transport,
optimizers, tensors, equality, compression.

actions.py           the actions that a strategy requests, their effects, and the data that they need
base.py              Strategy: an immutable description with pure methods; EveryStep, which averages gradients in each
                     backward; Manual, which syncs only on request
diloco.py            DiLoCo, and the division of parameters into fragments
gossip.py            Gossip, and the topologies, which determine the ranks to which a rank sends
local_sgd.py         LocalSGD; the warm-up of LocalSGD and DiLoCo, and their groups that average in every step
parameter_server.py  ParameterServer
"""

from __future__ import annotations

from syncline.strategies.base import EveryStep, Manual, Progress, Spec, Strategy
from syncline.strategies.diloco import DiLoCo
from syncline.strategies.gossip import Gossip
from syncline.strategies.local_sgd import LocalSGD
from syncline.strategies.parameter_server import ParameterServer

__all__ = [
    "DiLoCo",
    "EveryStep",
    "Gossip",
    "LocalSGD",
    "Manual",
    "ParameterServer",
    "Progress",
    "Spec",
    "Strategy",
]
