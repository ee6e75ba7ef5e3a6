"""The planner: its model of a step, what it counts, what it recommends, and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_traces import MadeRank, MadeRun, written

import syncline as sl
from support.goldens import assert_golden
from syncline.compression import After, Chain, Compression, MeanExchange, PowerSGD, Quantize
from syncline.tools.cli import main
from syncline.tools.plan.advice import advice_on, plan_json, plan_text
from syncline.tools.plan.cluster import Cluster, parse_rate, parse_seconds
from syncline.tools.plan.job import Gradient, Job, job_of_size
from syncline.tools.plan.machine import UNMEASURED, Machine, load_machine
from syncline.tools.plan.options import CODECS, KINDS, Option, codec_of
from syncline.tools.plan.predict import Planner, Reduction, exposed_time
from syncline.transport import Transport, run_ranks

SLOW = Cluster(hosts=2, ranks_per_host=1, cores_per_host=2, link_bytes_per_second=25e6)
ONE_HOST = Cluster(ranks_per_host=2, cores_per_host=2)
JOB = job_of_size(5_000_000, compute=0.2)


def planner_of(job: Job = JOB, cluster: Cluster = SLOW, machine: Machine = UNMEASURED) -> Planner:
    return Planner.of(job, cluster, machine)


# ---------------------------------------------------------------------- the timeline

TIMES = st.floats(0, 10, allow_nan=False)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=8), TIMES)
def test_a_step_waits_for_what_the_link_has_not_carried_when_the_backward_ends(
    sent: list[tuple[float, float]], extra: float
) -> None:
    sent.sort()
    backward = sent[-1][0] + extra
    free = 0.0
    for ready, on_link in sent:  # one after the other
        free = max(free, ready) + on_link
    found = exposed_time([Reduction(*one) for one in sent], backward)
    assert found == pytest.approx(max(0.0, free - backward))


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=8))
def test_over_a_link_without_a_limit_only_work_is_exposed(work: list[tuple[float, float, float]]) -> None:
    reductions = [
        Reduction(ready=float(at), on_link=0.0, encoding=one[0], stolen=one[1], decoding=one[2])
        for at, one in enumerate(work)
    ]
    found = exposed_time(reductions, backward=float(len(work)))
    assert found == pytest.approx(sum(map(sum, work)))


def test_a_bucket_that_is_ready_only_at_the_end_steals_nothing_from_the_backward() -> None:
    assert exposed_time([Reduction(5.0, 2.0, stolen=2.0)], backward=5.0) == 2.0


# ---------------------------------------------------------------------- bytes


SHAPES = ((300, 200), (128,), (64, 64), (40, 3))


def gradients() -> list[Gradient]:
    return [Gradient(str(at), shape, (at + 1) / len(SHAPES)) for at, shape in enumerate(SHAPES)]


def job_of(shapes: list[Gradient]) -> Job:
    return Job(name="j", gradients=shapes, forward=0.1, backward=0.2, update=0.05)


def test_the_bytes_of_a_compression_are_those_that_it_sends_and_each_can_be_made() -> None:
    for rank in (2, 4):

        def program(transport: Transport, rank: int = rank) -> int:
            made = MeanExchange(
                PowerSGD(rank), SHAPES, dtype=torch.float32, device=torch.device("cpu"), transport=transport
            )
            return sum(4 * one.numel for one in PowerSGD(rank).encoder(made.layout).means())

        (sent, _) = run_ranks(2, program)
        option = Option(compression=codec_of(f"PowerSGD({rank})"))
        assert planner_of(job_of(gradients())).predict(option).sent_bytes == sent
    job = job_of([Gradient("w", (128, 1000), 1.0)])
    for bits in (8, 4, 2):
        planned = planner_of(job).predict(Option(compression=codec_of(f"Quantize({bits})")))
        assert planned.sent_bytes == Quantize(bits).num_bytes(128_000)
    for codec in CODECS:
        assert isinstance(eval(f"sl.compression.{codec.code}", {"sl": sl}), Compression)


def test_bytes_of_rounds_and_of_rings() -> None:
    planner = planner_of()
    every_step = planner.predict(Option())
    in_rounds = planner.predict(Option(strategy="LocalSGD", every=8))
    assert in_rounds.sent_bytes == every_step.sent_bytes / 8
    assert in_rounds.wire_bytes == pytest.approx(every_step.wire_bytes / 8)
    many = replace(SLOW, hosts=10)
    assert planner_of(cluster=many).predict(Option()).wire_bytes == pytest.approx(1.8 * JOB.num_bytes)
    assert every_step.wire_bytes == pytest.approx(JOB.num_bytes)


# ---------------------------------------------------------------------- time


def test_a_slow_link_is_the_limit_and_small_buckets_leave_little_after_it() -> None:
    planner = planner_of()
    on_wire = JOB.num_bytes / 25e6
    assert planner.predict(Option()).step > on_wire
    whole = planner.predict(Option(cap_mb=25.0)).step
    parts = planner.predict(Option(cap_mb=2.0)).step
    assert parts < whole  # one bucket is sent only when the backward has ended
    assert planner.predict(Option()).step < 1.05 * parts  # and this is the automatic choice


def test_compressed_buckets_are_those_of_the_wrapper() -> None:
    planner = planner_of()
    few, many = (
        planner.predict(Option(compression=codec_of(code))).num_buckets
        for code in ("PowerSGD(2)", "Quantize(4)")
    )
    assert few < many / 2
    assert PowerSGD(2).sends_little
    assert not Quantize(4).sends_little
    assert After(3, Chain(PowerSGD(2), Quantize(4))).sends_little
    chosen = Option(compression=codec_of("PowerSGD(2)"), cap_mb=1.0)
    assert planner.predict(chosen).num_buckets == planner.predict(Option(cap_mb=1.0)).num_buckets


def test_one_rank_has_nothing_to_send() -> None:
    planner = planner_of(cluster=Cluster(ranks_per_host=1, cores_per_host=2))
    assert planner.predict(Option()).step == pytest.approx(JOB.compute)
    assert "nothing to synchronize" in plan_text(planner, advice_on(planner))


def test_idle_cores_hide_what_busy_cores_cannot() -> None:
    gloo = replace(ONE_HOST, engine="gloo")
    busy = planner_of(cluster=gloo).predict(Option(cap_mb=2.0))
    idle = planner_of(cluster=replace(gloo, cores_per_host=8)).predict(Option(cap_mb=2.0))
    assert idle.exposed < busy.exposed


def test_a_plan_for_a_hundred_thousand_ranks() -> None:
    rate = parse_rate("400Gbit")
    for engine in ("shm", "nccl"):
        cluster = Cluster(hosts=12_500, ranks_per_host=8, cores_per_host=64, link_bytes_per_second=rate)
        cluster = replace(cluster, engine="nccl" if engine == "nccl" else "shm")
        machine = load_machine(engine=engine)
        advice = advice_on(planner_of(job_of_size(1_300_000_000, compute=0.9), cluster, machine))
        assert len(advice.alternatives) == len(KINDS)
        assert all(math.isfinite(one.prediction.step) for one in advice.alternatives)
        ring, tree = 2 * 12_499 * cluster.latency_seconds, 2 * 14 * cluster.latency_seconds
        assert advice.exact.step > (tree if engine == "nccl" else ring)


# ---------------------------------------------------------------------- advice


def test_over_a_fast_link_nothing_has_to_be_set() -> None:
    advice = advice_on(planner_of(cluster=replace(SLOW, link_bytes_per_second=1e12, cores_per_host=8)))
    assert advice.recommended.option.is_exact
    assert not advice.warnings


def test_over_a_slow_link_the_mildest_way_that_is_nearly_as_fast_is_recommended() -> None:
    advice = advice_on(planner_of())
    assert not advice.recommended.option.is_exact
    assert advice.recommended.step < 0.5 * advice.exact.step
    milder = advice.alternatives[: [one.prediction for one in advice.alternatives].index(advice.recommended)]
    saved = advice.exact.step - advice.fastest.step
    assert all(advice.exact.step - one.prediction.step < 0.8 * saved for one in milder)


def test_each_alternative_says_from_when_it_is_faster() -> None:
    found = advice_on(planner_of()).alternatives
    (cast,) = [one for one in found if one.prediction.option.compression is codec_of("Cast()")]
    at = parse_rate(cast.pays.removeprefix("faster below ").removesuffix("/s").replace(" ", ""))
    for factor, is_faster in ((0.9, True), (1.1, False)):
        there = planner_of(cluster=replace(SLOW, link_bytes_per_second=factor * at))
        assert (there.predict(cast.prediction.option).step < there.predict(Option()).step) is is_faster


def test_a_model_that_does_not_fit_or_only_in_shards_says_so() -> None:
    (warning,) = advice_on(planner_of(cluster=replace(ONE_HOST, memory_bytes=100_000_000))).warnings
    assert "does not fit" in warning
    assert "FSDP" in warning
    advice = advice_on(planner_of(cluster=replace(ONE_HOST, memory_bytes=150_000_000)))
    (warning,) = advice.warnings
    assert "With the defaults it does not fit" in warning
    assert advice.exact.option.sharded
    assert advice.recommended.option.sharded
    (warning,) = advice_on(planner_of(job_of_size(20_000_000, compute=0.001))).warnings
    assert "Use one process" in warning


def test_an_option_that_does_not_fit_is_not_recommended() -> None:
    """Without the limit, an option that averages rarely is recommended. It needs more memory."""
    slow = replace(ONE_HOST, hosts=4, link_bytes_per_second=1e6)
    planner = planner_of(cluster=slow)
    assert not advice_on(planner).recommended.option.is_exact
    sharded = next(one.prediction for one in advice_on(planner).alternatives if one.prediction.option.sharded)
    limit = slow.ranks_per_host * int(sharded.memory_bytes * 1.01)
    advice = advice_on(planner_of(cluster=replace(slow, memory_bytes=limit)))
    assert advice.recommended.option.sharded
    unfit = {one.prediction.option.words for one in advice.alternatives if one.pays == "does not fit"}
    assert unfit == {one.prediction.option.words for one in advice.alternatives} - {sharded.option.words}


# ---------------------------------------------------------------------- text


def words_of(planner: Planner) -> str:
    return " ".join(plan_text(planner, advice_on(planner)).split())


def test_the_text_has_the_numbers_that_decided_and_every_way() -> None:
    planner = planner_of()
    assert_golden("plan", plan_text(planner, advice_on(planner)))
    found = json.loads(json.dumps(plan_json(planner, advice_on(planner))))
    assert found["recommended"]["arguments"] == advice_on(planner).recommended.option.code
    assert len(found["options"]) == len(KINDS)


def test_a_plan_says_how_wrong_it_may_be_in_at_most_100_columns() -> None:
    known = replace(UNMEASURED, is_measured=True, name="m" * 150)
    for machine in (UNMEASURED, known):
        for cluster in (SLOW, ONE_HOST, replace(SLOW, memory_bytes=1000)):
            planner = planner_of(replace(JOB, name="n" * 150), cluster, machine)
            for line in plan_text(planner, advice_on(planner)).splitlines():
                assert len(line) <= 100, line
    assert "How wrong this can be is not known" in words_of(planner_of())
    text, step = words_of(planner_of(machine=known)), advice_on(planner_of()).recommended.step
    assert f"Expect {850 * step:.1f} ms to {1150 * step:.1f} ms." in text
    assert "step ± 15 %" in text


def test_ranks_that_train_more_than_their_number_faster_are_explained() -> None:
    """The optimizer's step is long, and with sharded=True each of two ranks makes half of it."""
    job = Job(name="j", gradients=JOB.gradients, forward=0.01, backward=0.02, update=0.4)
    planner = planner_of(job, ONE_HOST)
    advice = advice_on(planner)
    assert advice.recommended.option.sharded
    assert advice.speedup > 2
    assert "more than 2 times, because a rank steps only its part of the parameters" in words_of(planner)
    assert "less than the computation of one process, 430.0 ms" in words_of(planner)
    assert "more than 2 times" not in words_of(planner_of())


