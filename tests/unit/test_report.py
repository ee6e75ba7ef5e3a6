"""The report of a trace: its figures add up, its verdict names the illness, and its cure is one that can be applied."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from made_traces import MadeRank, MadeRun, rows, written
from torch import nn

import hangs
import syncline as sl
from support.goldens import assert_golden
from syncline.compression import Chain, PowerSGD, Quantize
from syncline.tools.cli import main
from syncline.tools.plan.machine import UNMEASURED, Cost
from syncline.tools.plan.options import Option, codec_of
from syncline.tools.report.analysis import figures_of
from syncline.tools.report.document import MAX_POINTS, MAX_SPANS, document_of
from syncline.tools.report.load import ProcessTrace, load
from syncline.tools.report.page import page
from syncline.tools.report.planned import Link, cluster_of, cut_anew, link_of, option_of, wait_of
from syncline.tools.report.run import WINDOW_STEPS, Meeting, Run, compared, run_of
from syncline.tools.report.steps import RankStep, Span, without_gaps
from syncline.tools.report.text import text_of
from syncline.tools.report.verdict import Finding, verdict_on
from syncline.transport import Transport, run_ranks

Change = Callable[[int, Any], Sequence[rows.Row]]

LATE = [MadeRank(), MadeRank(data=5100)]


def traces(made: MadeRun, change: Change = lambda rank, row: [row]) -> list[ProcessTrace]:
    """The traces of a made run, in which each row is replaced by what `change` returns of its rank and of it."""
    found = []
    for rank, (process, *others) in enumerate(made.rows()):
        assert isinstance(process, rows.ProcessRow)
        changed = [new for row in others for new in change(rank, row)]
        found.append(ProcessTrace(process=process, found=changed))
    return found


def made(change: Change = lambda rank, row: [row], **settings: Any) -> Run:
    ranks = settings.pop("ranks", [MadeRank(), MadeRank()])
    return run_of(traces(MadeRun(ranks=ranks, **settings), change))


def made_with(contract: dict[str, Any]) -> Run:
    return made(lambda _, row: [row._replace(contract=contract) if isinstance(row, rows.ModuleRow) else row])


def verdict(run: Run) -> list[Finding]:
    return verdict_on(run, figures_of(run))


def one_about(words: str, run: Run) -> Finding:
    """The only finding with these words in its headline."""
    found = [one for one in verdict(run) if words in one.headline]
    assert len(found) == 1, (words, [one.headline for one in verdict(run)])
    return found[0]


def recorded_as(found: list[rows.Row], rank: int = 0, **changes: Any) -> ProcessTrace:
    process = rows.ProcessRow(rows.FORMAT, rank, 2, "host", "one", rank, 0, 1e9, "train.py", {})
    return ProcessTrace(process=process._replace(**changes), found=found)


def total(step: RankStep, *kinds: str) -> int:
    """How long the rank spent in these kinds of spans."""
    return sum(span.length for span in step.spans if span.kind in kinds)


def made_rows(num_ranks: int = 2, **settings: Any) -> list[list[rows.Row]]:
    """The rows of each rank but the first two, which say what process and what module it is."""
    return [found[2:] for found in MadeRun(ranks=[MadeRank()] * num_ranks, **settings).rows()]


# ---------------------------------------------------------------------- steps


def test_the_spans_of_a_step_cover_it() -> None:
    run = made()
    assert list(run.steps) == list(range(2, 21))  # the beginning of the first step is unknown
    for step in (step for ranks in run.steps.values() for step in ranks.values()):
        assert (step.spans[0].began, step.spans[-1].ended) == (step.began, step.ended)
        assert all(one.ended == two.began for one, two in zip(step.spans, step.spans[1:], strict=False))
        assert step.length == 100 + 1000 + 2000 + 10 + 500
        kinds = ("data", "forward", "backward", "wait", "optimizer")
        assert [total(step, kind) for kind in kinds] == [100, 1000, 2000, 10, 500]


def test_the_time_between_spans_is_named_after_what_it_is_for() -> None:
    for spans, kinds in (
        ([], ["data"]),
        ([Span("optimizer", 5, 9)], ["data", "optimizer", "data"]),
        (
            [Span("forward", 0, 2), Span("forward", 4, 5), Span("backward", 6, 10)],
            ["forward", "data", "forward", "loss", "backward"],
        ),
        (
            [Span("backward", 0, 2), Span("call", 3, 4), Span("optimizer", 6, 10)],
            ["backward", "update", "call", "update", "optimizer"],
        ),
        ([Span("call", 1, 9), Span("optimizer", 2, 3)], ["data", "call", "data"]),
    ):
        found = without_gaps(spans, 0, 10)
        assert [span.kind for span in found] == kinds, spans
        assert sum(span.length for span in found) == 10, spans


def test_a_step_without_an_attached_optimizer_ends_with_its_backward_and_has_evaluations_before_it() -> None:
    step = made(lambda _, row: [] if isinstance(row, rows.OptimizerRow) else [row]).steps[3][0]
    assert (total(step, "data"), total(step, "update", "optimizer")) == (600, 0)

    def evaluate(rank: int, row: Any) -> list[rows.Row]:
        if not isinstance(row, rows.OptimizerRow) or row.step != 3:
            return [row]
        return [row, rows.ForwardRow("Net", 4, row.ended, row.ended, row.ended + 50, False, 0)]

    run = made(evaluate, num_steps=6)
    assert [total(run.steps[number][0], "forward") for number in (3, 4)] == [1000, 1050]


def test_micro_batches_belong_to_one_step_and_their_buckets_to_the_last_backward() -> None:
    found: list[rows.Row] = []
    at = 0
    for step in range(1, 8):
        for micro in range(4):
            found.append(rows.ForwardRow("Net", step, at, at, at + 100, True, 0))
            buckets = [(0, at + 140, at + 200, at + 205)] if micro == 3 else []
            found.append(rows.BackwardRow("Net", step, at + 100, at + 205, 1, micro == 3, buckets, {}, []))
            at += 205
        found.append(rows.OptimizerRow("Net", "SGD", step, at, at + 10, False))
        at += 10
    run = run_of([recorded_as(found), recorded_as(found, 1)])
    assert {number: ranks[0].length for number, ranks in run.steps.items()} == dict.fromkeys(range(2, 8), 830)
    assert total(run.steps[2][0], "forward") == 400
    (bucket,) = figures_of(run).buckets
    assert (bucket.sent, figures_of(run).backward) == (40, 100)


def test_two_modules_in_one_loss_are_not_counted_twice() -> None:
    found: list[rows.Row] = []
    for step in range(1, 8):
        at = 1000 * step
        for module in ("One", "Two"):
            found.append(rows.ForwardRow(module, step, at + 100, at + 100, at + 200, True, 0))
        for module, began, ended, bucket in (
            ("One", 300, 500, (0, at + 350, at + 400, at + 450)),
            ("Two", 250, 900, (0, at + 600, at + 800, at + 880)),
        ):
            found.append(rows.BackwardRow(module, step, at + began, at + ended, 1, True, [bucket], {}, []))
        found.append(rows.OptimizerRow("One", "SGD", step, at + 900, at + 1000, False))
    of_both = figures_of(run_of([recorded_as(found), recorded_as(found, 1)]))
    assert sum(of_both.parts.values()) == pytest.approx(of_both.step)
    assert of_both.parts["transfer"] == 130


def test_a_gap_in_the_rows_of_a_process_is_no_step() -> None:
    run = made(lambda _, row: [] if getattr(row, "step", 0) in (7, 8) else [row])
    assert list(run.steps) == [*range(2, 7), *range(10, 21)]


# ---------------------------------------------------------------------- figures


def test_waits_for_a_late_rank_are_told_from_waits_for_the_link() -> None:
    found = figures_of(made(ranks=[MadeRank(), MadeRank(data=5100), MadeRank()], fixed=0.0, per_byte=0.0))
    assert found.parts["transfer"] == pytest.approx(0, abs=2)
    late = found.late
    assert late is not None
    assert (late.rank, late.phase, late.phase_time, late.usual_time) == (1, "data", 5100, 100)
    assert late.caused == pytest.approx(5000, abs=2)
    even = figures_of(made(per_byte=0.005))
    assert even.parts["late"] == pytest.approx(0, abs=2)
    assert even.parts["transfer"] > 3000
    alone = figures_of(made(ranks=[MadeRank()], fixed=0.0))
    assert (alone.late, alone.exposed) == (None, pytest.approx(0, abs=0.001))
    mixed = figures_of(made(ranks=[MadeRank(), MadeRank(data=3000), MadeRank(forward=1500)], per_byte=0.002))
    assert sum(mixed.parts.values()) == pytest.approx(mixed.step, rel=0.01)


def test_a_bucket_names_the_rank_that_sends_it_last() -> None:
    found = figures_of(made(ranks=[MadeRank(), MadeRank(), MadeRank(backward=4000)]))
    assert [one.waits_for for one in found.buckets] == [2, 2, 2, 2]
    assert found.buckets[3].parameters == ("layer3.weight", "layer3.bias")


# ---------------------------------------------------------------------- clocks


def test_ranks_of_two_hosts_are_put_on_one_clock() -> None:
    here, there = MadeRank(), MadeRank(clock="other", shift=987_654_321, data=1100)
    run = made(ranks=[here, there], num_steps=2 * WINDOW_STEPS + 10)
    assert 0 < run.clock_error < 1200
    same = made(ranks=[MadeRank(), MadeRank(data=1100)], num_steps=2 * WINDOW_STEPS + 10)
    for number in (5, WINDOW_STEPS + 5, 2 * WINDOW_STEPS + 5):
        moved = run.steps[number][1].began - same.steps[number][1].began
        assert abs(moved) <= run.clock_error


def test_a_clock_that_drifts_is_compared_in_each_window() -> None:
    first = {(n,): Meeting(n, 100 * n, 100 * n + 20) for n in range(3 * WINDOW_STEPS)}
    other = {(n,): Meeting(n, 101 * n + 7, 101 * n + 27) for n in range(3 * WINDOW_STEPS)}
    clock = compared(first, other)
    assert clock is not None
    assert len(clock.offsets) == 3
    for number in (WINDOW_STEPS // 2, 5 * WINDOW_STEPS // 2):
        assert clock.at(number) == pytest.approx(-number - 7, abs=WINDOW_STEPS)


def test_hosts_that_never_meet_are_put_on_one_clock_by_their_systems() -> None:
    (found,) = made_rows(1)
    local = [row._replace(buckets=[]) if isinstance(row, rows.BackwardRow) else row for row in found]
    moved = [recorded_as(local), recorded_as(local, 1, clock="other", at=5_000, unix_seconds=1e9 + 0.002)]
    run = run_of(moved)
    assert run.clock_error > 0
    assert run.steps[5][1].began - run.steps[5][0].began == 2000 - 5000


# ---------------------------------------------------------------------- the verdict: what takes time


def saving(rank: int, row: Any) -> list[rows.Row]:
    """Rank 1 saves before each forward."""
    if rank == 1 and isinstance(row, rows.ForwardRow):
        return [rows.CallRow("Checkpointer.save", row.began - 5000, row.began - 1), row]
    return [row]


def with_buffers(rank: int, row: Any) -> list[rows.Row]:
    is_forward = isinstance(row, rows.ForwardRow)
    return [row._replace(computed_from=row.began + 500, buffer_bytes=400) if is_forward else row]


ONE_BUCKET = {"bucket_bytes": [4_000_000], "fixed": 20.0, "per_byte": 0.0005}

TINY_BUCKETS = {"bucket_bytes": [20_000] * 40, "fixed": 150.0}


def with_calls(rank: int, row: Any) -> list[rows.Row]:
    """A call and a parameter sync in each step of the optimizer."""
    if not isinstance(row, rows.OptimizerRow):
        return [row]
    sync = rows.SyncRow("Net", row.step, row.ended - 250, row.ended, ["average"], 8)
    call = rows.CallRow("mean", row.began + 1, row.began + 240)
    return [call, row._replace(began=row.began + 240, ended=row.ended - 250), sync]


def one_late(**phase: int) -> dict[str, Any]:
    return {"ranks": [MadeRank(), MadeRank(**phase)]}


ILLNESSES: list[tuple[dict[str, Any], str, str, str]] = [
    (one_late(data=5100), "problem", "for rank 1, whose data loading", "DataLoader(num_workers="),
    (
        one_late(forward=6000),
        "problem",
        "forward and loss takes 6.0 ms; 1.0 ms on the other",
        "batches of eq",
    ),
    (
        one_late(backward=6000),
        "problem",
        "for rank 1, whose backward takes 6.0 ms",
        "batches of equal length",
    ),
    (one_late(update=5500), "problem", "end of the optimizer's step takes 5.5 ms", "log, save and evaluate"),
    ({"change": saving, "ranks": LATE}, "problem", "time in other calls of Syncline", "save less often"),
    ({"ranks": [MadeRank(data=4000)] * 2}, "problem", "they wait for data", "num_workers"),
    (ONE_BUCKET, "problem", "waits for gradients that are under way; with bucket", "Pass bucket_cap_mb="),
    (TINY_BUCKETS, "problem", "cut into 40 buckets of 20.0 kB", "leave bucket_cap_mb out"),
    ({"per_byte": 0.08, "fixed": 100.0}, "problem", "it carries 12.", "Quantize(8)"),
    (
        {"change": with_buffers, **one_late(data=450)},
        "problem",
        "synchronizes buffers before",
        'buffers="none"',
    ),
    ({"change": with_calls}, "note", "is calls of Syncline: mean.", "ddp.report(loss=loss)"),
    ({"change": with_calls}, "note", "is parameter syncs", "fragments="),
]
"""A run, and the finding about it: its kind, and words of its headline and of its cure."""


def test_an_illness_is_named_with_its_cure() -> None:
    for settings, kind, words, cure in ILLNESSES:
        run = made(**settings)
        found = one_about(words, run)
        assert (found.kind, cure in found.cure) == (kind, True), words
        ordered = [one.weight for one in verdict(run) if one.cure]
        assert ordered == sorted(ordered, reverse=True), f"{words}: the largest cost comes first"
        assert verdict(run)[1].headline.startswith("A step takes"), f"{words}: then where the time goes"


def test_a_healthy_run_has_one_good_finding() -> None:
    (found,) = verdict(made())
    assert (found.kind, "nothing holds it up" in found.headline) == ("fine", True)


def test_what_a_cure_promises_is_kept() -> None:
    sick = made(**ONE_BUCKET)
    assert "holds 100 % of the gradients" in verdict(sick)[0].detail
    cured = made(**{**ONE_BUCKET, "bucket_bytes": [500_000] * 8})
    assert figures_of(cured).step < 0.8 * figures_of(sick).step


def test_ranks_that_are_late_in_turns_are_not_blamed() -> None:
    turns = [
        traces(MadeRun(ranks=[MadeRank(data=4000 * n), MadeRank(data=4000 * (1 - n))])) for n in range(2)
    ]
    recorded = [replace(one, found=[]) for one in turns[0]]
    for step in range(1, 21):
        for rank, one in enumerate(recorded):
            first = [row for row in turns[step % 2][rank].found if getattr(row, "step", 0) == 1]
            one.found += [later(row, 20_000 * (step - 1))._replace(step=step) for row in first]
    assert "jitter" in one_about("No rank is consistently slow", run_of(recorded)).headline


def later(row: Any, by: int) -> Any:
    """Return a row with later times."""
    names = [name for name in ("began", "computed_from", "ended") if hasattr(row, name)]
    changed = {name: getattr(row, name) + by for name in names}
    if isinstance(row, rows.BackwardRow):
        changed["buckets"] = [(index, *(time + by for time in times)) for index, *times in row.buckets]
    return row._replace(**changed)


def test_few_or_short_steps_get_no_verdict() -> None:
    few = verdict(made(ranks=LATE, num_steps=12))
    assert [one.kind for one in few] == ["note", "note"]
    assert few[0].headline == "9 steps of 8.6 ms (mean): too few to judge."
    short = verdict(made(ranks=[MadeRank(data=10, forward=100, backward=200, update=50)] * 2))
    assert short[0].headline.endswith("too short to judge.")
    (none,) = verdict(made(num_steps=0))
    assert "No complete step" in none.headline


# ---------------------------------------------------------------------- the verdict: what is wrong


def test_unused_parameters_are_named() -> None:
    unused = {"unused": ["head.weight"], "looks_for_unused": True}
    sick = verdict(made(**unused))[0]
    assert sick.headline == "1 parameter never gets a gradient: head.weight."
    assert "requires_grad_(False)" in sick.cure
    brief = [MadeRank(data=0, forward=10, backward=10, update=5)] * 2
    for ranks in (LATE, brief):  # what takes time, or too little of it, hides nothing
        assert verdict(made(**unused, ranks=ranks))[0] == sick
    assert "Leave find_unused_parameters out" in one_about("find_unused", made(looks_for_unused=True)).cure
    without = one_about("never", made(unused=["head.weight"])).detail
    assert ("of find_unused" in sick.detail, "of find_unused" in without) == (True, False)


def test_discarded_steps_are_counted() -> None:
    words = one_about("discarded", made(discarded=[7, 9])).headline
    assert words.startswith("2 steps of 19 were discarded")
    assert "the first is step 7" in words


def test_a_rank_that_was_killed_comes_first_and_is_the_one_whose_trace_ends_first() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank()] * 3))
    for one, last in zip(recorded, (11, 10, 11), strict=True):
        one.found = [row for row in one.found if getattr(row, "step", 0) <= last]
    recorded[1].found.append(rows.PlaceRow(98, 20, "step 11, backward, at train.py:34 in main"))
    recorded[2].found.append(rows.EndRow(10**6, "PeerLost: rank 1"))
    first, *_ = verdict(run_of(recorded))
    assert "Rank 1 was lost after step 11" in first.headline
    assert "PeerLost" in first.detail
    assert "It was last seen at: step 11, backward, at train.py:34 in main." in first.detail
    assert "syncline run --resilient" in first.cure


def test_a_rank_that_was_killed_before_another_one_began_to_record_belongs_to_its_life() -> None:
    found = made_rows()
    killed = recorded_as(found[1][:1], 1, unix_seconds=1e9 - 0.2)
    run = run_of([recorded_as([*found[0], rows.EndRow(10**6, "PeerLost: rank 1")]), killed])
    assert len(run.processes) == 2
    assert "Rank 1 was lost after step 20" in verdict(run)[0].headline


def test_a_rank_that_the_others_did_without() -> None:
    first, *_ = verdict(made(after={12: [rows.RanksRow(0, 1, 13, "rank 1 of 2 was lost", 0, 43_000, 1)]}))
    assert "Before step 13: rank 1 of 2 was lost. The ranks, now 1, continued after 43" in first.headline
    assert (first.kind, "--max-restarts" in first.cure) == ("problem", True)
    grown = made(after={12: [rows.RanksRow(0, 3, 13, "the lost process has joined", 0, 43_000)]})
    assert {(one.kind, one.cure) for one in verdict(grown) if "joined" in one.headline} == {("note", "")}


def test_which_ends_are_errors() -> None:
    for error in ("", "KeyboardInterrupt: ", "SystemExit: 0", "SystemExit: 75"):
        assert not rows.EndRow(0, error).is_error, error
    assert rows.EndRow(0, "SystemExit: 3").is_error
    assert rows.EndRow(0, "ValueError: 0").is_error
    assert rows.EndRow(0, "KeyboardInterrupt: no, a class of the user", "KeyboardInterruptOfTheUser").is_error
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank()]))
    for one in recorded:
        one.found.append(rows.EndRow(10**6, "KeyboardInterrupt: ", "KeyboardInterrupt"))
    run = run_of(recorded)
    assert (verdict(run)[0].kind, "stopped by Ctrl-C" in verdict(run)[0].headline) == ("note", True)
    events = document_of(run, UNMEASURED)["events"]
    assert [(one["kind"], one["words"][:6]) for one in events] == [("stopped", f"rank {n}") for n in range(2)]
    recorded[1].found[-1] = rows.EndRow(10**6, "ValueError: 0")
    assert "Rank 1 ended with an error: ValueError: 0" in verdict(run_of(recorded))[0].headline


def diverged(step: int | None, tensor: str = "layer1.weight", **changes: Any) -> rows.DivergenceRow:
    row = rows.DivergenceRow("replica check of Net", step, tensor, 1, (1,), 8, "raised", 99)
    return row._replace(**changes)


def test_replicas_that_differ_are_the_first_finding() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank(), MadeRank(data=5000)], num_steps=9))
    for one in recorded:  # each rank records it
        one.found += [diverged(10), rows.EndRow(99, "ReplicaDivergence: Net, step 10, replica check: ...")]
    run = run_of(recorded)
    first, *others = verdict(run)
    assert first.kind == "problem"
    assert first.headline.startswith("Step 10: the replicas differ in layer1.weight; the error was raised")
    assert "In the minority: rank 1. All ranks last agreed on layer1.weight at step 8." in first.detail
    assert "Load a checkpoint of step 8 or earlier" in first.cure
    assert not any("ended with an error" in one.headline for one in others)  # it is said once
    document = document_of(run, UNMEASURED)
    assert document["findings"][0]["headline"] == first.headline
    (event,) = [one for one in document["events"] if one["kind"] == "diverged"]
    assert (event["step"], "layer1.weight" in event["words"]) == (10, True)
    assert "the replicas differ in layer1.weight" in text_of(document)
    assert page(document).count("Replicas differ</span>") == 1


def test_differences_of_replicas_are_counted_by_value_and_by_what_was_done() -> None:
    stays = {step: [diverged(step, outcome="warned")] for step in range(5, 15)}
    warned = one_about("differ", made(after=stays)).headline
    assert warned.startswith("Step 5: ")
    assert "training continued" in warned
    assert "found 10 times" in warned
    repaired = one_about("differ", made(after={5: [diverged(5, outcome="repaired")]}))
    assert (repaired.kind, "Load a checkpoint" in repaired.cure) == ("note", False)
    no_step = diverged(None, "", check="sl.check_replicas", num_differing=0, minority_ranks=())
    of_call = verdict(made(after={4: [no_step]}))[0]
    assert of_call.headline.startswith("Step 4: the replicas differ; ")
    assert of_call.detail == "Found by sl.check_replicas."
    many = {4: [diverged(4, f"layer{number}.weight") for number in range(5)]}
    named = [one.headline for one in verdict(made(after=many)) if "differ" in one.headline]
    assert (len(named), "2 more values" in named[-1]) == (4, True)


# ---------------------------------------------------------------------- what if


def test_the_time_of_other_buckets_is_that_of_a_run_with_them() -> None:
    settings = {"fixed": 50.0, "per_byte": 0.0008, "num_steps": 12}
    found = figures_of(made(bucket_bytes=[1_000_000] * 4, **settings))
    link = link_of(found.buckets)
    assert link is not None
    for size, number in ((2_000_000, 2), (500_000, 8)):
        predicted = wait_of(link, cut_anew(found.buckets, size), found.backward)
        other = figures_of(made(bucket_bytes=[size] * number, **settings))
        assert predicted == pytest.approx(other.parts["transfer"], rel=0.25, abs=60)


def test_a_link_has_a_fixed_time_and_one_for_its_bytes() -> None:
    sizes = [500_000, 1_000_000, 2_000_000, 4_000_000]
    link = link_of(figures_of(made(bucket_bytes=sizes, fixed=200.0, per_byte=0.003)).buckets)
    assert link is not None
    assert link.per_byte == pytest.approx(0.003, rel=0.05)
    assert link.fixed == pytest.approx(200, rel=0.2)
    assert Link(0.0, 0.0).bytes_per_second == float("inf")
    assert link_of([]) is None


# ---------------------------------------------------------------------- lives of a job


def test_of_a_job_that_was_restarted_the_last_life_counts() -> None:
    processes = [recorded_as(found, rank) for rank, found in enumerate(made_rows(num_steps=30))]
    for rank, found in enumerate(made_rows(num_steps=10)):
        processes.append(recorded_as(found, rank, pid=9, unix_seconds=1e9 + 60))
    run = run_of(processes)
    assert list(run.steps) == list(range(2, 11))
    assert figures_of(run).parts["late"] == 0


def test_a_process_that_joins_belongs_to_the_life_of_the_others() -> None:
    long = made_rows(num_steps=30)
    processes = [recorded_as(found, rank) for rank, found in enumerate(long)]
    processes.append(recorded_as(long[0][-9:], 2, unix_seconds=1e9 + 0.05))
    assert len(run_of(processes).processes) == 3


def test_a_part_that_begins_after_a_change_has_the_new_rank() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank()]))
    recorded[0].found.insert(30, recorded[0].process._replace(rank=4))
    run = run_of(recorded)
    assert (0 in run.steps[3], 4 in run.steps[20]) == (True, True)


# ---------------------------------------------------------------------- documents


def test_a_document_is_json_and_bounded() -> None:
    many = made(ranks=[MadeRank()] * 16, num_steps=2500)
    document = json.loads(json.dumps(document_of(many, UNMEASURED)))
    spans = sum(len(one["spans"]) for step in document["steps"].values() for one in step.values())
    assert spans <= MAX_SPANS
    assert len(document["lengths"]) == MAX_POINTS
    assert str(document["choices"]["slowest"]) in document["steps"]
    assert document["metrics"]["loss"][-1] == [2500, pytest.approx(1 / 2500)]


def test_a_step_has_one_length_in_the_whole_report() -> None:
    """One slow step moves the mean away from the median, so two kinds of figures would be seen."""
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank()]))
    for one in recorded:
        one.found[-3:] = [later(row, 300_000) for row in one.found[-3:]]
    run = run_of(recorded)
    found, document = figures_of(run), document_of(run, UNMEASURED)
    length = "21.3 ms"
    assert sum(found.parts.values()) == found.step
    assert sum(one["us"] for one in document["parts"]) == pytest.approx(found.step, abs=5)
    assert document["facts"][0]["value"] == document["predicted"][0]["measured"] == length
    assert f"A step takes {length} (mean of 17 steps)" in text_of(document)
    typical = document["choices"]["typical"]
    assert abs(run.length(typical) - found.step) == min(abs(run.length(n) - found.step) for n in run.steady)


def test_what_was_last_done_when_the_contract_was_recorded_is_not_shown() -> None:
    rule = {"what": "gradients", "when": "every backward", "how": "mean", "last_done": "step 1"}
    text = page(document_of(made_with({"title": "Net", "rows": [rule]}), UNMEASURED))
    assert "every backward" in text
    assert "step 1<" not in text
    assert "last done" not in text.partition("<script")[0]


def test_a_prediction_is_compared_with_the_run_if_the_planner_knows_its_synchronization() -> None:
    """The link of the made run is known, so the machine's figures can be exactly those of it."""
    of_link = Cost(10e-6, 1e-9, 0.0, 0.0)
    machine = replace(UNMEASURED, shared_memory={2: of_link}, gloo={2: of_link}, copy_per_byte=0.0)
    step, waits = document_of(made(fixed=10.0, per_byte=1e-3), machine)["predicted"]
    assert step["predicted"] == step["measured"]
    assert waits["predicted"] == waits["measured"] != "0.0 ms"
    assert document_of(made(ranks=[MadeRank()]), UNMEASURED)["predicted"] == []


