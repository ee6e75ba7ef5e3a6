"""Unix sockets between the ranks of one host: who may connect, how bytes and files are sent, which process has ended.

While the ranks connect, each rank listens for the next one at an abstract address. The address vanishes with its
process, so a killed process leaves no file behind. A connection is accepted only from the expected process of the same
user, as reported by the kernel, and only with the random token of the group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from syncline.errors import SynclineError
from syncline.liveness.processes import RankProcess
from syncline.words import describe_ranks


class Peers:
    """The processes of the other ranks, identified so that a reused process number is not mistaken for a rank.

    A process is identified by its number and its start time, which needs no open file. If `/proc` does not show the
    start time, a process descriptor (pidfd) identifies it.

    Args:
        pids: process numbers by rank.
        rank: this rank, which is not watched.

    Raises:
        OSError: this kernel has no process descriptors, or a process has ended already.
    """

    def __init__(self, pids: Sequence[int], rank: int) -> None:
        self.pids = list(pids)
        self._processes: dict[int, RankProcess] = {}
        self._rank_of: dict[int, int] = {}
        try:
            for peer, pid in enumerate(pids):
                if peer == rank:
                    continue
                process = RankProcess.here(pid)
                if process is None:
                    self._rank_of[os.pidfd_open(pid)] = peer
                else:
                    self._processes[peer] = process
        except BaseException:
            self.close()
            raise

    def gone(self) -> list[int]:
        """Return the ranks whose process has ended. Any thread may call this."""
        gone = [peer for peer, process in self._processes.items() if process.has_ended()]
        rank_of = self._rank_of
        if rank_of:
            poll = select.poll()  # a new object per call, because two threads cannot use one at once
            for descriptor in rank_of:
                poll.register(descriptor, select.POLLIN)
            gone += [rank_of[descriptor] for descriptor, events in poll.poll(0) if events & select.POLLIN]
        return sorted(gone)

    def close(self) -> None:
        """Stop watching all processes."""
        self._processes = {}
        rank_of, self._rank_of = self._rank_of, {}
        for descriptor in rank_of:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


_CREDENTIALS = struct.Struct("3i")

_LENGTH = struct.Struct("<I")

_HELLO = struct.Struct("<I32s")
"""The connecting rank, and the token."""

_MAX_BYTES = 1 << 20

_CONNECT_SECONDS = 20.0


class RankOnSocket(NamedTuple):
    """The process that is expected at the other end of a connection."""

    rank: int
    pid: int
    uid: int


# ---------------------------------------------------------------------- connections


def listener_for_next() -> socket.socket:
    """Return a socket that listens at a new random address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0syncline-" + secrets.token_hex(16).encode())
    listener.listen()
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket, as `connected` takes it."""
    address: bytes = listener.getsockname()
    return address[1:].decode()


def connected(address: str, expected: RankOnSocket, rank: int, token: bytes) -> socket.socket:
    """Return a connection from `rank` to the rank that listens at an address.

    Raises:
        OSError, SynclineError: nothing listens there, or another process than expected does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(b"\0" + address.encode())
        _check_credentials(connection, expected)
        connection.sendall(_HELLO.pack(rank, token))
    except BaseException:
        connection.close()
        raise
    return connection


def accepted(listener: socket.socket, expected: RankOnSocket, token: bytes) -> socket.socket:
    """Wait until the expected rank connects to `listener`, and return its connection. Close all other connections.

    Raises:
        SynclineError: it did not connect in time.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise SynclineError(f"{describe_ranks([expected.rank])} did not connect") from None
        try:
            # Checked before the first read, so that a foreign process that sends nothing cannot delay this rank.
            _check_credentials(connection, expected)
            connection.settimeout(_CONNECT_SECONDS)
            its_rank, its_token = _HELLO.unpack(_receive(connection, _HELLO.size))
            if its_rank != expected.rank or not secrets.compare_digest(its_token, token):
                raise SynclineError("not the expected rank, or not of this group")
        except (OSError, SynclineError):
            connection.close()  # the rank itself may still connect
        else:
            return connection


def _check_credentials(connection: socket.socket, expected: RankOnSocket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if (pid, uid) != (expected.pid, expected.uid):
        raise SynclineError(
            f"expected a connection from rank {expected.rank} (process {expected.pid}, user {expected.uid}), got "
            f"one from process {pid}, user {uid}"
        )


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


def send_rows(connection: socket.socket, rows: list[bytes]) -> None:
    """Send a list of bytes."""
    _send(connection, str(len(rows)).encode())
    for row in rows:
        _send(connection, row)


def receive_rows(connection: socket.socket) -> list[bytes]:
    """Receive what `send_rows` sent at the other end."""
    return [_receive_message(connection) for _ in range(int(_receive_message(connection)))]


def send_file(connection: socket.socket, descriptor: int | None) -> None:
    """Send an open file, or None in its place."""
    if descriptor is None:
        connection.sendall(b"-")
    else:
        socket.send_fds(connection, [b"+"], [descriptor])


def receive_file(connection: socket.socket) -> int | None:
    """Receive what `send_file` sent at the other end."""
    word, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not word:
        raise ConnectionResetError("the connection was closed")
    return descriptors[0] if descriptors else None
