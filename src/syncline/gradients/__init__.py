"""Average gradients during backward: hooks fill buckets, buckets are reduced while backward runs.

Imports: errors, words, checks, records, user_code, _torch, transport, session, optimizers, tensors, equality.

backward.py           one backward: its state, its graph tasks, and the wrapper to which it belongs
bucket.py             one bucket: a flat tensor, its views, its state
bucket_plan.py        which gradients travel together, and in which order: pure
comm_hook.py          a user's communication hook in place of all_reduce
hooks.py              the hooks of parameters, which run once per gradient; those of torch's distributed autograd
layout.py             where each gradient lies
ledger.py             what was reduced in the last backward
options.py            how gradients are synchronized: a frozen value; requests of a wrapper for the next backwards
out_of_step.py        errors after which ranks have sent different things
reducer.py            the reducer: the start of a backward (does it synchronize?) and its end
reduction.py          buckets in flight: filled, sent, waited for, handed out
shard.py              this rank's shard of a bucket
shard_plan.py         which rank owns which part of which bucket: pure
sparse.py             a bucket of one sparse gradient
tail.py               the words of all riders, behind the gradients of the last bucket
usage.py              which parameters a backward reaches, from the outputs of a forward
wrapper_protocol.py   what the library asks of a wrapped module, and how it finds it
"""

from __future__ import annotations

from syncline.gradients.riders.base import Words
from syncline.gradients.riders.stop import Stop, StopVote
from syncline.gradients.wrapper_protocol import ReplicaProtocol, replica_of

__all__ = ["ReplicaProtocol", "Stop", "StopVote", "Words", "replica_of"]
