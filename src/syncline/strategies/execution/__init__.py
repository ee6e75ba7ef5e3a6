"""Carry out strategies: count steps, ask what is due, and move the tensors.

driver.py      count optimizer steps, ask the strategy, do what it says, record it
flat.py        parameters as flat tensors
outer_step.py  the outer optimizer of DiLoCo
push_sum.py    one round of gossip
server.py      the shards of a parameter server
"""

from __future__ import annotations

from syncline.strategies.execution.driver import Rounds

__all__ = ["Rounds"]
