"""DistributedDataParallel: from torch's arguments to the parts that synchronize a module.

Imports: errors, checks, records, contract, _torch, liveness, transport, session, optimizers, tensors, equality,
gradients, sharded, buffers, compression, strategies, verbs, report.

arguments.py        check the arguments, by torch's rules
join.py             uneven inputs
mixed_precision.py  torch's `mixed_precision=`
replica.py          one rank's replica: puts the parts together
replica_checks.py   when replicas are compared
selection.py        which parameters and buffers take part, and whether the module has changed
torch_names.py      undocumented names of torch's class that frameworks use
wrapper.py          DistributedDataParallel: the class that users see
wrapping.py         when a module is wrapped: agree on it, broadcast first values
"""
