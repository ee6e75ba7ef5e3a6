"""How ranks talk at a torch.distributed store before they are connected."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from syncline.errors import CollectiveTimeout
from syncline.store_messages import SignedStore
from syncline.transport.calls import named_ranks
from syncline.transport.shared_memory.hub import Exchange

__all__ = ["store_exchange"]


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
