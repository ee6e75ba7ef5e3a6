"""The averaging of gradients during backward: hooks fill buckets, and buckets are reduced while backward runs.

Imports: errors, words, checks, records, native, user_code, events, _torch, liveness, transport, session,
optimizers, tensors, equality.

backward.py           one backward: its state, its graph tasks, and the wrapper to which it belongs
bucket.py             one bucket and its state; dense buckets in a flat tensor, whole or sharded
bucket_plan.py        which gradients are in which bucket, and in which order (pure functions)
comm_hook.py          a user's communication hook in place of all_reduce
copying.py            the copy of a gradient into its bucket, which also finds NaN and infinity
hooks.py              the hooks that report when a parameter's gradient is ready
layout.py             the buckets of a reducer, and the place of each gradient
ledger.py             what was reduced in the last backward; the events of a wrapper, for observers
options.py            the options of gradient synchronization, and the requests of a wrapper for its next backwards
out_of_step.py        errors after which ranks are out of step, because some have sent data that others do not expect
outputs.py            the outputs of forwards, which tell to which forward a backward belongs
reducer.py            the reducer, which begins and ends each backward and decides whether it synchronizes
reduction.py          the path of gradients: buckets are filled, sent, waited for, and handed out
shard.py              this rank's shard of a bucket
shard_plan.py         which rank owns which part of which bucket (pure functions)
sparse.py             a bucket of one sparse gradient
state.py              what lasts as long as a wrapper: its step, requests, riders, item counts and stragglers
step_guard.py         the check before the step of any optimizer that its gradients were reduced
step_times.py         the times of a step on each rank, which show which rank was late
stragglers.py         the ranks that are slow over many steps (pure functions and a window of steps)
tail.py               the tail of the last bucket, which carries the words of all riders and the times
usage.py              which parameters a backward reaches, and how often
user_hooks.py         hooks of the program on parameters, which run when `.grad` holds the mean
wrapper_protocol.py   the interface by which lower layers recognize a wrapper and call its methods
"""

from __future__ import annotations

from syncline.gradients.riders.base import Words
from syncline.gradients.riders.requests import Stop, StopVote
from syncline.gradients.wrapper_protocol import ReplicaProtocol, replica_of

__all__ = ["ReplicaProtocol", "Stop", "StopVote", "Words", "replica_of"]
