"""From a trace to a plan: the job and the cluster of a run, and its step as the planner predicts it (pure functions).

The size of each gradient is not recorded: the gradients of a bucket are assumed to be equally large matrices.

[Note: a step with other buckets]

Gradients become ready during the backward, a bucket is sent as soon as its gradients are ready, and buckets are reduced
one after the other. A reduction takes a fixed time and a time for its bytes. When the backward
has ended, the step waits for the remaining reductions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Any, NamedTuple, get_args

from syncline.tools.plan.cluster import Cluster, Engine
from syncline.tools.plan.job import Gradient, Job
from syncline.tools.plan.machine import Machine
from syncline.tools.plan.options import CODECS, Codec, Option
from syncline.tools.plan.predict import Planner, Reduction, exposed_time
from syncline.tools.report.analysis import BucketFigures, Figures
from syncline.tools.report.run import Run
from syncline.words import format_count, format_time

CAPS_MB = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100)
"""The values of `bucket_cap_mb` that are compared."""

_BYTES_PER_MB = 1 << 20

_LEAST_POINTS = 3


class Link(NamedTuple):
    """How long a reduction takes: a fixed time, and a time for each byte."""

    fixed: float
    per_byte: float

    def time(self, num_bytes: float) -> float:
        """Return how long the reduction of `num_bytes` bytes takes."""
        return self.fixed + self.per_byte * num_bytes

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth without the fixed time, if times are in microseconds."""
        return 1e6 / self.per_byte if self.per_byte > 0 else float("inf")


def link_of(buckets: Sequence[BucketFigures]) -> Link | None:
    """Return the line that fits the durations of the buckets best. None if no duration is known.

    Buckets for which no rank had to wait have no known duration. If all buckets are of about the same size, the whole
    time is attributed to the bytes.
    """
    points = [(one.payload_bytes, one.duration) for one in buckets if one.duration > 0 and one.payload_bytes]
    if not points:
        return None
    sizes, times = [size for size, _ in points], [time for _, time in points]
    through_zero = Link(0.0, sum(times) / sum(sizes))
    if len(points) < _LEAST_POINTS or max(sizes) < 2 * min(sizes):
        return through_zero
    slope, fixed = linear_regression(sizes, times)
    if slope <= 0:
        return Link(fmean(times), 0.0)
    return Link(fixed, slope) if fixed > 0 else through_zero


def wait_of(link: Link, buckets: Sequence[tuple[float, float]], backward: float) -> float:
    """Return how long a step waits for buckets after the backward, in microseconds.

    Args:
        link: how long a reduction takes.
        buckets: for each bucket, when it is sent, and its bytes, in the order in which they are sent.
        backward: how long the backward takes.

    Examples:
        >>> wait_of(Link(0.0, 1.0), [(10.0, 20.0), (50.0, 20.0)], backward=50.0)
        20.0
    """
    return exposed_time([Reduction(sent, link.time(num_bytes)) for sent, num_bytes in buckets], backward)


def cut_anew(buckets: Sequence[BucketFigures], cap_bytes: float) -> list[tuple[float, float]]:
    """Return when buckets of another size would be sent, and their bytes.

    Gradients are assumed to become ready evenly between the moments at which the recorded buckets were sent.
    """
    total = sum(one.payload_bytes for one in buckets)
    cuts = [0.0, *(min(cap_bytes * nth, total) for nth in range(1, math.ceil(total / cap_bytes) + 1))]
    return [(_ready(cut, buckets), cut - before) for before, cut in pairwise(cuts)]


def _ready(at: float, buckets: Sequence[BucketFigures]) -> float:
    """Return the time at which the first `at` bytes of gradients are ready."""
    start, since = 0.0, 0.0
    for one in buckets:
        end, until = start + one.payload_bytes, max(one.sent, since)
        if at < end:  # a bucket of unknown size holds no byte
            return since + (until - since) * (at - start) / (end - start)
        start, since = end, until
    return since


def best_cap(link: Link, buckets: Sequence[BucketFigures], backward: float) -> tuple[float, float] | None:
    """Return the bucket size in MiB with the shortest wait, and the time that a step saves, in microseconds.

    None if no other size is shorter.
    """
    ordered = sorted(buckets, key=lambda one: one.sent)
    present = wait_of(link, [(one.sent, one.payload_bytes) for one in ordered], backward)
    waits = {cap: wait_of(link, cut_anew(ordered, cap * _BYTES_PER_MB), backward) for cap in CAPS_MB}
    # The largest of those that are nearly as good: fewer buckets have less overhead that the model does not know.
    shortest = min(waits.values())
    cap = max(one for one, wait in waits.items() if wait <= shortest + 0.02 * max(1.0, present))
    return (cap, present - waits[cap]) if waits[cap] < present else None


