"""How the ranks of one host meet: over Unix sockets, by which memory is handed from one to the next.

They form a chain, so that no rank holds more than two sockets, however many ranks there are. Each listens for the next
one, for a moment, at an abstract address, which vanishes with its process: no file is left behind, whoever is killed.
Who connects must be the process that the ranks have named to each other, of the same user (the kernel tells), and know
the random token. That two ranks share a host is not inferred from names: each must map what rank 0 has
made, and read in it what the others wrote.

How ranks talk at a torch.distributed store before they are connected.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from syncline.errors import CollectiveTimeout, SynclineError
from syncline.liveness.calls import named_ranks
from syncline.liveness.processes import host_key
from syncline.liveness.store_messages import SignedStore, decode
from syncline.transport.shared_memory.core import MAX_RANKS, SharedMemoryUnavailable, library
from syncline.transport.shared_memory.memory import SharedMemory
from syncline.transport.shared_memory.peers import Peers

__all__ = ["NUM_EXCHANGES", "Exchange", "Hub", "store_exchange"]


Exchange = Callable[[bytes], list[bytes]]
"""Gathers every rank's bytes, in rank order; a collective call."""

NUM_EXCHANGES = 3
"""How many a hub makes at most: fewer where the ranks cannot share memory."""

_CREDENTIALS = struct.Struct("3i")

_LENGTH = struct.Struct("<I")

_HELLO = struct.Struct("<I32s")
"""The caller's rank, and the token."""

_MAX_BYTES = 1 << 20

_SHOWN_BYTES = 60

_CONNECT_SECONDS = 20.0

_PROOF_BYTES = 32

_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class _Presence:
    """What a rank says of itself."""

    pid: int
    uid: int
    host: str
    """The kernel's random number of this boot, and the namespaces within which process numbers and sockets count."""
    unable: str = ""
    """Why this rank cannot share memory at all."""
    build: str = ""
    """How its native library lays memory out."""
    address: str = ""
    """Where it listens for the next rank."""
    token: str = ""
    """What a caller must know; rank 0's."""