def test_the_planner_reads_the_fields_of_a_contract_and_not_its_words() -> None:
    quantized = Option(compression=codec_of("Quantize(4)"))
    for arguments, expected in (
        ({}, Option()),
        ({"sharded": True}, Option(sharded=True)),
        ({"compression": Chain(PowerSGD(2), Quantize(4))}, quantized),
        ({"strategy": sl.LocalSGD(2)}, None),
    ):

        def contract(t: Transport, arguments: Any = arguments) -> dict[str, Any]:
            return asdict(sl.DistributedDataParallel(nn.Linear(4, 4), process_group=t, **arguments).contract)

        assert option_of(made_with(run_ranks(2, contract)[0])) == expected, arguments
    for kind, engine in (("gloo", "gloo"), ("nccl", "nccl"), ("of a later version", "shm")):
        run = made_with({"transport": kind})
        assert (option_of(run), cluster_of(run, figures_of(run)).engine) == (None, engine)


# ---------------------------------------------------------------------- commands


def test_report_and_compare_print_what_they_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # this machine was not measured
    slow = {12: [rows.SlowRow("Net", 12, 1, "rank 1 is slow")]}
    sick = MadeRun(ranks=LATE, bucket_bytes=[1000] * 20, unused=["head.weight"], after=slow)
    before = written(tmp_path / "before", sick.rows())
    after = written(tmp_path / "after", MadeRun(ranks=[MadeRank(), MadeRank()]).rows())

    def printed(*arguments: str) -> str:
        assert main([*arguments]) == 0
        return re.sub(r"\d+-\d\d-\d\d \d\d:\d\d", "DATE", capsys.readouterr().out.replace(f"{tmp_path}/", ""))

    assert_golden("report", printed("report", str(before), "--format", "text"))
    names = [str(folder) for folder in (before, after)]
    assert "less time than one of before" in " ".join(printed("compare", *names).split())
    assert json.loads(printed("report", names[0], "--format", "json"))["choices"]
    assert printed("report", names[0]).split()[-1] == "before/report.html"
    assert "for rank 1" in (before / "report.html").read_text()


