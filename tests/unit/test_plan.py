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
from made_traces import MadeRank, MadeRun, rows

from syncline.compression import After, Chain, MeanExchange, PowerSGD, Quantize
from syncline.tools.cli import main
from syncline.tools.plan import (
    CODECS,
    UNMEASURED,
    Cluster,
    Gradient,
    Job,
    Machine,
    Option,
    Planner,
    Reduction,
    advice_on,
    codec_of,
    exposed_time,
    job_of_size,
    kinds_of_options,
    load_machine,
    parse_rate,
    parse_seconds,
    plan_json,
    plan_text,
)
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


@pytest.mark.parametrize("rank", [2, 4])
def test_the_bytes_of_power_sgd_are_those_that_its_encoder_sends(rank: int) -> None:
    def program(transport: Transport) -> int:
        compression, device = PowerSGD(rank), torch.device("cpu")
        exchange = MeanExchange(compression, SHAPES, dtype=torch.float32, device=device, transport=transport)
        return sum(4 * one.numel for one in compression.encoder(exchange.layout).means())

    (sent, _) = run_ranks(2, program)
    planned = planner_of(job_of(gradients())).predict(Option(compression=codec_of(f"PowerSGD({rank})")))
    assert planned.sent_bytes == sent


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_bytes_of_codes_are_those_that_are_sent(bits: int) -> None:
    job = job_of([Gradient("w", (128, 1000), 1.0)])
    planned = planner_of(job).predict(Option(compression=codec_of(f"Quantize({bits})")))
    assert planned.sent_bytes == Quantize(bits).num_bytes(128_000)


def test_every_compression_that_is_compared_can_be_made() -> None:
    import syncline as sl

    for codec in CODECS:
        made = eval(f"sl.compression.{codec.code}", {"sl": sl})
        assert isinstance(made, sl.compression.Compression)


def test_a_strategy_sends_in_a_round_and_not_in_every_step() -> None:
    planner = planner_of()
    every_step, in_rounds = (
        planner.predict(Option()),
        planner.predict(Option(strategy="LocalSGD", every=8)),
    )
    assert in_rounds.sent_bytes == every_step.sent_bytes / 8
    assert in_rounds.wire_bytes == pytest.approx(every_step.wire_bytes / 8)


def test_each_host_of_a_ring_sends_nearly_twice_the_bytes() -> None:
    many = replace(SLOW, hosts=10)
    assert planner_of(cluster=many).predict(Option()).wire_bytes == pytest.approx(1.8 * JOB.num_bytes)
    assert planner_of(cluster=SLOW).predict(Option()).wire_bytes == pytest.approx(JOB.num_bytes)


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


@pytest.mark.parametrize("engine", ["shm", "nccl"])
def test_a_plan_for_a_hundred_thousand_ranks(engine: str) -> None:
    cluster = Cluster(
        hosts=12_500,
        ranks_per_host=8,
        cores_per_host=64,
        link_bytes_per_second=parse_rate("400Gbit"),
        engine="nccl" if engine == "nccl" else "shm",
    )
    planner = planner_of(job_of_size(1_300_000_000, compute=0.9), cluster, load_machine(engine=engine))
    advice = advice_on(planner)
    assert len(advice.alternatives) == len(kinds_of_options())
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
    planner = planner_of()
    cast = next(
        one
        for one in advice_on(planner).alternatives
        if one.prediction.option.compression is codec_of("Cast()")
    )
    text = cast.pays.removeprefix("faster below ").removesuffix("/s").replace(" ", "")
    at = parse_rate(text)
    below, above = (
        planner_of(cluster=replace(SLOW, link_bytes_per_second=factor * at)) for factor in (0.9, 1.1)
    )
    option = cast.prediction.option
    assert below.predict(option).step < below.predict(Option()).step
    assert above.predict(option).step > above.predict(Option()).step


def test_a_model_that_does_not_fit_needs_another_tool() -> None:
    crowded = replace(ONE_HOST, memory_bytes=100_000_000)
    (warning,) = advice_on(planner_of(cluster=crowded)).warnings
    assert "does not fit" in warning
    assert "FSDP" in warning


def test_a_model_that_fits_only_in_shards_says_so() -> None:
    crowded = replace(ONE_HOST, memory_bytes=150_000_000)
    (warning,) = advice_on(planner_of(cluster=crowded)).warnings
    assert "With the defaults it does not fit" in warning
    advice = advice_on(planner_of(cluster=crowded))
    assert advice.exact.option.sharded
    assert advice.recommended.option.sharded


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


def test_a_job_that_is_too_small_for_several_ranks_says_so() -> None:
    tiny = job_of_size(20_000_000, compute=0.001)
    (warning,) = advice_on(planner_of(tiny)).warnings
    assert "Use one process" in warning


def test_the_text_has_the_numbers_that_decided_and_every_way() -> None:
    planner = planner_of()
    text = plan_text(planner, advice_on(planner))
    for words in ("The numbers that decided", "sl.DistributedDataParallel(model", "200 Mbit/s", "DiLoCo(20)"):
        assert words in text
    assert "this machine was not measured" in text
    assert "sharded=True cannot be combined with a compression yet" in text


