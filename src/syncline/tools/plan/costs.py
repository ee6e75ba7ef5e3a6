"""The cost of one bucket on a cluster, for each way to send it (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from syncline.tools.plan.cluster import Cluster
from syncline.tools.plan.job import Gradient
from syncline.tools.plan.machine import Coding, Machine
from syncline.tools.plan.options import Codec


class Sending(NamedTuple):
    """The cost of one collective, in seconds."""

    on_link: float = 0.0
    """How long it occupies the link between the ranks."""
    beside: float = 0.0
    """How long it needs besides, while the next collective can use the link."""
    work: float = 0.0
    """How long a core of each rank is busy."""
    wire_bytes: float = 0.0
    """The bytes that a host sends to other hosts."""

    def plus(self, other: Sending) -> Sending:
        """Return the cost of both collectives."""
        return Sending(*map(add, self, other))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of collectives on one cluster."""

    cluster: Cluster
    machine: Machine

    def all_reduce(self, num_bytes: float, *, scatters: bool = False) -> Sending:
        """Return the cost of an all_reduce.

        Between hosts, Gloo uses a ring of the hosts, in which each of `2 * (hosts - 1)` rounds waits for the latency.
        NCCL uses trees for many hosts, so that only their depth counts.

        Args:
            num_bytes: the bytes of the tensor.
            scatters: whether each rank needs only its own part of the result (a reduce_scatter).
        """
        cluster, hosts = self.cluster, self.cluster.hosts
        inside = self._inside(num_bytes)
        if hosts == 1:
            part = 0.5 if scatters else 1.0
            return Sending(part * inside.on_link, 0.0, part * inside.work)
        sent = 2 * (hosts - 1) / hosts * num_bytes
        depth = math.ceil(math.log2(hosts))
        across = self._across(sent, rounds=2 * (depth if cluster.engine == "nccl" else hosts - 1))
        # Up to the leader of the host, across, and down again.
        return across.plus(Sending(beside=1.5 * inside.on_link, work=1.5 * inside.work))

    def all_gather(self, num_bytes: float) -> Sending:
        """Return the cost of an all_gather, in which each rank contributes so many bytes."""
        cluster = self.cluster
        inside = self._inside(num_bytes * cluster.ranks_per_host / 2)
        if cluster.hosts == 1:
            return inside
        received = (cluster.hosts - 1) * cluster.ranks_per_host * num_bytes
        across = self._across(received, rounds=cluster.hosts - 1)
        down = self._inside(num_bytes * cluster.num_ranks / 2)
        return across.plus(Sending(beside=inside.on_link + down.on_link, work=inside.work + down.work))

    def all_to_all(self, num_bytes: float) -> Sending:
        """Return the cost of an exchange in which each rank sends so many bytes to each other rank."""
        cluster = self.cluster
        inside = self._inside(num_bytes * (cluster.ranks_per_host - 1))
        if cluster.hosts == 1:
            return inside
        elsewhere = cluster.num_ranks - cluster.ranks_per_host
        sent = cluster.ranks_per_host * elsewhere * num_bytes
        return self._across(sent, rounds=1).plus(Sending(beside=inside.on_link, work=inside.work))

    def mean(self, gradients: Sequence[Gradient], codec: Codec | None) -> Sending:
        """Return the cost of the mean of these gradients, without encoding and decoding."""
        num_bytes, num_ranks = sent_bytes(gradients, codec), self.cluster.num_ranks
        if codec is None:
            return self.all_reduce(num_bytes)
        match codec.kind:
            case "narrow":
                return self.all_reduce(num_bytes)
            case "codes" if num_ranks > 2:
                chunk = num_bytes / num_ranks
                return self.all_to_all(chunk).plus(self.all_gather(chunk))
            case "codes" | "pairs":
                return self.all_gather(num_bytes)
            case "factors":
                left, right = factor_values(gradients, codec.rank)
                return self.all_reduce(4 * left).plus(self.all_reduce(4 * right) if right else Sending())

    def blocked(self, codec: Codec | None) -> float:
        """Return how long a rank waits in its backward for the first message of a bucket, before it sends the second.

        Only compressions that send two messages for a bucket wait. The bytes are not part of it.
        """
        has_two = codec is not None and (
            codec.kind == "factors" or (codec.kind == "codes" and self.cluster.num_ranks > 2)
        )
        if not has_two or self.cluster.hosts == 1:
            return 0.0
        return 2 * self.cluster.crowding * self.machine.cost("gloo", 2).work_fixed

    def coding(self, codec: Codec | None) -> Coding:
        """Return what a compression costs for each value on this machine."""
        return Coding(0.0, 0.0) if codec is None else self.machine.coding(codec.code)

    # ------------------------------------------------------------------ parts

    def _inside(self, num_bytes: float) -> Sending:
        """Return the cost of an all_reduce within a host."""
        cluster = self.cluster
        if cluster.ranks_per_host == 1:
            return Sending()
        cost = self.machine.cost(cluster.engine, cluster.ranks_per_host)
        return Sending(cost.time(num_bytes), 0.0, cost.work(num_bytes))

    def _across(self, num_bytes: float, *, rounds: int) -> Sending:
        """Return the cost of a collective between hosts, in which a host sends so many bytes."""
        assert self.cluster.link_bytes_per_second is not None
        software = self.machine.cost("gloo", 2)
        on_wire = num_bytes / self.cluster.link_bytes_per_second
        on_link = max(on_wire, software.per_byte * num_bytes) + rounds * self.cluster.latency_seconds
        fixed = software.fixed
        if not self.cluster.has_idle_cores:
            # The threads of the transport wait for a core before they can send the next bucket. Cores that are busy
            # do not have to wake up, so only the work of a message counts.
            on_link, fixed = on_link + self.cluster.crowding * software.work_fixed, 0.0
        return Sending(
            on_link=on_link,
            beside=fixed,
            work=software.work(num_bytes),
            wire_bytes=num_bytes,
        )


def sent_bytes(gradients: Sequence[Gradient], codec: Codec | None) -> float:
    """Return how many bytes a rank passes to the transport for the mean of these gradients."""
    if codec is None:
        return sum(one.num_bytes for one in gradients)
    if codec.kind == "factors":
        return 4 * sum(factor_values(gradients, codec.rank))
    return math.ceil(sum(one.numel for one in gradients) * codec.ratio) * codec.bits / 8


def factor_values(gradients: Sequence[Gradient], rank: int) -> tuple[int, int]:
    """Return how many values PowerSGD sends first and then, of these gradients.

    Tensors that are no matrices, and small matrices, are sent whole with the first factors.

    Examples:
        >>> factor_values([Gradient("w", (100, 200), 1.0), Gradient("b", (100,), 1.0)], rank=2)
        (300, 400)
    """
    left = right = 0
    for one in gradients:
        rows = one.shape[0] if len(one.shape) > 1 else 0
        columns = one.numel // rows if rows else 0
        if rows and (rows + columns) * rank < one.numel:
            left += rank * rows
            right += rank * columns
        else:
            left += one.numel
    return left, right