def test_a_chrome_trace_has_every_span_and_bucket_of_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = written(tmp_path / "trace", MadeRun(ranks=LATE).rows())
    assert main(["report", str(directory), "--format", "chrome"]) == 0
    assert "2 ranks" in capsys.readouterr().out
    run = made(ranks=LATE)
    for rank in range(2):
        trace = json.loads((directory / "chrome" / f"rank-{rank}.json").read_text())
        assert trace["distributedInfo"] == {"backend": "syncline", "rank": rank, "world_size": 2}
        events = trace["traceEvents"]
        steps = [one for one in events if one["name"].startswith("ProfilerStep#")]
        assert [one["name"] for one in steps] == [f"ProfilerStep#{number}" for number in range(2, 21)]
        assert all(one["pid"] == rank for one in events)
        work = [one for one in events if one.get("cat") == "cpu_op"]
        assert len(work) == sum(len(ranks[rank].spans) for ranks in run.steps.values())
        assert sum(one["dur"] for one in work) == sum(one["dur"] for one in steps)
        begun, ended = ({one["id"]: one for one in events if one["ph"] == phase} for phase in "be")
        assert len(begun) == len(ended) == 4 * len(steps)
        assert all(one["ts"] <= ended[key]["ts"] for key, one in begun.items())
        parameters = ["layer0.weight", "layer0.bias"]
        assert begun["5/Net/0"]["args"] == {"bytes": 1_000_000, "parameters": parameters}


