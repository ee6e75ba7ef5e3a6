"""The position of each rank and the end of ranks, from which a wait that cannot end becomes an error with its cause.

Imports: errors, words, environment, user_code, _torch.

board.py        the step, phase and bucket of each rank, published for its peers
calls.py        the call in which a rank waits, also one of torch.distributed; the reason why a group has failed
deadlock.py     detection of waits that can never end, by pure functions of the board
failed_wait.py  the search for the cause of a wait that fails, and the error
health.py       the state of a group: whether it can still be used, and the positions of its ranks
notices.py      failures and positions that ranks publish for each other through the store
processes.py    whether the process of a rank has ended, is stopped, or is a fork of a rank
store.py        messages at the store, signed and checked; this process's connection to the store
"""

from __future__ import annotations

from syncline.liveness.board import Board, Place, Wait
from syncline.liveness.calls import Failure
from syncline.liveness.failed_wait import FailedWait
from syncline.liveness.health import Health, Lane
from syncline.liveness.notices import Notices
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
    "Wait",
    "decode",
]
