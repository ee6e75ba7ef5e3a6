"""How long a step would take, what it would send and how much memory it would need (pure functions).

[Note: the timeline]

Gradients become ready during the backward. A bucket is sent as soon as its gradients are ready, and buckets cross the
link one after the other. The step waits for what has not arrived when the backward has ended. Times can be in any unit,
as long as all of them are in the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from syncline.tools.plan.cluster import Cluster
from syncline.tools.plan.costs import Costs, Sending, sent_bytes
from syncline.tools.plan.job import Gradient, Job, buckets_of
from syncline.tools.plan.machine import Machine
from syncline.tools.plan.options import CAPS_MB, Option


class Reduction(NamedTuple):
    """One bucket on its way."""

    ready: float
    """The time at which its last gradient is ready, after the beginning of a backward that nothing delays."""
    on_link: float
    """How long it occupies the link, so that the next bucket waits."""
    encoding: float = 0.0
    """The work before it is sent. The backward pauses meanwhile."""
    beside: float = 0.0
    """How long it needs before and after the link, while the next bucket can use the link."""
    stolen: float = 0.0
    """How long the backward stands still, because the transport needs this rank's core."""
    decoding: float = 0.0
    """The work after it has arrived, before the next bucket is decoded."""


def exposed_time(reductions: Sequence[Reduction], backward: float) -> float:
    """Return by how much the reductions make a backward longer, with the wait at its end.

    Args:
        reductions: the buckets, in the order in which they are sent.
        backward: how long the backward takes alone.

    Examples:
        >>> exposed_time([Reduction(10.0, 20.0), Reduction(50.0, 20.0)], backward=50.0)
        20.0
        >>> exposed_time([Reduction(10.0, 20.0, stolen=5.0), Reduction(50.0, 20.0, decoding=1.0)], backward=50.0)
        26.0
    """
    late, free = 0.0, 0.0
    arrived = []
    for one in reductions:
        late += one.encoding
        # The last bucket has nothing after it that it could hold up: the rank waits for it.
        free = max(free, one.ready + late) + one.on_link
        arrived.append(free + one.beside)
        late += one.stolen if one.ready < backward else 0.0
    now = backward + late
    for one, at in zip(reductions, arrived, strict=True):
        now = max(now, at) + one.decoding
    return now - backward


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted cost of one option. Times are in seconds, means over steps."""

    option: Option
    step: float
    compute: float
    """The part of a step without any synchronization."""
    wire_bytes: float
    """The bytes that a host sends to other hosts in a step."""
    sent_bytes: float
    """The bytes that a rank passes to the transport in a step."""
    on_link: float
    """How long the link is occupied in a step."""
    memory_bytes: float
    """The memory of a rank: parameters, gradients, optimizer, buckets, and the batch if it is known."""
    num_buckets: int

    @property
    def exposed(self) -> float:
        """How much longer a step is than its computation."""
        return self.step - self.compute


@dataclass(frozen=True, kw_only=True)
class Planner:
    """The predictions for one job on one cluster."""

    job: Job
    """The job, as fast as it is on this cluster."""
    cluster: Cluster
    machine: Machine
    buckets: Mapping[float | None, Sequence[Sequence[Gradient]]]
    """The buckets for each value of `bucket_cap_mb`."""
    large_buckets: Sequence[Sequence[Gradient]] | None = None
    """The buckets of automatic size of a compression that sends little; None if they are those of all options."""

    @property
    def _costs(self) -> Costs:
        return Costs(cluster=self.cluster, machine=self.machine)

    @staticmethod
    def of(job: Job, cluster: Cluster, machine: Machine) -> Planner:
        """Return the planner of a job on a cluster."""
        buckets = {cap: buckets_of(job, cluster, cap) for cap in (None, *CAPS_MB)}
        large = buckets_of(job, cluster, None, sends_little=True)
        return Planner(job=job, cluster=cluster, machine=machine, buckets=buckets, large_buckets=large)

    def buckets_for(self, option: Option) -> Sequence[Sequence[Gradient]]:
        """Return the buckets of an option."""
        sends_little = option.compression is not None and option.compression.kind == "factors"
        if sends_little and option.cap_mb is None and self.large_buckets is not None:
            return self.large_buckets
        return self.buckets[option.cap_mb]

    def predict(self, option: Option) -> Prediction:
        """Return what an option would cost."""
        if self.cluster.num_ranks == 1:
            return self._prediction(option, 0.0, Sending(), num_buckets=0)
        if option.strategy == "EveryStep":
            return self._every_step(option)
        return self._rounds(option)

    def waits(self, option: Option) -> float:
        """Return how long a synchronized backward waits at its end, without the work that makes it longer."""
        found = [self._reduction(bucket, option)[0] for bucket in self.buckets_for(option)]
        work = sum(one.encoding + one.stolen + one.decoding for one in found) - found[-1].stolen
        return max(0.0, exposed_time(found, self.job.backward) - work)

    # ------------------------------------------------------------------ gradients in every step

    def _every_step(self, option: Option) -> Prediction:
        job = self.job
        found = [self._reduction(bucket, option) for bucket in self.buckets_for(option)]
        exposed = exposed_time([reduction for reduction, _ in found], job.backward)
        of_calls = self.machine.calls_of(self.cluster.ranks_per_host)
        calls = (
            of_calls.per_step + of_calls.per_bucket * len(found) + of_calls.per_gradient * len(job.gradients)
        )
        saved = self._saved_by_sharding() if option.sharded else 0.0
        total = reduce(Sending.plus, (sending for _, sending in found))
        return self._prediction(option, exposed + calls - saved, total, num_buckets=len(found))

    def _reduction(self, bucket: Sequence[Gradient], option: Option) -> tuple[Reduction, Sending]:
        costs = self._costs
        numel, num_bytes = sum(one.numel for one in bucket), sum(one.num_bytes for one in bucket)
        if option.sharded:
            sending = costs.all_reduce(num_bytes, scatters=True)
        else:
            sending = costs.mean(bucket, option.compression)
        coding, crowding = costs.coding(option.compression), self.cluster.crowding
        # A bucket of shards keeps the result. Otherwise gradients are copied into it and out of it.
        copies = crowding * self.machine.copy_per_byte * num_bytes
        is_idle = self.cluster.has_idle_cores
        return Reduction(
            ready=bucket[-1].ready * self.job.backward,
            on_link=sending.on_link,
            beside=sending.beside,
            encoding=copies + crowding * coding.encoding * numel,
            stolen=(0.0 if is_idle else sending.work) + costs.blocked(option.compression),
            decoding=(0.0 if option.sharded else copies) + crowding * coding.decoding * numel,
        ), sending

    def _saved_by_sharding(self) -> float:
        """Return how much shorter the optimizer's step is if each rank steps its part."""
        if self.cluster.engine != "shm":
            return 0.0
        ranks = self.cluster.ranks_per_host
        calls = self.machine.calls_of(ranks).per_update * len(self.job.gradients)
        return max(0.0, self.job.update - calls) * (1 - 1 / ranks)

    # ------------------------------------------------------------------ strategies

    def _rounds(self, option: Option) -> Prediction:
        """Predict a strategy that synchronizes parameters once in some steps."""
        job, machine, costs = self.job, self.machine, self._costs
        sending = costs.mean(job.gradients, option.compression)
        coding, crowding = costs.coding(option.compression), self.cluster.crowding
        own = machine.outer_per_byte if option.strategy == "DiLoCo" else machine.average_per_byte
        work = crowding * (own * job.num_bytes + (coding.encoding + coding.decoding) * job.numel)
        a_round = sending.on_link + sending.beside + work
        return self._prediction(
            option,
            a_round / option.every,
            Sending(*(one / option.every for one in sending)),
            num_buckets=0,
        )

    # ------------------------------------------------------------------ together

    def _prediction(
        self, option: Option, exposed: float, sending: Sending, *, num_buckets: int
    ) -> Prediction:
        return Prediction(
            option=option,
            step=self.job.compute + exposed,
            compute=self.job.compute,
            wire_bytes=sending.wire_bytes,
            sent_bytes=sent_bytes(self.job.gradients, option.compression) / option.every,
            on_link=sending.on_link,
            memory_bytes=memory_bytes(self.job, self.cluster, option),
            num_buckets=num_buckets,
        )