def test_of_a_long_trace_the_beginning_and_the_end_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(tmp_path / "trace", MadeRun(ranks=[MadeRank()] * 2, num_steps=400).rows())
    whole = run_of(load(directory))
    monkeypatch.setattr("syncline.tools.report.load.MOST_BYTES", 40_000)
    run = run_of(load(directory))
    assert len(run.steps) < 150
    assert (min(run.steps), max(run.steps)) == (2, 400)
    assert all(one.is_cut for one in run.processes)
    assert "the middle of the run was" in document_of(run, UNMEASURED)["subtitle"]
    for number, ranks in run.steps.items():
        if number - 1 in run.steps:
            assert ranks[0].spans == whole.steps[number][0].spans


def test_metrics_of_any_name_and_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = MadeRun(ranks=[MadeRank()]).rows()
    metrics = {"name": 1.0, "row": 2.0, "loss": float("nan")}
    recorded[0] = [
        row._replace(metrics=metrics) if isinstance(row, rows.BackwardRow) else row for row in recorded[0]
    ]
    directory = written(tmp_path / "trace", recorded)
    for form in ("text", "html", "chrome", "json"):
        capsys.readouterr()
        assert main(["report", str(directory), "--format", form]) == 0
    assert "NaN" not in capsys.readouterr().out
    assert "NaN" not in (directory / "chrome" / "rank-0.json").read_text()


