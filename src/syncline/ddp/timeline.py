"""The timeline of one step of a wrapped module, in words: as planned, or as recorded."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import table
from syncline.ddp.conclusion import concluded
from syncline.ddp.plan import Buffers, Evidence, Parameters, Plan, Reduction, Size
from syncline.ddp.report import BUFFER_WORDS, NONFINITE_WORDS
from syncline.gradients.bucket_plan import BucketPlan
from syncline.records import BackwardRecord, BufferRecord, describe_mean, describe_nonfinite
from syncline.words import MAX_COLUMNS, format_bytes, format_count, format_names, format_time, wrapped

_NOTHING_SENT = "nothing sent: there is one rank"

_STAY_LOCAL = "nothing sent: gradients stay on their rank"


def explain(
    plan: Plan,
    evidence: Evidence,
    buckets: Sequence[BucketPlan],
    names: Sequence[str],
    *,
    verbose: bool = False,
) -> str:
    """Return a timeline of one step, in words: of the last recorded step, or of the plan if no step has run.

    The lines have at most 100 columns. The last sentence says what synchronization cost, and which rank was late.

    Args:
        plan: the plan of the module.
        evidence: the last records of this rank.
        buckets: the plans of the buckets.
        names: the names of the parameters. The indices in `buckets` refer to this list.
        verbose: whether to name each safety check.
    """
    checks = f"plus {format_bytes(plan.num_report_bytes)} of safety checks"
    checks += f": {', '.join(plan.reports)}" if verbose else " (ddp.explain(verbose=True) names them)"
    recorded = evidence.backward
    if recorded is None:
        heading = "One step, as planned (none has run yet)"
        buffers, backward = _buffers_planned(plan), _backward_planned(plan, buckets, names, checks)
    else:
        heading = f"One step, as recorded on rank {plan.rank}, step {recorded.step}"
        buffers = _buffers_recorded(plan, evidence.buffers)
        backward = _backward_recorded(plan, recorded, checks)
    forward = [f"parameters  nothing sent: {_parameters_text(plan)}", f"buffers     {buffers}"]
    phases = {
        "forward": [_NOTHING_SENT] if plan.num_ranks == 1 else forward,
        "backward": backward,
        "step": _steps(plan, evidence),
        "loss": [_loss(plan)],
    }
    width = max(map(len, phases)) + 2
    rows = [
        ("" if at else phase, line)
        for phase, lines in phases.items()
        for at, line in enumerate(short for line in lines for short in wrapped(line, MAX_COLUMNS - width))
    ]
    conclusion = "\n".join(wrapped(concluded(plan, evidence), indent=""))
    return f"{heading}\n{table(rows)}\n{conclusion}"


# ---------------------------------------------------------------------- forward


def _parameters_text(plan: Plan) -> str:
    """Return the reason why a forward sends no parameters."""
    return {
        Parameters.ALONE: "there is one rank",
        Parameters.BROADCAST: "they were broadcast from rank 0 at construction",
        Parameters.AS_GIVEN: "init_sync=False",
        Parameters.ONE_COPY: "the optimizer step writes the one copy",
        Parameters.GATHERED: "the optimizer step gathers them",
        Parameters.BY_STRATEGY: "they are synchronized after an optimizer step",
    }[plan.parameters]


def _buffers_planned(plan: Plan) -> str:
    match plan.buffers:
        case Buffers.ABSENT:
            return "nothing sent: the module has no buffers"
        case Buffers.ALONE:
            return _NOTHING_SENT
        case Buffers.LOCAL:
            return "nothing sent: the module had no buffers when it was wrapped"
        case Buffers.OFF:
            why = "broadcasting buffers is switched off" if plan.rules is None else "buffers='none'"
            return f"nothing sent: {why}"
        case Buffers.WITH_PARAMETERS:
            assert plan.rules is not None
            return f"nothing sent: they are synchronized {plan.rules.buffers_when}"
        case Buffers.BEFORE_FORWARD:
            condition = "(not sent if the previous forward ran under no_sync or no_grad)"
            return f"{BUFFER_WORDS[plan.config.buffers]}: {plan.sizes.buffers} {condition}"


def _buffers_recorded(plan: Plan, record: BufferRecord | None) -> str:
    if record is None or not record.sent:
        return f"nothing sent: {'no forward has run yet' if record is None else record.reason}"
    size = Size(record.num_tensors, record.payload_bytes)
    calls = ", 1 call" if plan.config.buffers == "broadcast" else ""
    return f"{BUFFER_WORDS[plan.config.buffers]}: {size}{calls}"


# ---------------------------------------------------------------------- backward


def _backward_planned(
    plan: Plan, buckets: Sequence[BucketPlan], names: Sequence[str], checks: str
) -> list[str]:
    if plan.num_ranks == 1:
        return [f"{_NOTHING_SENT}; .grad holds the gradients of this rank"]
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
    if options.on_nonfinite in NONFINITE_WORDS:
        rule += f"; a gradient that is not finite: {NONFINITE_WORDS[options.on_nonfinite]}"
    kind = "views of the buckets" if options.as_bucket_view else "separate tensors"
    holds = f".grad holds the mean over {len(plan.reducing_ranks)} ranks ({kind})"
    if plan.reduction is Reduction.SHARDS:
        kind = ".grad of a parameter cannot be read"
        holds = f"each rank holds its shard of the mean over {plan.num_ranks} ranks ({kind})"
    end = f"at the end of backward each rank waits for all buckets; then {holds}"
    return [*lines, checks, end, f"a missing gradient {rule}"]


def _backward_recorded(plan: Plan, backward: BackwardRecord, checks: str) -> list[str]:
    if plan.num_ranks == 1:
        lines = [f"{_NOTHING_SENT}; .grad holds the gradients of this rank"]
    elif backward.synchronized:
        lines = _buckets_recorded(plan, backward, checks)
    elif plan.rules is not None:
        lines = [_STAY_LOCAL]
    else:
        lines = ["nothing sent: backward ran under no_sync, and each rank added its gradients to .grad"]
    if backward.reduced_afterwards:
        lines.append(f"after backward, by sl.sync_gradients_: .grad now holds the {describe_mean(backward)}")
    nonfinite = backward.nonfinite
    if nonfinite is not None and (nonfinite.found or nonfinite.in_mean):
        lines.append(describe_nonfinite(nonfinite))
    elif nonfinite is not None and nonfinite.num_steps:
        lines.append(str(nonfinite))
    if backward.unused:
        lines.append(f"no gradient on this rank, counted as zero: {format_names(backward.unused)}")
    return lines


def _buckets_recorded(plan: Plan, backward: BackwardRecord, checks: str) -> list[str]:
    lines = []
    for bucket in backward.buckets:
        size = format_bytes(bucket.payload_bytes)
        lines.append(f"{format_names(bucket.parameters)} -> bucket {bucket.index} ({size})")
        when = "at the end of backward" if bucket.trigger is None else f"when {bucket.trigger} was ready"
        launched = f"{format_time(bucket.launched_seconds)} after the first gradient"
        waited = f"waited {format_time(bucket.waited_seconds)} for the bucket at the end"
        lines.append(f"  {_sent(plan)} {when}, {launched}; {waited}")
    lines.append(checks)
    mean = describe_mean(backward)
    if plan.reduction is Reduction.SHARDS:
        return [*lines, f"each rank now holds its shard of the {mean}; .grad of a parameter cannot be read"]
    return [*lines, f".grad now holds the {mean}"]


def _sent(plan: Plan) -> str:
    """Return a text that says how a bucket is sent."""
    if plan.reduction is Reduction.ENCODED:
        return f"sent by {plan.config.encoding}"
    if plan.reduction is Reduction.HOOK:
        return f"sent by communication hook {plan.comm_hook}"
    return "sent by reduce_scatter" if plan.reduction is Reduction.SHARDS else "sent by all_reduce"


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
            return [f"{shard}; then all_gather: every rank receives the parameters of the other shards"]
        case _:
            return ["nothing sent; every rank applies the same update to the same parameters"]


def _rounds(plan: Plan, evidence: Evidence) -> list[str]:
    assert plan.rules is not None
    lines = [plan.rules.at_step]
    last = evidence.round
    if last is not None:
        size = f"{format_count(last.num_calls, 'call')}, {format_bytes(last.payload_bytes)}"
        took = format_time(last.duration_seconds)
        lines.append(f"after step {last.step}: {'; '.join(last.what)} ({size}, {took})")
    if evidence.next_round is not None:
        lines.append(f"next after step {evidence.next_round}")
    return lines


def _loss(plan: Plan) -> str:
    if plan.metrics:
        return f"local to each rank; ddp.report averages {format_names(plan.metrics)} with the gradients"
    return "local to each rank, not averaged automatically; sl.mean(loss, weight=...) averages it"
