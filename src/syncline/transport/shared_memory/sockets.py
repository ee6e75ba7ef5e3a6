"""Unix sockets between the ranks of one host: connect, send bytes and files, and detect ended processes.

While the ranks connect, each rank listens at an abstract address, to which the next rank connects. The kernel removes
the address when the process ends, so a killed process leaves no file behind. A rank accepts a connection only if the
kernel reports the expected process and user at the other end, and if the random token of the group arrives over it.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from syncline.errors import CollectiveTimeout, PeerLost, SynclineError
from syncline.liveness.processes import RankProcess
from syncline.words import describe_ranks, end_of_processes


class Peers:
    """A watcher of the processes of the other ranks, which reports the processes that have ended.

    Args:
        processes: the processes of all ranks, in rank order.
        rank: this rank, whose own process is not watched.
    """

    def __init__(self, processes: Sequence[RankProcess], rank: int) -> None:
        self.processes = dict(enumerate(processes))
        """The processes of all ranks, by rank."""
        self.pause_seconds = min(0.05, 0.002 + 0.001 * len(processes))
        """How long a wait sleeps between two calls of `gone`."""
        self._turns = itertools.cycle(_turns(rank, len(processes)))

    def gone(self) -> list[int]:
        """Return ranks whose processes have ended. Several threads can call this method at the same time.

        Among many ranks, one call looks at some of them, and the next call at others. The ranks begin with different
        ones. So as long as all wait, each process is looked at by some rank at any time, and the cost of a look does
        not grow with the number of ranks.
        """
        return sorted(peer for peer in next(self._turns) if self.processes[peer].has_ended())


def failed_connection(what: str, lost: Sequence[int], error: OSError | None = None) -> SynclineError:
    """Return the error to raise after ranks of this host could not communicate over their connections.

    Args:
        what: what they could not do, as a clause.
        lost: the ranks whose processes have ended.
        error: the error of the connection, if `lost` may be empty.
    """
    if lost:
        return PeerLost(f"{what}, because of {describe_ranks(lost)}: {end_of_processes(lost)}")
    if isinstance(error, TimeoutError):
        return CollectiveTimeout(
            f"{what}, because another rank did not answer in time. Check whether a rank is stopped"
        )
    return PeerLost(f"{what}, because the connection to another rank is lost ({error})")


_LOOKS = 256
"""How many processes all ranks together look at in one round of calls of `Peers.gone`, if there are many ranks."""


def _turns(rank: int, size: int) -> list[list[int]]:
    """Divide the other ranks into turns: those that `Peers.gone` looks at in one call, in the next call, and so on.

    Examples:
        >>> _turns(1, 4)
        [[2, 3, 0]]
        >>> _turns(90, 100)[:2]
        [[91, 92], [93, 94]]
    """
    others = [(rank + distance) % size for distance in range(1, size)]
    each = max(2, _LOOKS // size) if len(others) > _FEW_PEERS else max(1, len(others))
    return [others[begin : begin + each] for begin in range(0, len(others), each)] or [[]]


_FEW_PEERS = 16
"""The number of other ranks up to which `Peers.gone` looks at all of them in each call."""

_CREDENTIALS = struct.Struct("3i")

_LENGTH = struct.Struct("<I")

_HELLO = struct.Struct("<I32s")
"""The layout of the first message on a connection: the number of the connecting rank, and the token of the group."""

_MAX_BYTES = 1 << 20
"""The size of the largest message that a rank accepts."""

_FULL_QUEUE_SECONDS = 0.01
"""How long a rank waits before it connects again, if the queue of the listener is full."""

_LOOK_SECONDS = 0.05
"""The interval at which a rank that waits for a connection checks the processes of the other ranks."""


class RankOnSocket(NamedTuple):
    """The rank that is expected at the other end of a connection, with its process and user."""

    rank: int
    pid: int
    uid: int


# ---------------------------------------------------------------------- connections


def listener_for_next() -> socket.socket:
    """Return a new socket that listens at a random abstract address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0syncline-" + secrets.token_hex(16).encode())
    listener.listen()
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket, in the form that `connected` expects."""
    address: bytes = listener.getsockname()
    return address[1:].decode()


def connected(
    address: str, expected: RankOnSocket, rank: int, token: bytes, timeout_seconds: float
) -> socket.socket:
    """Connect to the rank that listens at `address`, and return the connection.

    Args:
        address: the result of `address_of` on the listening rank.
        expected: the rank and process that should be listening there.
        rank: this rank.
        token: the random token of the group.
        timeout_seconds: how long to wait, now for the connection, and later for data on it.

    Raises:
        OSError: no process listens at the address.
        SynclineError: the process that listens there is not the expected one.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout_seconds
    try:
        connection.settimeout(timeout_seconds)
        while True:
            try:
                connection.connect(b"\0" + address.encode())
                break
            except BlockingIOError:
                # Other programs fill the queue of the listener, which closes their connections.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_FULL_QUEUE_SECONDS)
        _check_credentials(connection, expected)
        connection.sendall(_HELLO.pack(rank, token))
    except BaseException:
        connection.close()
        raise
    return connection