@pytest.mark.parametrize("machine", [UNMEASURED, replace(UNMEASURED, is_measured=True, name="m" * 150)])
@pytest.mark.parametrize("cluster", [SLOW, ONE_HOST, replace(SLOW, memory_bytes=1000)])
def test_a_plan_has_at_most_100_columns(machine: Machine, cluster: Cluster) -> None:
    planner = planner_of(replace(JOB, name="n" * 150), cluster, machine)
    for line in plan_text(planner, advice_on(planner)).splitlines():
        assert len(line) <= 100, line


def test_a_plan_says_how_wrong_it_may_be() -> None:
    unknown, known = (
        " ".join(plan_text(planner, advice_on(planner)).split())
        for planner in (planner_of(), planner_of(machine=replace(UNMEASURED, is_measured=True)))
    )
    assert "How wrong this can be is not known" in unknown
    step = advice_on(planner_of()).recommended.step
    assert f"Expect {850 * step:.1f} ms to {1150 * step:.1f} ms." in known
    assert "step ± 15 %" in known


def test_ranks_that_train_more_than_their_number_faster_are_explained() -> None:
    """The optimizer's step is long, and with sharded=True each of two ranks makes half of it."""
    planner = planner_of(
        Job(name="j", gradients=JOB.gradients, forward=0.01, backward=0.02, update=0.4), ONE_HOST
    )
    advice = advice_on(planner)
    assert advice.recommended.option.sharded
    assert advice.speedup > 2
    text = " ".join(plan_text(planner, advice).split())
    assert "more than 2 times, because a rank steps only its part of the parameters" in text
    assert "less than the computation of one process, 430.0 ms" in text
    usual = planner_of()
    assert "more than 2 times" not in plan_text(usual, advice_on(usual))


def test_the_json_is_the_same_plan() -> None:
    planner = planner_of()
    found = json.loads(json.dumps(plan_json(planner, advice_on(planner))))
    assert found["recommended"]["arguments"] == advice_on(planner).recommended.option.code
    assert len(found["options"]) == len(kinds_of_options())


# ---------------------------------------------------------------------- figures of a machine


def test_the_figures_of_a_machine_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(UNMEASURED.to_json()))
    assert load_machine(path) == UNMEASURED


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[]", "nonsense", '{"syncline machine": 2}', '{"syncline machine": 1}'),
        json.dumps({**UNMEASURED.to_json(), "copy_per_byte": "fast"}),
        json.dumps({**UNMEASURED.to_json(), "copy_per_byte": float("nan")}),
        json.dumps({**UNMEASURED.to_json(), "gloo": {}}),
        json.dumps({**UNMEASURED.to_json(), "calls": {"2": [1.0, 1.0, -1.0, 1.0]}}),
    ],
)
def test_a_file_without_figures_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="syncline bench --calibrate"):
        load_machine(path)


def test_without_a_measurement_the_figures_are_those_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_machine() is UNMEASURED
    (tmp_path / "syncline").mkdir()
    measured = replace(UNMEASURED, is_measured=True, copy_per_byte=1.0)
    (tmp_path / "syncline" / "machine.json").write_text(json.dumps(measured.to_json()))
    assert load_machine() == measured


def test_a_compression_that_was_not_measured_costs_as_much_as_the_slowest() -> None:
    known = {"Cast()": UNMEASURED.coding("Cast()"), "Quantize(4)": UNMEASURED.coding("Quantize(4)")}
    few = replace(UNMEASURED, codings=known)
    assert few.coding("PowerSGD(2)") == known["Quantize(4)"]


@pytest.mark.parametrize("text", ["", "fast", "0Mbit", "10", "Gbit", "1.2.3Gbit"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a bandwidth"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "soon", "10", "1..2ms"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        parse_seconds(text)


# ---------------------------------------------------------------------- the command line


def test_a_plan_of_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--parameters", "124M", "--compute", "80ms", "--hosts", "4", "-n", "2", "--bandwidth", "1Gbit"]
    assert main(["plan", *options]) == 0
    assert "8 ranks on 4 hosts" in capsys.readouterr().out


def test_a_plan_of_a_trace_on_another_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, found in enumerate(MadeRun(ranks=[MadeRank(), MadeRank()]).rows()):
        (tmp_path / f"rank-0000{rank}.here.1.000000.trace.jsonl").write_bytes(rows.encode(*found))
    assert (
        main(["plan", "--trace", str(tmp_path), "--hosts", "2", "--bandwidth", "100Mbit", "--format", "json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"] == 2
    assert found["compute"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "expected one of"),
        (["--parameters", "1M"], "belong together"),
        (["--parameters", "lots", "--compute", "1s"], "expected a number of parameters"),
        (["--parameters", "1M", "--compute", "1s", "--hosts", "2"], "--bandwidth"),
        (["--parameters", "1M", "--compute", "1s", "--hosts", "0"], "at least 1"),
        (["--parameters", "1M", "--compute", "1s", "--memory", "much"], "expected a size"),
        (["model.py"], "FILE.py:FUNCTION"),
        (["absent.py:build"], "FILE.py:FUNCTION"),
        (["--trace", "absent"], "absent"),
        (["--parameters", "1M", "--compute", "1s", "--machine", "absent"], "cannot read"),
    ],
)
def test_wrong_usage_is_explained(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 2
    found = capsys.readouterr()
    assert words in found.err
    assert not found.out
