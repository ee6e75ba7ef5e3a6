"""What runs on each of the two ranks: programs, each under torch's class and under ours, over both transports.

The ranks agree after each run by a store of their own. A rank whose program ends, by an error or in good order, while
the other one waits for it in vain, does what the end of its process would do: under torch's class it closes its
connections, under ours it says that it leaves, or why it fails. Groups that were damaged are made anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from syncline import DistributedDataParallel
from syncline.session import transport_of
from syncline.transport import C10dTransport, Transport

from .facts import facts_of
from .interpreter import Outcome, alone, on_rank
from .program import Layer, Model, Optimizer, Program, Step

__all__ = ["WAYS", "Entry", "Job", "run_programs"]

WAYS = ("torch", "gloo", "shm")
"""Torch's class; ours over Gloo, and over shared memory."""
Entry = tuple[int, str, Outcome | None]
"""The number of a program, the way, and the outcome; None when it begins."""


class Job(NamedTuple):
    """One program to run in one way."""

    number: int
    program: Program
    way: str


_GRACE_SECONDS = 0.3
"""How long the other rank must have been asleep before a rank that has ended makes its end known."""
_LOOK_SECONDS = 0.02
"""How often it looks."""
_NOTICED_SECONDS = 20.0
"""How long the other one may take to notice."""
_TIMEOUT_SECONDS = {"torch": 6.0, "gloo": 16.0, "shm": 16.0}
"""After which a collective that nobody joins fails."""
_PLAIN_TIMEOUT_SECONDS = 4.0
"""The same of the program's own collectives."""
_MEETING_TIMEOUT = timedelta(seconds=120)
_WATCHDOG_SECONDS = 60.0
"""After which this process is ended: nothing else has ended the wait."""
_WARM_UP = Program((Model((Layer("linear"),)),), (), (Optimizer("adamw", (0,)),), (Step(0),))


def run_programs(jobs: list[Job], folder: str, wraps: dict[str, Any] | None = None) -> None:
    """Run programs on this rank; a file of this rank's in `folder` gets an entry before and after each run.

    Args:
        jobs: the same on both ranks.
        folder: where the entries go.
        wraps: the class for each way, where it is not the usual one.
    """
    torch.set_num_threads(1)
    alone(_WARM_UP)  # imports much of torch
    if any(facts_of(job.program).compiles for job in jobs):
        importlib.import_module(
            "torch._dynamo.compiled_autograd"
        )  # takes seconds, which no rank is to wait for
    gc.collect()
    gc.freeze()  # what is there already is not looked through after each run
    peer = _Peer()
    ways = {way: _Way(way, peer, (wraps or {}).get(way)) for way in dict.fromkeys(job.way for job in jobs)}
    with (Path(folder) / f"{dist.get_rank()}").open("ab") as file:
        for number, program, way in jobs:
            faulthandler.dump_traceback_later(_WATCHDOG_SECONDS, exit=True, file=sys.__stderr__)
            _write(file, (number, way, None))
            _write(file, (number, way, ways[way].run(program)))
    faulthandler.cancel_dump_traceback_later()
    for opened in ways.values():
        opened.close()
    peer.leave()


def _write(file: BinaryIO, entry: Entry) -> None:
    pickle.dump(entry, file)
    file.flush()