def test_reports_and_comparisons_have_at_most_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "a_layer_whose_name_is_" + "very_" * 20 + "long"
    recorded = MadeRun(unused=[long], ranks=LATE).rows()
    folders = [str(written(tmp_path / ("run" * 20 + str(n)), recorded)) for n in range(2)]
    for command in (["report"], ["report", "--format", "text"], ["watch", "--once"]):
        assert main([*command, folders[0]]) == 0
    assert main(["compare", *folders]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= 100 or line == f"{folders[0]}/report.html", line


def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = MadeRun(ranks=[MadeRank()]).rows()
    process = recorded[0][0]
    assert isinstance(process, rows.ProcessRow)
    recorded[0][0] = process._replace(format=rows.FORMAT + 1)
    written(tmp_path / "newer", recorded)
    for arguments, words in (
        ("report", "required: DIR"),
        ("report nowhere", "there is no directory nowhere"),
        ("report .", "has no trace"),
        ("report . --format pdf", "invalid choice"),
        ("report . --formt text", "did you mean --format"),
        ("compare one", "required: DIR"),
        ("report newer", "use the version that has recorded the trace"),
    ):
        assert main(arguments.split()) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line, arguments


@pytest.mark.real
def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    directory = written(tmp_path / "trace", MadeRun(ranks=[MadeRank()]).rows())
    program = (
        "import sys; from syncline.tools.cli import main; "
        f"main(['report', {str(directory)!r}]); sys.exit('torch' in sys.modules)"
    )
    assert hangs.run([sys.executable, "-c", program]).returncode == 0
