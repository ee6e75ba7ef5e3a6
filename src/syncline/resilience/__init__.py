"""Training that goes on when ranks are lost: `sl.steps`.

One loop has a `Group`, which agrees with the other processes on who is left, by the state machine of membership.py over
the register in the launcher's store, and then connects them anew. The wrapped modules, the optimizers and the sampler
follow. A rank that has missed a step gets the state from another one.

Imports: errors, words, checks, environment, _torch, liveness, transport, session, optimizers, tensors, sharded, data,
compression, strategies, checkpoint, ddp.

batches.py     the batches of one rank, and how many samples they have
group.py       the processes that train together, as one of them sees them
handover.py    a training state goes from one rank to others, over the transport
membership.py  which processes train together: a state machine of one process, without a clock, a store or a transport
parts.py       the wrapped modules, attached optimizers and the sampler of a training state
register.py    what a process reads and writes in the launcher's store
samples.py     the samples that ranks have used, when replicas drift and ranks are lost
steps.py       `sl.steps`, the loop
undo.py        what a body finds when it begins, so that it can run again
"""

from __future__ import annotations
