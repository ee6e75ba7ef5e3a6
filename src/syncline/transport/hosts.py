"""The hosts of a group: which rank is on which host, and the shared memory within each host."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from syncline.errors import SynclineError
from syncline.liveness.board import MAIN_LANE
from syncline.liveness.health import Lane
from syncline.liveness.processes import host_key
from syncline.transport.c10d import C10dTransport
from syncline.transport.c10d_groups import writing
from syncline.transport.shared_memory.core import SharedMemoryUnavailable
from syncline.transport.shared_memory.hub import NUM_EXCHANGES, Hub
from syncline.transport.shared_memory.transport import SharedMemoryTransport
from syncline.words import describe_ranks


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group and their ranks.

    Example:
        >>> hosts = Hosts.of(["a", "b", "a"])
        >>> hosts.members, hosts.host_of, hosts.leaders
        (((0, 2), (1,)), (0, 1, 0), [0, 1])
    """

    members: tuple[tuple[int, ...], ...]
    """The ranks of each host. The hosts are in the order of their leaders."""
    host_of: tuple[int, ...]
    """The index of each rank's host."""

    @staticmethod
    def of(keys: Sequence[object]) -> Hosts:
        """Return the hosts for the ranks' keys; ranks with equal keys are on one host."""
        ranks_with: dict[object, list[int]] = {}
        for rank, key in enumerate(keys):
            ranks_with.setdefault(key, []).append(rank)
        number_of = {key: host for host, key in enumerate(ranks_with)}
        return Hosts(tuple(map(tuple, ranks_with.values())), tuple(number_of[key] for key in keys))

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each host."""
        return [ranks[0] for ranks in self.members]

    @property
    def widest(self) -> int:
        """Number of ranks on the largest host."""
        return max(map(len, self.members))

    @property
    def is_even(self) -> bool:
        """Whether the hosts in sequence hold all ranks in order, and each the same number of ranks."""
        in_order = [rank for ranks in self.members for rank in ranks] == list(range(len(self.host_of)))
        return in_order and self.are_alike

    @property
    def are_alike(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({len(ranks) for ranks in self.members}) == 1

    def put_in_rank_order(self, target: Tensor, parts: Tensor) -> None:
        """Copy the parts of all ranks into rank order.

        Args:
            target: flat; receives the parts of the ranks in their order.
            parts: flat, of the same dtype; one row per host, padded to the number of ranks on the largest host.
        """
        numel = target.numel() // len(self.host_of)
        rows = parts.view(len(self.members), self.widest, numel)
        in_order = target.view(len(self.host_of), numel)
        with writing():
            for host, ranks in enumerate(self.members):
                in_order[list(ranks)] = rows[host, : len(ranks)]


# ---------------------------------------------------------------------- shared memory within each host


def host_key_or_random() -> str:
    """Return a key that is equal for ranks of one host; on systems that have none, a different key per rank."""
    try:
        return host_key()
    except OSError:
        return secrets.token_hex(16)


def shared_memory_inside(beneath: C10dTransport, hosts: Hosts) -> SharedMemoryTransport | None:
    """Return the transport between the ranks of this host; None for a rank that is alone on its host.

    A collective call of all hosts. It raises on all ranks if it fails on one host.
    """
    members = hosts.members[hosts.host_of[beneath.rank]]
    num_exchanges = 0

    def exchange_here(payload: bytes) -> list[bytes]:
        nonlocal num_exchanges
        num_exchanges += 1
        rows = beneath.all_gather_bytes(payload)
        return [rows[rank] for rank in members]

    inside, trouble = None, ""
    try:
        if len(members) > 1:
            hub = Hub(rank=members.index(beneath.rank), size=len(members), exchange=exchange_here)
            inside = SharedMemoryTransport(
                hub,
                beneath=None,
                store=None,
                health=beneath.health,
                own_lane=Lane(MAIN_LANE, None),
                timeout_seconds=beneath.timeout_seconds,
                board=beneath.board,
                numbers=members,
            )
    except (SynclineError, OSError, MemoryError) as error:
        trouble = trouble_on_host(members, error)
    while num_exchanges < NUM_EXCHANGES:  # other hosts may still need these collective exchanges
        exchange_here(b"")
    raise_if_any(beneath, trouble)
    return inside


def trouble_on_host(members: Sequence[int], error: Exception) -> str:
    """Return an error of a host's ranks as text for the other hosts."""
    return f"{describe_ranks(members)}, numbered from 0 on their host: {str(error) or type(error).__name__}"


def raise_if_any(beneath: C10dTransport, trouble: str) -> None:
    """Raise on all ranks if one reports trouble; a collective call.

    Raises:
        SharedMemoryUnavailable: with the texts of all ranks that report trouble.
    """
    troubles = [row.decode() for row in beneath.all_gather_bytes(trouble.encode())]
    if any(troubles):
        raise SharedMemoryUnavailable("\n".join(dict.fromkeys(text for text in troubles if text)))
