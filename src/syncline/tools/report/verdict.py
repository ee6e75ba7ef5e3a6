"""The verdict on a run, in sentences: what takes the time, why, and what to do about it (pure functions).

Each finding has a cure that can be applied as it stands. The finding about the largest part of a step comes first.
Every part that ranks spend on waiting or on synchronization has a finding if it is large enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.tools.report.analysis import ENOUGH_STEPS, EXPOSED, PARTS, Figures, divergences_in
from syncline.tools.report.planned import best_cap, link_of, wait_of
from syncline.tools.report.run import Run
from syncline.tracing import rows
from syncline.words import format_bytes, format_count, format_names, format_time

Kind = Literal["problem", "note", "fine"]

_NOTEWORTHY = 0.05
"""The fraction of a step from which a loss of time is a finding."""

_LARGE = 0.1
"""The fraction of a step from which a loss of time is a problem."""

_MAX_DIVERGENCES = 3
"""The number of values that differ between replicas to name. The events of the report name all of them."""

_SMALL_BYTES = 256 * 1024

_SLOW_BYTES_PER_SECOND = 300e6
"""A slower link is named as the cause. Shared memory and fast networks carry much more."""

_PHASES_IN_WORDS = {
    "data": "data loading, which is all the time before the forward,",
    "forward": "forward and loss",
    "backward": "backward",
    "update": "the time from the backward to the end of the optimizer's step",
    "other": "time in other calls of Syncline, such as saves,",
}

_EQUAL_WORK = (
    "Give this rank as much to compute as the others (batches of equal length), and its own cores or device: "
    "other programs there slow it down."
)

_CURES_OF_LATE_RANKS = {
    "data": (
        "Let this rank load its data as fast as the others: more workers (DataLoader(num_workers=..., "
        "persistent_workers=True, prefetch_factor=...)), the same files on a disk as near, no transforms in the "
        "training process."
    ),
    "forward": _EQUAL_WORK,
    "backward": _EQUAL_WORK,
    "update": "Do on this rank only what all ranks do between backward and step: log, save and evaluate less often.",
    "other": "Do less on this rank alone: save less often, or with blocking=False.",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding: a sentence, its reasons, and what to do."""

    kind: Kind
    headline: str
    detail: str = ""
    cure: str = ""
    weight: float = 0.0
    """The part of a step that the finding is about. Findings are ordered by it."""


def _part_of_a_step(share: float, headline: str, *, detail: str, cure: str) -> Iterator[Finding]:
    """Yield a finding about a part of a step, if this part is large enough."""
    if share >= _NOTEWORTHY:
        kind: Kind = "problem" if share >= _LARGE else "note"
        yield Finding(kind=kind, headline=headline, detail=detail, cure=cure, weight=share)


def verdict_on(run: Run, figures: Figures) -> list[Finding]:
    """Return the findings about a run, the most important first. Errors come before losses of time.

    On a busy machine, times vary from run to run, and must not hide errors of the program.
    """
    failed = [*_diverged(run), *_failures(run)]
    if not figures.num_steps:
        none = Finding(
            kind="note",
            headline="No complete step was recorded.",
            cure="Let the program run a few steps, with a module that is wrapped by sl.DistributedDataParallel.",
        )
        return [*failed, none]
    if figures.num_steps >= ENOUGH_STEPS:
        failed += _never_used(run)
    if not figures.is_enough:
        return [*failed, _too_few(figures), _where_the_time_goes(figures)]
    checks: Sequence[Callable[[Run, Figures], Iterator[Finding]]] = (
        _late_rank,
        _input_bound,
        _buckets,
        _buffers,
        _syncs,
        _calls,
        _looked_for_in_vain,
        _discarded,
    )
    found = sorted((one for check in checks for one in check(run, figures)), key=lambda one: -one.weight)
    if not found:
        return [*failed, _all_is_well(figures)]
    return [*failed, found[0], _where_the_time_goes(figures), *found[1:]]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"


def _time(micros: float) -> str:
    return format_time(micros / 1e6)


def _where_the_time_goes(figures: Figures) -> Finding:
    compute = figures.share("forward", "backward", "update")
    shares = {part: figures.share(part) for part in ("data", *EXPOSED)}
    named = "; ".join(f"{_percent(share)} {PARTS[part]}" for part, share in shares.items() if share >= 0.01)
    return Finding(
        kind="note",
        headline=f"A step takes {_time(figures.step)} ({_mean_of(figures)}): {_percent(compute)} is compute"
        f"{f'; {named}' if named else ''}.",
    )


