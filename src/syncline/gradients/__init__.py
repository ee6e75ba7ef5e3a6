"""Average gradients during backward: hooks fill buckets, buckets are reduced while backward runs.

Imports: errors, differences, checks, records, user_code, _torch, transport, session, optimizers, tensors, equality.

backward_owner.py        which wrapper a backward belongs to, where several share parameters
bucket.py                one bucket: a flat tensor, its views, its state
bucket_plan.py           which gradients travel together, and in which order: pure
comm_hook.py             a user's communication hook in place of all_reduce
coverage.py              which slice of a replica is compared in which step
discarded.py             gradients that must not be applied
distributed_autograd.py  gradients that torch's distributed autograd keeps in contexts
graph_tasks.py           which graph tasks of the autograd engine make up one backward: a state machine
guard.py                 what must be equal on all ranks beside gradients: optimizer settings, forwards
layout.py                where each gradient lies
ledger.py                what was reduced in the last backward
nonfinite.py             find NaN and infinity in gradients, and decide on all ranks alike
normalize_by.py          count the items behind gradients, and divide by them
options.py               how gradients are synchronized: a frozen value
outputs.py               the tensors in whatever a forward returns
reducer.py               the reducer: hooks, the start of a backward, buckets in flight, its end
replica_watch.py         compare a slice of the replica in each step
same_data.py             warn if all ranks train on the same data
shard.py                 this rank's shard of a bucket
shard_plan.py            which rank owns which part of which bucket: pure
sparse.py                a bucket of one sparse gradient
stop_vote.py             which ranks were asked to stop
tail.py                  small facts of each rank, behind the gradients of the last bucket
usage.py                 which parameters a backward reaches
verdict.py               what all ranks conclude from the facts: nothing, or the same error
wrapper_protocol.py      what the library asks of a wrapped module, and how it finds it
"""
