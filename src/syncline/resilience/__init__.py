"""Training that goes on when ranks are lost: `sl.steps`.

One loop has a `Group`, which agrees with the other processes on who is left, by the state machine of membership.py over
the register in the launcher's store, and then connects them anew. The wrapped modules, the optimizers and the sampler
follow. A rank that has missed a step, or joins, gets the state from the others.

Imports: errors, words, checks, environment, records, user_code, events, _torch, liveness, transport,
session, optimizers, tensors, gradients, sharded, data, compression, strategies, checkpoint, ddp.

batches.py     the batches of one rank, and the samples that ranks have used
faults.py      exceptions of one process: which of them are a loss, and which end the job
group.py       the processes that train together, as one of them sees them
handover.py    a training state goes from the ranks that have it to others, over the transport
membership.py  which processes train together: a state machine of one process, without a clock, a store or a transport
parts.py       the wrapped modules, attached optimizers and the sampler of a training state
register.py    what a process reads and writes in the launcher's store
slow_ranks.py  what the loop does about ranks that are slow over many steps
steps.py       `sl.steps`, the loop
training.py    which steps a training state has committed, and how its objects follow the ranks that are left
undo.py        what a body finds when it begins, so that it can run again
watch.py       what a process does in the background: it shows that it runs, and watches another process
"""

from __future__ import annotations
