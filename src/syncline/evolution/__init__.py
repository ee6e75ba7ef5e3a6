"""Training without a backward pass: losses are sent, and noise is regenerated from seeds.

Imports: errors, words, checks, records, contract, transport, session, optimizers, tensors, equality, sharded.

members.py   members of a population, their noise, and the gradient estimated from their losses
strategy.py  EvolutionStrategy
"""

from __future__ import annotations
