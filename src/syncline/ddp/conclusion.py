"""The last sentence of the timeline, which says what synchronization cost in a step, and which rank was late."""

from __future__ import annotations

from syncline.ddp.plan import Evidence, Plan, Reduction
from syncline.records import BackwardRecord, LateRank, RoundRecord, StepTiming
from syncline.words import format_bytes, format_time

_SMALL_SHARE = 0.05
"""The fraction of a step up to which waiting is not worth optimizing."""

_MAIN_SHARE = 0.5
"""The fraction of the waiting time from which a cause is named as its explanation."""

_ENOUGH_STEPS = 10
"""The first step that is judged. Earlier steps allocate memory and lay out buckets."""

_ENOUGH_SECONDS = 0.002
"""The shortest step that is judged. The time of a shorter one depends mostly on the scheduling of processes."""

_SLOWEST_LINK = 1e6
"""A bandwidth that links between ranks exceed, in bytes a second."""

_SLOWEST_MEMORY = 1e8
"""A bandwidth that shared memory exceeds, in bytes a second."""


def concluded(plan: Plan, evidence: Evidence) -> str:
    """Return the conclusion from the last records, in one or two sentences."""
    backward = evidence.backward
    if plan.num_ranks == 1:
        return "There is one rank, so synchronization costs nothing."
    if backward is None:
        return "No step has run yet. After two steps, this line says what synchronization costs."
    if not backward.synchronized:
        if plan.rules is None:
            return "This backward sent nothing, so no rank waited for its gradients."
        return _of_round(evidence.round)
    if backward.timing is None:
        return "This was the first step. From the next step on, this line says what synchronization costs."
    if evidence.device != "cpu":
        return (
            f"The gradients are on {evidence.device}, for which this process does not wait, so these times do not show "
            "what synchronization costs: use torch.profiler."
        )
    timing, late = backward.timing, backward.timing.late
    if late is not None and (
        late.rank == plan.rank or late.late_seconds >= _MAIN_SHARE * timing.waited_seconds
    ):
        text = _of_late(late, timing, has_updates=bool(plan.optimizers))
    else:
        text = _of_waits(plan, backward, timing)
    return " ".join(filter(None, [text, _too_little(backward.step, timing.step_seconds)]))


def _too_little(step: int, step_seconds: float) -> str:
    """Return a sentence that says why this step cannot be judged; empty if it can be."""
    reasons = ["too few steps"] if step < _ENOUGH_STEPS else []
    reasons += ["too short a step"] if step_seconds < _ENOUGH_SECONDS else []
    return f"{' and '.join(reasons).capitalize()} to judge." if reasons else ""


def _of_round(last: RoundRecord | None) -> str:
    if last is None:
        return "No parameter sync has run yet, and this backward sent nothing."
    took, waited = format_time(last.duration_seconds), format_time(last.waited_seconds)
    return f"The last parameter sync took {took}, of which this rank waited {waited} for other ranks."


def _of_late(late: LateRank, timing: StepTiming, *, has_updates: bool) -> str:
    before = "its optimizer step" if has_updates else "its backward"
    phase = {
        "update": "its gradients and its optimizer step took",
        "data": f"from {before} to its forward, where data is loaded, it took",
        "forward": "its forward and loss took",
        "backward": "its backward took",
    }[late.phase]
    num_others = sum(times is not None for times in timing.of_ranks) - 1
    others = "the other rank" if num_others == 1 else f"the median of the other {num_others} ranks"
    return (
        f"Rank {late.rank} was late by {format_time(late.late_seconds)}: {phase} {format_time(late.phase_seconds)}, "
        f"against {format_time(late.usual_seconds)} on {others}. {_waited(timing)}."
    )


def _waited(timing: StepTiming) -> str:
    share = timing.waited_seconds / timing.step_seconds
    waited, step = format_time(timing.waited_seconds), format_time(timing.step_seconds)
    return f"This rank waited {waited} in a step of {step} ({share:.0%})"


def _of_waits(plan: Plan, backward: BackwardRecord, timing: StepTiming) -> str:
    if timing.waited_seconds <= _SMALL_SHARE * timing.step_seconds:
        return f"{_waited(timing)}, so there is nothing to gain."
    for_buckets = sum(bucket.waited_seconds for bucket in backward.buckets)
    if for_buckets < _MAIN_SHARE * timing.waited_seconds:
        return (
            f"{_waited(timing)}, but only {format_time(for_buckets)} of it for gradients: look at the buffers, and at "
            "calls of syncline between the steps."
        )
    longest = max(backward.buckets, key=lambda bucket: bucket.waited_seconds)
    num_bytes = sum(bucket.payload_bytes for bucket in backward.buckets)
    waited = (
        f"{_waited(timing)}, {format_time(longest.waited_seconds)} of it for bucket {longest.index}. No rank was late "
        "enough to explain this"
    )
    in_memory = plan.shares_memory and plan.num_hosts == 1
    if num_bytes / (_SLOWEST_MEMORY if in_memory else _SLOWEST_LINK) < _MAIN_SHARE * timing.waited_seconds:
        return (
            f"{waited}, and {format_bytes(num_bytes)} are sent in less time. So the process of another rank was "
            "probably not running: look at the load of the host."
        )
    advice = "smaller buckets (bucket_cap_mb), which are sent earlier"
    if plan.reduction is Reduction.ALL_REDUCE and not in_memory:
        advice = f"a compression, or {advice}"
    way = "through shared memory" if in_memory else "over this link"
    return (
        f"{waited}, so the limit was to send {format_bytes(num_bytes)} {way}, or a busy host: try {advice}."
    )
