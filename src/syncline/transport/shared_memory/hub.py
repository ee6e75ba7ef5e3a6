"""Connections between the ranks of one host, over which the ranks pass the descriptors of shared memory.

The ranks form a chain in which each rank is connected to the rank before and the rank after it, so no rank holds more
than two sockets. Equal keys of hosts do not prove that the ranks can share memory. So all ranks map some memory that
rank 0 has created, each rank writes random bytes to it, and each rank checks the bytes of the other ranks.

`store_exchange` gathers bytes through a torch.distributed store, for ranks that are not connected yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from syncline.errors import SynclineError
from syncline.liveness.calls import FAILURES
from syncline.liveness.gathering import StoreGathering
from syncline.liveness.processes import RankProcess, host_key
from syncline.liveness.store import SignedStore, decode
from syncline.native import Library, NativeUnavailable
from syncline.native import library as native_library
from syncline.transport.shared_memory.memory import SharedMemory
from syncline.transport.shared_memory.sockets import (
    Peers,
    RankOnSocket,
    accepted,
    address_of,
    connected,
    failed_connection,
    listener_for_next,
    receive_file,
    receive_rows,
    send_file,
    send_rows,
)
from syncline.words import describe_ranks

T = TypeVar("T")

Exchange = Callable[[bytes], list[bytes]]
"""A collective function that gets the bytes of this rank, and returns the bytes of all ranks in rank order."""

_MAX_RANKS = 256

NUM_EXCHANGES = 2
"""The number of times that a `Hub` calls `exchange`. It makes fewer calls if the ranks cannot share memory."""

_SHOWN_BYTES = 60

_PROOF_BYTES = 32

_TOKEN_BYTES = 32

_HEX_DIGITS = frozenset("0123456789abcdef")

_PAGE_BYTES = 4096

_UNSEEN = "/proc does not show its process, so the other ranks would not notice the end of this process"


class SharedMemoryUnavailable(SynclineError):
    """The error that all ranks of a group raise if they cannot share memory.

    Args:
        text: the reasons, in the same words on all ranks.
        is_worth_a_warning: whether users can change something so that the ranks can share memory. It is False for ranks
            on several hosts.
    """

    def __init__(self, text: str, *, is_worth_a_warning: bool = True) -> None:
        super().__init__(text)
        self.is_worth_a_warning = is_worth_a_warning


def library() -> Library:
    """Return the native library. The first call loads it.

    Raises:
        SharedMemoryUnavailable: the library was not built, belongs to another version, or cannot be loaded.
    """
    try:
        return native_library()
    except NativeUnavailable as error:
        raise SharedMemoryUnavailable(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class _Presence:
    """A rank's description of itself. Each rank sends one to all ranks before the ranks connect."""

    pid: int
    uid: int
    host: str
    """A text about the host: the boot ID of the kernel, and the namespaces of process numbers and sockets."""
    started: int
    """The start time of the rank's process, as in `RankProcess`."""
    unable: str = ""
    """The reason why the rank cannot share memory with any rank; "" if there is no such reason."""
    build: str = ""
    """A text that identifies the memory layout of the rank's native library."""
    address: str = ""
    """The address at which the rank listens for the next rank; "" for the last rank."""
    token: str = ""
    """The token that every rank must send when it connects. Only rank 0 sets this field."""

    @property
    def process(self) -> RankProcess:
        """The described process."""
        return RankProcess(self.host, self.pid, self.started)

    def on_socket(self, rank: int) -> RankOnSocket:
        """Return `rank` and the described process as one object, which states whom a connection must reach.

        Args:
            rank: the rank that sent this description.
        """
        return RankOnSocket(rank, self.pid, self.uid)


def _parsed(row: bytes, rank: int) -> _Presence:
    """Parse the description that `rank` sent, and raise an error if its process number or token is not valid."""
    where = f"the description that rank {rank} sent to set up shared memory"
    found = decode(_Presence, row, where)
    if (
        found.pid < 1
        or len(found.token) not in (0, 2 * _TOKEN_BYTES)
        or not _HEX_DIGITS.issuperset(found.token)
    ):
        raise SynclineError(
            f"{where}: expected a process number above 0, and a token that is empty or has 64 hexadecimal digits; got "
            f"{row[:_SHOWN_BYTES]!r}"
        )
    return found


