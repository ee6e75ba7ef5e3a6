"""Transports: interchangeable engines that move and reduce flat tensors. Each operation returns a `Work`.

Imports: errors, tracebacks, words, checks, environment, records, native, user_code, _torch, liveness.

agreement.py          check that all ranks are about to make the same call, before any data is sent
base.py               the class Transport: final public methods; engines implement `_start_*`
c10d.py               engine: any torch.distributed process group
c10d_groups.py        process groups: options of their calls, creation, destruction, dtypes
c10d_work.py          an operation of a process group: the wait for it, and its errors
caller_lock.py        a lock that lets one thread of a rank use a transport at a time
hierarchy.py          engine: shared memory within each host, Gloo between hosts
hosts.py              which rank is on which host, and the shared memory within each host
phases.py             operations that consist of several phases, and how they advance
statistics.py         counts of operations, bytes and waiting time, and the bytes that each operation sends
thread_rendezvous.py  the calls of ranks that are threads, and how they are matched
threads.py            engine: ranks as threads of one process
watched.py            the base of engines whose ranks are processes: health, lanes, waits that check for failed peers
work.py               an operation under way, and several operations as one
"""

from __future__ import annotations

from syncline.transport.base import REDUCE_OPS, ReduceOp, Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.c10d_work import C10dWork
from syncline.transport.hierarchy import HierarchicalTransport
from syncline.transport.statistics import Statistics, sent_bytes
from syncline.transport.threads import ThreadGroup, ThreadsTransport, run_ranks
from syncline.transport.work import Work

__all__ = [
    "REDUCE_OPS",
    "C10dTransport",
    "C10dWork",
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
