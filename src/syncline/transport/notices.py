"""What ranks tell each other beside the data, through their process group's store.

Two things: why the group is broken (the first to know tells the others, who look while they wait), and in
which call a rank has been waiting for long (so that a timeout can name who is elsewhere). Nothing is sent
while all goes well. Telling is best effort: when the store is gone, ranks still have their own errors.
"""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailed,
    PeerLost,
    SynclineError,
)
from syncline.transport.calls import Failure

__all__ = ["Notices"]

_KINDS: dict[str, type[SynclineError]] = {
    kind.__name__: kind for kind in (CollectiveMismatch, CollectiveTimeout, PeerFailed, PeerLost)
}
_STORE_TIMEOUT = timedelta(seconds=1)
_MAX_TEXT_CHARS = 64 * 1024


class Notices:
    """One rank's view of its group's notices.

    Args:
        store: the group's store; a connection of its own is opened, so that nobody's use of it is disturbed.
        rank: this rank in the group.
        size: number of ranks in the group.
    """

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        own = store  # Any: torch's stub of Store knows neither `clone` nor `timeout`
        timeout = store.timeout
        with contextlib.suppress(RuntimeError):  # a store that cannot be cloned is shared
            own = store.clone()
            own.set_timeout(_STORE_TIMEOUT)
            if store.timeout != timeout:
                own.set_timeout(timeout)  # it is the same store after all
        self._store: Store | None = PrefixStore("syncline", own)
        # Old notices stay in the store, and a group that is made again under the same name must not see them.
        # Each rank counts for itself how often that was: to ask another rank would be to wait for it.
        self._epoch = self._count(f"epoch/{rank}")

    def publish(self, failure: Failure) -> None:
        """Tell why the group is broken; the first notice stays."""
        text = failure.text[-_MAX_TEXT_CHARS:]
        record = {"kind": failure.kind.__name__, "text": text, "rank": self._rank}
        if self._store is not None:
            try:
                self._store.compare_set(self._key("failure"), "", json.dumps(record))
            except RuntimeError:
                self._store = None

    def failure(self) -> Failure | None:
        """Why the group is broken, in the words of the rank that knew first; None if nobody said."""
        text = self._read(self._key("failure"))
        if text is None:
            return None
        record = json.loads(text)
        return Failure(_KINDS.get(record["kind"], PeerFailed), record["text"], aborted_by=record["rank"])

    def waits_in(self, place: str) -> None:
        """Tell in which call this rank waits."""
        self._write(self._key(f"place/{self._rank}"), place)

    def places(self) -> str:
        """Where each rank was last seen waiting; a line each."""
        seen = [self._read(self._key(f"place/{rank}")) for rank in range(self._size)]
        return "\n".join(
            f"  rank {rank}: {'not seen waiting so far' if place is None else f'last seen waiting in {place}'}"
            for rank, place in enumerate(seen)
        )

    def _key(self, name: str) -> str:
        return f"{self._epoch}/{name}"

    def _count(self, key: str) -> int:
        assert self._store is not None
        try:
            return self._store.add(key, 1)
        except RuntimeError:
            self._store = None
            return 0

    def _write(self, key: str, value: str) -> None:
        if self._store is not None:
            try:
                self._store.set(key, value)
            except RuntimeError:
                self._store = None

    def _read(self, key: str) -> str | None:
        store = self._store
        if store is None:
            return None
        try:
            return store.get(key).decode() if store.check([key]) else None
        except RuntimeError:
            self._store = None
            return None