class Hub:
    """This rank's connections in the chain of the ranks of one host. All ranks create their hubs together.

    Args:
        rank: this rank.
        size: number of ranks.
        exchange: a function that gathers bytes before the ranks are connected. The hub calls it at most `NUM_EXCHANGES`
            times.
        timeout_seconds: how long this rank waits for another one, in each call.

    Raises:
        SharedMemoryUnavailable: the ranks cannot share memory. All ranks raise this error, with the same text.
        PeerLost: the process of another rank has ended.
    """

    def __init__(self, *, rank: int, size: int, exchange: Exchange, timeout_seconds: float) -> None:
        if sys.platform != "linux":
            library()  # raises the error
        self.rank = rank
        self.size = size
        self._timeout_seconds = timeout_seconds
        self._connections: dict[int, socket.socket] = {}
        """A map from rank to connection, for the rank before and the rank after this one."""
        weakref.finalize(self, _close, self._connections)
        token = secrets.token_bytes(_TOKEN_BYTES)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listener_for_next()) if rank < size - 1 else None
            everyone = self._exchange_presence(listener, token, exchange)
            try:
                _agree(exchange, lambda: self._connect_and_verify(listener, everyone))
            except SharedMemoryUnavailable as error:
                self.close()
                # The end of a process says nothing about memory, so it must not make the ranks use another transport.
                lost = [peer for peer, presence in enumerate(everyone) if presence.process.has_ended()]
                if lost:
                    raise failed_connection("the ranks could not set up shared memory", lost) from error
                raise

    def _exchange_presence(
        self, listener: socket.socket | None, token: bytes, exchange: Exchange
    ) -> list[_Presence]:
        process = RankProcess.own()
        mine = _Presence(
            pid=os.getpid(),
            uid=os.getuid(),
            host=host_key(),
            started=0 if process is None else process.started,
            unable=_UNSEEN if process is None else attempt(library)[1],
            build=_build(),
            address="" if listener is None else address_of(listener),
            token="" if self.rank else token.hex(),
        )
        rows = exchange(json.dumps(vars(mine)).encode())
        everyone = [_parsed(row, rank) for rank, row in enumerate(rows)]
        _check_ability(everyone)
        return everyone

    def _connect_and_verify(self, listener: socket.socket | None, everyone: list[_Presence]) -> None:
        try:
            self.peers = Peers([presence.process for presence in everyone], self.rank)
            self._connect(listener, everyone)
            self._verify()
        except BaseException:
            # So that the other ranks of the chain do not wait for this rank
            if listener is not None:
                listener.close()
            self.close()
            raise

    def _connect(self, listener: socket.socket | None, everyone: list[_Presence]) -> None:
        token = bytes.fromhex(everyone[0].token)
        if self.rank > 0:
            before = self.rank - 1
            self._connections[before] = connected(
                everyone[before].address,
                everyone[before].on_socket(before),
                self.rank,
                token,
                self._timeout_seconds,
            )
        if listener is not None:
            after = self.rank + 1
            self._connections[after] = accepted(
                listener, everyone[after].on_socket(after), token, self._timeout_seconds, self.peers
            )

    def _verify(self) -> None:
        proof = self.allocate(self.size * _PROOF_BYTES, "the proof that memory is shared")
        mine = secrets.token_bytes(_PROOF_BYTES)
        proof.map[self.rank * _PROOF_BYTES : (self.rank + 1) * _PROOF_BYTES] = mine
        for rank, written in enumerate(self.gather(mine)):
            if proof.map[rank * _PROOF_BYTES : (rank + 1) * _PROOF_BYTES] != written:
                raise SynclineError(
                    f"rank {self.rank} did not find the bytes that rank {rank} wrote to the shared memory"
                )
        self.gather(b"")  # wait until all ranks have read

    # ------------------------------------------------------------------ collective calls over the hub

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in rank order. This is a collective call, which waits for all ranks.

        Raises:
            OSError: the connection to another rank is closed, or another rank did not answer in time.
        """
        before, after = self._neighbours()
        rows = [] if before is None else receive_rows(before)
        rows.append(payload)
        if after is not None:  # the last rank gathers all rows and sends them back along the chain
            send_rows(after, rows)
            rows = receive_rows(after)
        if before is not None:
            send_rows(before, rows)
        return rows

    def allocate(self, num_bytes: int, purpose: str, *, populated_bytes: int | None = None) -> SharedMemory:
        """Create shared memory of zeros, and map it on all ranks; a collective call.

        Args:
            num_bytes: the size of the memory, which is the same on all ranks. It is rounded up to whole pages.
            purpose: the use of the memory, for error messages.
            populated_bytes: how many bytes at the beginning get pages now; None for all. The others get theirs at their
                first use.

        Raises:
            SharedMemoryUnavailable: there is not enough memory. All ranks raise this error.
            PeerLost: the connection to another rank is lost, for instance because its process has ended.
            CollectiveTimeout: another rank did not answer in time.
        """
        num_bytes = pages(num_bytes)
        try:
            memory, trouble = attempt(
                partial(
                    self._passed_on, num_bytes, num_bytes if populated_bytes is None else populated_bytes
                ),
                raised=(OSError,),
            )
            troubles = [row.decode() for row in self.gather(trouble.encode())]
        except OSError as error:
            self.close()  # so that the other ranks of the chain do not wait for this rank
            what = f"rank {self.rank} of the {self.size} ranks of this host cannot get shared memory for {purpose}"
            raise failed_connection(what, self.peers.gone(), error) from error
        _raise_if_any(f"cannot allocate shared memory for {purpose}:", troubles)
        assert memory is not None
        memory.release_file()
        return memory

    def _passed_on(self, num_bytes: int, populated_bytes: int) -> SharedMemory | None:
        """Map the memory that rank 0 creates, and pass its descriptor to the next rank.

        Return the memory. Return None if rank 0 could not create it.
        """
        before, after = self._neighbours()
        memory: SharedMemory | None = None
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
            # Each rank makes its own part of the pages, on its own NUMA node.
            each = populated_bytes // self.size
            last = self.rank == self.size - 1
            memory.populate(self.rank * each, populated_bytes if last else (self.rank + 1) * each)
        return memory

    def close(self) -> None:
        """Close this rank's connections to the other ranks."""
        _close(self._connections)

    def _neighbours(self) -> tuple[socket.socket | None, socket.socket | None]:
        """Return the connections to the rank before and to the rank after this one.

        At an end of the chain, the missing connection is None.
        """
        if self.size > 1 and not self._connections:
            raise ConnectionResetError("this rank has closed its connections to the other ranks")
        return self._connections.get(self.rank - 1), self._connections.get(self.rank + 1)


