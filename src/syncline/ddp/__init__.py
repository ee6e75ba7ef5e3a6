"""The package of DistributedDataParallel: the wrapper, and the parts that synchronize the module inside of it.

Imports: errors, words, checks, environment, records, contract, user_code, events, _torch, liveness,
transport, session, optimizers, tensors, equality, gradients, sharded, buffers, compression, strategies, verbs.

conclusion.py     say in one sentence what synchronization cost in a step, and which rank was late
config.py         check the arguments of a wrapper, and hold them in one frozen value, which the ranks compare
drift.py          decide when replicas may differ (a strategy, sl.diverge), and compare them when they must be equal
join.py           support ranks that run out of inputs at different times
lanes.py          close the lanes of an object when it is freed, or has opened new ones
plan.py           hold the facts about a wrapped module, and derive from them how it is synchronized
registrations.py  compare hooks, optimizers and metrics that users register
replica.py        hold the parts that synchronize one rank's replica
replacement.py    let torch's name of the class refer to ours
report.py         describe plans and records in words, as the rows of a contract
selection.py      select the parameters and buffers that take part, and detect changes of the module
timeline.py       describe one step in words, from the plan or from the records
torch_names.py    provide the undocumented methods and attributes of torch's class that frameworks use
training.py       define the methods for a training loop: attach, clip, normalize, report
wrapper.py        define DistributedDataParallel, the class that users see
wrapping.py       check and compare a module when it is wrapped, broadcast its first values, run it in lower precision
"""

from __future__ import annotations

from syncline.ddp.selection import Inventory

__all__ = ["Inventory"]