def _parsed(row: bytes, rank: int) -> _Presence:
    """What a rank has said of itself; `bytes.fromhex` and `Peers` can work with it."""
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
        exchange: how the ranks talk before they are connected; used at most `NUM_EXCHANGES` times.

    Raises:
        SharedMemoryUnavailable: on all ranks alike, with the reasons.
    """

    def __init__(self, *, rank: int, size: int, exchange: Exchange) -> None:
        self.rank = rank
        self.size = size
        self._connections: dict[int, socket.socket] = {}
        """To the rank before and to the rank after this one."""
        weakref.finalize(self, _close, self._connections)
        token = secrets.token_bytes(32)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(_listener()) if rank < size - 1 else None
            everyone = self._present(listener, token, exchange)
            trouble = _attempt(lambda: self._connect(listener, everyone))
            _agree(exchange, trouble)
        try:
            _agree(exchange, _attempt(lambda: self._follow(everyone)))
        except SharedMemoryUnavailable:
            self.close()
            raise

    def _present(self, listener: socket.socket | None, token: bytes, exchange: Exchange) -> list[_Presence]:
        mine = _Presence(
            pid=os.getpid(),
            uid=os.getuid(),
            host=host_key(),
            unable=_attempt(library),
            build=_build(),
            address="" if listener is None else listener.getsockname()[1:].decode(),
            token="" if self.rank else token.hex(),
        )
        rows = exchange(json.dumps(asdict(mine)).encode())
        everyone = [_parsed(row, rank) for rank, row in enumerate(rows)]
        _check_that_they_can(everyone)
        return everyone

    def _connect(self, listener: socket.socket | None, everyone: list[_Presence]) -> None:
        token = bytes.fromhex(everyone[0].token)
        if self.rank > 0:
            before = self.rank - 1
            connection = self._connections[before] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(b"\0" + everyone[before].address.encode())
            _check_credentials(connection, everyone[before], before)
            connection.sendall(_HELLO.pack(self.rank, token))
        if listener is not None:
            after = self.rank + 1
            self._connections[after] = _accepted(listener, everyone[after], after, token)

    def _follow(self, everyone: list[_Presence]) -> None:
        self.peers = Peers([presence.pid for presence in everyone], self.rank)
        proof = self.share(self.size * _PROOF_BYTES, "the proof that memory is shared")
        mine = secrets.token_bytes(_PROOF_BYTES)
        proof.map[self.rank * _PROOF_BYTES : (self.rank + 1) * _PROOF_BYTES] = mine
        for rank, written in enumerate(self.gather(mine)):
            if proof.map[rank * _PROOF_BYTES : (rank + 1) * _PROOF_BYTES] != written:
                raise SynclineError(f"what rank {rank} wrote into the memory cannot be read here")
        self.gather(b"")  # all have read

    # ------------------------------------------------------------------ what is said over the hub

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; a collective call, blocking.

        Raises:
            OSError: a rank has gone, or did not come in time.
        """
        before, after = self._neighbours()
        rows = [] if before is None else _receive_rows(before)
        rows.append(payload)
        if after is not None:  # all rows have come together at the last rank
            _send_rows(after, rows)
            rows = _receive_rows(after)
        if before is not None:
            _send_rows(before, rows)
        return rows

    def share(self, num_bytes: int, purpose: str) -> SharedMemory:
        """New memory that every rank has mapped, all zeros; a collective call.

        Args:
            num_bytes: how much, the same on all ranks.
            purpose: what it is for, for messages.

        Raises:
            SharedMemoryUnavailable: on all ranks alike: there is not enough memory.
            SynclineError: a rank has gone.
        """
        num_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        try:
            memory, trouble = self._passed_on(num_bytes)
            troubles = [row.decode() for row in self.gather(trouble.encode())]
        except OSError as error:
            self.close()  # the next rank of the chain is not to wait for this one
            raise SynclineError(
                f"shared memory for {purpose}: a rank of this host has gone ({error})"
            ) from error
        if any(troubles) or memory is None:
            lines = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text]
            raise SharedMemoryUnavailable("\n".join([f"shared memory for {purpose} cannot be had:", *lines]))
        memory.release_file()
        return memory

    def _passed_on(self, num_bytes: int) -> tuple[SharedMemory | None, str]:
        """Rank 0's new memory, as it is mapped here, or what went wrong here."""
        before, after = self._neighbours()
        memory: SharedMemory | None = None
        try:
            if before is None:
                try:
                    memory = SharedMemory.create(num_bytes)
                finally:
                    if after is not None:
                        _send_file(after, None if memory is None else memory.file_descriptor)
            else:
                descriptor = _receive_file(before)
                if after is not None:
                    _send_file(after, descriptor)
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
        """The connections to the rank before and to the rank after this one; None at the ends of the chain."""
        if self.size > 1 and not self._connections:
            raise ConnectionResetError("the connections are closed")
        return self._connections.get(self.rank - 1), self._connections.get(self.rank + 1)


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


# ---------------------------------------------------------------------- who may take part


def _check_that_they_can(everyone: list[_Presence]) -> None:
    reasons = [f"rank {rank}: {presence.unable}" for rank, presence in enumerate(everyone) if presence.unable]
    if len(everyone) > MAX_RANKS:
        reasons.append(f"{len(everyone)} ranks, and at most {MAX_RANKS} can share memory")
    others = [rank for rank, presence in enumerate(everyone) if presence.host != everyone[0].host]
    if others:
        reasons.append(f"{named_ranks(others)} run on another host (or in another container) than rank 0")
    builds = [rank for rank, presence in enumerate(everyone) if presence.build != everyone[0].build]
    if builds and not others:
        reasons.append(f"{named_ranks(builds)} run another build of the native library than rank 0")
    users = [rank for rank, presence in enumerate(everyone) if presence.uid != everyone[0].uid]
    if users:
        reasons.append(f"{named_ranks(users)} run as another user than rank 0")
    pids = [presence.pid for presence in everyone]
    if len(set(pids)) < len(pids) and not others:
        reasons.append("two ranks are in one process")
    if reasons:
        raise SharedMemoryUnavailable(
            "\n".join(["the ranks cannot share memory:", *reasons]), is_worth_a_warning=not others
        )


