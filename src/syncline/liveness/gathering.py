"""Gathering of a text of each rank at a store, by way of rank 0.

If each rank read the texts of all ranks, a store would answer n * n reads. So rank 0 reads them, and writes them as one
message. Each of the other ranks writes one message and reads one.

While a rank waits, it looks at the processes of ranks on its host, if it knows them. If one of them has ended, rank 0
writes this instead of the texts, for the ranks of other hosts. If rank 0 has ended, a rank on its host writes it, see
`watching_rank_0`. So all ranks raise an error, and not only after the timeout.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from syncline.errors import CollectiveTimeout, PeerLost, SynclineError
from syncline.liveness.store import SignedStore, clone_of
from syncline.words import describe_ranks, end_of_processes

Ended = Callable[[Sequence[int]], list[int]]
"""A function that returns those of some ranks whose processes have certainly ended, as far as this rank can see."""

_LOOK_SECONDS = 0.05
"""How often a rank that waits looks at the processes of the other ranks, if it knows them."""

_RANK_0_SECONDS = 0.5
"""How often a rank looks at the process of rank 0 in `watching_rank_0`, where it can wait for minutes."""

_MAX_PAUSE_SECONDS = 0.05
"""How long a rank that knows the processes pauses between two questions to the store, at most."""

_ALL = " and all"

_GRACE_SECONDS = 5.0
"""How long a rank still waits for rank 0 after the deadline, if the texts of all ranks are in the store."""

_BYTES_PER_RANK = 1 << 16
"""The number of bytes for each rank up to which the message with the texts of all ranks is accepted."""


class MissingRanks(Exception):
    """Some ranks have not written their texts. `gathered` raises it, and its caller raises an error with more words.

    Args:
        ranks: these ranks.
        have_ended: whether their processes have certainly ended.
    """

    def __init__(self, ranks: list[int], *, have_ended: bool) -> None:
        super().__init__(f"{describe_ranks(ranks)} are missing")
        self.ranks = ranks
        self.have_ended = have_ended


def first_of(messages: SignedStore, keys: Sequence[str], timeout_seconds: float) -> str:
    """Wait for the message of rank 0, and return it. For `keys` and the errors, see `gathered`."""
    if _wait(messages, keys[:1], timeout_seconds) is not None and not messages.has(keys[0]):
        raise MissingRanks(_missing(messages, keys), have_ended=False)
    return messages.get(keys[0])


def gathered(
    messages: SignedStore,
    keys: Sequence[str],
    rank: int,
    timeout_seconds: float,
    has_ended: Ended | None = None,
) -> list[str]:
    """Return the messages of all ranks in rank order; a collective call. Each rank has written its own before.

    Args:
        messages: the store.
        keys: for each rank, the key of its message. The first of them, with a suffix, is the key under which rank 0
            writes all messages.
        rank: this rank.
        timeout_seconds: how long to wait for the other ranks.
        has_ended: a function that finds ended ranks; None if the processes are not known.

    Raises:
        MissingRanks: some ranks have written nothing before the deadline, or have ended.
    """
    whole = f"{keys[0]}{_ALL}"
    wanted = keys if rank == 0 else [whole]
    # All of them, because rank 0 may have stopped waiting here, having noticed the end of another rank elsewhere.
    others = [peer for peer in range(len(keys)) if peer != rank]
    ended = _wait(messages, wanted, timeout_seconds, has_ended and (lambda: has_ended(others)))
    if ended:  # also if they had written before: they take no part in what follows
        if rank == 0:
            messages.set(whole, json.dumps({"ended": ended}))
        raise MissingRanks(ended, have_ended=True)
    missing = [] if ended is None else _missing(messages, keys)
    if missing:
        raise MissingRanks(missing, have_ended=False)
    if rank != 0 and (ended is None or _wait(messages, [whole], _GRACE_SECONDS) is None):
        return _parsed(messages.get(whole, max_bytes=len(keys) * _BYTES_PER_RANK), whole, len(keys))
    texts = messages.multi_get(keys)
    if rank == 0:  # another rank gets here if rank 0 is late
        messages.set(whole, json.dumps(texts))
    return texts


@contextlib.contextmanager
def watching_rank_0(store: Any, key: str, has_ended: Callable[[], bool]) -> Iterator[None]:
    """Look at the process of rank 0 while this rank waits for it in `gathered`.

    If the process has ended, a message of this rank wakes up all ranks that wait, also those of other hosts. It has a
    connection of its own, because the wait occupies the connection of `store`.

    Args:
        store: the store of torch.distributed of the messages.
        key: the first of the keys of `gathered`.
        has_ended: a function that returns whether the process of rank 0 has certainly ended.
    """
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_RANK_0_SECONDS):
            if has_ended():
                with contextlib.suppress(RuntimeError, SynclineError):  # the store may have ended with rank 0
                    clone, _ = clone_of(store, store.timeout)
                    SignedStore(clone).set_first(f"{key}{_ALL}", json.dumps({"ended": [0]}))
                return

    threading.Thread(target=look, name="syncline-rank-0", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _missing(messages: SignedStore, keys: Sequence[str]) -> list[int]:
    return [rank for rank, key in enumerate(keys) if not messages.has(key)]


def _wait(
    messages: SignedStore,
    keys: Sequence[str],
    timeout_seconds: float,
    ended: Callable[[], list[int]] | None = None,
) -> list[int] | None:
    """Wait for messages. Return None once they are there, or the ended ranks: an empty list after the deadline."""
    if ended is not None:
        return _wait_for_the_living(messages, keys, timeout_seconds, ended)
    try:
        messages.wait(keys, timedelta(seconds=max(0.001, timeout_seconds)))
    except DistStoreError:
        return []
    return None


def _wait_for_the_living(
    messages: SignedStore, keys: Sequence[str], timeout_seconds: float, ended: Callable[[], list[int]]
) -> list[int] | None:
    """Do what `_wait` does, and look at the processes meanwhile.

    The store is asked again and again, because torch prints a warning whenever its own wait reaches a deadline.
    """
    begin = last_look = time.monotonic()
    pause_seconds = 0.001
    while not messages.has(*keys):
        now = time.monotonic()
        if now > begin + timeout_seconds:
            return []
        if now > last_look + _LOOK_SECONDS:
            last_look = now
            found = ended()
            if found and not messages.has(*keys):
                return found
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
    return None


def _parsed(text: str, key: str, size: int) -> list[str]:
    """Return the texts of all ranks from rank 0's message."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and _are_all(int, lost := found.get("ended")) and lost:
        raise MissingRanks(lost, have_ended=True)
    if not _are_all(str, found) or len(found) != size:
        raise SynclineError(
            f"key {key!r} at the store: expected a list of {size} texts, got {text[:60]!r}. Either another program "
            "wrote this message, or the ranks run different versions of Syncline"
        )
    texts: list[str] = found
    return texts


