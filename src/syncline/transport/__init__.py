"""A few operations on flat tensors, each of which returns a Work. Engines are interchangeable.

Imports: errors, words, user_code, _torch, liveness.

agreement.py          compare on all ranks what they are about to do, before any data is sent
base.py               Transport: final public methods; engines implement `_start_*`
c10d.py               engine: any torch.distributed process group
c10d_groups.py        process groups: options of their calls, creation, destruction, dtypes
c10d_work.py          an operation of a process group: waiting, and errors in our words
caller_lock.py        which thread of a rank may use a transport now
faulty.py             engine: fails on purpose, for tests
hierarchy.py          engine: shared memory within each host, Gloo between hosts
hosts.py              which rank is on which host, and shared memory within each
phases.py             operations that consist of several phases, and how they advance
statistics.py         counts, and the bytes that each operation sends: pure functions of sizes
thread_rendezvous.py  matches the calls of ranks that are threads: one state machine per collective
threads.py            engine: ranks as threads of one process
watched_work.py       a wait that checks for failed peers, deadlock and timeout
work.py               an operation under way; several of them as one, against one deadline
"""

from __future__ import annotations

from syncline.transport.base import REDUCE_OPS, ReduceOp, Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.c10d_work import C10dWork
from syncline.transport.faulty import Fault, FaultyTransport
from syncline.transport.hierarchy import HierarchicalTransport
from syncline.transport.statistics import Statistics, sent_bytes
from syncline.transport.threads import ThreadGroup, ThreadsTransport, run_ranks
from syncline.transport.work import Work

__all__ = [
    "REDUCE_OPS",
    "C10dTransport",
    "C10dWork",
    "Fault",
    "FaultyTransport",
    "HierarchicalTransport",
    "ReduceOp",
    "Statistics",
    "ThreadGroup",
    "ThreadsTransport",
    "Transport",
    "Work",
    "run_ranks",
    "sent_bytes",
]