# ---------------------------------------------------------------------- figures of a machine


def test_the_figures_of_a_machine_survive_a_file_which_is_checked(tmp_path: Path) -> None:
    path, figures = tmp_path / "machine.json", UNMEASURED.to_json()
    path.write_text(json.dumps(figures))
    assert load_machine(path) == UNMEASURED
    for text in (
        *("{}", "[]", "nonsense", '{"syncline machine": 2}', '{"syncline machine": 1}'),
        json.dumps({**figures, "copy_per_byte": "fast"}),
        json.dumps({**figures, "copy_per_byte": float("nan")}),
        json.dumps({**figures, "gloo": {}}),
        json.dumps({**figures, "calls": {"2": [1.0, 1.0, -1.0, 1.0]}}),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="syncline bench --calibrate"):
            pytest.fail(f"{text} is {load_machine(path)}")


def test_without_a_measurement_the_figures_are_those_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_machine() is UNMEASURED
    (tmp_path / "syncline").mkdir()
    measured = replace(UNMEASURED, is_measured=True, copy_per_byte=1.0)
    (tmp_path / "syncline" / "machine.json").write_text(json.dumps(measured.to_json()))
    assert load_machine() == measured
    known = {code: UNMEASURED.coding(code) for code in ("Cast()", "Quantize(4)")}
    few = replace(UNMEASURED, codings=known)
    assert few.coding("PowerSGD(2)") == known["Quantize(4)"], "not measured: as the slowest"


