"""Detection of waits that cannot end, and of their cause: the positions of all ranks, and ranks that have ended.

Imports: errors, words, environment, user_code, events, _torch.

at_exit.py      the end of a process: threads that are inside C++ code of torch, and groups that still exist
board.py        the position of each rank, published for its peers: step, phase, bucket, and call
calls.py        the calls in which ranks wait, of Syncline or of torch.distributed; the failure of a group
connection.py   connections of this process to stores, with a deadline for each request
deadlock.py     detection of waits that can never end, by pure functions of the places of all ranks
failed_wait.py  the search for the cause of a failed wait, and the error that names the cause
folder_store.py a store in a folder of this host, without a server process
gathering.py    texts of all ranks, gathered at the store by way of rank 0
health.py       the state of a group: whether the group can still be used, and the positions of its ranks
notices.py      failures and positions that ranks publish for each other, at the store or in shared memory
processes.py    detection of processes that have ended, are stopped, or are forks of a rank
store.py        messages at the store, signed and checked
"""

from __future__ import annotations

from syncline.liveness.board import Board, Place, StepPhase, Wait
from syncline.liveness.calls import Failure
from syncline.liveness.connection import StoreConnection, StoreSilent
from syncline.liveness.failed_wait import FailedWait
from syncline.liveness.health import Health, Lane
from syncline.liveness.notices import Notices, StoreMedium
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore, decode

__all__ = [
    "Board",
    "FailedWait",
    "Failure",
    "Health",
    "Lane",
    "Notices",
    "Place",
    "RankProcess",
    "SignedStore",
    "StepPhase",
    "StoreConnection",
    "StoreMedium",
    "StoreSilent",
    "Wait",
    "decode",
]
