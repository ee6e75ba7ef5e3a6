"""Training without a backward pass: losses travel, and noise is regenerated from seeds.

Imports: errors, words, checks, records, contract, user_code, transport, session, optimizers, tensors, sharded.

members.py   members of a population, their noise, and the gradient estimated from their losses
strategy.py  EvolutionStrategy
"""

from __future__ import annotations
