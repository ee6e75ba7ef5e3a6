"""Strategies: when and how parameters sync (pure; `syncline.strategies.execution` carries them out).

Imports: errors, words, checks, records, contract, user_code, _torch, transport, optimizers, tensors, equality,
compression.

base.py              Strategy: an immutable description with pure methods; its messages and actions
diloco.py            DiLoCo, and how parameters are divided into fragments
every_step.py        EveryStep: gradients are averaged in each backward
gossip.py            Gossip, and which rank sends to which
local_sgd.py         LocalSGD
manual.py            Manual: syncs only on request
parameter_server.py  ParameterServer
workers.py           groups of ranks that average gradients between parameter syncs
"""

from __future__ import annotations

from syncline.strategies.base import Progress, Spec, Strategy
from syncline.strategies.diloco import DiLoCo
from syncline.strategies.every_step import EveryStep
from syncline.strategies.gossip import Gossip
from syncline.strategies.local_sgd import LocalSGD
from syncline.strategies.manual import Manual
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
