"""Strategies: when and how parameters meet (pure; `syncline.rounds` carries them out)."""

from __future__ import annotations

from syncline.strategy.base import Progress, Spec, Strategy
from syncline.strategy.diloco import DiLoCo
from syncline.strategy.every_step import EveryStep
from syncline.strategy.gossip import Gossip
from syncline.strategy.local_sgd import LocalSGD
from syncline.strategy.manual import Manual
from syncline.strategy.parameter_server import ParameterServer

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
