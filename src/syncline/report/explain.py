"""Describe a synchronization as text: the rows of the contract and the timeline of one step.

These are pure functions of plans (`Plan`, bucket plans) and records (`Evidence`). Before the first step they describe
the plan, afterwards the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from syncline.contract import Contract, Row, Rules, add_evidence, table
from syncline.gradients.bucket_plan import BucketPlan
from syncline.records import BackwardRecord, BufferRecord, NonFiniteRecord, RoundRecord, describe_nonfinite
from syncline.words import format_bytes, format_count, format_names

__all__ = ["Evidence", "Plan", "ReplicaRule", "Sizes", "contract_of", "explain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The numbers and sizes of parameters, gradients and buffers."""

    num_parameters: int
    parameter_bytes: int
    num_gradients: int
    gradient_bytes: int
    num_buffers: int
    buffer_bytes: int


class ReplicaRule(NamedTuple):
    """The rule for comparing replicas."""

    every: int
    on_divergence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings that are known when a module is wrapped."""

    module: str
    transport: str
    num_ranks: int
    num_hosts: int
    sizes: Sizes
    init_sync: bool
    init_buffers: bool
    buffer_policy: str
    as_bucket_view: bool
    allow_unused: bool
    comm_hook: str | None = None
    compression: str | None = None
    """How gradients are encoded."""
    reduce_dtype: str | None = None
    optimizers: tuple[str, ...] = ()
    """The attached optimizers."""
    sharded: bool = False
    """Whether each rank reduces and updates only its shard."""
    num_reducing: int | None = None
    """Number of ranks that average gradients with each other, if that is not all of them."""
    rules: Rules | None = None
    """The rules of a strategy under which replicas drift."""
    replica_check: ReplicaRule | None = None
    """The number of steps within which replicas are compared, and the action if they differ."""
    on_nonfinite: str = "ignore"
    """The action for gradients that are not finite."""
    metrics: tuple[str, ...] = ()
    """The metrics that `ddp.report` was given."""
    has_buffer_hook: bool = False
    """Whether a user's hook synchronizes buffers."""
    num_copies: int = 0
    """Number of copies of sharded parameters, one in each host's memory for its ranks; 0 if each rank has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The records of one rank."""

    rank: int
    backward: BackwardRecord | None
    buffers: BufferRecord | None
    round: RoundRecord | None = None
    """The last parameter sync, under a strategy that has them."""
    next_round: int | None = None
    """The step after which the next parameter sync takes place, if known."""
    met_at: Mapping[str, int] = field(default_factory=dict)
    """The steps after which parameters, buffers and optimizers were last synchronized."""
    replicas_compared: tuple[int, bool] | None = None
    """The step of the last comparison of replicas, and whether they were equal."""
    num_repairs: int = 0
    """Number of times that replicas were made equal because they differed."""


_NONFINITE_WORDS = {
    "raise": "an error on every rank",
    "skip": "no rank steps",
    "zero": "counts as zero",
}

_BUFFER_WORDS = {"broadcast": "broadcast from rank 0", "average": "average, statistics pooled", "none": "-"}


# ---------------------------------------------------------------------- the contract


def contract_of(plan: Plan, evidence: Evidence | None = None) -> Contract:
    """Return the contract of a plan; with evidence, each row also has the last action."""
    ranks = format_count(plan.num_ranks, "rank")
    where = f"{ranks} on {format_count(plan.num_hosts, 'host')}" if plan.num_ranks > 1 else "1 rank alone"
    if plan.rules is not None:
        where += f", strategy: {plan.rules.strategy}"
    contract = Contract(
        title=f"DistributedDataParallel({plan.module}), {where}, transport: {plan.transport}",
        rows=(
            _gradients_row(plan),
            _parameters_row(plan),
            _buffers_row(plan),
            _optimizer_row(plan),
            _metrics_row(plan),
            *_replica_rows(plan),
        ),
    )
    if evidence is None or evidence.backward is None:
        return contract
    return add_evidence(contract, _last_done(plan, evidence, evidence.backward))