_SECONDS = 1e-6


def cluster_of(run: Run, figures: Figures) -> Cluster:
    """Return the hosts of a run. The bandwidth between hosts is the one of the buckets in the trace."""
    hosts = Counter(one.process.host for one in run.processes)
    first, others = run.processes[0].process, len(hosts) - 1
    link = (link_of(figures.buckets) or Link(0.0, 0.0)) if others else None
    engines = [one for one in get_args(Engine) if one == _contract_of(run).get("transport")]
    return Cluster(
        hosts=len(hosts),
        ranks_per_host=max(hosts.values()),
        cores_per_host=first.num_cores or max(hosts.values()),
        threads_per_rank=first.num_threads,
        # A host sends this part of the bytes of a bucket.
        link_bytes_per_second=link and 2 * others / len(hosts) * link.bytes_per_second,
        latency_seconds=link.fixed * _SECONDS / (2 * others) if link else 0.0,
        engine=engines[0] if engines else "shm",
    )


def _contract_of(run: Run) -> Mapping[str, Any]:
    """Return the contract of the last module. Contracts of earlier versions have only a title and rows."""
    return run.modules[-1].contract if run.modules else {}


def job_of(run: Run, figures: Figures) -> Job:
    """Return the job of a run: its gradients, and how long a rank computes."""
    return Job(
        name=str(run.module),
        gradients=[gradient for bucket in _buckets_of(figures) for gradient in bucket],
        forward=figures.parts.get("forward", 0.0) * _SECONDS,
        backward=_backward_of(figures) * _SECONDS,
        update=figures.parts.get("update", 0.0) * _SECONDS,
        data=figures.parts.get("data", 0.0) * _SECONDS,
        times=f"mean of {format_count(figures.num_steps, 'step')}",
    )


def _backward_of(figures: Figures) -> float:
    """Return how long the backward takes, in microseconds: at least until the last bucket is sent."""
    return max(figures.backward, max((one.sent for one in figures.buckets), default=0.0), 1.0)


def _buckets_of(figures: Figures) -> list[list[Gradient]]:
    """Return the gradients of each bucket, in the order in which buckets are sent."""
    backward, before = _backward_of(figures), 0.0
    found = []
    for bucket in sorted(figures.buckets, key=lambda one: one.sent):
        names = bucket.parameters or ("?",)
        numel = bucket.payload_bytes / 4 / len(names)
        side = max(1, math.isqrt(round(numel)))
        shape, each = (side, round(numel / side)), (bucket.sent - before) / len(names)
        ready = [(before + each * (at + 1)) / backward for at in range(len(names))]
        found.append([Gradient(name, shape, at) for name, at in zip(names, ready, strict=True)])
        before = bucket.sent
    return found


def option_of(run: Run) -> Option | None:
    """Return the planner's option for the way in which a run synchronizes; None if there is none."""
    reduction = _contract_of(run).get("reduction", "")
    if codec := _codec_in(reduction):
        return Option(compression=codec)
    return {"all_reduce": Option(), "shards": Option(sharded=True)}.get(reduction)


def _codec_in(expression: str) -> Codec | None:
    """Return the compression of an expression such as `Quantize(bits=4)`."""
    for codec in CODECS:
        name, _, value = codec.code.rstrip(")").partition("(")
        if re.search(rf"\b{name}\((?:\w+=)?{re.escape(value)}\b" if value else rf"\b{name}\(", expression):
            return codec
    return None


def predicted_rows(run: Run, figures: Figures, machine: Machine) -> list[dict[str, str]]:
    """Return rows with the planner's predictions for a run beside the measurements.

    The computation time is that of the trace. The waits follow from the machine's figures for each bucket.

    Args:
        run: the run.
        figures: its figures.
        machine: the figures of the machine.
    """
    option = option_of(run)
    if option is None or run.num_ranks < 2 or not figures.buckets:
        return []
    job, cluster = job_of(run, figures), cluster_of(run, figures)
    planner = Planner(job=job, cluster=cluster, machine=machine, buckets={None: _buckets_of(figures)})
    waits = planner.waits(option)
    measured = (figures.parts.get("transfer", 0.0) + figures.parts.get("late", 0.0)) * _SECONDS
    rest = figures.step * _SECONDS - measured
    of = f"costs of {machine.name}" if cluster.hosts == 1 else "the link as in this trace"
    times = (
        (f"a step, mean ({of})", rest + waits, rest + measured),
        ("waits for gradients at the end of the backward, mean", waits, measured),
    )
    return [
        {"what": what, "predicted": format_time(one), "measured": format_time(other)}
        for what, one, other in times
    ]
