"""Synchronization without a wrapper and without a backward: functions to call when you want it.

Each is a collective: every rank of the group has to call it, in the same order.

broadcast.py       all become what one rank's is
all_reduce.py      the sum, mean, ... of what all have
average.py         the weighted mean of modules, optimizers and trees
sync_gradients.py  the mean of gradients, without another batch
keep_best.py       all become what the best rank's is
check_replicas.py  are all equal, bit for bit?
diverge.py         let replicas drift apart on purpose
values.py          mean and barrier: nothing is changed in place
common.py          what they have in common
"""

from __future__ import annotations

from syncline.verbs.all_reduce import all_reduce_
from syncline.verbs.average import average_
from syncline.verbs.broadcast import broadcast_
from syncline.verbs.check_replicas import check_replicas
from syncline.verbs.diverge import diverge
from syncline.verbs.keep_best import keep_best_
from syncline.verbs.sync_gradients import sync_gradients_
from syncline.verbs.values import barrier, mean

__all__ = [
    "all_reduce_",
    "average_",
    "barrier",
    "broadcast_",
    "check_replicas",
    "diverge",
    "keep_best_",
    "mean",
    "sync_gradients_",
]
