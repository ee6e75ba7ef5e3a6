"""The verdict on a run, in sentences: what takes the time, why, and what to do about it (pure functions).

Each finding has a cure that can be applied as it stands. The finding about the largest part of a step comes first.
Every part that ranks spend on waiting or on synchronization has a finding if it is large enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.tools.report.analysis import ENOUGH_STEPS, Figures
from syncline.tools.report.divergences import divergences_in
from syncline.tools.report.run import Run
from syncline.tools.report.what_if import best_cap, link_of, wait_of
from syncline.tracing import rows
from syncline.words import format_bytes, format_count, format_names, format_time

Kind = Literal["problem", "note", "fine"]

_NOTEWORTHY = 0.05
"""The part of a step from which on a loss of time is a finding."""

_LARGE = 0.1
"""The part of a step from which on it is a problem."""

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


def verdict_on(run: Run, figures: Figures | None) -> list[Finding]:
    """Return the findings about a run, the most important first. What is wrong comes before what takes time.

    How long things take differs from run to run on a busy machine, and must not hide what is wrong with the program.
    """
    failed = [*_diverged(run), *_failures(run)]
    if figures is None:
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
        _slow_link,
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
    parts = [
        (figures.share("data"), "before the forward (data)"),
        (figures.share("late"), "waits for ranks that are late"),
        (figures.share("transfer"), "waits for gradients that are under way"),
        (figures.share("buffers"), "buffers"),
        (figures.share("sync"), "parameter syncs"),
        (figures.share("call"), "other calls of Syncline"),
    ]
    named = "; ".join(f"{_percent(share)} {words}" for share, words in parts if share >= 0.01)
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


def _kind(share: float) -> Kind:
    return "problem" if share >= _LARGE else "note"


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
    if late is None or share < _NOTEWORTHY:
        return
    bucket = max(figures.buckets, key=lambda one: one.late, default=None)
    waits = f"bucket {bucket.bucket}" if bucket is not None else "its gradients"
    if late.share < 0.6:
        yield Finding(
            kind=_kind(share),
            headline=f"No rank is consistently slow; {_percent(share)} of a step, {_time(figures.parts['late'])}, is "
            "jitter.",
            detail=f"Ranks wait for each other: now one is late, now another. Most of it is the wait for {waits}. No "
            f"rank causes more than {_percent(late.share)} of it.",
            cure="Give all ranks the same amount of work in each step: batches of equal length (group samples of "
            "similar length), the same number of workers, and cores that other programs leave alone.",
            weight=share,
        )
        return
    others = "the others" if len(figures.phases_of_ranks) > 2 else "the other"
    yield Finding(
        kind=_kind(share),
        headline=f"The others wait {_time(late.caused)} a step for rank {late.rank}, whose "
        f"{_PHASES_IN_WORDS[late.phase]} takes {_time(late.phase_time)}; {_time(late.usual_time)} on {others}.",
        detail=f"Means; {_percent(share)} of a step. They wait for {waits}, which rank {late.rank} sends last.",
        cure=_CURES_OF_LATE_RANKS[late.phase],
        weight=share,
    )


def _input_bound(run: Run, figures: Figures) -> Iterator[Finding]:
    usual = sorted(own["data"] for own in figures.phases_of_ranks.values())
    share = usual[len(usual) // 2 if len(usual) > 2 else 0] / max(1.0, figures.step)
    if share < _NOTEWORTHY:
        return
    yield Finding(
        kind=_kind(share),
        headline=f"{_percent(share)} of a step is the time before the forward, on all ranks: they wait for data.",
        detail="Unless the program does something else there, such as an evaluation.",
        cure="Load ahead: DataLoader(num_workers=..., persistent_workers=True, prefetch_factor=4), and prepare what "
        "is the same in each epoch once.",
        weight=share,
    )


# ---------------------------------------------------------------------- buckets and the link


def _buckets(run: Run, figures: Figures) -> Iterator[Finding]:
    buckets, link = figures.buckets, link_of(figures.buckets)
    if not buckets or link is None:
        return
    total = sum(one.payload_bytes for one in buckets)
    share = figures.share("transfer")
    if len(buckets) >= 8 and total / len(buckets) < _SMALL_BYTES and total / len(buckets) < total / 4:
        yield Finding(
            kind="problem" if share >= _NOTEWORTHY else "note",
            headline=f"The gradients are cut into {len(buckets)} buckets of {format_bytes(int(total / len(buckets)))}: "
            "each costs a fixed time, on every rank.",
            detail=f"Waits for buckets are {_percent(share)} of a step, and to fill and send each takes compute time, "
            "too.",
            cure="Use the default size: leave bucket_cap_mb out, or pass bucket_cap_mb=25.",
            weight=max(share, _NOTEWORTHY),
        )
        return
    if share < _NOTEWORTHY:
        return
    best, whole = best_cap(link, buckets, figures.backward), figures.step
    largest = max(buckets, key=lambda one: one.payload_bytes)
    saved = 0.0 if best is None else min(best[1], figures.parts["transfer"]) / whole
    if best is not None and saved >= 0.03:
        if largest.payload_bytes > 0.6 * total:
            why = (
                f"bucket {largest.bucket} holds {_percent(largest.payload_bytes / total)} of the gradients, and is "
                f"sent {_time(largest.sent)} after the backward began, which takes {_time(figures.backward)}. So "
                "little of its way is hidden behind the backward"
            )
        else:
            why = "with buckets of another size, more of their way is hidden behind the backward"
        yield Finding(
            kind=_kind(share),
            headline=f"{_percent(share)} of a step waits for gradients that are under way; with "
            f"bucket_cap_mb={best[0]:g} the step would take about {_percent(saved)} less.",
            detail=f"{why[0].upper()}{why[1:]}.",
            cure=f"Pass bucket_cap_mb={best[0]:g}.",
            weight=share,
        )
    elif link.bytes_per_second > _SLOW_BYTES_PER_SECOND:  # otherwise, `_slow_link` has a finding
        yield Finding(
            kind=_kind(share),
            headline=f"{_percent(share)} of a step waits for gradients that are under way.",
            detail="No other size of the buckets makes this clearly shorter.",
            cure="Larger batches make the backward longer, which hides it. sharded=True sends half of the bytes before "
            "the optimizer's step, and compression=sl.compression.Cast() half of all.",
            weight=share,
        )


def _slow_link(run: Run, figures: Figures) -> Iterator[Finding]:
    share, link = figures.share("transfer"), link_of(figures.buckets)
    if share < _NOTEWORTHY or link is None or link.bytes_per_second > _SLOW_BYTES_PER_SECOND:
        return
    whole = figures.step
    total = sum(one.payload_bytes for one in figures.buckets)
    smaller = wait_of(
        link, [(one.sent, one.payload_bytes / 4) for one in sorted(figures.buckets, key=lambda b: b.sent)],
        figures.backward,
    )  # fmt: skip
    saved = max(0.0, figures.parts["transfer"] - smaller) / whole
    yield Finding(
        kind=_kind(share),
        headline=f"The link between the ranks is slow: it carries {format_bytes(int(link.bytes_per_second))} of "
        f"gradients a second, so the {format_bytes(total)} of a step take {_time(link.time(total))}.",
        detail=f"{_percent(share)} of a step waits for gradients that are under way.",
        cure="Send less: compression=sl.compression.Quantize(8) sends a quarter of the bytes"
        + (f" (about {_percent(saved)} less time a step)" if saved >= 0.03 else "")
        + ", and strategy=sl.DiLoCo(20) sends once in 20 steps. Larger batches help, too.",
        weight=share,
    )


# ---------------------------------------------------------------------- buffers, parameter syncs, calls


def _buffers(run: Run, figures: Figures) -> Iterator[Finding]:
    share = figures.share("buffers")
    if share >= _NOTEWORTHY:
        yield Finding(
            kind=_kind(share),
            headline=f"{_percent(share)} of a step, {_time(figures.parts['buffers'])}, synchronizes buffers before the "
            "forward.",
            detail="This includes waits for the rank that sends them.",
            cure='If they are running statistics, as those of BatchNorm, pass buffers="none" (torch\'s '
            "broadcast_buffers=False), and call ddp.sync_buffers_() before an evaluation or a save.",
            weight=share,
        )


def _syncs(run: Run, figures: Figures) -> Iterator[Finding]:
    share = figures.share("sync")
    if share >= _NOTEWORTHY:
        yield Finding(
            kind=_kind(share),
            headline=f"{_percent(share)} of a step, {_time(figures.parts['sync'])}, is parameter syncs (mean over all "
            "steps).",
            detail="This includes waits for ranks that are late.",
            cure="Let the strategy synchronize after more steps, or use sl.DiLoCo with compression= or fragments=.",
            weight=share,
        )


def _calls(run: Run, figures: Figures) -> Iterator[Finding]:
    share, late = figures.share("call"), figures.late
    if share < _NOTEWORTHY or (late is not None and late.phase == "other"):  # then `_late_rank` says it
        return
    spans = [span for ranks in run.steps.values() for step in ranks.values() for span in step.spans]
    lengths: Counter[str] = Counter()
    for span in spans:
        if span.kind == "call":
            lengths[span.label] += span.length
    names = format_names([name for name, _ in lengths.most_common(3)])
    yield Finding(
        kind=_kind(share),
        headline=f"{_percent(share)} of a step, {_time(figures.parts['call'])}, is calls of Syncline: {names}.",
        detail="This includes waits for ranks that are late.",
        cure="Metrics of each step travel with the gradients: ddp.report(loss=loss) instead of sl.mean(loss). Save "
        "less often, or with blocking=False.",
        weight=share,
    )


def _never_used(run: Run) -> Iterator[Finding]:
    last = [step for ranks in run.steps.values() for step in ranks.values()][-200:]
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
    if _looks_for_unused(run) and not any(
        step.unused for ranks in run.steps.values() for step in ranks.values()
    ):
        yield Finding(
            kind="note",
            headline="find_unused_parameters=True is set, but every parameter got a gradient in every step.",
            detail="Each backward looks for unused parameters in its graph.",
            cure="Leave find_unused_parameters out.",
            weight=0.01,
        )


def _looks_for_unused(run: Run) -> bool:
    return any(row.looks_for_unused for row in run.modules)


# ---------------------------------------------------------------------- what went wrong


def _discarded(run: Run, figures: Figures) -> Iterator[Finding]:
    numbers = [n for n, ranks in run.steps.items() if any(step.is_discarded for step in ranks.values())]
    if numbers:
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
        checkpoint = (
            f" Load a checkpoint of step {one.row.agreed_at_step} or earlier."
            if one.row.agreed_at_step
            else ""
        )
        yield Finding(
            kind="note" if is_repaired else "problem",
            headline=f"Step {one.step}: {one.fact}; {one.reaction}.",
            detail=" ".join(filter(None, [f"Found by {one.row.check}.", one.minority, one.agreed])),
            cure=_CURE_OF_DIVERGENCE + ("" if is_repaired else checkpoint),
        )
    more = len(found) - _MAX_DIVERGENCES
    if more > 0:
        yield Finding(
            kind="problem",
            headline=f"The replicas differ in {format_count(more, 'more value')}: see the events.",
        )


def _failures(run: Run) -> Iterator[Finding]:
    changes = changes_in(run)
    for row in changes:
        yield Finding(
            kind="problem" if row.num_lost else "note",
            headline=f"Before step {row.step}: {row.reason}. The ranks, now {row.num_ranks}, continued after "
            f"{_time(row.ended - row.began)}.",
            cure="Start the job with syncline run --resilient --max-restarts 3: then a process that is lost is "
            "started again, and joins."
            if row.num_lost
            else "",
        )
    killed = [
        one
        for one in run.processes
        if one.end is None and any(other.end is not None for other in run.processes)
    ]
    lost = {one.process.rank: one for one in killed}
    errors = [one for one in run.processes if one.end is not None and one.end.is_error]
    stopped = [one for one in run.processes if one.end is not None and one.end.is_of("KeyboardInterrupt")]
    if lost and not changes:
        rank = min(lost, key=lambda one: lost[one].unix_seconds(lost[one].last_at))
        # Its own trace lacks its last moments. Those of the others have the last step that all have made together.
        last = [_last_step(one.found) for one in run.processes]
        step = max((one for one in last if one is not None), default=None)
        place = _last_place(lost[rank].found)
        after = "before its first step ended" if step is None else f"after step {step}"
        said = f" The others ended with: {errors[0].end.error}" if errors and errors[0].end else ""
        yield Finding(
            kind="problem",
            headline=f"Rank {rank} was lost {after}: its process ended without a word, as if it was killed.",
            detail=f"{place}Look for the memory limit of the host or container first.{said}",
            cure="Write the loop with sl.steps and start it with syncline run --resilient --max-restarts 3: the others "
            "train on, and a new process joins. Or save with sl.Checkpointer, and use syncline run --max-restarts 3.",
        )
    elif errors and not changes:
        first = min(errors, key=lambda one: one.unix_seconds(one.end.at if one.end else 0))
        assert first.end is not None
        if first.end.is_of("ReplicaDivergence") and divergences_in(run):
            return  # `_diverged` has a finding about it
        yield Finding(
            kind="problem",
            headline=f"Rank {first.process.rank} ended with an error: {first.end.error}",
        )
    elif stopped and not changes:
        yield Finding(kind="note", headline="The run was stopped by Ctrl-C.")


def changes_in(run: Run) -> list[rows.RanksRow]:
    """Return the changes of the ranks, each once."""
    found: dict[tuple[int, int], rows.RanksRow] = {}
    for one in run.processes:
        for row in one.found:
            if isinstance(row, rows.RanksRow):
                found.setdefault((row.step, row.num_ranks), row)
    return [found[key] for key in sorted(found)]


def _last_place(found: Sequence[rows.Row]) -> str:
    words = [row.words for row in found if isinstance(row, rows.PlaceRow)]
    return f"It was last seen at: {words[-1]}. " if words else ""


def _last_step(found: Sequence[rows.Row]) -> int | None:
    return max((row.step for row in found if isinstance(row, rows.BackwardRow)), default=None)
