"""The report of a trace: its figures add up, its verdict names the illness, and its cure is one that can be applied."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_traces import MadeRank, MadeRun, rows

import hangs
from syncline.tools.cli import main
from syncline.tools.plan import UNMEASURED, Cost
from syncline.tools.report.analysis import Figures, figures_of
from syncline.tools.report.clocks import WINDOW_STEPS, Meeting, compared
from syncline.tools.report.document import MAX_POINTS, MAX_SPANS, document_of
from syncline.tools.report.load import ProcessTrace, load
from syncline.tools.report.page import page
from syncline.tools.report.run import Run, run_of
from syncline.tools.report.steps import Span, without_gaps
from syncline.tools.report.text import text_of
from syncline.tools.report.verdict import Finding, verdict_on
from syncline.tools.report.what_if import Link, cut_anew, link_of, wait_of


def traces(made: MadeRun) -> list[ProcessTrace]:
    found = []
    for recorded in made.rows():
        process, *others = recorded
        assert isinstance(process, rows.ProcessRow)
        found.append(ProcessTrace(process=process, found=others))
    return found


def made(**settings: Any) -> Run:
    ranks = settings.pop("ranks", [MadeRank(), MadeRank()])
    return run_of(traces(MadeRun(ranks=ranks, **settings)))


def figures(run: Run) -> Figures:
    found = figures_of(run)
    assert found is not None
    return found


def verdict(run: Run) -> list[Finding]:
    return verdict_on(run, figures_of(run))


def written(directory: Path, recorded: list[list[rows.Row]]) -> Path:
    """Write traces into a directory."""
    directory.mkdir(exist_ok=True)
    for rank, found in enumerate(recorded):
        path = directory / f"rank-{rank:05d}.host.{100 + rank}.000000.trace.jsonl"
        path.write_bytes(b"".join(rows.encode(row) for row in found))
    return directory


# ---------------------------------------------------------------------- steps


def test_the_spans_of_a_step_cover_it() -> None:
    run = made()
    assert list(run.steps) == list(range(2, 21))  # the beginning of the first step is unknown
    for ranks in run.steps.values():
        for step in ranks.values():
            assert step.spans[0].began == step.began
            assert step.spans[-1].ended == step.ended
            assert all(one.ended == two.began for one, two in zip(step.spans, step.spans[1:], strict=False))
            assert step.length == 100 + 1000 + 2000 + 10 + 500
            assert (step.total("data"), step.total("forward")) == (100, 1000)
            assert (step.total("backward"), step.total("wait"), step.total("optimizer")) == (2000, 10, 500)


@pytest.mark.parametrize(
    ("spans", "kinds"),
    [
        ([], ["data"]),
        ([Span("optimizer", 5, 9)], ["data", "optimizer", "data"]),
        ([Span("forward", 0, 2), Span("forward", 4, 5), Span("backward", 6, 10)],
         ["forward", "data", "forward", "loss", "backward"]),
        ([Span("backward", 0, 2), Span("call", 3, 4), Span("optimizer", 6, 10)],
         ["backward", "update", "call", "update", "optimizer"]),
        ([Span("call", 1, 9), Span("optimizer", 2, 3)], ["data", "call", "data"]),
    ],
)  # fmt: skip
def test_the_time_between_spans_is_named_after_what_it_is_for(spans: list[Span], kinds: list[str]) -> None:
    found = without_gaps(spans, 0, 10)
    assert [span.kind for span in found] == kinds
    assert sum(span.length for span in found) == 10


def test_without_an_attached_optimizer_a_step_ends_with_its_backward() -> None:
    recorded = MadeRun(ranks=[MadeRank()]).rows()[0]
    process, *others = [row for row in recorded if not isinstance(row, rows.OptimizerRow)]
    assert isinstance(process, rows.ProcessRow)
    run = run_of([ProcessTrace(process=process, found=others)])
    step = run.steps[3][0]
    assert (step.total("data"), step.total("update", "optimizer")) == (600, 0)


def test_micro_batches_belong_to_one_step() -> None:
    recorded: list[rows.Row] = []
    at = 0
    for step in range(1, 5):
        for micro in range(3):
            recorded.append(rows.ForwardRow("Net", step, at + 1, at + 1, at + 2, True, 0))
            recorded.append(rows.BackwardRow("Net", step, at + 3, at + 5, 1, micro == 2, [], {}, []))
            at += 5
        recorded.append(rows.OptimizerRow("Net", "SGD", step, at, at + 1, False))
        at += 1
    process = rows.ProcessRow(rows.FORMAT, 0, 1, "host", "one", 1, 0, 0.0, "train.py", {})
    run = run_of([ProcessTrace(process=process, found=recorded)])
    assert {number: ranks[0].length for number, ranks in run.steps.items()} == {2: 16, 3: 16, 4: 16}
    assert run.steps[2][0].total("forward") == 3


def test_an_evaluation_between_two_steps_is_part_of_the_later_one() -> None:
    recorded = MadeRun(ranks=[MadeRank()], num_steps=6).rows()[0]
    process, *others = recorded
    assert isinstance(process, rows.ProcessRow)
    at = next(n for n, row in enumerate(others) if isinstance(row, rows.ForwardRow) and row.step == 4)
    before = others[at - 1]
    assert isinstance(before, rows.OptimizerRow)
    others.insert(at, rows.ForwardRow("Net", 4, before.ended, before.ended, before.ended + 50, False, 0))
    run = run_of([ProcessTrace(process=process, found=others)])
    assert run.steps[4][0].total("forward") == 1050
    assert run.steps[3][0].total("forward") == 1000


# ---------------------------------------------------------------------- figures


def test_the_parts_add_up_to_a_step() -> None:
    found = figures(made(ranks=[MadeRank(), MadeRank(data=3000), MadeRank(forward=1500)], per_byte=0.002))
    assert sum(found.parts.values()) == pytest.approx(found.step, rel=0.01)


def test_waits_for_a_late_rank_are_told_from_waits_for_the_link() -> None:
    found = figures(made(ranks=[MadeRank(), MadeRank(data=5100)], fixed=0.0, per_byte=0.0))
    assert found.parts["transfer"] == pytest.approx(0, abs=2)
    assert found.late is not None
    assert (found.late.rank, found.late.phase) == (1, "data")
    assert found.late.caused == pytest.approx(5000, abs=2)
    assert (found.late.phase_time, found.late.usual_time) == (5100, 100)
    even = figures(made(per_byte=0.005))
    assert even.parts["late"] == pytest.approx(0, abs=2)
    assert even.parts["transfer"] > 3000


def test_one_rank_waits_for_nobody() -> None:
    found = figures(made(ranks=[MadeRank()], fixed=0.0))
    assert found.late is None
    assert found.exposed == pytest.approx(0, abs=0.001)


def test_a_bucket_names_the_rank_that_sends_it_last() -> None:
    found = figures(made(ranks=[MadeRank(), MadeRank(), MadeRank(backward=4000)]))
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
    first = {(n,): Meeting((n,), n, 100 * n, 100 * n + 20) for n in range(3 * WINDOW_STEPS)}
    other = {(n,): Meeting((n,), n, 101 * n + 7, 101 * n + 27) for n in range(3 * WINDOW_STEPS)}
    clock = compared(first, other)
    assert clock is not None
    assert len(clock.offsets) == 3
    for number in (WINDOW_STEPS // 2, 5 * WINDOW_STEPS // 2):
        assert clock.at(number) == pytest.approx(-number - 7, abs=WINDOW_STEPS)


def test_clocks_that_never_met_stay_as_they_are() -> None:
    assert compared({}, {(1,): Meeting((1,), 1, 0, 1)}) is None


# ---------------------------------------------------------------------- the verdict


def test_a_healthy_run_has_one_good_finding() -> None:
    (found,) = verdict(made())
    assert found.kind == "fine"
    assert "nothing holds it up" in found.headline


@pytest.mark.parametrize(
    ("rank", "words", "cure"),
    [
        (MadeRank(data=5100), "whose data loading", "DataLoader(num_workers="),
        (
            MadeRank(forward=6000),
            "whose forward and loss takes 6.0 ms; 1.0 ms on the other",
            "batches of equal",
        ),
        (MadeRank(backward=6000), "whose backward takes 6.0 ms", "batches of equal length"),
        (MadeRank(update=5500), "end of the optimizer's step takes 5.5 ms", "log, save and evaluate"),
    ],
)
def test_a_late_rank_is_named_with_its_phase(rank: MadeRank, words: str, cure: str) -> None:
    late, where, *_ = verdict(made(ranks=[MadeRank(), rank]))
    assert where.headline.startswith("A step takes")
    assert "for rank 1" in late.headline
    assert words in late.headline
    assert cure in late.cure


def test_ranks_that_are_late_in_turns() -> None:
    run = made(ranks=[MadeRank(), MadeRank()])
    slow = [
        MadeRun(ranks=[MadeRank(data=4000 * (n % 2)), MadeRank(data=4000 * (1 - n % 2))]) for n in range(2)
    ]
    recorded = [ProcessTrace(process=one.process, found=[]) for one in run.processes]
    at = [0, 0]
    for step in range(1, 21):
        for rank in range(2):
            for row in slow[step % 2].rows()[rank]:
                if isinstance(row, rows.ModuleRow) and step == 1:
                    recorded[rank].found.append(row)
                if isinstance(row, rows.ForwardRow) and row.step == 1:
                    recorded[rank].found.append(
                        row._replace(step=step, **{name: getattr(row, name) + at[rank] for name in (
                            "began", "computed_from", "ended")})
                    )  # fmt: skip
                if isinstance(row, rows.BackwardRow) and row.step == 1:
                    buckets = [(index, *(time + at[rank] for time in times)) for index, *times in row.buckets]
                    recorded[rank].found.append(
                        row._replace(step=step, began=row.began + at[rank], ended=row.ended + at[rank],
                                     buckets=buckets)
                    )  # fmt: skip
        at = [one + 20_000 for one in at]
    found = verdict(run_of(recorded))
    assert any("No rank is consistently slow" in one.headline for one in found)


def test_all_ranks_wait_for_data() -> None:
    found = verdict(made(ranks=[MadeRank(data=4000), MadeRank(data=4000)]))
    assert "they wait for data" in found[0].headline
    assert "num_workers" in found[0].cure


def test_one_huge_bucket_is_cut_by_the_cure() -> None:
    settings = {"fixed": 20.0, "per_byte": 0.0005}
    run = made(bucket_bytes=[4_000_000], **settings)
    sick = verdict(run)[0]
    assert "bucket_cap_mb=" in sick.cure
    assert "holds 100 % of the gradients" in sick.detail
    cured = made(bucket_bytes=[500_000] * 8, **settings)
    assert figures(cured).step < 0.8 * figures(run).step


def test_tiny_buckets_are_named() -> None:
    run = made(bucket_bytes=[20_000] * 40, fixed=150.0)
    sick = verdict(run)[0]
    assert "cut into 40 buckets of 20.0 kB" in sick.headline
    assert "leave bucket_cap_mb out" in sick.cure


def test_a_slow_link_is_named_with_its_speed() -> None:
    found = verdict(made(per_byte=0.08, fixed=100.0))  # 12.5 MB/s
    slow = next(one for one in found if "slow" in one.headline)
    assert "it carries 12." in slow.headline
    assert "Quantize(8)" in slow.cure
    assert "DiLoCo" in slow.cure


def test_unused_parameters_are_named() -> None:
    run = made(unused=["head.weight"], looks_for_unused=True)
    (sick,) = [one for one in verdict(run) if "never" in one.headline]
    assert sick.headline == "1 parameter never gets a gradient: head.weight."
    assert "requires_grad_(False)" in sick.cure
    late = [MadeRank(), MadeRank(data=2000)]
    brief = [MadeRank(data=0, forward=10, backward=10, update=5)] * 2
    for ranks in (late, brief):  # what takes time, or too little of it, hides nothing
        assert verdict(made(unused=["head.weight"], looks_for_unused=True, ranks=ranks))[0] == sick
    (needless,) = [one for one in verdict(made(looks_for_unused=True)) if "find_unused" in one.headline]
    assert "Leave find_unused_parameters out" in needless.cure


def test_discarded_steps_are_counted() -> None:
    found = verdict(made(discarded=[7, 9]))
    (sick,) = [one for one in found if "discarded" in one.headline]
    assert "2 steps of 19 were discarded" in sick.headline
    assert "the first is step 7" in sick.headline


def test_a_rank_that_was_killed_comes_first() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank()]))
    recorded[0].found.append(rows.EndRow(99, "PeerLost: rank 1: its process has ended"))
    recorded[1].found.append(rows.PlaceRow(98, 20, "step 20, backward, at train.py:34 in main"))
    first, *_ = verdict_on(run_of(recorded), figures_of(run_of(recorded)))
    assert "Rank 1 was lost after step 20" in first.headline
    assert "PeerLost" in first.detail
    assert "It was last seen at: step 20, backward, at train.py:34 in main." in first.detail
    assert "syncline run --resilient" in first.cure


def test_a_rank_that_the_others_did_without() -> None:
    lost = rows.RanksRow(0, 1, 13, "rank 1 of 2 was lost", 0, 43_000)
    first, *_ = verdict(made(after={12: [lost]}))
    assert "Before step 13: rank 1 of 2 was lost. The ranks, now 1, continued after 43" in first.headline
    assert "--max-restarts" in first.cure


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
    assert first.headline == (
        "Step 10: the replicas differ in layer1.weight; the error was raised on all ranks."
    )
    assert first.detail == (
        "Found by replica check of Net. In the minority: rank 1. All ranks last agreed on layer1.weight at step 8."
    )
    assert "Load a checkpoint of step 8 or earlier" in first.cure
    assert not any("ended with an error" in one.headline for one in others)  # it is said once
    document = document_of(run, UNMEASURED)
    assert document["findings"][0]["headline"] == first.headline
    (event,) = [one for one in document["events"] if one["kind"] == "diverged"]
    assert (event["step"], "layer1.weight" in event["words"]) == (10, True)
    assert "the replicas differ in layer1.weight" in text_of(document)
    assert page(document).count("Replicas differ</span>") == 1


def test_a_difference_that_stays_is_named_once_and_a_repair_is_no_problem() -> None:
    found = {step: [diverged(step, outcome="warned")] for step in range(5, 15)}
    (warned,) = [one for one in verdict(made(after=found)) if "differ" in one.headline]
    assert warned.headline.startswith("Step 5: ")
    assert warned.headline.endswith("training continued with values that differ, and was found 10 times.")
    (repaired,) = [
        one for one in verdict(made(after={5: [diverged(5, outcome="repaired")]})) if "differ" in one.headline
    ]
    assert (repaired.kind, "Load a checkpoint" in repaired.cure) == ("note", False)


def test_a_check_that_belongs_to_no_step_is_put_after_the_last_one() -> None:
    found = {4: [diverged(None, "", check="sl.check_replicas", num_differing=0, minority_ranks=())]}
    first, *_ = verdict(made(after=found))
    assert first.headline.startswith("Step 4: the replicas differ; ")
    assert first.detail == "Found by sl.check_replicas."


def test_of_many_values_that_differ_three_are_named() -> None:
    found = {4: [diverged(4, f"layer{number}.weight") for number in range(5)]}
    of_replicas = [one.headline for one in verdict(made(after=found)) if "differ" in one.headline]
    assert len(of_replicas) == 4
    assert "2 more values" in of_replicas[-1]


def test_a_trace_without_a_step() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank()], num_steps=0))
    (found,) = verdict_on(run_of(recorded), None)
    assert "No complete step" in found.headline


# ---------------------------------------------------------------------- what if


def test_the_time_of_other_buckets_is_that_of_a_run_with_them() -> None:
    settings = {"fixed": 50.0, "per_byte": 0.0008, "num_steps": 12}
    run = made(bucket_bytes=[1_000_000] * 4, **settings)
    found = figures(run)
    link = link_of(found.buckets)
    assert link is not None
    for size, number in ((2_000_000, 2), (500_000, 8)):
        predicted = wait_of(link, cut_anew(found.buckets, size), found.backward)
        other = figures(made(bucket_bytes=[size] * number, **settings))
        assert predicted == pytest.approx(other.parts["transfer"], rel=0.25, abs=60)


def test_a_link_has_a_fixed_time_and_one_for_its_bytes() -> None:
    found = figures(
        made(bucket_bytes=[500_000, 1_000_000, 2_000_000, 4_000_000], fixed=200.0, per_byte=0.003)
    )
    link = link_of(found.buckets)
    assert link is not None
    assert link.per_byte == pytest.approx(0.003, rel=0.05)
    assert link.fixed == pytest.approx(200, rel=0.2)
    assert Link(0.0, 0.0).bytes_per_second == float("inf")
    assert link_of([]) is None


# ---------------------------------------------------------------------- documents and commands


def test_a_document_is_json_and_bounded() -> None:
    many = made(ranks=[MadeRank()] * 16, num_steps=2500)
    document = json.loads(json.dumps(document_of(many, UNMEASURED)))
    spans = sum(len(one["spans"]) for step in document["steps"].values() for one in step.values())
    assert spans <= MAX_SPANS
    assert len(document["lengths"]) == MAX_POINTS
    assert str(document["choices"]["slowest"]) in document["steps"]
    assert document["metrics"]["loss"][-1] == [2500, pytest.approx(1 / 2500)]


def test_the_text_has_at_most_100_columns() -> None:
    text = text_of(
        document_of(made(ranks=[MadeRank(), MadeRank(data=5100)], bucket_bytes=[1000] * 20), UNMEASURED)
    )
    assert "for rank 1" in text
    assert "and 8 more" in text
    assert max(map(len, text.splitlines())) <= 100


def test_report_and_compare_are_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path / "before", MadeRun(ranks=[MadeRank(), MadeRank(data=5100)]).rows())
    after = written(tmp_path / "after", MadeRun(ranks=[MadeRank(), MadeRank()]).rows())
    assert main(["report", str(before), "--format", "text"]) == 0
    assert "for rank 1" in capsys.readouterr().out
    assert main(["report", str(before), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"]
    assert main(["report", str(before)]) == 0
    assert capsys.readouterr().out.split()[-1] == str(before / "report.html")
    assert "for rank 1" in (before / "report.html").read_text()
    assert main(["compare", str(before), str(after)]) == 0
    assert "takes 58 % less time" in " ".join(capsys.readouterr().out.split())  # a long path folds lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report"], "expected the directory of a trace"),
        (["report", "nowhere"], "there is no directory nowhere"),
        (["report", "."], "has no trace"),
        (["report", ".", "--format", "pdf"], "invalid choice"),
        (["report", ".", "--formt", "text"], "did you mean --format"),
        (["compare", "one"], "expected two directories"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_trace_of_a_newer_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = MadeRun(ranks=[MadeRank()]).rows()
    process = recorded[0][0]
    assert isinstance(process, rows.ProcessRow)
    recorded[0][0] = process._replace(format=rows.FORMAT + 1)
    assert main(["report", str(written(tmp_path / "trace", recorded))]) == 2
    assert "use the version that has recorded the trace" in capsys.readouterr().err


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    directory = written(tmp_path / "trace", MadeRun(ranks=[MadeRank()]).rows())
    program = (
        "import sys; from syncline.tools.cli import main; "
        f"main(['report', {str(directory)!r}]); sys.exit('torch' in sys.modules)"
    )
    assert hangs.run([sys.executable, "-c", program]).returncode == 0


def test_a_chrome_trace_has_every_span_and_bucket_of_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = MadeRun(ranks=[MadeRank(), MadeRank(data=5100)]).rows()
    assert main(["report", str(written(tmp_path / "trace", recorded)), "--format", "chrome"]) == 0
    assert "2 ranks" in capsys.readouterr().out
    run = made(ranks=[MadeRank(), MadeRank(data=5100)])
    for rank in range(2):
        trace = json.loads((tmp_path / "trace" / "chrome" / f"rank-{rank}.json").read_text())
        assert trace["distributedInfo"] == {"backend": "syncline", "rank": rank, "world_size": 2}
        events = trace["traceEvents"]
        steps = [one for one in events if one["name"].startswith("ProfilerStep#")]
        assert [one["name"] for one in steps] == [f"ProfilerStep#{number}" for number in range(2, 21)]
        assert all(one["pid"] == rank for one in events)
        work = [one for one in events if one.get("cat") == "cpu_op"]
        assert len(work) == sum(len(ranks[rank].spans) for ranks in run.steps.values())
        assert sum(one["dur"] for one in work) == sum(one["dur"] for one in steps)
        begun = {one["id"]: one for one in events if one["ph"] == "b"}
        ended = {one["id"]: one for one in events if one["ph"] == "e"}
        assert len(begun) == len(ended) == 4 * len(steps)
        assert all(one["ts"] <= ended[key]["ts"] for key, one in begun.items())
        assert begun["5/Net/0"]["args"] == {
            "bytes": 1_000_000,
            "parameters": ["layer0.weight", "layer0.bias"],
        }


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


# ---------------------------------------------------------------------- programs of all kinds


def recorded_as(found: list[rows.Row], rank: int = 0, **changes: Any) -> ProcessTrace:
    process = rows.ProcessRow(rows.FORMAT, rank, 2, "host", "one", rank, 0, 1e9, "train.py", {})
    return ProcessTrace(process=process._replace(**changes), found=found)


def test_buckets_of_micro_batches_are_sent_after_the_beginning_of_their_own_backward() -> None:
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
    (bucket,) = figures(run_of([recorded_as(found), recorded_as(found, 1)])).buckets
    assert bucket.sent == 40
    assert figures(run_of([recorded_as(found), recorded_as(found, 1)])).backward == 100


def test_two_modules_in_one_loss_are_not_counted_twice() -> None:
    found: list[rows.Row] = []
    for step in range(1, 8):
        at = 1000 * step
        for module in ("One", "Two"):
            found.append(rows.ForwardRow(module, step, at + 100, at + 100, at + 200, True, 0))
        found.append(
            rows.BackwardRow(
                "One", step, at + 300, at + 500, 1, True, [(0, at + 350, at + 400, at + 450)], {}, []
            )
        )
        found.append(
            rows.BackwardRow(
                "Two", step, at + 250, at + 900, 1, True, [(0, at + 600, at + 800, at + 880)], {}, []
            )
        )
        found.append(rows.OptimizerRow("One", "SGD", step, at + 900, at + 1000, False))
    found_figures = figures(run_of([recorded_as(found), recorded_as(found, 1)]))
    assert sum(found_figures.parts.values()) == pytest.approx(found_figures.step)
    assert found_figures.parts["transfer"] == 130


def test_of_a_job_that_was_restarted_the_last_life_counts() -> None:
    first = [found[2:] for found in MadeRun(ranks=[MadeRank()] * 2, num_steps=30).rows()]
    second = [found[2:] for found in MadeRun(ranks=[MadeRank()] * 2, num_steps=10).rows()]
    processes = [recorded_as(found, rank) for rank, found in enumerate(first)]
    processes += [recorded_as(found, rank, pid=9, unix_seconds=1e9 + 60) for rank, found in enumerate(second)]
    run = run_of(processes)
    assert list(run.steps) == list(range(2, 11))
    assert figures(run).parts["late"] == 0


def test_a_process_that_joins_belongs_to_the_life_of_the_others() -> None:
    long = [found[2:] for found in MadeRun(ranks=[MadeRank()] * 2, num_steps=30).rows()]
    processes = [recorded_as(found, rank) for rank, found in enumerate(long)]
    processes.append(recorded_as(long[0][-9:], 2, unix_seconds=1e9 + 0.05))
    assert len(run_of(processes).processes) == 3


def test_hosts_that_never_meet_are_put_on_one_clock_by_their_systems() -> None:
    found = MadeRun(ranks=[MadeRank()]).rows()[0][2:]
    local = [row._replace(buckets=[]) if isinstance(row, rows.BackwardRow) else row for row in found]
    moved = [recorded_as(local), recorded_as(local, 1, clock="other", at=5_000, unix_seconds=1e9 + 0.002)]
    run = run_of(moved)
    assert run.clock_error > 0
    assert run.steps[5][1].began - run.steps[5][0].began == 2000 - 5000


def test_the_rank_that_was_lost_is_the_one_whose_trace_ends_first() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank()] * 3))
    recorded[1].found = [row for row in recorded[1].found if getattr(row, "step", 0) <= 10]
    recorded[2].found = [row for row in recorded[2].found if getattr(row, "step", 0) <= 11]
    recorded[2].found.append(rows.EndRow(10**6, "PeerLost: rank 1"))
    recorded[0].found = [row for row in recorded[0].found if getattr(row, "step", 0) <= 11]
    first, *_ = verdict_on(run_of(recorded), figures_of(run_of(recorded)))
    assert "Rank 1 was lost after step 11" in first.headline


def test_a_rank_that_is_late_by_its_saves() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank(data=5100)]))
    calls = []
    for row in recorded[1].found:
        if isinstance(row, rows.ForwardRow):
            calls.append(rows.CallRow("Checkpointer.save", row.began - 5000, row.began - 1))
        calls.append(row)
    recorded[1].found = calls
    late = verdict_on(run_of(recorded), figures_of(run_of(recorded)))[0]
    assert "time in other calls of Syncline, such as saves" in late.headline
    assert "save less often" in late.cure


def test_unused_parameters_without_find_unused_are_no_setting() -> None:
    (sick,) = [one for one in verdict(made(unused=["head.weight"])) if "never" in one.headline]
    assert "Because of find_unused_parameters=True" not in sick.detail


def test_metrics_of_any_name_and_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = MadeRun(ranks=[MadeRank()]).rows()
    recorded[0] = [
        row._replace(metrics={"name": 1.0, "row": 2.0, "loss": float("nan")})
        if isinstance(row, rows.BackwardRow)
        else row
        for row in recorded[0]
    ]
    directory = written(tmp_path / "trace", recorded)
    for form in ("json", "text", "html", "chrome"):
        assert main(["report", str(directory), "--format", form]) == 0
    assert "NaN" not in (directory / "chrome" / "rank-0.json").read_text()
    capsys.readouterr()
    assert main(["report", str(directory), "--format", "json"]) == 0
    assert "NaN" not in capsys.readouterr().out


def test_a_part_that_begins_after_a_change_has_the_new_rank() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank()]))
    recorded[0].found.insert(30, recorded[0].process._replace(rank=4))
    run = run_of(recorded)
    assert 0 in run.steps[3]
    assert 4 in run.steps[20]


def test_a_rank_that_was_killed_before_another_one_began_to_record_belongs_to_its_life() -> None:
    found = [found[2:] for found in MadeRun(ranks=[MadeRank()] * 2).rows()]
    killed = recorded_as(found[1][:3], 1, unix_seconds=1e9 - 0.2)
    other = recorded_as([*found[0], rows.EndRow(10**6, "PeerLost: rank 1")])
    run = run_of([other, killed])
    assert len(run.processes) == 2
    assert "Rank 1 was lost after step 20" in verdict_on(run, figures_of(run))[0].headline


# ---------------------------------------------------------------------- one figure a quantity, its kind named


def test_a_step_has_one_length_in_the_whole_report() -> None:
    """One slow step moves the mean away from the median, so two kinds of figures would be seen."""
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank()]))
    for one in recorded:
        one.found = [
            later(row, 300_000) if at >= len(one.found) - 3 else row for at, row in enumerate(one.found)
        ]
    run = run_of(recorded)
    found, document = figures(run), document_of(run, UNMEASURED)
    length = "21.3 ms"
    assert sum(found.parts.values()) == found.step
    assert document["facts"][0]["value"] == length
    assert sum(one["us"] for one in document["parts"]) == pytest.approx(found.step, abs=5)
    assert document["predicted"][0]["measured"] == length
    text = text_of(document)
    assert f"A step takes {length} (mean of 17 steps)" in text
    assert "a step (means)" in text
    typical = document["choices"]["typical"]
    assert abs(run.length(typical) - found.step) == min(abs(run.length(n) - found.step) for n in run.steady)


def later(row: Any, by: int) -> Any:
    """Return a row with later times."""
    changed = {
        name: getattr(row, name) + by for name in ("began", "computed_from", "ended") if hasattr(row, name)
    }
    if isinstance(row, rows.BackwardRow):
        changed["buckets"] = [(index, *(time + by for time in times)) for index, *times in row.buckets]
    return row._replace(**changed)


def test_few_steps_get_no_verdict() -> None:
    few = verdict(made(ranks=[MadeRank(), MadeRank(data=5100)], num_steps=12))
    assert [one.kind for one in few] == ["note", "note"]
    assert few[0].headline == "9 steps of 8.6 ms (mean): too few to judge."
    short = verdict(made(ranks=[MadeRank(data=10, forward=100, backward=200, update=50)] * 2))
    assert short[0].headline.endswith("too short to judge.")
    assert "for rank 1" in verdict(made(ranks=[MadeRank(), MadeRank(data=5100)]))[0].headline


def test_the_largest_cost_comes_first_and_each_has_advice() -> None:
    """Buffers take 9 % of a step, and jitter takes less."""
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank(data=450)]))
    for one in recorded:
        one.found = [
            row._replace(computed_from=row.began + 500, ended=row.ended, buffer_bytes=400)
            if isinstance(row, rows.ForwardRow)
            else row
            for row in one.found
        ]
    run = run_of(recorded)
    found = verdict_on(run, figures_of(run))
    shares = [one.weight for one in found if one.cure]
    assert shares == sorted(shares, reverse=True)
    assert "synchronizes buffers" in found[0].headline
    assert 'buffers="none"' in found[0].cure
    assert (found[0].kind, found[0].weight) == ("problem", pytest.approx(0.12, abs=0.02))


def test_parameter_syncs_and_calls_have_advice() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank()]))
    for one in recorded:
        found: list[rows.Row] = []
        for row in one.found:
            if isinstance(row, rows.OptimizerRow):
                found += [
                    rows.CallRow("mean", row.began + 1, row.began + 240),
                    row._replace(began=row.began + 240),
                ]
                found.append(rows.SyncRow("Net", row.step, row.ended - 250, row.ended, ["average"], 8))
            else:
                found.append(row)
        one.found = found
    run = run_of(recorded)
    words = " ".join(map(str, verdict_on(run, figures_of(run))))
    assert "is calls of Syncline: mean." in words
    assert "ddp.report(loss=loss)" in words


def test_ctrl_c_is_no_error() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank()]))
    for one in recorded:
        one.found.append(rows.EndRow(10**6, "KeyboardInterrupt: "))
    run = run_of(recorded)
    first, *_ = verdict_on(run, figures_of(run))
    assert (first.kind, first.headline) == ("note", "The run was stopped by Ctrl-C.")
    events = document_of(run, UNMEASURED)["events"]
    assert [(one["kind"], one["words"]) for one in events] == [
        ("stopped", "rank 0 stopped by Ctrl-C"),
        ("stopped", "rank 1 stopped by Ctrl-C"),
    ]


@pytest.mark.parametrize(
    ("error", "is_error"),
    [("", False), ("KeyboardInterrupt: ", False), ("SystemExit: 0", False), ("SystemExit: 75", False),
     ("SystemExit: 3", True), ("ValueError: 0", True)],
)  # fmt: skip
def test_which_ends_are_errors(error: str, is_error: bool) -> None:
    assert rows.EndRow(0, error).is_error is is_error


def test_what_was_last_done_when_the_contract_was_recorded_is_not_shown() -> None:
    recorded = traces(MadeRun(ranks=[MadeRank(), MadeRank()]))
    for one in recorded:
        row = one.found[0]
        assert isinstance(row, rows.ModuleRow)
        rule = {"what": "gradients", "when": "every backward", "how": "mean", "last_done": "step 1"}
        one.found[0] = row._replace(contract={"title": "Net", "rows": [rule]})
    text = page(document_of(run_of(recorded), UNMEASURED))
    assert "every backward" in text
    assert "step 1<" not in text
    assert "last done" not in text.partition("<script")[0]


def test_reports_and_comparisons_have_at_most_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "a_layer_whose_name_is_" + "very_" * 20 + "long"
    settings = {"unused": [long], "ranks": [MadeRank(), MadeRank(data=5100)]}
    folders = [written(tmp_path / ("run" * 20 + str(n)), MadeRun(**settings).rows()) for n in range(2)]
    assert main(["report", str(folders[0])]) == 0
    assert main(["report", str(folders[0]), "--format", "text"]) == 0
    assert main(["compare", *map(str, folders)]) == 0
    assert main(["watch", "--once", str(folders[0])]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= 100 or line == str(folders[0] / "report.html"), line


# ---------------------------------------------------------------------- predicted and measured


def test_a_prediction_is_compared_with_the_run() -> None:
    """The link of the made run is known, so the machine's figures can be exactly those of it."""
    of_link = Cost(10e-6, 1e-9, 0.0, 0.0)
    machine = replace(UNMEASURED, shared_memory={2: of_link}, gloo={2: of_link}, copy_per_byte=0.0)
    settings = {"ranks": [MadeRank(), MadeRank()], "fixed": 10.0, "per_byte": 1e-3}
    step, waits = document_of(made(**settings), machine)["predicted"]
    assert step["predicted"] == step["measured"]
    assert waits["predicted"] == waits["measured"] != "0.0 ms"


def test_a_run_whose_synchronization_the_planner_does_not_know_has_no_prediction() -> None:
    run = made(ranks=[MadeRank()])
    assert document_of(run, UNMEASURED)["predicted"] == []
