"""The job to train: the gradients in the order in which they become ready, and how long one rank computes.

Times are in seconds, for one rank that computes beside the other ranks of its host and waits for none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from syncline.tools.plan.cluster import Cluster


class Gradient(NamedTuple):
    """One parameter's gradient."""

    name: str
    shape: tuple[int, ...]
    ready: float
    """When it is ready: 0 at the beginning of the backward, 1 at its end."""
    itemsize_bytes: int = 4

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize_bytes


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, on one rank."""

    name: str
    gradients: Sequence[Gradient]
    """In the order in which they become ready."""
    forward: float
    """The forward and the loss, in seconds."""
    backward: float
    update: float
    """The optimizer's step and everything else from the backward to the end of the step."""
    data: float = 0.0
    """The time before the forward, such as loading the batch."""
    times: str = "as given"
    """The origin of the times, in words: "median of 10 steps"."""
    activation_bytes: int = 0
    """The memory of one rank's batch; 0 if it is not known."""

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(one.numel for one in self.gradients)

    @property
    def num_bytes(self) -> int:
        """The bytes of all gradients."""
        return sum(one.num_bytes for one in self.gradients)

    @property
    def compute(self) -> float:
        """How long a step takes without any synchronization."""
        return self.data + self.forward + self.backward + self.update

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Job:
        """Return the job whose `dataclasses.asdict` has become JSON."""
        gradients = [Gradient(name, tuple(shape), *rest) for name, shape, *rest in found["gradients"]]
        return Job(**{**found, "gradients": gradients})

    def slower(self, factor: float) -> Job:
        """Return the same job on ranks that compute more slowly by this factor."""
        phases = ("data", "forward", "backward", "update")
        return replace(self, **{name: getattr(self, name) * factor for name in phases})


def job_of_size(numel: int, *, compute: float) -> Job:
    """Return a job of which only the number of parameters and the length of a step are known.

    The parameters are assumed to be square matrices of one size, as many as is usual for models of this size, whose
    gradients become ready evenly; so the number of parameters is only nearly the given one. Of a step, 30 % are assumed
    to be the forward, 60 % the backward, and 10 % the optimizer's step.

    Args:
        numel: the number of parameters.
        compute: how long a step takes without synchronization, in seconds.

    Examples:
        >>> job = job_of_size(1_000_000, compute=0.1)
        >>> job.numel, job.backward, [one.ready for one in job.gradients[:3]]
        (1002528, 0.06, [0.125, 0.25, 0.375])
    """
    count = max(1, min(1000, round(8 * (numel / 1e6) ** 0.4)))
    side = max(1, round(math.sqrt(numel / count)))
    return Job(
        name="a model of which only the size is known",
        gradients=[Gradient(f"tensor {at}", (side, side), (at + 1) / count) for at in range(count)],
        forward=0.3 * compute,
        backward=0.6 * compute,
        update=0.1 * compute,
    )


def buckets_of(
    job: Job, cluster: Cluster, cap_mb: float | None, *, sends_little: bool = False
) -> list[Sequence[Gradient]]:
    """Return the gradients of each bucket, in the order in which buckets are sent.

    Args:
        job: the job.
        cluster: the hosts, on which the automatic size depends.
        cap_mb: the argument `bucket_cap_mb`; None for the automatic size.
        sends_little: whether a compression leaves only a small part of each bucket to send, which makes automatic
            buckets larger.
    """
    # Imports torch, which a report of a trace does not need.
    from syncline.gradients import bucket_plan

    specs = [
        bucket_plan.ParameterSpec(
            name=one.name,
            numel=one.numel,
            itemsize_bytes=one.itemsize_bytes,
            dtype=f"float{8 * one.itemsize_bytes}",
            device="cpu",
        )
        for one in job.gradients
    ]
    if cap_mb is None:
        load = bucket_plan.HostLoad(
            num_ranks=cluster.ranks_per_host,
            num_cores=cluster.cores_per_host,
            num_threads_per_rank=cluster.threads_per_rank,
        )
        caps = bucket_plan.automatic_caps(
            [load] * min(2, cluster.hosts),  # hosts are alike, and only one host differs from several
            device_type="cuda" if cluster.engine == "nccl" else "cpu",
            reduces_in_place=cluster.engine == "shm" and (cluster.hosts == 1 or cluster.ranks_per_host > 1),
            gradient_bytes=job.num_bytes,
            sends_little=sends_little,
        )
    else:
        cap_bytes = round(cap_mb * bucket_plan.MIB)
        caps = bucket_plan.BucketCaps(cap_bytes=cap_bytes, first_cap_bytes=cap_bytes)
    plans = bucket_plan.plan_buckets(specs, range(len(specs)), caps=caps, tail_numel=0)
    return [[job.gradients[index] for index in sorted(plan.parameters)] for plan in plans]
