"""Gathering of a text of each rank at a store, by way of rank 0.

If each rank read the texts of all ranks, a store would answer n * n reads. So rank 0 reads them, and writes them as one
message. Each of the other ranks writes one message and reads one.

While a rank waits, it checks the processes of ranks on its host, if they are known. If one of them has ended, the rank
writes a list of the ended ranks in place of the texts, which wakes up all ranks, also those of other hosts. So all
ranks raise an error before the timeout.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistStoreError

from syncline.environment import patience
from syncline.errors import CollectiveTimeout, PeerLost, SynclineError
from syncline.liveness.store import SignedStore
from syncline.words import describe_ranks, end_of_processes

Ended = Callable[[Sequence[int]], list[int]]
"""A function that takes ranks, and returns those whose processes this rank has found to have ended."""

_AT_ONCE = 3
"""The number of processes that a rank checks at a time. Ranks begin with different ones, so together they check all."""

_ALL = " and all"

_GRACE_SECONDS = patience(5.0)
"""How long a rank still waits for rank 0 after the deadline, if the texts of all ranks are in the store."""

_BYTES_PER_RANK = 1 << 16
"""The number of bytes for each rank up to which the message with the texts of all ranks is accepted."""


class MissingRanks(Exception):
    """The error of `gathered` if ranks have not written their texts. Its caller raises a more detailed error instead.

    Args:
        ranks: the ranks without a text.
        have_ended: whether their processes have certainly ended.
    """

    def __init__(self, ranks: list[int], *, have_ended: bool) -> None:
        super().__init__(f"{describe_ranks(ranks)} are missing")
        self.ranks = ranks
        self.have_ended = have_ended


def first_of(messages: SignedStore, keys: Sequence[str], timeout_seconds: float) -> str:
    """Wait for the message of rank 0, and return it. For `keys` and the errors, see `gathered`."""
    if not _wait(messages, keys[:1], timeout_seconds) and not messages.has(keys[0]):
        raise MissingRanks(_missing(messages, keys), have_ended=False)
    return messages.get(keys[0])


def gathered(
    messages: SignedStore,
    keys: Sequence[str],
    rank: int,
    timeout_seconds: float,
    lookout: Lookout | None = None,
) -> list[str]:
    """Return the messages of all ranks in rank order; a collective call. Each rank has written its own before.

    Args:
        messages: the store.
        keys: for each rank, the key of its message. The first of them, with a suffix, is the key under which rank 0
            writes all messages.
        rank: this rank.
        timeout_seconds: how long to wait for the other ranks.
        lookout: an object that finds ended ranks; None if the processes are not known.

    Raises:
        MissingRanks: some ranks have written nothing before the deadline, or have ended.
    """
    whole = f"{keys[0]}{_ALL}"
    wanted = keys if rank == 0 else [whole]
    is_in_time = _wait(messages, wanted, timeout_seconds, lookout, keys)
    if rank == 0 and lookout is not None and messages.has(whole):  # a rank has written that ranks have ended
        return _parsed(messages.get(whole), whole, len(keys))
    missing = [] if is_in_time else _missing(messages, keys)
    if missing:
        raise MissingRanks(missing, have_ended=False)
    if rank != 0 and (is_in_time or _wait(messages, wanted, _GRACE_SECONDS)):
        return _parsed(messages.get(whole, max_bytes=len(keys) * _BYTES_PER_RANK), whole, len(keys))
    texts = messages.multi_get(keys)
    if rank == 0:  # another rank gets here if rank 0 is late
        messages.set(whole, json.dumps(texts))
    return texts


class Lookout:
    """A check of the processes of the other ranks. Each call checks only a few, because a host may have hundreds.

    Args:
        rank: this rank.
        size: the number of ranks.
        has_ended: a function that finds ended ranks.
        may_raise: whether `has_ended` may raise an error, so that this rank stops waiting.
    """

    def __init__(self, rank: int, size: int, has_ended: Ended, *, may_raise: bool = False) -> None:
        self._has_ended = has_ended
        self.may_raise = may_raise
        self._others = [(rank + 1 + k) % size for k in range(size - 1)]
        self._num_looks = 0

    def ended(self) -> list[int]:
        """Check rank 0 and some other ranks. If one of them has ended, check all, and return those that have ended.

        Ranks that have written their text before they ended count as well, because the next collective lacks them.
        """
        first = self._num_looks * _AT_ONCE % max(1, len(self._others))
        self._num_looks += 1
        some = [0, *self._others[first : first + _AT_ONCE]]
        return self._has_ended(self._others) if self._has_ended(some) else []


def _look(lookout: Lookout, keys: Sequence[str], messages: Callable[[], SignedStore]) -> None:
    """Check processes. If one has ended, write the ended ranks in place of all texts, which wakes up all ranks."""
    ended = lookout.ended()
    if ended:
        with contextlib.suppress(RuntimeError, SynclineError):  # the store may have ended with rank 0
            store = messages()
            store.set_first(f"{keys[0]}{_ALL}", json.dumps({"ended": ended}))
            for key in keys if 0 not in ended else ():  # rank 0 waits for all of them
                store.set_first(key, "")


def _missing(messages: SignedStore, keys: Sequence[str]) -> list[int]:
    return [rank for rank, key in enumerate(keys) if not messages.has(key)]


def _wait(
    messages: SignedStore,
    wanted: Sequence[str],
    timeout_seconds: float,
    lookout: Lookout | None = None,
    keys: Sequence[str] = (),
) -> bool:
    """Wait for some messages, and look for ended processes meanwhile. Return False if one is missing at the timeout.

    Args:
        messages: the store.
        wanted: the keys of the messages.
        timeout_seconds: how long to wait.
        lookout: an object that finds ended ranks; None to check no processes.
        keys: the keys of all ranks. Only a lookout needs them.
    """
    timeout = timedelta(seconds=max(0.001, timeout_seconds))
    try:
        if lookout is None:
            messages.wait(wanted, timeout)
        else:
            store = (lambda: messages) if lookout.may_raise else messages.clone
            look = partial(_look, lookout, keys, store)
            messages.wait(wanted, timeout, look, may_raise=lookout.may_raise)
    except DistStoreError:
        return False
    return True


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
        may_raise: see `Lookout`.
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
        may_raise: bool = False,
    ) -> None:
        self._messages = messages
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._purpose = purpose
        self._lookout = None if has_ended is None else Lookout(rank, size, has_ended, may_raise=may_raise)
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
            texts = gathered(self._messages, keys, self._rank, self._timeout_seconds, self._lookout)
        except MissingRanks as missing:
            raise self._error(missing) from missing
        return [text.encode() for text in texts]

    def check_processes(self) -> None:
        """Check that no other rank has ended, as far as this rank can see. Each call checks some of them.

        Raises:
            PeerLost: some ranks have ended.
        """
        lost = [] if self._lookout is None else self._lookout.ended()
        if lost:
            raise self._error(MissingRanks(lost, have_ended=True))

    def forget(self) -> None:
        """Delete the messages of this rank. All ranks must have returned from their last call."""
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
