"""The timeline of one step in words: as planned before the first step, as recorded afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import table
from syncline.ddp.contract_rows import BUFFER_WORDS, NONFINITE_WORDS, mean_of
from syncline.ddp.plan import Buffers, Evidence, Parameters, Plan, Reduction
from syncline.gradients.bucket_plan import BucketPlan
from syncline.records import BackwardRecord, BufferRecord, NonFiniteRecord, describe_nonfinite
from syncline.words import format_bytes, format_count, format_names

__all__ = ["explain"]


_ALONE = "nothing sent: there is one rank"

_STAY_LOCAL = "nothing sent: gradients stay on their rank"


def explain(plan: Plan, evidence: Evidence, buckets: Sequence[BucketPlan], names: Sequence[str]) -> str:
    """Describe one step as a timeline."""
    recorded = evidence.backward
    if recorded is None:
        heading = "One step, as planned (none has run yet)"
        buffers, backward = _buffers_planned(plan), _backward_planned(plan, buckets, names)
    else:
        heading = f"One step, as recorded on rank {evidence.rank}, step {recorded.step}"
        buffers = _buffers_recorded(plan, evidence.buffers)
        backward = _backward_recorded(plan, recorded)
    forward = [f"parameters  nothing sent: {_parameters(plan)}", f"buffers     {buffers}"]
    phases = {
        "forward": [_ALONE] if plan.num_ranks == 1 else forward,
        "backward": backward,
        "step": _steps(plan, evidence),
        "loss": [_loss(plan)],
    }
    rows = [("" if at else phase, line) for phase, lines in phases.items() for at, line in enumerate(lines)]
    return f"{heading}\n{table(rows)}"


# ---------------------------------------------------------------------- forward


def _parameters(plan: Plan) -> str:
    """Return why a forward sends no parameters."""
    return {
        Parameters.ALONE: "there is one rank",
        Parameters.BROADCAST: "they were broadcast from rank 0 at construction",
        Parameters.AS_GIVEN: "init_sync=False",
        Parameters.ONE_COPY: "the last step has written the one copy",
        Parameters.GATHERED: "the last step has gathered them",
        Parameters.BY_STRATEGY: "they meet after a step",
    }[plan.parameters]


def _buffers_planned(plan: Plan) -> str:
    match plan.buffers:
        case Buffers.ABSENT:
            return "nothing sent: the module has none, so there is no call at all"
        case Buffers.ALONE:
            return _ALONE
        case Buffers.OFF:
            why = "broadcasting buffers is switched off" if plan.rules is None else "buffers='none'"
            return f"nothing sent: {why}"
        case Buffers.WITH_PARAMETERS:
            assert plan.rules is not None
            return f"nothing sent: they meet {plan.rules.buffers_when}"
        case Buffers.BEFORE_FORWARD:
            size = (
                f"{format_count(plan.sizes.num_buffers, 'tensor')}, {format_bytes(plan.sizes.buffer_bytes)}"
            )
            condition = "(none if the previous forward ran under no_sync or no_grad)"
            return f"{BUFFER_WORDS[plan.config.buffers]}: {size} {condition}"


def _buffers_recorded(plan: Plan, record: BufferRecord | None) -> str:
    if record is None or not record.sent:
        return f"nothing sent: {'no forward has run yet' if record is None else record.reason}"
    size = f"{format_count(record.num_tensors, 'tensor')}, {format_bytes(record.payload_bytes)}"
    calls = ", 1 call" if plan.config.buffers == "broadcast" else ""
    return f"{BUFFER_WORDS[plan.config.buffers]}: {size}{calls}"


# ---------------------------------------------------------------------- backward


def _backward_planned(plan: Plan, buckets: Sequence[BucketPlan], names: Sequence[str]) -> list[str]:
    if plan.num_ranks == 1:
        return [f"{_ALONE}; gradients are its own"]
    if not plan.averages_in_backward:
        return [_STAY_LOCAL]
    lines = []
    for bucket in buckets:
        members = [names[i] for i in sorted(bucket.parameters, reverse=True)]
        size = format_bytes(bucket.payload_bytes)
        lines.append(f"{format_names(members)} -> bucket {bucket.index} ({size})")
        lines.append(f"  {_sent(plan)} when the last of its gradients is ready")
    options = plan.config.gradients
    rule = "counts as zero" if options.allow_unused else "is an error on every rank"
    if options.on_nonfinite != "ignore":
        rule += f"; one that is not finite: {NONFINITE_WORDS[options.on_nonfinite]}"
    kind = "views of the buckets" if options.as_bucket_view else "tensors of their own"
    holds = f".grad holds the mean over {plan.num_reducing or plan.num_ranks} ranks ({kind})"
    if plan.reduction is Reduction.SHARDS:
        kind = ".grad of a parameter cannot be read"
        holds = f"each rank holds its shard of the mean over {plan.num_ranks} ranks ({kind})"
    return [*lines, f"at its end all buckets are waited for and {holds}; a missing gradient {rule}"]


def _backward_recorded(plan: Plan, backward: BackwardRecord) -> list[str]:
    if plan.num_ranks == 1:
        lines = [f"{_ALONE}; gradients are its own"]
    elif backward.synchronized:
        lines = _buckets_recorded(plan, backward)
    elif plan.rules is not None:
        lines = [_STAY_LOCAL]
    else:
        lines = ["nothing sent: it ran under no_sync, gradients were added to .grad on each rank"]
    if backward.reduced_afterwards:
        lines.append(f"after it, by sl.sync_gradients_: .grad now holds the {mean_of(backward)}")
    if backward.nonfinite is not None:
        lines += _nonfinite_recorded(plan, backward.nonfinite)
    if backward.unused:
        lines.append(f"no gradient on this rank, counted as zero: {format_names(backward.unused)}")
    return lines


def _buckets_recorded(plan: Plan, backward: BackwardRecord) -> list[str]:
    lines = []
    for bucket in backward.buckets:
        size = format_bytes(bucket.payload_bytes)
        lines.append(f"{format_names(bucket.parameters)} -> bucket {bucket.index} ({size})")
        when = "at the end of backward" if bucket.trigger is None else f"when {bucket.trigger} was ready"
        launched = f"{bucket.launched_seconds * 1e3:.1f} ms after the first gradient"
        waited = f"waited {bucket.waited_seconds * 1e3:.1f} ms for it at the end"
        lines.append(f"  {_sent(plan)} {when}, {launched}; {waited}")
    mean = mean_of(backward)
    if plan.reduction is Reduction.SHARDS:
        return [*lines, f"each rank now holds its shard of the {mean}; .grad of a parameter cannot be read"]
    return [*lines, f".grad now holds the {mean}"]


def _nonfinite_recorded(plan: Plan, record: NonFiniteRecord) -> list[str]:
    if record.found or record.in_mean:
        return [describe_nonfinite(record)]
    if not record.num_steps:
        return []
    steps = format_count(record.num_steps, "step")
    return [f"not finite: nothing in this step ({plan.config.gradients.on_nonfinite}: {steps} before)"]


def _sent(plan: Plan) -> str:
    """Return how a bucket is sent, in words."""
    if plan.reduction is Reduction.ENCODED and plan.config.compression is not None:
        return f"sent by {plan.config.compression.in_words()}"
    if plan.reduction is Reduction.HOOK:
        return f"sent by communication hook {plan.comm_hook}"
    return "reduced, each rank its shard," if plan.reduction is Reduction.SHARDS else "sent by all_reduce"


# ---------------------------------------------------------------------- after backward


def _steps(plan: Plan, evidence: Evidence) -> list[str]:
    match plan.parameters:
        case Parameters.BY_STRATEGY:
            return _rounds(plan, evidence)
        case Parameters.ONE_COPY:
            one = "there is one copy" if plan.num_copies == 1 else "each host has one copy"
            shard = f"steps its shard (1 of {plan.num_ranks // plan.num_copies})"
            waits = f"Each rank waits until all backwards are over, {shard}, and waits until all have written"
            return [f"nothing sent: {one} of the parameters. {waits}"]
        case Parameters.GATHERED:
            shard = f"each rank steps its shard (1 of {plan.num_ranks})"
            return [f"{shard}; then all_gather: every rank gets the others' parameters"]
        case _:
            return ["nothing sent; every rank applies the same update to the same parameters"]


def _rounds(plan: Plan, evidence: Evidence) -> list[str]:
    assert plan.rules is not None
    lines = [plan.rules.at_step]
    last = evidence.round
    if last is not None:
        size = f"{format_count(last.num_calls, 'call')}, {format_bytes(last.payload_bytes)}"
        took = f"{last.duration_seconds * 1e3:.1f} ms"
        lines.append(f"after step {last.step}: {'; '.join(last.what)} ({size}, {took})")
    if evidence.next_round is not None:
        lines.append(f"next after step {evidence.next_round}")
    return lines


def _loss(plan: Plan) -> str:
    if plan.metrics:
        return f"local to each rank; the means of {format_names(plan.metrics)} travel behind the gradients (ddp.report)"
    return "local to each rank, never averaged by itself; sl.mean(loss, weight=...) averages it"
