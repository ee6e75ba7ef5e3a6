"""DistributedDataParallel: the wrapper, its configuration, the parts that synchronize a module, contract and timeline.

Imports: errors, words, checks, records, contract, _torch, liveness, transport, session, optimizers, tensors, equality,
gradients, sharded, buffers, compression, strategies, verbs.

config.py         the configuration: the checked arguments in one frozen value, which the ranks compare
drift.py          when replicas may differ (a strategy, sl.diverge), and comparisons when they may not
join.py           support uneven inputs
plan.py           the plain facts about a wrapped module, and what follows from them
registrations.py  compare hooks, optimizers and metrics that users register
replica.py        hold the parts that synchronize one rank's replica
report.py         put plans and records into words: the rows of a contract, the timeline of a step
selection.py      select the parameters and buffers that take part, and detect changes of the module
torch_names.py    provide undocumented names of torch's class that frameworks use
training.py       methods for a training loop: attach, clip, normalize, report
wrapper.py        define DistributedDataParallel, the class that users see
wrapping.py       check and compare a module when it is wrapped, broadcast its first values, run it in lower precision
"""

from __future__ import annotations

from syncline.ddp.selection import Inventory

__all__ = ["Inventory"]