_ADAM_VALUES = 2.0
"""AdamW keeps two values for each parameter."""


def memory_bytes(job: Job, cluster: Cluster, option: Option) -> float:
    """Return the memory that a rank needs, on average over the ranks of a host.

    Parameters, gradients and buckets take the size of the parameters each, and the optimizer a multiple of it.

    Examples:
        >>> from syncline.tools.plan.job import job_of_size
        >>> job, cluster = job_of_size(1_000_000, compute=0.1), Cluster(cores_per_host=8, ranks_per_host=4)
        >>> memory_bytes(job, cluster, Option()) / job.num_bytes
        5.0
        >>> memory_bytes(job, cluster, Option(sharded=True)) / job.num_bytes
        2.0
    """
    one = job.num_bytes
    state = _ADAM_VALUES * one
    if option.sharded:
        from syncline.gradients.bucket_plan import POOL_BYTES  # imports torch, which a report does not need

        # One copy of the parameters, and of the optimizer's state, for the ranks that share memory. Each rank keeps its
        # shard of the gradients. Buckets take turns in a pool.
        share = cluster.ranks_per_host if cluster.engine == "shm" else cluster.num_ranks
        parameters = one / share if cluster.engine == "shm" else one
        return parameters + min(one, POOL_BYTES) + (state + one) / share + job.activation_bytes
    total = 2 * one + state + job.activation_bytes
    if option.strategy == "EveryStep":
        total += one  # the buckets
        codec = option.compression
        if codec is not None and codec.kind != "narrow":
            total += one  # the residual
    elif option.strategy == "DiLoCo":
        total += 2 * one  # the common copy of the parameters, and the outer momentum
        if option.compression is not None:
            total += one
    return total