def accepted(
    listener: socket.socket, expected: RankOnSocket, token: bytes, timeout_seconds: float, peers: Peers
) -> socket.socket:
    """Wait until the expected rank connects to `listener`, and return the connection.

    Connections from other processes are closed.

    Args:
        listener: the socket at which this rank listens.
        expected: the rank and process that should connect.
        token: the random token of the group.
        timeout_seconds: how long to wait, now for the connection, and later for data on it.
        peers: the processes of the other ranks.

    Raises:
        PeerLost: the process of a rank has ended.
        SynclineError: the expected rank did not connect in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        remaining_seconds = deadline - time.monotonic()
        listener.settimeout(max(0.01, min(remaining_seconds, _LOOK_SECONDS)))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if lost := peers.gone():
                raise failed_connection("not all ranks of this host were connected", lost) from None
            if remaining_seconds > 0:
                continue
            raise SynclineError(
                f"rank {expected.rank} (process {expected.pid}) did not connect within {timeout_seconds:g} s"
            ) from None
        with contextlib.suppress(
            OSError, SynclineError
        ):  # after an error, the expected rank may still connect
            # This check comes before the first read, so that another process that sends nothing cannot delay this rank.
            _check_credentials(connection, expected)
            connection.settimeout(timeout_seconds)
            its_rank, its_token = _HELLO.unpack(_receive(connection, _HELLO.size))
            if its_rank == expected.rank and secrets.compare_digest(its_token, token):
                return connection
        connection.close()


def _check_credentials(connection: socket.socket, expected: RankOnSocket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if (pid, uid) != (expected.pid, expected.uid):
        raise SynclineError(
            f"expected rank {expected.rank} (process {expected.pid} of user {expected.uid}) at the other end of the "
            f"connection; got process {pid} of user {uid}"
        )


# ---------------------------------------------------------------------- bytes and files on a socket


def _send(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the other rank closed the connection")
        data += more
    return bytes(data)


def _receive_message(connection: socket.socket) -> bytes:
    (num_bytes,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if num_bytes > _MAX_BYTES:
        raise ConnectionResetError(f"expected a message of at most {_MAX_BYTES} bytes; got {num_bytes} bytes")
    return _receive(connection, num_bytes)


def send_rows(connection: socket.socket, rows: list[bytes]) -> None:
    """Send a list of bytes objects to the process at the other end, as one message."""
    lengths = struct.pack(f"<{len(rows) + 1}I", len(rows), *map(len, rows))
    _send(connection, lengths + b"".join(rows))


def receive_rows(connection: socket.socket) -> list[bytes]:
    """Receive the list of bytes objects that the other rank sent with `send_rows`."""
    data = _receive_message(connection)
    num_rows = _LENGTH.unpack_from(data)[0]
    begin = _LENGTH.size * (num_rows + 1)
    if begin > len(data):
        raise ConnectionResetError(f"expected the lengths of {num_rows} rows; got {len(data)} bytes")
    rows = []
    for length in struct.unpack_from(f"<{num_rows}I", data, _LENGTH.size):
        rows.append(data[begin : begin + length])
        begin += length
    return rows


def send_file(connection: socket.socket, descriptor: int | None) -> None:
    """Send an open file to the process at the other end. If `descriptor` is None, send None."""
    if descriptor is None:
        connection.sendall(b"-")
    else:
        socket.send_fds(connection, [b"+"], [descriptor])


def receive_file(connection: socket.socket) -> int | None:
    """Receive an open file that the other rank sent with `send_file`, and return its descriptor.

    The descriptor is None if the other rank sent None.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("the other rank closed the connection")
    return descriptors[0] if descriptors else None