class _Peer:
    """The other rank, by a store."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        # At a port of its own: the store of the job is a file.
        meeting_point = distributed_c10d._get_default_store()
        if self.rank == 0:
            self._store = dist.TCPStore("127.0.0.1", 0, 2, True, _MEETING_TIMEOUT, wait_for_workers=False)
            meeting_point.set("fuzz port", str(self._store.port))
        else:
            port = int(meeting_point.get("fuzz port"))
            self._store = dist.TCPStore("127.0.0.1", port, 2, False, _MEETING_TIMEOUT)
        self._number = 0
        # Only then do the short timeouts of the groups begin: on a busy machine one rank may be seconds late.
        self.tell(str(os.getpid()))
        pid = self.word(_MEETING_TIMEOUT.total_seconds())
        assert pid is not None, "the other rank has not come"
        self._pid = int(pid)

    def next_run(self) -> None:
        self._number += 1

    def tell(self, word: str) -> None:
        self._store.set(f"{self._number}/{self.rank}", word)

    def word(self, timeout_seconds: float) -> str | None:
        """What the other rank has told of this run; None if nothing in time."""
        key = f"{self._number}/{1 - self.rank}"
        try:
            self._store.wait([key], timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return None
        return self._store.get(key).decode()

    def leave(self) -> None:
        """Let rank 0, which has the store, wait until the other rank needs it no more."""
        self.next_run()
        self.tell("needs nothing")
        if self.rank == 0:
            self.word(_WATCHDOG_SECONDS)

    def ends(self) -> bool:
        """Wait until the other rank has told of its end. Return False if it waits in vain: it is asleep.

        A rank that is late because the machine is busy is not asleep: one of its threads could run.
        """
        asleep: deque[bool] = deque(maxlen=round(_GRACE_SECONDS / _LOOK_SECONDS))
        while self.word(_LOOK_SECONDS) is None:
            asleep.append(not (_can_run(self._pid) or _can_run(os.getpid())))
            if sum(asleep) > 0.5 * (asleep.maxlen or 0):  # it wakes at times, to look whether this rank lives
                return False
        return True


def _can_run(pid: int) -> bool:
    """Return whether a thread of a process runs, or would if a processor were free, or waits for a disk.

    The calling thread does not count.
    """
    threads: list[Path] = []
    with contextlib.suppress(OSError):  # the process has ended
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    for thread in threads:
        with contextlib.suppress(OSError):
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state in "RD" and int(thread.name) != threading.get_native_id():
                return True
    return False


class _Way:
    """One class over one transport, with a group of its own."""

    def __init__(self, name: str, peer: _Peer, wrap: Callable[..., nn.Module] | None) -> None:
        self.name = name
        self._peer = peer
        usual = nn.parallel.DistributedDataParallel if name == "torch" else DistributedDataParallel
        self._wrap = usual if wrap is None else wrap
        self._open()

    def _open(self) -> None:
        self._group = dist.new_group(timeout=timedelta(seconds=_TIMEOUT_SECONDS[self.name]))
        self._plain_group = dist.new_group(timeout=timedelta(seconds=_PLAIN_TIMEOUT_SECONDS))
        self._given: Any = self._group
        if self.name == "gloo":
            self._given = C10dTransport(self._group)
        elif self.name == "shm":
            self._given = transport_of(self._group)
            assert self._given.reduces_in_place, "shared memory cannot be had here"

    def close(self) -> None:
        """Make the end of this rank known; damaged or not."""
        given, groups = self._given, [self._group, self._plain_group]
        del self._given, self._group, self._plain_group
        if isinstance(given, Transport):
            given.close()
        del given
        gc.collect()
        while groups:
            dist.destroy_process_group(groups.pop())
        gc.collect()

    def run(self, program: Program) -> Outcome:
        """Run one program; both ranks return when both have ended."""
        peer = self._peer
        peer.next_run()
        began_at = time.monotonic()
        ended = on_rank(
            program,
            self._wrap,
            rank=peer.rank,
            group=self._given,
            plain_group=self._plain_group,
            is_torchs=self.name == "torch",
        )
        outcome = ended.outcome
        outcome.seconds = time.monotonic() - began_at
        peer.tell("has ended")
        has_peer_ended = peer.ends()
        is_sound = has_peer_ended and outcome.error is None
        if not has_peer_ended and isinstance(self._given, Transport):
            if outcome.error is None:
                self._given.leave()
            else:
                self._given.abort(f"it ended by an exception: {outcome.error}")
            has_peer_ended = peer.word(_NOTICED_SECONDS) is not None
        outcome.was_alone = not has_peer_ended and outcome.error is None
        ended.free()
        gc.collect()
        if not has_peer_ended:
            self.close()
            peer.word(_WATCHDOG_SECONDS)
        peer.next_run()
        peer.tell("sound" if is_sound else "damaged")
        if is_sound and peer.word(_WATCHDOG_SECONDS) == "sound":
            return outcome
        if has_peer_ended:
            self.close()
        # Both are through with the old group before a new one is made.
        peer.next_run()
        peer.tell("closed")
        peer.word(_WATCHDOG_SECONDS)
        self._open()
        return outcome
