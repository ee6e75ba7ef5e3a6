"""The buckets that Syncline would lay out for a job (pure functions)."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.tools.plan.cluster import Cluster
from syncline.tools.plan.job import Gradient, Job


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