def pages(num_bytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


# ---------------------------------------------------------------------- checks of the ranks


def _check_ability(everyone: list[_Presence]) -> None:
    """Raise `SharedMemoryUnavailable` if the descriptions of the ranks show that they cannot share memory."""
    first = everyone[0]
    reasons = [f"rank {rank}: {presence.unable}" for rank, presence in enumerate(everyone) if presence.unable]
    if len(everyone) > _MAX_RANKS:
        reasons.append(f"there are {len(everyone)} ranks, but at most {_MAX_RANKS} ranks can share memory")
    others = [rank for rank, presence in enumerate(everyone) if presence.host != first.host]
    if others:
        reasons.append(f"{describe_ranks(others)} run on another host (or in another container) than rank 0")
    builds = [rank for rank, presence in enumerate(everyone) if presence.build != first.build]
    if builds and not others:
        reasons.append(f"{describe_ranks(builds)} run another build of the native library than rank 0")
    users = [rank for rank, presence in enumerate(everyone) if presence.uid != first.uid]
    if users:
        reasons.append(f"{describe_ranks(users)} run as another user than rank 0")
    if len({presence.pid for presence in everyone}) < len(everyone) and not others:
        reasons.append("several ranks are in the same process")
    if reasons:
        text = "\n".join(["the ranks cannot share memory:", *reasons])
        raise SharedMemoryUnavailable(text, is_worth_a_warning=not others)


def _build() -> str:
    """Return a text that identifies the memory layout of the native library. Returns "" if there is no library."""
    try:
        core = library()
    except SharedMemoryUnavailable:
        return ""
    return f"{core.group_bytes(2)} {core.lane_bytes(2, 4, 4096, 4096)}"


def attempt(
    action: Callable[[], T], *, raised: tuple[type[Exception], ...] = FAILURES
) -> tuple[T | None, str]:
    """Call `action`. If it succeeds, return its result and "". If it fails, return None and the text of its error.

    Args:
        action: a function.
        raised: the errors that are raised instead. By default these are the failures of the group, because after such a
            failure the ranks can no longer tell each other the text.
    """
    try:
        return action(), ""
    except raised:
        raise
    except (SynclineError, OSError, MemoryError) as error:
        return None, str(error) or type(error).__name__


def _agree(exchange: Exchange, action: Callable[[], object]) -> None:
    """Call `action`. If it fails on one rank, raise `SharedMemoryUnavailable` on all ranks.

    A connection that is lost in it is an ordinary error: a rank that fails closes its connections. The ranks use
    another way to tell each other, `exchange`.
    """
    _, trouble = attempt(action, raised=())
    troubles = [row.decode(errors="replace") for row in exchange(trouble.encode())]
    _raise_if_any("the ranks cannot share memory:", troubles)


def _raise_if_any(problem: str, troubles: list[str]) -> None:
    """Raise `SharedMemoryUnavailable` if at least one rank reports an error.

    Args:
        problem: the first line of the error.
        troubles: the error text of each rank, in rank order. It is "" for a rank without an error.
    """
    if any(troubles):
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text]
        raise SharedMemoryUnavailable("\n".join([problem, *lines]))


def store_exchange(store: Any, rank: int, size: int, timeout_seconds: float) -> Exchange:
    """Return a function that gathers the bytes of all ranks through a store.

    The returned function is collective, and every call of it uses new keys. All ranks that use the store must call
    `store_exchange` equally often.

    Args:
        store: a store that all ranks can reach.
        rank: this rank.
        size: number of ranks.
        timeout_seconds: how long a call of the returned function waits for the other ranks.

    Examples:
        >>> from torch.distributed import HashStore
        >>> store_exchange(HashStore(), 0, 1, 5.0)(b"here")
        [b'here']
    """
    # Old keys stay in the store. Each rank counts its calls of `store_exchange`, so that no rank reads the messages of
    # an earlier group.
    messages = SignedStore(store)
    epoch = messages.count_up(f"syncline/exchange/epoch/{rank}")
    return StoreGathering(
        messages,
        f"syncline/exchange/{epoch}",
        rank=rank,
        size=size,
        timeout_seconds=timeout_seconds,
        purpose="to set up shared memory",
    )
