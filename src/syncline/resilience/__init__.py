"""Training that continues when ranks are lost: `sl.steps`.

Each loop has a `Group`. It agrees with the other processes on the membership, by the state machine of membership.py
over the register in the launcher's store, and then connects the members anew. The wrapped modules, the optimizers and
the sampler adapt to the new ranks. A rank that has missed a step, or joins, receives the state from the others.

Imports: errors, words, checks, environment, records, user_code, events, _torch, liveness, transport,
session, optimizers, tensors, gradients, sharded, data, compression, strategies, checkpoint, ddp.

batches.py     the batches of one rank, and the samples that ranks have used
faults.py      classification of exceptions: some cost the job one process, others end it
group.py       one process's view of the group: it agrees on the membership, and connects to the members
handover.py    a training state goes from the ranks that have it to others, over the transport
membership.py  the state machine that computes the membership, without a clock, a store or a transport
parts.py       the wrapped modules, attached optimizers and the sampler of a training state
register.py    the keys in the launcher's store that processes read and write
slow_ranks.py  handling of ranks that are slow over many steps
steps.py       `sl.steps`, the loop
training.py    the objects of a training state: their commits, and their adaptation to a new membership
undo.py        snapshots of the state at the beginning of a body, so that it can run again
watch.py       background thread of a process: it sends a pulse, and watches the pulse of another process
"""

from __future__ import annotations