def _gradients_row(plan: Plan) -> Row:
    if plan.num_ranks == 1:
        when, how = "never: there is one rank", "-"
    else:
        when, how = "every backward outside no_sync", "mean, all_reduce"
        if plan.reduce_dtype is not None:
            how += f" in {plan.reduce_dtype}"
    if plan.sharded:
        how = how.replace("all_reduce", f"reduce_scatter: each rank gets its share of {plan.num_ranks}")
    if plan.compression is not None and plan.num_ranks > 1:
        how = f"mean, {plan.compression}"
    if plan.comm_hook is not None:
        when, how = "every backward outside no_sync", f"by communication hook {plan.comm_hook}"
    drift_allowed = "none"
    rule = None if plan.rules is None else plan.rules.gradients
    if rule is not None and (plan.num_ranks > 1 or plan.comm_hook is not None):
        when, drift_allowed = rule.when, rule.drift_allowed
        is_plain = plan.comm_hook is None and plan.compression is None
        how = rule.how if is_plain or rule.how == "-" else how
    if plan.on_nonfinite != "ignore":
        how = f"{how.removeprefix('-')}; not finite: {_NONFINITE_WORDS[plan.on_nonfinite]}".removeprefix("; ")
    return Row(
        what="gradients",
        size=_size(plan.sizes.num_gradients, plan.sizes.gradient_bytes),
        when=when,
        how=how,
        drift_allowed=drift_allowed,
    )


def _parameters_row(plan: Plan) -> Row:
    rules = _acting_rules(plan)
    if rules is not None:
        start = "equal at first" if plan.init_sync else "at first as they are (init_sync=False)"
        return Row(
            what="parameters",
            size=_size(plan.sizes.num_parameters, plan.sizes.parameter_bytes),
            when=f"{start}, then {rules.parameters.when}",
            how=rules.parameters.how,
            drift_allowed=rules.parameters.drift_allowed,
        )
    if plan.num_ranks == 1:
        when, how = "never: there is one rank", "-"
    elif plan.init_sync:
        when, how = "once, at construction", "broadcast from rank 0"
    else:
        when, how = "never: init_sync=False", "the caller vouches that they are equal"
    if plan.sharded:
        how = "values of rank 0" if plan.init_sync or plan.num_copies == 1 else how
        if plan.num_copies:
            where = "for all ranks" if plan.num_copies == 1 else f"on each of {plan.num_copies} hosts"
            when, how = "at every step", f"one copy {where}, {how}; a barrier before and after writing"
        else:
            when, how = "at every step", f"{how} at construction, then all_gather of the shares"
    return Row(
        what="parameters",
        size=_size(plan.sizes.num_parameters, plan.sizes.parameter_bytes),
        when=when,
        how=how,
        drift_allowed="none",
    )


def _acting_rules(plan: Plan) -> Rules | None:
    """Return the strategy's rules; None if there is no strategy, or if it does nothing on a single rank."""
    return plan.rules if plan.rules is not None and (plan.num_ranks > 1 or plan.rules.acts_alone) else None


def _optimizer_row(plan: Plan) -> Row:
    if plan.rules is not None and plan.num_ranks > 1:
        attached = ", ".join(plan.optimizers)
        return Row(
            what="optimizer",
            size=attached or "none attached: ddp.attach(optimizer)",
            when=plan.rules.optimizer.when,
            how=plan.rules.optimizer.how,
            drift_allowed=plan.rules.optimizer.drift_allowed,
        )
    if plan.sharded:
        return Row(
            what="optimizer",
            size=", ".join(plan.optimizers) or "none attached: ddp.attach(optimizer)",
            when="at every step",
            how=f"each rank steps its share of {plan.num_ranks} and has state for it alone",
            drift_allowed="none",
        )
    how = "every rank applies the same update"
    if plan.optimizers and plan.num_ranks > 1:
        how += "; settings compared in backward"
    return Row(
        what="optimizer",
        size=", ".join(plan.optimizers) or "-",
        when="never: equal by construction",
        how=how,
        drift_allowed="none",
    )


def _buffers_row(plan: Plan) -> Row:
    if not plan.sizes.num_buffers:
        return Row(what="buffers", size="none", when="never: there are none", how="-", drift_allowed="-")
    size = _size(plan.sizes.num_buffers, plan.sizes.buffer_bytes)
    if plan.num_ranks == 1:
        return Row(what="buffers", size=size, when="never: there is one rank", how="-", drift_allowed="none")
    if plan.rules is not None and plan.buffer_policy != "none":
        return Row(
            what="buffers",
            size=size,
            when=plan.rules.buffers_when,
            how=plan.rules.buffers_how or _BUFFER_WORDS[plan.buffer_policy],
            drift_allowed=plan.rules.buffers_drift,
        )
    if plan.buffer_policy == "none":
        when, how = (
            ("once, at construction", "broadcast from rank 0") if plan.init_buffers else ("never", "-")
        )
        return Row(what="buffers", size=size, when=when, how=how, drift_allowed="unbounded")
    return Row(
        what="buffers",
        size=size,
        when="before forward, not after no_sync",
        how=_BUFFER_WORDS[plan.buffer_policy],
        drift_allowed="one step",
    )


