"""DistributedDataParallel: the wrapper, its arguments, and the parts that synchronize a module.

Imports: errors, checks, records, contract, _torch, liveness, transport, session, optimizers, tensors, equality,
gradients, sharded, buffers, compression, strategies, verbs, report.

arguments.py        check the arguments by torch's rules
join.py             support uneven inputs
mixed_precision.py  run the module in lower precision: torch's `mixed_precision=`
replica.py          hold the parts that synchronize one rank's replica
replica_checks.py   compare replicas during backward and after parameter syncs
selection.py        select the parameters and buffers that take part, and detect changes of the module
torch_names.py      provide undocumented names of torch's class that frameworks use
wrapper.py          define DistributedDataParallel, the class that users see
wrapping.py         agree on a module when it is wrapped, and broadcast its first values
"""
