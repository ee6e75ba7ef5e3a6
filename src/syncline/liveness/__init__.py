"""Which rank is where, and which rank is gone: what turns a wait into an error that names the cause.

Imports: errors, environment, user_code, _torch.

board.py        the step, phase and bucket of each rank, published for its peers
calls.py        what a rank called, also of torch.distributed itself, and why its group is broken
deadlock.py     can the waits of the ranks ever end? Pure functions of the board
failed_wait.py  the cause of a wait that fails, and the error
health.py       can a group still be used, and where are its ranks?
notices.py      failures that ranks publish for each other through the store
processes.py    has the process of a rank ended, is it stopped, or is this one a fork of a rank?
store.py        messages at the store, signed and checked; our connection to it
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
