"""The verbs: functions that synchronize tensors at the moment of the call, without a wrapper or a backward.

Each verb is a collective call: every rank of the group must make the same calls in the same order.

Imports: errors, words, checks, trees, user_code, events, _torch, transport, session, optimizers, tensors,
equality, gradients, sharded, buffers, checkpoint.

all_reduce.py      all_reduce_
average.py         average_
broadcast.py       broadcast_, keep_best_
check_replicas.py  check_replicas
common.py          functions that several verbs use: the comparison of calls, checks of targets
diverge.py         diverge, which lets replicas drift apart on purpose
gather.py          gather
metrics.py         mean, barrier
sync_gradients.py  sync_gradients_
"""

from __future__ import annotations

from syncline.verbs.all_reduce import all_reduce_
from syncline.verbs.average import average_
from syncline.verbs.broadcast import broadcast_, keep_best_
from syncline.verbs.check_replicas import check_replicas
from syncline.verbs.diverge import diverge
from syncline.verbs.gather import gather
from syncline.verbs.metrics import barrier, mean
from syncline.verbs.sync_gradients import sync_gradients_

__all__ = [
    "all_reduce_",
    "average_",
    "barrier",
    "broadcast_",
    "check_replicas",
    "diverge",
    "gather",
    "keep_best_",
    "mean",
    "sync_gradients_",
]