def test_what_is_no_bandwidth_and_no_time_is_refused() -> None:
    for text in ("", "fast", "0Mbit", "10", "Gbit", "1.2.3Gbit"):
        with pytest.raises(ValueError, match="expected a bandwidth"):
            pytest.fail(f"{text!r} is {parse_rate(text)}")
    for text in ("", "soon", "10", "1..2ms"):
        with pytest.raises(ValueError, match="expected a time"):
            pytest.fail(f"{text!r} is {parse_seconds(text)}")


# ---------------------------------------------------------------------- the command line


def test_a_plan_of_a_size_and_of_a_trace_on_another_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = "--parameters 124M --compute 80ms --hosts 4 -n 2 --bandwidth 1Gbit"
    assert main(["plan", *size.split()]) == 0
    assert "8 ranks on 4 hosts" in capsys.readouterr().out
    trace = str(written(tmp_path, MadeRun(ranks=[MadeRank(), MadeRank()]).rows()))
    cluster = "--hosts 2 --bandwidth 100Mbit --format json"
    assert main(["plan", "--trace", trace, *cluster.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"] == 2
    assert found["compute"] > 0


def test_wrong_usage_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    size = "--parameters 1M --compute 1s"
    for options, words in (
        ("", "expected one of"),
        ("--parameters 1M", "belong together"),
        ("--parameters lots --compute 1s", "expected a number of parameters"),
        (f"{size} --hosts 2", "--bandwidth"),
        (f"{size} --hosts 0", "expected a number of hosts from 1"),
        (f"{size} --memory much", "expected a size"),
        ("model.py", "FILE.py:FUNCTION"),
        ("absent.py:build", "FILE.py:FUNCTION"),
        ("--trace absent", "absent"),
        (f"{size} --machine absent", "cannot use absent: No such file"),
    ):
        assert main(["plan", *options.split()]) == 2, options
        found = capsys.readouterr()
        assert words in found.err, options
        assert not found.out, options
