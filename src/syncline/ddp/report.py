"""The contract of a wrapped module, with a row for each group of tensors.

Before the first step, the contract describes the plan. After the first step, it also shows the last synchronizations.
"""

from __future__ import annotations

from syncline.contract import Contract, Row, Rule, add_evidence
from syncline.ddp.plan import Buffers, Evidence, Parameters, Plan, Reduction
from syncline.gradients.riders.replica_watch import ReplicaCheck
from syncline.records import BackwardRecord, describe_mean
from syncline.words import format_bytes, format_count, format_names

NONFINITE_WORDS = {
    "raise": "an error on every rank",
    "skip": "no rank steps",
    "zero": "counts as zero",
}
"""The consequence of a gradient that is not finite, for each value of `on_nonfinite` that changes a step."""

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
    if isinstance(plan.config.replica_check, ReplicaCheck):
        rows.append(_replica_row(plan, plan.config.replica_check))
    title = f"DistributedDataParallel({plan.module}), {where}, transport: {plan.transport}"
    kind = "nccl" if evidence.device != "cpu" else "shm" if plan.shares_memory else "gloo"
    reduction = str(plan.config.compression) if plan.reduction is Reduction.ENCODED else plan.reduction
    if plan.rules is not None and plan.rules.gradients is not None:
        reduction = Reduction.NOTHING
    contract = Contract(title=title, rows=tuple(rows), transport=kind, reduction=reduction)
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
    if options.on_nonfinite in NONFINITE_WORDS:
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
        case Buffers.LOCAL:
            return Rule("never: local, added after wrapping", None, "unbounded")
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
            when="every backward after ddp.report(...)", how="weighted mean, with the gradients"
        )
    return _row("loss, metrics", format_names(plan.metrics) if plan.metrics else "-", rule)


def _checks_row(plan: Plan) -> Row:
    if not _sends_reports(plan):
        return _row("safety checks", "none", _ALONE if plan.num_ranks == 1 else Rule("never", None, "-"))
    rule = Rule("with the gradients", "in the same message", "none")
    return _row("safety checks", format_bytes(plan.num_report_bytes), rule)


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
        "safety checks": f"step {backward.step}"
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