def _accepted(listener: socket.socket, expected: _Presence, rank: int, token: bytes) -> socket.socket:
    """Wait until `rank` connects to `listener`, and return its connection. Anybody else's is closed."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise SynclineError(f"{named_ranks([rank])} did not connect") from None
        try:
            # Before anything is read: nobody waits for a stranger who says nothing.
            _check_credentials(connection, expected, rank)
            connection.settimeout(_CONNECT_SECONDS)
            its_rank, its_token = _HELLO.unpack(_receive(connection, _HELLO.size))
            if its_rank != rank or not secrets.compare_digest(its_token, token):
                raise SynclineError("a stranger")
        except (OSError, SynclineError):
            connection.close()  # the rank itself may still come
        else:
            return connection


def _check_credentials(connection: socket.socket, expected: _Presence, rank: int) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if (pid, uid) != (expected.pid, expected.uid):
        raise SynclineError(
            f"expected a connection from rank {rank} (process {expected.pid}, user {expected.uid}), got one from "
            f"process {pid}, user {uid}"
        )


def _build() -> str:
    try:
        core = library()
    except SharedMemoryUnavailable:
        return ""
    return f"{core.group_bytes(2)} {core.lane_bytes(2, 4, 4096, 4096)}"


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0syncline-" + secrets.token_hex(16).encode())
    listener.listen()
    return listener


def _attempt(action: Callable[[], object]) -> str:
    """What went wrong in `action`; empty if nothing did."""
    try:
        action()
    except (SynclineError, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def _agree(exchange: Exchange, trouble: str) -> None:
    """All ranks go on, or none does."""
    troubles = [row.decode(errors="replace") for row in exchange(trouble.encode())]
    if any(troubles):
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text]
        raise SharedMemoryUnavailable("\n".join(["the ranks cannot share memory:", *lines]))


# ---------------------------------------------------------------------- bytes and files on a socket


def _send(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return bytes(data)


def _receive_message(connection: socket.socket) -> bytes:
    (num_bytes,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if num_bytes > _MAX_BYTES:
        raise ConnectionResetError(f"a message of {num_bytes} bytes")
    return _receive(connection, num_bytes)


def _send_rows(connection: socket.socket, rows: list[bytes]) -> None:
    _send(connection, str(len(rows)).encode())
    for row in rows:
        _send(connection, row)


def _receive_rows(connection: socket.socket) -> list[bytes]:
    return [_receive_message(connection) for _ in range(int(_receive_message(connection)))]


def _send_file(connection: socket.socket, descriptor: int | None) -> None:
    if descriptor is None:
        connection.sendall(b"-")
    else:
        socket.send_fds(connection, [b"+"], [descriptor])


def _receive_file(connection: socket.socket) -> int | None:
    word, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not word:
        raise ConnectionResetError("the connection was closed")
    return descriptors[0] if descriptors else None


def store_exchange(store: Any, rank: int, size: int, timeout_seconds: float) -> Exchange:
    """A collective that gathers bytes at the store; each call uses names of its own.

    Args:
        store: the same for all ranks. Ranks that meet there once more, after a group was destroyed, must all do so.
        rank: this rank.
        size: number of ranks.
        timeout_seconds: how long to wait for the others.

    Example:
        >>> from torch.distributed import HashStore
        >>> store_exchange(HashStore(), 0, 1, 5.0)(b"here")
        [b'here']
    """
    # Old names stay in the store. Each rank counts for itself how often it was here, so that nobody reads what ranks
    # said to each other before.
    messages = SignedStore(store)
    epoch = messages.count_up(f"syncline/meet/epoch/{rank}")
    num_calls = 0

    def exchange(payload: bytes) -> list[bytes]:
        nonlocal num_calls
        keys = [f"syncline/meet/{epoch}/{num_calls}/{peer}" for peer in range(size)]
        num_calls += 1
        messages.set(keys[rank], payload.decode())
        try:
            messages.wait(keys, timedelta(seconds=timeout_seconds))
        except DistStoreError as error:
            missing = [peer for peer, key in enumerate(keys) if not messages.has(key)]
            raise CollectiveTimeout(
                f"rank {rank} of {size} waited {timeout_seconds:g} s, but {named_ranks(missing)} did not come to share "
                "memory. Did they fail before, or call something else?"
            ) from error
        return [text.encode() for text in messages.multi_get(keys)]

    return exchange