def _metrics_row(plan: Plan) -> Row:
    when, how = "only when asked: sl.mean(...)", "weighted mean"
    if plan.metrics:
        when, how = "every backward after ddp.report(...)", "weighted mean, behind the gradients"
    return Row(
        what="loss, metrics",
        size=format_names(plan.metrics) if plan.metrics else "-",
        when=when,
        how=how,
        drift_allowed="local values differ",
    )


def _replica_rows(plan: Plan) -> list[Row]:
    """Return the row about comparing replicas, if that was requested."""
    rule = plan.replica_check
    if rule is None:
        return []
    has_one_copy = plan.sharded and plan.num_copies == 1
    parts = [] if has_one_copy else ["parameters"]
    if plan.rules is None:
        if plan.sizes.num_buffers and plan.buffer_policy != "none" and not plan.has_buffer_hook:
            parts.append("buffers")
        if plan.optimizers and not plan.sharded:
            parts.append("optimizer state")
    size = ", ".join(parts) or "nothing"
    if has_one_copy and parts:
        size += " (of the parameters there is one copy)"
    when = _when_replicas_are_compared(plan, rule)
    if plan.num_ranks > 1 and not parts:
        when = ["never: there is one copy of the parameters, and each rank has its share of the optimizer"]
    is_done = not when[0].startswith("never")
    return [
        Row(
            what="replica check",
            size=size,
            when="; ".join(when),
            how=f"fingerprints, with the gradients; if they differ: {rule.on_divergence}" if is_done else "-",
            drift_allowed="none",
        )
    ]


def _when_replicas_are_compared(plan: Plan, rule: ReplicaRule) -> list[str]:
    if plan.num_ranks == 1:
        return ["never: there is one rank"]
    within = f"all within {format_count(rule.every, 'step')}"
    if plan.rules is None:
        return [f"in synchronized backwards a slice, {within}"]
    when = []
    if plan.rules.reduces and (plan.rules.gradients is None or plan.rules.gradients.how != "-"):
        among = "" if plan.num_reducing is None else f" among the {plan.num_reducing} ranks of a worker"
        when.append(f"in backwards that average gradients a slice, {within}{among}")
    if plan.rules.meets_equal:
        when.append(f"after each meeting, {within} and a meeting")
    return when or ["never: replicas are not equal between or after meetings"]


def _last_done(plan: Plan, evidence: Evidence, backward: BackwardRecord) -> dict[str, str]:
    buffers = evidence.buffers
    if backward.synchronized:
        num = len(backward.buckets)
        gradients = f"step {backward.step}: {format_count(num, 'bucket')}, {_mean(backward)}"
    elif backward.reduced_afterwards:
        gradients = f"after step {backward.step}: sl.sync_gradients_, {_mean(backward)}"
    elif plan.num_ranks == 1:
        gradients = f"step {backward.step}: nothing to send"
    elif plan.rules is not None:
        gradients = f"step {backward.step}: local"
    else:
        gradients = f"after step {backward.step}: added up, no_sync"
    if backward.nonfinite is not None and (backward.nonfinite.found or backward.nonfinite.in_mean):
        gradients += f"; not finite: {backward.nonfinite.outcome}"
    if buffers is None:
        sent = "no forward yet"
    elif buffers.sent:
        sent = "before the last forward"
    else:
        sent = f"not sent: {buffers.reason}"
    parameters = "at construction" if plan.init_sync and plan.num_ranks > 1 else "nothing sent"
    if plan.sharded:
        parameters = {0: "see step", 1: "nothing sent: one copy"}.get(
            plan.num_copies, "nothing sent: one copy a host"
        )
    optimizer = "nothing sent"
    if plan.rules is not None:
        parameters, sent, optimizer = (
            f"after step {evidence.met_at[what]}" if what in evidence.met_at else otherwise
            for what, otherwise in (
                ("parameters", "no meeting yet"),
                ("buffers", "no meeting yet" if plan.sizes.num_buffers else "-"),
                ("optimizer", "nothing sent"),
            )
        )
    return {
        "gradients": gradients,
        "parameters": parameters,
        "buffers": sent,
        "optimizer": optimizer,
        "loss, metrics": f"step {backward.step}, with the gradients" if backward.metrics else "see sl.mean",
        "replica check": _last_compared(evidence),
    }


def _last_compared(evidence: Evidence) -> str:
    if evidence.replicas_compared is None:
        return "not yet"
    step, are_equal = evidence.replicas_compared
    repaired = f", repaired {format_count(evidence.num_repairs, 'time')}" if evidence.num_repairs else ""
    return f"step {step}: {'equal' if are_equal else 'different'}{repaired}"


