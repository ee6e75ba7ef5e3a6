"""Texts about a wrapped module: the contract, with a row for each group of tensors, and the timeline of one step.

Before the first step, the contract and the timeline describe the plan. After the first step, the contract also shows
the last synchronizations, and the timeline describes the last recorded step.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from syncline.contract import Contract, Row, Rule, add_evidence, table
from syncline.ddp.plan import Buffers, Evidence, Parameters, Plan, Reduction, Size
from syncline.gradients.bucket_plan import BucketPlan
from syncline.gradients.riders.replica_watch import ReplicaCheck
from syncline.records import BackwardRecord, BufferRecord, describe_mean, describe_nonfinite
from syncline.words import format_bytes, format_count, format_names

NONFINITE_WORDS = {
    "raise": "an error on every rank",
    "skip": "no rank steps",
    "zero": "counts as zero",
}
"""The consequence of a gradient that is not finite, for each value of `on_nonfinite`."""

BUFFER_WORDS = {
    "broadcast": "broadcast from rank 0",
    "average": "average, statistics pooled",
    "none": "broadcast from rank 0",
}
"""The way in which buffers are synchronized, for each buffer policy. Under "none" they are synchronized only if a
user sets `ddp.forward_sync_buffers` later."""

_ALONE = Rule("never: there is one rank", None, "none")


def contract_of(plan: Plan, evidence: Evidence) -> Contract:
    """Return the contract that describes a plan. After the first step, each row also shows the last synchronization."""
    ranks = format_count(plan.num_ranks, "rank")
    where = f"{ranks} on {format_count(plan.num_hosts, 'host')}" if plan.num_ranks > 1 else "1 rank alone"
    if plan.rules is not None:
        where += f", strategy: {plan.rules.strategy}"
    sizes = plan.sizes
    rows = [
        _row("gradients", str(sizes.gradients), _gradients(plan)),
        _row("parameters", str(sizes.parameters), _parameters_rule(plan)),
        _row("buffers", str(sizes.buffers), _buffers(plan)),
        _optimizer_row(plan),
        _metrics_row(plan),
        _checks_row(plan),
    ]
    if plan.config.replica_check is not None:
        rows.append(_replica_row(plan, plan.config.replica_check))
    title = f"DistributedDataParallel({plan.module}), {where}, transport: {plan.transport}"
    contract = Contract(title=title, rows=tuple(rows))
    if evidence.backward is None:
        return contract
    return add_evidence(contract, _last_done(plan, evidence, evidence.backward))


def _row(what: str, size: str, rule: Rule) -> Row:
    return Row(what=what, size=size, when=rule.when, how=rule.how or "-", drift_allowed=rule.drift_allowed)


def _gradients(plan: Plan) -> Rule:
    always = Rule("every backward outside no_sync", "mean, all_reduce", "none")
    rule = always if plan.rules is None or plan.rules.gradients is None else plan.rules.gradients
    if plan.num_ranks == 1 and plan.comm_hook is None:
        rule = _ALONE
    options = plan.config.gradients
    dtype = "" if options.reduce_dtype is None else f" in {str(options.reduce_dtype).removeprefix('torch.')}"
    how = {
        Reduction.NOTHING: None,
        Reduction.ALL_REDUCE: f"{rule.how}{dtype if rule is always else ''}",
        Reduction.SHARDS: f"mean, reduce_scatter: each rank gets its shard (1 of {plan.num_ranks}){dtype}",
        Reduction.ENCODED: f"mean, {plan.config.encoding}",
        Reduction.HOOK: f"by communication hook {plan.comm_hook}",
    }[plan.reduction]
    if options.on_nonfinite != "ignore":
        nonfinite = f"not finite: {NONFINITE_WORDS[options.on_nonfinite]}"
        how = nonfinite if how is None else f"{how}; {nonfinite}"
    return Rule(rule.when, how, rule.drift_allowed)


def _parameters_rule(plan: Plan) -> Rule:
    init_sync = plan.config.init_sync
    given = "broadcast from rank 0" if init_sync else "equal, as the user guarantees"
    match plan.parameters:
        case Parameters.BY_STRATEGY:
            assert plan.rules is not None
            start = "equal at construction" if init_sync else "unchanged at construction (init_sync=False)"
            return plan.rules.parameters._replace(when=f"{start}, then {plan.rules.parameters.when}")
        case Parameters.ALONE:
            return _ALONE
        case Parameters.ONE_COPY:
            where = "for all ranks" if plan.num_copies == 1 else f"on each of {plan.num_copies} hosts"
            values = "values of rank 0" if init_sync or plan.num_copies == 1 else given
            how = f"one copy {where}, {values}; a barrier before and after writing"
            return Rule("at every step", how, "none")
        case Parameters.GATHERED:
            values = "values of rank 0" if init_sync else given
            return Rule("at every step", f"{values} at construction, then all_gather of the shards", "none")
        case Parameters.BROADCAST:
            return Rule("once, at construction", given, "none")
        case Parameters.AS_GIVEN:
            return Rule("never: init_sync=False", given, "none")


def _buffers(plan: Plan) -> Rule:
    match plan.buffers:
        case Buffers.ABSENT:
            return Rule("never: the module has none", None, "-")
        case Buffers.ALONE:
            return _ALONE
        case Buffers.OFF if plan.config.init_buffers:
            return Rule("once, at construction", "broadcast from rank 0", "unbounded")
        case Buffers.OFF:
            return Rule("never", None, "unbounded")
        case Buffers.BEFORE_FORWARD:
            return Rule("before forward, not after no_sync", BUFFER_WORDS[plan.config.buffers], "one step")
        case Buffers.WITH_PARAMETERS:
            assert plan.rules is not None
            how = plan.rules.buffers_how or BUFFER_WORDS[plan.config.buffers]
            return Rule(plan.rules.buffers_when, how, plan.rules.buffers_drift)


def _optimizer_row(plan: Plan) -> Row:
    attached = ", ".join(plan.optimizers)
    needed = attached or "none attached: ddp.attach(optimizer)"
    if plan.rules is not None and plan.num_ranks > 1:
        return _row("optimizer", needed, plan.rules.optimizer)
    if plan.config.gradients.sharded:
        how = f"each rank steps its shard (1 of {plan.num_ranks}) and has the state of that shard only"
        return _row("optimizer", needed, Rule("at every step", how, "none"))
    how = "every rank applies the same update"
    if plan.optimizers and plan.num_ranks > 1:
        how += "; settings compared in backward"
    return _row("optimizer", attached or "-", Rule("never: equal by construction", how, "none"))


def _metrics_row(plan: Plan) -> Row:
    rule = Rule("only when asked: sl.mean(...)", "weighted mean", "local values differ")
    if plan.metrics:
        rule = rule._replace(
            when="every backward after ddp.report(...)", how="weighted mean, behind the gradients"
        )
    return _row("loss, metrics", format_names(plan.metrics) if plan.metrics else "-", rule)


def _checks_row(plan: Plan) -> Row:
    if not _sends_reports(plan):
        return _row("checks", "none", _ALONE if plan.num_ranks == 1 else Rule("never", None, "-"))
    rule = Rule("with the gradients", "reports of each rank: see explain()", "none")
    return _row("checks", f"{plan.num_report_bits} bits", rule)


def _sends_reports(plan: Plan) -> bool:
    return plan.num_ranks > 1 and plan.averages_in_backward


def _replica_row(plan: Plan, check: ReplicaCheck) -> Row:
    """Return the row of the contract about the comparison of replicas."""
    parts = plan.compared_parts
    size = ", ".join(parts) or "nothing"
    if plan.has_one_copy and parts:
        size += " (there is one copy of the parameters)"
    if plan.num_ranks == 1 and parts:
        return _row("replica check", size, _ALONE)
    within = f"all slices within {format_count(check.every, 'step')}"
    when = []
    if parts and plan.averages_in_backward:
        which = "synchronized backwards" if plan.rules is None else "backwards that average gradients"
        among = "" if plan.workers is None else f" among the {len(plan.reducing_ranks)} ranks of a worker"
        when.append(f"in {which}{among}, slice by slice, {within}")
    if parts and plan.rules is not None and plan.rules.equal_after_sync:
        when.append(f"after each parameter sync, {within} and one parameter sync")
    if not when:
        why = "replicas are not equal between or after parameter syncs"
        if not parts:
            why = "there is one copy of the parameters, and each rank has its shard of the optimizer"
        return _row("replica check", size, Rule(f"never: {why}", None, "none"))
    how = f"fingerprints, with the gradients; if they differ: {check.on_divergence}"
    return _row("replica check", size, Rule("; ".join(when), how, "none"))


# ---------------------------------------------------------------------- the last synchronizations


def _last_done(plan: Plan, evidence: Evidence, backward: BackwardRecord) -> dict[str, str]:
    done = {
        "gradients": _last_gradients(plan, backward),
        "parameters": "nothing sent",
        "buffers": _last_buffers(evidence),
        "optimizer": "nothing sent",
        "loss, metrics": f"step {backward.step}, with the gradients" if backward.metrics else "see sl.mean",
        "checks": f"step {backward.step}"
        if backward.synchronized and _sends_reports(plan)
        else "nothing sent",
        "replica check": _last_compared(evidence),
    }
    if plan.rules is not None:
        done |= {
            "parameters": "no parameter sync yet",
            "buffers": "no parameter sync yet" if plan.sizes.buffers.num_tensors else "-",
            **{what: f"after step {step}" for what, step in evidence.synced_at.items()},
        }
    elif plan.parameters is Parameters.GATHERED:
        done["parameters"] = "at the last step"
    elif plan.parameters is Parameters.ONE_COPY:
        done["parameters"] = f"nothing sent: one copy{'' if plan.num_copies == 1 else ' per host'}"
    elif plan.parameters is Parameters.BROADCAST:
        done["parameters"] = "at construction"
    return done


def _last_gradients(plan: Plan, backward: BackwardRecord) -> str:
    if backward.synchronized:
        done = f"step {backward.step}: {format_count(len(backward.buckets), 'bucket')}, {describe_mean(backward)}"
    elif backward.reduced_afterwards:
        done = f"after step {backward.step}: sl.sync_gradients_, {describe_mean(backward)}"
    elif plan.num_ranks == 1:
        done = f"step {backward.step}: nothing to send"
    elif plan.rules is not None:
        done = f"step {backward.step}: local"
    else:
        done = f"after step {backward.step}: added up, no_sync"
    if backward.nonfinite is not None and (backward.nonfinite.found or backward.nonfinite.in_mean):
        done += f"; not finite: {backward.nonfinite.outcome}"
    return done


def _last_buffers(evidence: Evidence) -> str:
    if evidence.buffers is None:
        return "no forward yet"
    return "before the last forward" if evidence.buffers.sent else f"not sent: {evidence.buffers.reason}"


def _last_compared(evidence: Evidence) -> str:
    if evidence.replicas_compared is None:
        return "not yet"
    step, are_equal = evidence.replicas_compared
    repaired = f", repaired {format_count(evidence.num_repairs, 'time')}" if evidence.num_repairs else ""
    return f"step {step}: {'equal' if are_equal else 'different'}{repaired}"


_MAX_COLUMNS = 100

_NOTHING_SENT = "nothing sent: there is one rank"

_STAY_LOCAL = "nothing sent: gradients stay on their rank"


def explain(plan: Plan, evidence: Evidence, buckets: Sequence[BucketPlan], names: Sequence[str]) -> str:
    """Return a timeline of one step, in words: of the last recorded step, or of the plan if no step has run.

    Args:
        plan: the plan of the module.
        evidence: the last records of this rank.
        buckets: the plans of the buckets.
        names: the names of the parameters. The indices in `buckets` refer to this list.
    """
    recorded = evidence.backward
    if recorded is None:
        heading = "One step, as planned (none has run yet)"
        buffers, backward = _buffers_planned(plan), _backward_planned(plan, buckets, names)
    else:
        heading = f"One step, as recorded on rank {plan.rank}, step {recorded.step}"
        buffers = _buffers_recorded(plan, evidence.buffers)
        backward = _backward_recorded(plan, recorded)
    forward = [f"parameters  nothing sent: {_parameters_text(plan)}", f"buffers     {buffers}"]
    phases = {
        "forward": [_NOTHING_SENT] if plan.num_ranks == 1 else forward,
        "backward": backward,
        "step": _steps(plan, evidence),
        "loss": [_loss(plan)],
    }
    rows = [("" if at else phase, line) for phase, lines in phases.items() for at, line in enumerate(lines)]
    return f"{heading}\n{table(rows)}"


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


def _backward_planned(plan: Plan, buckets: Sequence[BucketPlan], names: Sequence[str]) -> list[str]:
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
    if options.on_nonfinite != "ignore":
        rule += f"; a gradient that is not finite: {NONFINITE_WORDS[options.on_nonfinite]}"
    kind = "views of the buckets" if options.as_bucket_view else "separate tensors"
    holds = f".grad holds the mean over {len(plan.reducing_ranks)} ranks ({kind})"
    if plan.reduction is Reduction.SHARDS:
        kind = ".grad of a parameter cannot be read"
        holds = f"each rank holds its shard of the mean over {plan.num_ranks} ranks ({kind})"
    end = f"at the end of backward each rank waits for all buckets; then {holds}"
    return [*lines, *_reports(plan), end, f"a missing gradient {rule}"]


def _reports(plan: Plan) -> list[str]:
    text = f"behind the gradients each rank reports: {', '.join(plan.reports)}"
    return textwrap.wrap(text, _MAX_COLUMNS, subsequent_indent="  ")


def _backward_recorded(plan: Plan, backward: BackwardRecord) -> list[str]:
    if plan.num_ranks == 1:
        lines = [f"{_NOTHING_SENT}; .grad holds the gradients of this rank"]
    elif backward.synchronized:
        lines = _buckets_recorded(plan, backward)
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


def _buckets_recorded(plan: Plan, backward: BackwardRecord) -> list[str]:
    lines = []
    for bucket in backward.buckets:
        size = format_bytes(bucket.payload_bytes)
        lines.append(f"{format_names(bucket.parameters)} -> bucket {bucket.index} ({size})")
        when = "at the end of backward" if bucket.trigger is None else f"when {bucket.trigger} was ready"
        launched = f"{bucket.launched_seconds * 1e3:.1f} ms after the first gradient"
        waited = f"waited {bucket.waited_seconds * 1e3:.1f} ms for the bucket at the end"
        lines.append(f"  {_sent(plan)} {when}, {launched}; {waited}")
    lines += _reports(plan)
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
        took = f"{last.duration_seconds * 1e3:.1f} ms"
        lines.append(f"after step {last.step}: {'; '.join(last.what)} ({size}, {took})")
    if evidence.next_round is not None:
        lines.append(f"next after step {evidence.next_round}")
    return lines


def _loss(plan: Plan) -> str:
    if plan.metrics:
        return f"local to each rank; ddp.report averages {format_names(plan.metrics)} behind the gradients"
    return "local to each rank, not averaged automatically; sl.mean(loss, weight=...) averages it"
