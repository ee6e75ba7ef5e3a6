"""Connections between the ranks of one host, over which each rank passes memory to the next.

The ranks form a chain, so that no rank holds more than two sockets. Equal host names do not prove that two ranks are on
one host: each rank must map the memory that rank 0 has created, and read in it the bytes that the others wrote.

`store_exchange` gathers bytes through a torch.distributed store, for ranks that are not connected yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from syncline.errors import CollectiveTimeout, SynclineError
from syncline.liveness.processes import host_key
from syncline.liveness.store import SignedStore, decode
from syncline.transport.shared_memory.core import MAX_RANKS, SharedMemoryUnavailable, library
from syncline.transport.shared_memory.memory import SharedMemory
from syncline.transport.shared_memory.sockets import (
    Peers,
    RankOnSocket,
    accepted,
    address_of,
    connected,
    listener_for_next,
    receive_file,
    receive_rows,
    send_file,
    send_rows,
)
from syncline.words import describe_ranks

Exchange = Callable[[bytes], list[bytes]]
"""A collective function that gathers every rank's bytes, in rank order."""

NUM_EXCHANGES = 3
"""Largest number of exchanges that a hub makes. It makes fewer if the ranks cannot share memory."""

_SHOWN_BYTES = 60

_PROOF_BYTES = 32

_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class _Presence:
    """A rank's description of itself for the others."""

    pid: int
    uid: int
    host: str
    """The kernel's random number of this boot, and the namespaces of process numbers and sockets."""
    unable: str = ""
    """The reason why this rank cannot share memory at all; empty if it can."""
    build: str = ""
    """The memory layout of its native library."""
    address: str = ""
    """The address at which it listens for the next rank."""
    token: str = ""
    """The token that a connecting rank must send; set by rank 0 only."""

    def process(self, rank: int) -> RankOnSocket:
        """Return the process that is accepted as `rank`."""
        return RankOnSocket(rank, self.pid, self.uid)


def _parsed(row: bytes, rank: int) -> _Presence:
    """Return a rank's description of itself, checked so that `bytes.fromhex` and `Peers` accept its values."""
    where = f"rank {rank} on how it can share memory"
    found = decode(_Presence, row, where)
    if found.pid < 1 or not re.fullmatch(r"([0-9a-f]{64})?", found.token):
        raise SynclineError(
            f"{where}: expected the number of a process and a token, got {row[:_SHOWN_BYTES]!r}"
        )
    return found


class Hub:
    """This rank's place in the chain of one host's ranks.

    Args:
        rank: this rank.
        size: number of ranks.
        exchange: gathers bytes before the ranks are connected; called at most `NUM_EXCHANGES` times.

    Raises:
        SharedMemoryUnavailable: the ranks cannot share memory. Raised on all ranks, with the reasons.
    """

    def __init__(self, *, rank: int, size: int, exchange: Exchange) -> None:
        self.rank = rank
        self.size = size
        self._connections: dict[int, socket.socket] = {}
        """The connections to the rank before and to the rank after this one, by rank."""
        weakref.finalize(self, _close, self._connections)
        token = secrets.token_bytes(32)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listener_for_next()) if rank < size - 1 else None
            everyone = self._exchange_presence(listener, token, exchange)
            trouble = _attempt(lambda: self._connect(listener, everyone))
            _agree(exchange, trouble)
        try:
            _agree(exchange, _attempt(lambda: self._verify(everyone)))
        except SharedMemoryUnavailable:
            self.close()
            raise

    def _exchange_presence(
        self, listener: socket.socket | None, token: bytes, exchange: Exchange
    ) -> list[_Presence]:
        mine = _Presence(
            pid=os.getpid(),
            uid=os.getuid(),
            host=host_key(),
            unable=_attempt(library),
            build=_build(),
            address="" if listener is None else address_of(listener),
            token="" if self.rank else token.hex(),
        )
        rows = exchange(json.dumps(asdict(mine)).encode())
        everyone = [_parsed(row, rank) for rank, row in enumerate(rows)]
        _check_ability(everyone)
        return everyone

    def _connect(self, listener: socket.socket | None, everyone: list[_Presence]) -> None:
        token = bytes.fromhex(everyone[0].token)
        if self.rank > 0:
            before = self.rank - 1
            self._connections[before] = connected(
                everyone[before].address, everyone[before].process(before), self.rank, token
            )
        if listener is not None:
            after = self.rank + 1
            self._connections[after] = accepted(listener, everyone[after].process(after), token)

    def _verify(self, everyone: list[_Presence]) -> None:
        self.peers = Peers([presence.pid for presence in everyone], self.rank)
        proof = self.allocate(self.size * _PROOF_BYTES, "the proof that memory is shared")
        mine = secrets.token_bytes(_PROOF_BYTES)
        proof.map[self.rank * _PROOF_BYTES : (self.rank + 1) * _PROOF_BYTES] = mine
        for rank, written in enumerate(self.gather(mine)):
            if proof.map[rank * _PROOF_BYTES : (rank + 1) * _PROOF_BYTES] != written:
                raise SynclineError(f"the bytes that rank {rank} wrote into the memory cannot be read here")
        self.gather(b"")  # wait until all ranks have read

    # ------------------------------------------------------------------ collective calls over the hub

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in rank order; a collective call that blocks.

        Raises:
            OSError: a rank has ended, or did not answer in time.
        """
        before, after = self._neighbours()
        rows = [] if before is None else receive_rows(before)
        rows.append(payload)
        if after is not None:  # the last rank collects all rows and sends them back along the chain
            send_rows(after, rows)
            rows = receive_rows(after)
        if before is not None:
            send_rows(before, rows)
        return rows

    def allocate(self, num_bytes: int, purpose: str) -> SharedMemory:
        """Return new memory, all zeros, that every rank has mapped; a collective call.

        Args:
            num_bytes: size of the memory, the same on all ranks.
            purpose: use of the memory, for messages.

        Raises:
            SharedMemoryUnavailable: there is not enough memory. Raised on all ranks.
            SynclineError: a rank has ended.
        """
        num_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        try:
            memory, trouble = self._passed_on(num_bytes)
            troubles = [row.decode() for row in self.gather(trouble.encode())]
        except OSError as error:
            self.close()  # so that the next rank of the chain does not wait for this one
            raise SynclineError(
                f"shared memory for {purpose}: the process or connection of a rank on this host is gone ({error})"
            ) from error
        _raise_if_any(f"there is no shared memory for {purpose}:", troubles)
        assert memory is not None
        memory.release_file()
        return memory

    def _passed_on(self, num_bytes: int) -> tuple[SharedMemory | None, str]:
        """Return rank 0's new memory, mapped here and passed to the next rank, and an error text or ""."""
        before, after = self._neighbours()
        memory: SharedMemory | None = None
        try:
            if before is None:
                try:
                    memory = SharedMemory.create(num_bytes)
                finally:
                    if after is not None:
                        send_file(after, None if memory is None else memory.file_descriptor)
            else:
                descriptor = receive_file(before)
                if after is not None:
                    send_file(after, descriptor)
                if descriptor is not None:
                    memory = SharedMemory(descriptor, num_bytes)
            if memory is not None:
                each = num_bytes // self.size
                last = self.rank == self.size - 1
                memory.populate(self.rank * each, num_bytes if last else (self.rank + 1) * each)
        except SynclineError as error:
            return memory, str(error)
        return memory, ""

    def close(self) -> None:
        """Close the connections."""
        _close(self._connections)

    def _neighbours(self) -> tuple[socket.socket | None, socket.socket | None]:
        """Return the connections to the rank before and to the rank after this one; None at the ends of the chain."""
        if self.size > 1 and not self._connections:
            raise ConnectionResetError("the connections are closed")
        return self._connections.get(self.rank - 1), self._connections.get(self.rank + 1)


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