# ---------------------------------------------------------------------- the timeline


def explain(plan: Plan, evidence: Evidence, buckets: Sequence[BucketPlan], names: Sequence[str]) -> str:
    """Describe one step as a timeline."""
    backward = evidence.backward
    if backward is None:
        heading = "One step, as planned (none has run yet)"
        entries = [*_forward_planned(plan), *_backward_planned(plan, buckets, names)]
    else:
        heading = f"One step, as recorded on rank {evidence.rank}, step {backward.step}"
        entries = [*_forward_recorded(plan, evidence.buffers), *_backward_recorded(plan, backward)]
    entries += [
        *_steps(plan, evidence),
        ("loss", _loss(plan)),
    ]
    return heading + "\n" + table(_without_repeats(entries))


def _loss(plan: Plan) -> str:
    if plan.metrics:
        return f"local to each rank; the means of {format_names(plan.metrics)} travel behind the gradients (ddp.report)"
    return "local to each rank, never averaged by itself; sl.mean(loss, weight=...) averages it"


def _steps(plan: Plan, evidence: Evidence) -> list[tuple[str, str]]:
    rules = _acting_rules(plan)
    if rules is None:
        return [("step", _step(plan))]
    entries = [("step", rules.at_step)]
    meeting = evidence.round
    if meeting is not None:
        size = f"{format_count(meeting.num_calls, 'call')}, {format_bytes(meeting.payload_bytes)}"
        took = f"{meeting.duration_seconds * 1e3:.1f} ms"
        entries.append(("step", f"after step {meeting.step}: {'; '.join(meeting.what)} ({size}, {took})"))
    if evidence.next_round is not None:
        entries.append(("step", f"next after step {evidence.next_round}"))
    return entries


def _step(plan: Plan) -> str:
    if not plan.sharded:
        return "nothing sent; every rank applies the same update to the same parameters"
    if plan.num_copies:
        one = "there is one copy" if plan.num_copies == 1 else "each host has one copy"
        return (
            f"nothing sent: {one} of the parameters. Each rank waits until all backwards are over, steps its share "
            f"of {plan.num_ranks // plan.num_copies}, and waits until all have written"
        )
    return f"each rank steps its share of {plan.num_ranks}; then all_gather: every rank gets the others' parameters"


def _forward_planned(plan: Plan) -> list[tuple[str, str]]:
    if plan.num_ranks == 1:
        return [("forward", "nothing sent: there is one rank")]
    parameters = "parameters  nothing sent: "
    if plan.sharded:
        parameters += "the last step has " + ("written the one copy" if plan.num_copies else "gathered them")
    else:
        parameters += (
            "they were broadcast from rank 0 at construction" if plan.init_sync else "init_sync=False"
        )
    if plan.rules is not None:
        parameters = "parameters  nothing sent: they meet after a step"
    if not plan.sizes.num_buffers:
        buffers = "buffers     nothing sent: the module has none, so there is no call at all"
    elif plan.rules is not None:
        buffers = "buffers     nothing sent: " + (
            "buffers='none'" if plan.buffer_policy == "none" else f"they meet {plan.rules.buffers_when}"
        )
    elif plan.buffer_policy == "none":
        buffers = "buffers     nothing sent: broadcasting buffers is switched off"
    else:
        size = f"{format_count(plan.sizes.num_buffers, 'tensor')}, {format_bytes(plan.sizes.buffer_bytes)}"
        buffers = (
            f"buffers     {_BUFFER_WORDS[plan.buffer_policy]}: {size} "
            "(none if the previous forward ran under no_sync or no_grad)"
        )
    return [("forward", parameters), ("forward", buffers)]


def _forward_recorded(plan: Plan, buffers: BufferRecord | None) -> list[tuple[str, str]]:
    if plan.num_ranks == 1 or buffers is None:
        return [("forward", "nothing sent: there is one rank")]
    if buffers.sent:
        size = f"{format_count(buffers.num_tensors, 'tensor')}, {format_bytes(buffers.payload_bytes)}"
        line = f"buffers     {_BUFFER_WORDS[plan.buffer_policy]}: {size}"
        if plan.buffer_policy == "broadcast":
            line += ", 1 call"
    else:
        line = f"buffers     nothing sent: {buffers.reason}"
    return [_forward_planned(plan)[0], ("forward", line)]