def _mean_of(figures: Figures) -> str:
    return f"mean of {format_count(figures.num_steps, 'step')}"


def _too_few(figures: Figures) -> Finding:
    few = figures.num_steps < ENOUGH_STEPS
    return Finding(
        kind="note",
        headline=f"{format_count(figures.num_steps, 'step')} of {_time(figures.step)} (mean): too "
        f"{'few' if few else 'short'} to judge.",
        cure=f"Record at least {ENOUGH_STEPS} steps after the first three, which are slower."
        if few
        else "Record more steps.",
    )


def _all_is_well(figures: Figures) -> Finding:
    rest = figures.exposed
    return Finding(
        kind="fine",
        headline=f"A step takes {_time(figures.step)} ({_mean_of(figures)}), and nothing holds it up: "
        f"{_percent(1 - rest)} of it is the program's own work.",
        detail=f"Ranks wait {_percent(rest)} of the time." if len(figures.phases_of_ranks) > 1 else "",
    )


# ---------------------------------------------------------------------- waits for late ranks, data


def _late_rank(run: Run, figures: Figures) -> Iterator[Finding]:
    late, share = figures.late, figures.share("late")
    if late is None:
        return iter(())
    bucket = max(figures.buckets, key=lambda one: one.late).bucket
    if late.share < 0.6:
        return _part_of_a_step(
            share,
            f"No rank is consistently slow; {_percent(share)} of a step, {_time(figures.parts['late'])}, is jitter.",
            detail="Ranks wait for each other: now one is late, now another. Most of it is the wait for bucket "
            f"{bucket}. No rank causes more than {_percent(late.share)} of it.",
            cure="Give all ranks the same amount of work in each step: batches of equal length (group samples of "
            "similar length), the same number of workers, and cores that other programs leave alone.",
        )
    others = "the others" if len(figures.phases_of_ranks) > 2 else "the other"
    return _part_of_a_step(
        share,
        f"The others wait {_time(late.caused)} a step for rank {late.rank}, whose "
        f"{_PHASES_IN_WORDS[late.phase]} takes {_time(late.phase_time)}; {_time(late.usual_time)} on {others}.",
        detail=f"Means; {_percent(share)} of a step. They wait for bucket {bucket}, which rank {late.rank} sends last.",
        cure=_CURES_OF_LATE_RANKS[late.phase],
    )


