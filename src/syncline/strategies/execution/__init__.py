"""Execution of strategies: count optimizer steps, ask the strategy for its actions, and carry the actions out.

driver.py      counts optimizer steps, asks the strategy for actions, carries them out, records them
flat.py        tensors that are joined to one flat tensor; the mean outer gradient in the memory of the parameters
kept.py        the interface of the data that actions need in addition to the module
outer_step.py  the copies of the parameters and the outer optimizer of DiLoCo
push_sum.py    the push-sum weight of gossip
server.py      the shards of a parameter server
standing.py    two-phase commit of parameter syncs, for `sl.steps`
"""

from __future__ import annotations

from syncline.strategies.execution.driver import Rounds

__all__ = ["Rounds"]
