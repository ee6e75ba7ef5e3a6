"""Whether the directory of saves is what it has to be: one that all ranks see, and that can be written."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid

from syncline.errors import SynclineError
from syncline.plan.difference import describe_ranks, ranks_with
from syncline.state.files import Files
from syncline.state.shelf import Shelf
from syncline.state.together import Refused, everywhere, on_rank_0
from syncline.transport.base import Transport

__all__ = ["check_readable", "check_writable", "checked_path"]

_TITLE = "sl.Checkpointer"


def checked_path(directory: object) -> str:
    """The absolute path of a directory.

    Raises:
        TypeError, ValueError: it is no path.
    """
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str):
        raise TypeError(f"expected directory to be a path, a str or an os.PathLike of one, got {directory!r}")
    if not path:
        raise ValueError("expected directory to be a path, got '' ('.' is where the program was started)")
    return os.path.abspath(path)


def check_writable(lane: Transport, files: Files, shelf: Shelf, path: str) -> None:
    """Raise unless all ranks see the same directory, and rank 0 can write there; it is made. A collective call.

    Raises:
        SynclineError: the same on every rank.
    """

    def write() -> str:
        files.make_directory(path)
        probe = shelf.probe_path(uuid.uuid4().hex)
        files.write(probe, [b"seen by all ranks?"])
        return probe

    try:
        probe = on_rank_0(lane, write)
    except Refused as refused:
        raise SynclineError(f"{_TITLE}: {path} cannot be written: {refused}") from None
    name = probe.rpartition("/")[2]
    seen = everywhere(lane, lambda: (socket.gethostname(), path, name in files.names(path)))
    if lane.rank == 0:
        with contextlib.suppress(OSError):
            files.remove(probe)
    blind = {rank: f"{where} on {host}" for rank, (host, where, is_seen) in enumerate(seen) if not is_seen}
    if blind:
        host, where, _ = seen[0]
        raise SynclineError(
            f"{_TITLE}: what rank 0 wrote into {where} on {host} is not in {_by_place(blind)}. Give the same directory "
            "on all ranks, on a file system that all hosts have mounted at the same place"
        )


def check_readable(lane: Transport, shelf: Shelf, path: str) -> None:
    """Raise unless all ranks see saves there: who only reads waits for nothing to be saved. A collective call.

    Raises:
        SynclineError: the same on every rank.
    """
    try:
        seen = everywhere(lane, lambda: (socket.gethostname(), bool(shelf.saves())))
    except Refused as refused:
        raise SynclineError(f"{_TITLE}: {path} cannot be read: {refused}") from None
    blind = {rank: host for rank, (host, has_saves) in enumerate(seen) if not has_saves}
    if blind:
        raise SynclineError(
            f"{_TITLE}: expected saves to load in {path}, found none on {_by_place(blind)}. Is it another directory, "
            "or not mounted there?"
        )


def _by_place(places: dict[int, str]) -> str:
    return "; ".join(f"{place} ({describe_ranks(ranks)})" for place, ranks in ranks_with(places).items())