# ---------------------------------------------------------------------- checks of the ranks


def _check_ability(everyone: list[_Presence]) -> None:
    reasons = [f"rank {rank}: {presence.unable}" for rank, presence in enumerate(everyone) if presence.unable]
    if len(everyone) > MAX_RANKS:
        reasons.append(f"{len(everyone)} ranks, and at most {MAX_RANKS} can share memory")
    others = [rank for rank, presence in enumerate(everyone) if presence.host != everyone[0].host]
    if others:
        reasons.append(f"{describe_ranks(others)} run on another host (or in another container) than rank 0")
    builds = [rank for rank, presence in enumerate(everyone) if presence.build != everyone[0].build]
    if builds and not others:
        reasons.append(f"{describe_ranks(builds)} run another build of the native library than rank 0")
    users = [rank for rank, presence in enumerate(everyone) if presence.uid != everyone[0].uid]
    if users:
        reasons.append(f"{describe_ranks(users)} run as another user than rank 0")
    pids = [presence.pid for presence in everyone]
    if len(set(pids)) < len(pids) and not others:
        reasons.append("two ranks are in one process")
    if reasons:
        raise SharedMemoryUnavailable(
            "\n".join(["the ranks cannot share memory:", *reasons]), is_worth_a_warning=not others
        )


def _build() -> str:
    try:
        core = library()
    except SharedMemoryUnavailable:
        return ""
    return f"{core.group_bytes(2)} {core.lane_bytes(2, 4, 4096, 4096)}"


def _attempt(action: Callable[[], object]) -> str:
    """Run `action`, and return the text of its error; empty if there is none."""
    try:
        action()
    except (SynclineError, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def _agree(exchange: Exchange, trouble: str) -> None:
    """Raise on all ranks if one of them reports trouble."""
    troubles = [row.decode(errors="replace") for row in exchange(trouble.encode())]
    _raise_if_any("the ranks cannot share memory:", troubles)


def _raise_if_any(problem: str, troubles: list[str]) -> None:
    if any(troubles):
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text]
        raise SharedMemoryUnavailable("\n".join([problem, *lines]))


def store_exchange(store: Any, rank: int, size: int, timeout_seconds: float) -> Exchange:
    """Return a collective function that gathers bytes through the store; each call uses new keys.

    Args:
        store: the same for all ranks. If a group is created again after it was destroyed, all ranks must take part.
        rank: this rank.
        size: number of ranks.
        timeout_seconds: how long to wait for the others.

    Example:
        >>> from torch.distributed import HashStore
        >>> store_exchange(HashStore(), 0, 1, 5.0)(b"here")
        [b'here']
    """
    # Old keys stay in the store. Each rank counts its calls of this function, so that no rank reads messages of an
    # earlier group.
    messages = SignedStore(store)
    epoch = messages.count_up(f"syncline/exchange/epoch/{rank}")
    num_calls = 0

    def exchange(payload: bytes) -> list[bytes]:
        nonlocal num_calls
        keys = [f"syncline/exchange/{epoch}/{num_calls}/{peer}" for peer in range(size)]
        num_calls += 1
        messages.set(keys[rank], payload.decode())
        try:
            messages.wait(keys, timedelta(seconds=timeout_seconds))
        except DistStoreError as error:
            missing = [peer for peer, key in enumerate(keys) if not messages.has(key)]
            raise CollectiveTimeout(
                f"rank {rank} of {size} waited {timeout_seconds:g} s, but {describe_ranks(missing)} did not take part "
                "in setting up shared memory. Look for an earlier error of theirs, or for a different call"
            ) from error
        return [text.encode() for text in messages.multi_get(keys)]

    return exchange