def _are_all(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


class StoreGathering:
    """A collective function that gathers the bytes of all ranks at a store. All ranks call it equally often.

    Args:
        messages: the store.
        prefix: the beginning of the keys, which no other object uses.
        rank: this rank.
        size: number of ranks.
        timeout_seconds: how long a call waits for the other ranks.
        purpose: the purpose of the calls, for messages.
        has_ended: a function that finds ended ranks; None if the processes are not known.
    """

    def __init__(
        self,
        messages: SignedStore,
        prefix: str,
        *,
        rank: int,
        size: int,
        timeout_seconds: float,
        purpose: str,
        has_ended: Ended | None = None,
    ) -> None:
        self._messages = messages
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._purpose = purpose
        self._has_ended = has_ended
        self._num_calls = 0

    def __call__(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in rank order. A payload is text in UTF-8.

        Raises:
            CollectiveTimeout: some ranks have not called in time.
            PeerLost: some ranks have ended.
        """
        keys = [f"{self._prefix}/{self._num_calls}/{peer}" for peer in range(self._size)]
        self._num_calls += 1
        self._messages.set(keys[self._rank], payload.decode())
        try:
            texts = gathered(self._messages, keys, self._rank, self._timeout_seconds, self._has_ended)
        except MissingRanks as missing:
            raise self._error(missing) from missing
        return [text.encode() for text in texts]

    def check_processes(self) -> None:
        """Check that no other rank has ended, as far as this rank can see.

        Raises:
            PeerLost: some ranks have ended.
        """
        if self._has_ended is not None:
            lost = self._has_ended([peer for peer in range(self._size) if peer != self._rank])
            if lost:
                raise self._error(MissingRanks(lost, have_ended=True))

    def forget(self) -> None:
        """Delete what this rank has written. All ranks must have returned from their last call."""
        for number in range(self._num_calls):
            self._messages.delete(f"{self._prefix}/{number}/{self._rank}")
            if self._rank == 0:
                self._messages.delete(f"{self._prefix}/{number}/0{_ALL}")

    def _error(self, missing: MissingRanks) -> SynclineError:
        ranks = describe_ranks(missing.ranks)
        if missing.have_ended:
            return PeerLost(
                f"rank {self._rank} of {self._size} lost {ranks} {self._purpose}: {end_of_processes(missing.ranks)}. "
                "Look at the last lines of the log of the rank that ended first"
            )
        return CollectiveTimeout(
            f"rank {self._rank} of {self._size} waited {self._timeout_seconds:g} s {self._purpose}, but {ranks} did "
            "not take part. Look for an earlier error on the missing ranks, or for a branch in which they make a "
            "different call"
        )
