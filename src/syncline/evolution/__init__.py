"""Training without a backward pass: losses travel, noise is made again from seeds.

Imports: errors, words, differences, checks, records, contract, user_code, transport, session, optimizers, tensors,
sharded.

members.py   which rank evaluates which member, and what the losses say: pure
strategy.py  EvolutionStrategy
"""

from __future__ import annotations
