"""Execution of strategies: count steps, ask for the due actions, and move the tensors.

driver.py      counts optimizer steps, asks the strategy for actions, has them carried out, records them
effects.py     what actions do, as facts and in words: pure
executor.py    carries out actions on the tensors and optimizers of one rank
flat.py        parameters as flat tensors
outer_step.py  the outer optimizer of DiLoCo
push_sum.py    one round of gossip
server.py      the shards of a parameter server
"""

from __future__ import annotations

from syncline.strategies.execution.driver import Rounds

__all__ = ["Rounds"]