def _backward_planned(
    plan: Plan, buckets: Sequence[BucketPlan], names: Sequence[str]
) -> list[tuple[str, str]]:
    if plan.num_ranks == 1:
        return [("backward", "nothing sent: there is one rank; gradients are its own")]
    rule = None if plan.rules is None else plan.rules.gradients
    if plan.rules is not None and (not plan.rules.reduces or (rule is not None and rule.how == "-")):
        return [("backward", "nothing sent: gradients stay on their rank")]
    entries = []
    for bucket in buckets:
        members = [names[i] for i in sorted(bucket.parameters, reverse=True)]
        size = format_bytes(bucket.payload_bytes)
        entries.append(("backward", f"{format_names(members)} -> bucket {bucket.index} ({size})"))
        entries.append(("backward", f"  {_sent_by(plan)} when the last of its gradients is ready"))
    entries.append(("backward", _end_of_backward(plan)))
    return entries


def _backward_recorded(plan: Plan, backward: BackwardRecord) -> list[tuple[str, str]]:
    if plan.num_ranks == 1:
        entries = [("backward", "nothing sent: there is one rank; gradients are its own")]
    elif not backward.synchronized and plan.rules is not None:
        entries = [("backward", "nothing sent: gradients stay on their rank")]
    elif not backward.synchronized:
        entries = [
            ("backward", "nothing sent: it ran under no_sync, gradients were added to .grad on each rank")
        ]
    else:
        entries = []
        for bucket in backward.buckets:
            size = format_bytes(bucket.payload_bytes)
            entries.append(
                ("backward", f"{format_names(bucket.parameters)} -> bucket {bucket.index} ({size})")
            )
            launched = f"{bucket.launched_seconds * 1e3:.1f} ms after the first gradient"
            if bucket.trigger is None:
                sent = f"  {_sent_by(plan)} at the end of backward, {launched}"
            else:
                sent = f"  {_sent_by(plan)} when {bucket.trigger} was ready, {launched}"
            entries.append(
                ("backward", f"{sent}; waited {bucket.waited_seconds * 1e3:.1f} ms for it at the end")
            )
        if plan.sharded:
            holds = (
                f"each rank now holds its share of the {_mean(backward)}; .grad of a parameter cannot be read"
            )
        else:
            holds = f".grad now holds the {_mean(backward)}"
        entries.append(("backward", holds))
    if backward.reduced_afterwards:
        entries.append(
            ("backward", f"after it, by sl.sync_gradients_: .grad now holds the {_mean(backward)}")
        )
    if backward.nonfinite is not None:
        entries += _nonfinite_recorded(plan, backward.nonfinite)
    if backward.unused:
        entries.append(
            ("backward", f"no gradient on this rank, counted as zero: {format_names(backward.unused)}")
        )
    return entries


def _nonfinite_recorded(plan: Plan, record: NonFiniteRecord) -> list[tuple[str, str]]:
    if record.found or record.in_mean:
        return [("backward", describe_nonfinite(record))]
    if not record.num_steps:
        return []
    steps = format_count(record.num_steps, "step")
    return [("backward", f"not finite: nothing in this step ({plan.on_nonfinite}: {steps} before)")]


def _sent_by(plan: Plan) -> str:
    """Return the text for how a bucket is sent; sharded gradients are never sent by hooks, which are refused."""
    if plan.compression is not None:
        return f"sent by {plan.compression}"
    return "reduced, each rank its share," if plan.sharded else "sent by all_reduce"


def _end_of_backward(plan: Plan) -> str:
    kind = "views of the buckets" if plan.as_bucket_view else "tensors of their own"
    rule = "counts as zero" if plan.allow_unused else "is an error on every rank"
    nonfinite = ""
    if plan.on_nonfinite != "ignore":
        nonfinite = f"; one that is not finite: {_NONFINITE_WORDS[plan.on_nonfinite]}"
    if plan.sharded:
        return (
            f"at its end all buckets are waited for and each rank holds its share of the mean over {plan.num_ranks} "
            f"ranks (.grad of a parameter cannot be read); a missing gradient {rule}{nonfinite}"
        )
    num_ranks = plan.num_reducing or plan.num_ranks
    return (
        f"at its end all buckets are waited for and .grad holds the mean over {num_ranks} ranks ({kind}); "
        f"a missing gradient {rule}{nonfinite}"
    )


# ---------------------------------------------------------------------- helpers


def _size(num_tensors: int, num_bytes: int) -> str:
    return f"{format_count(num_tensors, 'tensor')}, {format_bytes(num_bytes)}"


def _mean(backward: BackwardRecord) -> str:
    return f"mean over {format_count(backward.divisor, 'item' if backward.counted_items else 'rank')}"


def _without_repeats(entries: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the entries with each phase named only once."""
    shown = []
    previous = ""
    for phase, text in entries:
        shown.append(("" if phase == previous else phase, text))
        previous = phase
    return shown
