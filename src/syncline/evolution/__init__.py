"""Training without a backward pass: ranks send losses, and regenerate the noise of all members from seeds.

Imports: errors, tracebacks, words, checks, records, contract, transport, session, optimizers, tensors,
equality, sharded.

members.py   the members of a population, their noise, and the gradient that is estimated from their losses
strategy.py  EvolutionStrategy
"""

from __future__ import annotations
