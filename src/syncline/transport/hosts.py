"""The class `Hosts`, which records the host of each rank, and functions that set up shared memory within each host."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.liveness.board import MAIN_LANE
from syncline.liveness.health import Lane
from syncline.liveness.processes import host_key
from syncline.transport.c10d import C10dTransport
from syncline.transport.shared_memory.hub import NUM_EXCHANGES, Hub, SharedMemoryUnavailable, attempt
from syncline.transport.shared_memory.transport import SharedMemoryTransport
from syncline.words import describe_ranks


@dataclass(frozen=True)
class Hosts:
    """A division of the ranks of a group by their hosts.

    Examples:
        >>> hosts = Hosts.of(["a", "b", "a"])
        >>> hosts.members, hosts.host_of, hosts.leaders
        (((0, 2), (1,)), (0, 1, 0), [0, 1])
    """

    members: tuple[tuple[int, ...], ...]
    """The ranks of each host. The hosts are ordered by their lowest ranks."""
    host_of: tuple[int, ...]
    """For each rank, the index of its host in `members`."""

    @staticmethod
    def of(keys: Sequence[object]) -> Hosts:
        """Divide the ranks by their keys, which are given in rank order. Ranks with equal keys are on one host."""
        ranks_with: dict[object, list[int]] = {}
        for rank, key in enumerate(keys):
            ranks_with.setdefault(key, []).append(rank)
        number_of = {key: host for host, key in enumerate(ranks_with)}
        return Hosts(tuple(map(tuple, ranks_with.values())), tuple(number_of[key] for key in keys))

    @property
    def leaders(self) -> list[int]:
        """The leader of each host, which is its lowest rank."""
        return [ranks[0] for ranks in self.members]

    @property
    def widest(self) -> int:
        """The largest number of ranks on one host."""
        return max(map(len, self.members))

    @property
    def is_even(self) -> bool:
        """Whether all hosts have the same number of ranks, and the ranks of each host are consecutive and ascending."""
        in_order = [rank for ranks in self.members for rank in ranks] == list(range(len(self.host_of)))
        return in_order and self.are_alike

    @property
    def are_alike(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({len(ranks) for ranks in self.members}) == 1

    @torch.inference_mode()  # the target may be an inference tensor, which can be written only in this mode
    def put_in_rank_order(self, target: Tensor, parts: Tensor) -> None:
        """Copy the parts of all ranks from `parts` to `target`, so that they are in rank order there.

        Args:
            target: a flat tensor with one part per rank.
            parts: a flat tensor of the same dtype. It contains one row per host, with the parts of this host's ranks.
                Every row has space for as many parts as the largest host has ranks.
        """
        numel = target.numel() // len(self.host_of)
        rows = parts.view(len(self.members), self.widest, numel)
        in_order = target.view(len(self.host_of), numel)
        for host, ranks in enumerate(self.members):
            in_order[list(ranks)] = rows[host, : len(ranks)]


# ---------------------------------------------------------------------- shared memory within each host


def host_key_or_random() -> str:
    """Return a key that is equal on all ranks of a host and unique to the host.

    If the system provides no such key, return a random key. The rank then counts as alone on its host.
    """
    try:
        return host_key()
    except OSError:
        return secrets.token_hex(16)


def shared_memory_inside(beneath: C10dTransport, hosts: Hosts) -> SharedMemoryTransport | None:
    """Create the transport between the ranks of this host; a collective call of all ranks on all hosts.

    Returns None on a rank that is alone on its host. If the call fails on one host, all ranks of all hosts raise
    `SharedMemoryUnavailable`.
    """
    members = hosts.members[hosts.host_of[beneath.rank]]
    num_exchanges = 0

    def exchange_here(payload: bytes) -> list[bytes]:
        nonlocal num_exchanges
        num_exchanges += 1
        rows = beneath.all_gather_bytes(payload)
        return [rows[rank] for rank in members]

    def connect() -> SharedMemoryTransport | None:
        if len(members) == 1:
            return None
        return SharedMemoryTransport(
            Hub(
                rank=members.index(beneath.rank),
                size=len(members),
                exchange=exchange_here,
                timeout_seconds=beneath.timeout_seconds,
            ),
            beneath.health,
            Lane(MAIN_LANE, None),
            timeout_seconds=beneath.timeout_seconds,
            numbers=members,
        )

    inside, trouble = attempt(connect)
    while num_exchanges < NUM_EXCHANGES:  # other hosts may still need these collective exchanges
        exchange_here(b"")
    raise_if_any(beneath, members, trouble)
    return inside


def raise_if_any(beneath: C10dTransport, members: Sequence[int], trouble: str) -> None:
    """Raise the same error on all ranks if at least one rank reports an error; a collective call.

    Args:
        beneath: the transport between all ranks.
        members: the ranks of this host.
        trouble: the text of this rank's error, in which the ranks of this host are numbered from 0. Pass "" if this
            rank has no error.

    Raises:
        SharedMemoryUnavailable: at least one rank reports an error. The text contains all reported errors.
    """
    if trouble:
        trouble = f"{describe_ranks(members)}, numbered from 0 on their host: {trouble}"
    troubles = [row.decode() for row in beneath.all_gather_bytes(trouble.encode())]
    if any(troubles):
        raise SharedMemoryUnavailable("\n".join(dict.fromkeys(text for text in troubles if text)))