def _input_bound(run: Run, figures: Figures) -> Iterator[Finding]:
    usual = sorted(own["data"] for own in figures.phases_of_ranks.values())
    share = usual[len(usual) // 2 if len(usual) > 2 else 0] / max(1.0, figures.step)
    return _part_of_a_step(
        share,
        f"{_percent(share)} of a step is the time before the forward, on all ranks: they wait for data.",
        detail="Unless the program does something else there, such as an evaluation.",
        cure="Load ahead: DataLoader(num_workers=..., persistent_workers=True, prefetch_factor=4), and prepare what "
        "is the same in each epoch once.",
    )


# ---------------------------------------------------------------------- buckets and the link


def _buckets(run: Run, figures: Figures) -> Iterator[Finding]:
    buckets, link, share = figures.buckets, link_of(figures.buckets), figures.share("transfer")
    if link is None:
        return
    best, largest = best_cap(link, buckets, figures.backward), max(buckets, key=lambda one: one.payload_bytes)
    saved = 0.0 if best is None else min(best[1], figures.parts["transfer"]) / figures.step
    total, is_slow = (
        sum(one.payload_bytes for one in buckets),
        link.bytes_per_second <= _SLOW_BYTES_PER_SECOND,
    )
    if len(buckets) >= 8 and total / len(buckets) < _SMALL_BYTES:
        yield Finding(
            kind="problem" if share >= _NOTEWORTHY else "note",
            headline=f"The gradients are cut into {len(buckets)} buckets of {format_bytes(int(total / len(buckets)))}: "
            "each costs a fixed time, on every rank.",
            detail=f"Waits for buckets are {_percent(share)} of a step, and to fill and send each takes compute time, "
            "too.",
            cure="Use the default size: leave bucket_cap_mb out, or pass bucket_cap_mb=25.",
            weight=max(share, _NOTEWORTHY),
        )
    elif best is not None and saved >= 0.03:
        if largest.payload_bytes > 0.6 * total:
            why = (
                f"Bucket {largest.bucket} holds {_percent(largest.payload_bytes / total)} of the gradients, and is "
                f"sent {_time(largest.sent)} after the backward began, which takes {_time(figures.backward)}. So "
                "little of its way is hidden behind the backward."
            )
        else:
            why = "With buckets of another size, more of their way is hidden behind the backward."
        yield from _part_of_a_step(
            share,
            f"{_percent(share)} of a step waits for gradients that are under way; with bucket_cap_mb={best[0]:g} the "
            f"step would take about {_percent(saved)} less.",
            detail=why,
            cure=f"Pass bucket_cap_mb={best[0]:g}.",
        )
    elif not is_slow:
        yield from _part_of_a_step(
            share,
            f"{_percent(share)} of a step waits for gradients that are under way.",
            detail="No other size of the buckets makes this clearly shorter.",
            cure="Larger batches make the backward longer, which hides it. sharded=True sends half of the bytes before "
            "the optimizer's step, and compression=sl.compression.Cast() half of all.",
        )
    if is_slow:
        quarters = sorted((one.sent, one.payload_bytes / 4) for one in buckets)
        saved = max(0.0, figures.parts["transfer"] - wait_of(link, quarters, figures.backward)) / figures.step
        yield from _part_of_a_step(
            share,
            f"The link between the ranks is slow: it carries {format_bytes(int(link.bytes_per_second))} of "
            f"gradients a second, so the {format_bytes(total)} of a step take {_time(link.time(total))}.",
            detail=f"{_percent(share)} of a step waits for gradients that are under way.",
            cure="Send less: compression=sl.compression.Quantize(8) sends a quarter of the bytes"
            + (f" (about {_percent(saved)} less time a step)" if saved >= 0.03 else "")
            + ", and strategy=sl.DiLoCo(20) sends once in 20 steps. Larger batches help, too.",
        )


# ---------------------------------------------------------------------- buffers, parameter syncs, calls


def _buffers(run: Run, figures: Figures) -> Iterator[Finding]:
    share = figures.share("buffers")
    return _part_of_a_step(
        share,
        f"{_percent(share)} of a step, {_time(figures.parts['buffers'])}, synchronizes buffers before the forward.",
        detail="This includes waits for the rank that sends them.",
        cure='If they are running statistics, as those of BatchNorm, pass buffers="none" (torch\'s '
        "broadcast_buffers=False), and call ddp.sync_buffers_() before an evaluation or a save.",
    )


def _syncs(run: Run, figures: Figures) -> Iterator[Finding]:
    share = figures.share("sync")
    return _part_of_a_step(
        share,
        f"{_percent(share)} of a step, {_time(figures.parts['sync'])}, is parameter syncs (mean over all steps).",
        detail="This includes waits for ranks that are late.",
        cure="Let the strategy synchronize after more steps, or use sl.DiLoCo with compression= or fragments=.",
    )


def _calls(run: Run, figures: Figures) -> Iterator[Finding]:
    share, late = figures.share("call"), figures.late
    if late is not None and late.phase == "other":  # then `_late_rank` reports it
        return iter(())
    lengths: Counter[str] = Counter()
    for span in (span for step in run.steps_of_ranks for span in step.spans if span.kind == "call"):
        lengths[span.label] += span.length
    names = format_names([name for name, _ in lengths.most_common(3)])
    return _part_of_a_step(
        share,
        f"{_percent(share)} of a step, {_time(figures.parts['call'])}, is calls of Syncline: {names}.",
        detail="This includes waits for ranks that are late.",
        cure="Metrics of each step travel with the gradients: ddp.report(loss=loss) instead of sl.mean(loss). Save "
        "less often, or with blocking=False.",
    )


def _never_used(run: Run) -> Iterator[Finding]:
    last = [*run.steps_of_ranks][-200:]
    never = set.intersection(*(set(step.unused) for step in last)) if last else set()
    if never:
        names = format_names(sorted(never))
        yield Finding(
            kind="problem",
            headline=f"{format_count(len(never), 'parameter')} never "
            f"{'get a gradient' if len(never) > 1 else 'gets a gradient'}: {names}.",
            detail="Because of find_unused_parameters=True this is no error. But each backward has to look for them "
            "in its graph, and their buckets carry zeros."
            if _looks_for_unused(run)
            else "With several ranks that average their gradients, this is an error.",
            cure="Take them out of the model, or freeze them before it is wrapped (parameter.requires_grad_(False)). "
            "Then leave find_unused_parameters out.",
        )


def _looked_for_in_vain(run: Run, figures: Figures) -> Iterator[Finding]:
    if _looks_for_unused(run) and not any(step.unused for step in run.steps_of_ranks):
        yield Finding(
            kind="note",
            headline="find_unused_parameters=True is set, but every parameter got a gradient in every step.",
            detail="Each backward looks for unused parameters in its graph.",
            cure="Leave find_unused_parameters out.",
            weight=0.01,
        )


def _looks_for_unused(run: Run) -> bool:
    return any(row.looks_for_unused for row in run.modules)


# ---------------------------------------------------------------------- errors


def _discarded(run: Run, figures: Figures) -> Iterator[Finding]:
    if numbers := run.discarded:
        yield Finding(
            kind="problem" if len(numbers) > 0.05 * len(run.steps) else "note",
            headline=f"{format_count(len(numbers), 'step')} of {len(run.steps)} "
            f"{'were' if len(numbers) > 1 else 'was'} discarded, because gradients were not finite: the first is step "
            f"{numbers[0]}.",
            cure="Use a lower learning rate, ddp.clip_grad_norm_(max_norm), or a torch.amp.GradScaler with float16.",
            weight=len(numbers) / len(run.steps),
        )


_CURE_OF_DIVERGENCE = (
    "Look for a write on some ranks only, seeds that differ, and operations whose result differs between ranks "
    "(syncline doctor searches for such operations). A bit that flips in memory does this, too."
)


def _diverged(run: Run) -> Iterator[Finding]:
    found = divergences_in(run)
    for one in found[:_MAX_DIVERGENCES]:
        is_repaired = one.row.outcome == "repaired"
        has_lost = one.row.agreed_at_step and not is_repaired
        load = f" Load a checkpoint of step {one.row.agreed_at_step} or earlier." if has_lost else ""
        yield Finding(
            kind="note" if is_repaired else "problem",
            headline=f"Step {one.step}: {one.fact}.",
            detail=one.detail,
            cure=_CURE_OF_DIVERGENCE + load,
        )
    more = len(found) - _MAX_DIVERGENCES
    if more > 0:
        yield Finding(
            kind="problem",
            headline=f"The replicas differ in {format_count(more, 'more value')}: see the events.",
        )


def _failures(run: Run) -> Iterator[Finding]:
    for row in run.changes:
        yield Finding(
            kind="problem" if row.num_lost else "note",
            headline=f"Before step {row.step}: {row.reason}. The ranks, now {row.num_ranks}, continued after "
            f"{_time(row.ended - row.began)}.",
            cure="Start the job with syncline run --resilient --max-restarts 3: then a process that is lost is "
            "started again, and joins."
            if row.num_lost
            else "",
        )
    if run.changes:
        return
    ends = [(one, one.end) for one in run.processes if one.end is not None]
    killed = [one for one in run.processes if one.end is None]
    errors = [(one, end) for one, end in ends if end.is_error]
    if killed and ends:
        lost = min(killed, key=lambda one: one.unix_seconds(one.last_at))
        # The trace of a failed rank lacks its last moments. The other traces have the last step that all ranks made.
        step = max((row.step for row in run.rows_of(rows.BackwardRow)), default=None)
        after = "before its first step ended" if step is None else f"after step {step}"
        places = [f"It was last seen at: {row.words}. " for row in lost.rows_of(rows.PlaceRow)]
        said = f" The others ended with: {errors[0][1].error}" if errors else ""
        yield Finding(
            kind="problem",
            headline=f"Rank {lost.process.rank} was lost {after}: its process ended without a word, as if it was "
            "killed.",
            detail=f"{''.join(places[-1:])}Look for the memory limit of the host or container first.{said}",
            cure="Write the loop with sl.steps and start it with syncline run --resilient --max-restarts 3: the others "
            "train on, and a new process joins. Or save with sl.Checkpointer, and use syncline run --max-restarts 3.",
        )
    elif errors:
        first, end = min(errors, key=lambda one: one[0].unix_seconds(one[1].at))
        if not (
            end.is_of("ReplicaDivergence") and divergences_in(run)
        ):  # then `_diverged` has a finding about it
            yield Finding(
                kind="problem", headline=f"Rank {first.process.rank} ended with an error: {end.error}"
            )
    elif any(end.is_of("KeyboardInterrupt") for _, end in ends):
        yield Finding(kind="note", headline="The run was stopped by Ctrl-C.")
