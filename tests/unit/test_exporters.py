"""Exporters: what a run has done is read back from the real client libraries. Ranks are threads."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hangs
import syncline as sl
from syncline.events import OBSERVERS, RanksChanged
from syncline.exporters.base import MAX_METRICS, MAX_MODULES, Names, import_client
from syncline.transport import Transport, run_ranks


def train(transport: Transport, num_steps: int = 3, **settings: Any) -> sl.DistributedDataParallel:
    """Train a net with a buffer, in several buckets. The loss is reported."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.Linear(3, 1))
    ddp = sl.DistributedDataParallel(net, process_group=transport, bucket_cap_mb=1e-5, **settings)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = ddp(torch.full((2, 2), 1.0 + step + transport.rank)).square().mean()
        ddp.report(loss=loss)
        loss.backward()
        optimizer.step()
    return ddp


def train_and_diverge(transport: Transport) -> None:
    """Train, write to a parameter of rank 1, and train until the check finds it."""
    ddp = train(transport, replica_check=sl.ReplicaCheck(every=1))
    with torch.no_grad():
        ddp.module[1].bias.data += float(transport.rank == 1)
    with pytest.raises(sl.ReplicaDivergence):
        ddp(torch.ones(2, 2)).sum().backward()


def train_with_a_discarded_step(transport: Transport) -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport, on_nonfinite="skip")
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for value in (1.0, float("nan"), 2.0):
        optimizer.zero_grad()
        ddp(torch.full((1, 1), value + transport.rank)).sum().backward()
        optimizer.step()


def train_in_micro_batches(transport: Transport) -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport)
    for _ in range(2):
        with ddp.no_sync():
            ddp(torch.full((1, 1), 1.0 + transport.rank)).sum().backward()
        ddp(torch.full((1, 1), 1.0 + transport.rank)).sum().backward()


def sizes(ddp: sl.DistributedDataParallel) -> int:
    """The bytes of the buckets of the last step."""
    assert ddp.last_step is not None
    return sum(one.payload_bytes for one in ddp.last_step.buckets)


ranks_change = RanksChanged(0, 1, 4, "rank 1 of 2 was lost", 1.0, 2.0, 1)


def change_ranks() -> None:
    """Say that a rank was lost, as `sl.steps` does. `tests/fault` loses real ones."""
    for receive in OBSERVERS.ranks_changed:
        receive(ranks_change)


# ---------------------------------------------------------------------- what all share


def test_importing_syncline_or_its_exporters_imports_no_client_library() -> None:
    program = """
import sys, torch, syncline as sl
sl.exporters, sl.exporters.TensorBoard, sl.exporters.OpenTelemetry, sl.exporters.Prometheus
print([name for name in sys.modules if name.startswith(("tensorboard", "torch.utils.tensorboard", "prometheus"))])
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    result = hangs.run([sys.executable, "-c", program])
    assert (result.stdout, result.stderr) == ("[]\n[]\n", "")


@pytest.mark.parametrize(
    ("exporter", "module", "extra"),
    [
        ("TensorBoard", "torch.utils.tensorboard", "tensorboard"),
        ("OpenTelemetry", "opentelemetry.trace", "opentelemetry"),
        ("Prometheus", "prometheus_client", "prometheus"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_extra(
    exporter: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    arguments = (tmp_path,) if exporter == "TensorBoard" else ()
    with pytest.raises(
        ImportError, match=rf"exporters\.{exporter} needs .*pip install 'syncline\[{extra}\]'"
    ):
        getattr(sl.exporters, exporter)(*arguments)


def test_the_extras_are_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for extra in ("tensorboard", "opentelemetry", "prometheus"):
        assert f"\n{extra} = [" in text


def test_names_beyond_the_limit_share_a_label() -> None:
    names = Names(3)
    assert [names.label(str(number)) for number in range(5)] == ["0", "1", "2", "other", "other"]
    assert [names.fits(str(number)) for number in range(5)] == [True, True, True, False, False]


def test_a_module_that_exists_is_imported() -> None:
    assert import_client("json", exporter="X", package="x", extra="x").dumps(1) == "1"


# ---------------------------------------------------------------------- Prometheus


@pytest.fixture
def registry() -> Any:
    return pytest.importorskip("prometheus_client").CollectorRegistry()


def test_prometheus_counts_steps_waits_and_bytes_of_each_rank(registry: Any) -> None:
    with sl.exporters.Prometheus(registry):
        found = run_ranks(2, train)
    for rank in range(2):
        labels = {"rank": str(rank), "module": "Sequential"}
        values = {
            name: registry.get_sample_value(f"syncline_{name}", labels)
            for name in ("steps_total", "step_seconds_count", "exposed_wait_seconds_count", "step_number")
        }
        assert values == {
            "steps_total": 3,
            "step_seconds_count": 2,  # the length of the first step is unknown
            "exposed_wait_seconds_count": 3,
            "step_number": 3,
        }
        assert registry.get_sample_value("syncline_step_seconds_sum", labels) > 0
        assert registry.get_sample_value("syncline_ranks", {"rank": str(rank)}) == 2
        sent = {"rank": str(rank), "what": "gradients"}
        assert registry.get_sample_value("syncline_sent_bytes_total", sent) == 3 * sizes(found[rank])
        buffers = {"rank": str(rank), "what": "buffers"}
        assert registry.get_sample_value("syncline_sent_bytes_total", buffers) > 0
        last = found[rank].last_step
        assert last is not None
        loss = registry.get_sample_value("syncline_metric", {"rank": str(rank), "name": "loss"})
        assert loss == last.metrics["loss"]


def test_prometheus_counts_what_went_wrong(registry: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with sl.exporters.Prometheus(registry):
            run_ranks(3, train_and_diverge)
            run_ranks(2, train_with_a_discarded_step)
            change_ranks()
    diverged = {"rank": "2", "outcome": "raised"}
    assert registry.get_sample_value("syncline_divergences_total", diverged) == 1
    labels = {"rank": "1", "module": "Linear"}
    assert registry.get_sample_value("syncline_discarded_steps_total", labels) == 1
    assert registry.get_sample_value("syncline_steps_total", labels) == 3
    assert registry.get_sample_value("syncline_ranks_lost_total", {"rank": "0"}) == 1
    assert registry.get_sample_value("syncline_ranks", {"rank": "0"}) == 1
    assert (
        registry.get_sample_value("syncline_ranks", {"rank": "2"}) is None
    )  # the numbers of ranks have changed


def test_prometheus_measures_calls_and_parameter_syncs(registry: Any) -> None:
    def rank(transport: Transport) -> None:
        train(transport, 4, strategy=sl.LocalSGD(2))
        sl.mean(1.0, group=transport)

    with sl.exporters.Prometheus(registry):
        run_ranks(2, rank)
    labels = {"rank": "1", "module": "Sequential"}
    assert registry.get_sample_value("syncline_parameter_sync_seconds_count", labels) == 2
    assert registry.get_sample_value("syncline_steps_total", labels) == 4
    assert registry.get_sample_value("syncline_call_seconds_count", {"rank": "1", "name": "mean"}) == 1
    sent = {"rank": "1", "what": "parameters"}
    assert registry.get_sample_value("syncline_sent_bytes_total", sent) > 0


def test_micro_batches_are_one_step(registry: Any) -> None:
    with sl.exporters.Prometheus(registry):
        run_ranks(2, train_in_micro_batches)
    assert registry.get_sample_value("syncline_steps_total", {"rank": "0", "module": "Linear"}) == 2


def test_prometheus_keeps_at_most_so_many_series(registry: Any) -> None:
    def rank(transport: Transport) -> None:
        for _ in range(MAX_MODULES + 5):
            ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport)
            for number in range(4):
                ddp.report(**{f"{len(str(id(ddp)))}_{number}_{one}": 1.0 for one in range(20)})
                ddp(torch.ones(1, 1)).sum().backward()

    with sl.exporters.Prometheus(registry):
        run_ranks(1, rank)
    samples = [one for family in registry.collect() for one in family.samples]
    assert len({one.labels["module"] for one in samples if "module" in one.labels}) == MAX_MODULES + 1
    assert sum(one.name == "syncline_metric" for one in samples) == MAX_METRICS
    others = {"rank": "0", "module": "other"}
    assert registry.get_sample_value("syncline_steps_total", others) == 4 * 5


def test_a_registry_takes_one_exporter(registry: Any) -> None:
    exporter = sl.exporters.Prometheus(registry)
    with pytest.raises(ValueError, match="expected registry to have no metrics of Syncline"):
        sl.exporters.Prometheus(registry)
    for _ in range(2):
        with exporter:
            run_ranks(1, lambda t: train(t, 1))
    assert registry.get_sample_value("syncline_steps_total", {"rank": "0", "module": "Sequential"}) == 2


def test_training_goes_on_when_the_client_library_fails(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = sl.exporters.Prometheus(registry)
    monkeypatch.setattr(exporter._metrics, "steps", None)
    with exporter:
        with pytest.warns(RuntimeWarning) as warned:
            run_ranks(1, train)
        assert OBSERVERS.backward_ended == ()
    (one,) = warned.list
    assert "sl.exporters.Prometheus stops, because of AttributeError" in str(one.message)
    assert "Training continues" in str(one.message)
    assert one.filename == __file__  # it shows a line of the program


# ---------------------------------------------------------------------- TensorBoard


@pytest.fixture
def tensorboard() -> Any:
    return pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars_in(tensorboard: Any, directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of a directory: steps and values by tag."""
    found = tensorboard.EventAccumulator(str(directory)).Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def texts_in(tensorboard: Any, directory: Path) -> list[tuple[int, str]]:
    found = tensorboard.EventAccumulator(str(directory)).Reload()
    return [
        (one.step, one.tensor_proto.string_val[0].decode())
        for one in found.Tensors("syncline/events/text_summary")
    ]


def test_tensorboard_writes_the_numbers_of_rank_0(tensorboard: Any, tmp_path: Path) -> None:
    with sl.exporters.TensorBoard(tmp_path, every=1):
        found = run_ranks(2, train)
    assert len(list(tmp_path.iterdir())) == 1
    scalars = scalars_in(tensorboard, tmp_path)
    assert [step for step, _ in scalars["loss"]] == [1, 2, 3]
    last = found[0].last_step
    assert last is not None
    assert scalars["loss"][-1][1] == pytest.approx(last.metrics["loss"])
    assert scalars["backward/payload_bytes"][-1][1] == sizes(found[0])
    assert [step for step, _ in scalars["step/duration_seconds"]] == [2, 3]
    assert {tag for tag in scalars if "/" in tag} == {
        "backward/duration_seconds", "backward/payload_bytes", "backward/waited_seconds", "step/duration_seconds",
    }  # fmt: skip


def test_tensorboard_writes_each_tenth_step(tensorboard: Any, tmp_path: Path) -> None:
    with sl.exporters.TensorBoard(str(tmp_path)):
        run_ranks(1, lambda t: train(t, 21))
    assert [step for step, _ in scalars_in(tensorboard, tmp_path)["loss"]] == [1, 11, 21]


def test_tensorboard_writes_all_ranks_if_asked(tensorboard: Any, tmp_path: Path) -> None:
    with sl.exporters.TensorBoard(tmp_path, every=1, all_ranks=True):
        run_ranks(2, train)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    both = [scalars_in(tensorboard, tmp_path / f"rank-{rank}")["loss"] for rank in range(2)]
    assert both[0] == both[1]


def test_tensorboard_writes_into_a_writer_of_the_user(tensorboard: Any, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with sl.exporters.TensorBoard(writer, every=1):
        run_ranks(2, train)
    writer.add_scalar("mine", 1.0, 1)
    writer.close()
    assert {"mine", "loss"} <= scalars_in(tensorboard, tmp_path).keys()


def test_tensorboard_keeps_two_modules_apart(tensorboard: Any, tmp_path: Path) -> None:
    def rank(transport: Transport) -> None:
        train(transport)
        train(transport, 1)

    with sl.exporters.TensorBoard(tmp_path, every=1):
        run_ranks(2, rank)
    scalars = scalars_in(tensorboard, tmp_path)
    assert (len(scalars["loss"]), len(scalars["Sequential 2/loss"])) == (3, 1)


@pytest.mark.filterwarnings("ignore:.*not finite:RuntimeWarning")
def test_tensorboard_shows_what_went_wrong(tensorboard: Any, tmp_path: Path) -> None:
    with sl.exporters.TensorBoard(tmp_path):
        run_ranks(3, train_and_diverge)
        run_ranks(2, train_with_a_discarded_step)
        change_ranks()
    (diverged, changed) = texts_in(tensorboard, tmp_path)
    assert (diverged[0], "1.bias" in diverged[1]) == (4, True)
    assert changed == (4, "rank 1 of 2 was lost; the ranks, now 1, continued after 1 s")
    assert scalars_in(tensorboard, tmp_path)["Linear/step/num_discarded"] == [(2, 1.0)]


def test_tensorboard_writes_parameter_syncs(tensorboard: Any, tmp_path: Path) -> None:
    with sl.exporters.TensorBoard(tmp_path, every=3):
        run_ranks(2, lambda t: train(t, 8, strategy=sl.LocalSGD(2)))
    scalars = scalars_in(tensorboard, tmp_path)
    assert [step for step, _ in scalars["parameter_sync/payload_bytes"]] == [2, 6]


def test_training_goes_on_when_the_writer_fails(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    class Full:
        def add_scalar(self, *values: object) -> None:
            raise OSError(28, "No space left on device")

        flush = add_scalar

    with (
        pytest.warns(
            RuntimeWarning, match="TensorBoard stops.*No space left on device.*Training continues"
        ) as warned,
        sl.exporters.TensorBoard(Full()),
    ):  # type: ignore[arg-type]
        run_ranks(2, train)
    assert len(warned.list) == 1


# ---------------------------------------------------------------------- OpenTelemetry


class Telemetry:
    """The SDK of OpenTelemetry, which keeps everything in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._reader])
        # The process can set its providers only once.
        monkeypatch.setattr(trace, "get_tracer", lambda name: tracers.get_tracer(name))
        monkeypatch.setattr(metrics, "get_meter", lambda name: self.meters.get_meter(name))

    def spans(self, name: str, rank: int = 0) -> list[Any]:
        """The spans of a rank, in the order of their beginnings."""
        found = [one for one in self._spans.get_finished_spans() if one.name == f"syncline.{name}"]
        of_rank = [one for one in found if one.attributes["syncline.rank"] == rank]
        return sorted(of_rank, key=lambda one: one.start_time)

    def points(self, name: str, **attributes: Any) -> list[Any]:
        """The points of a metric with these attributes."""
        wanted = {f"syncline.{key}": value for key, value in attributes.items()}
        data = self._reader.get_metrics_data()
        found = [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == f"syncline.{name}"
            for point in metric.data.data_points
        ]
        return [point for point in found if wanted.items() <= dict(point.attributes).items()]


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Telemetry]:
    pytest.importorskip("opentelemetry.sdk")
    found = Telemetry(monkeypatch)
    yield found
    found.meters.shutdown()


def is_inside(inner: Any, outer: Any) -> bool:
    return bool(
        inner.parent.span_id == outer.context.span_id
        and outer.start_time <= inner.start_time <= inner.end_time <= outer.end_time
    )


def test_opentelemetry_gets_the_spans_of_each_step(telemetry: Telemetry) -> None:
    with sl.exporters.OpenTelemetry(every=1):
        found = run_ranks(2, train)
    for rank in range(2):
        steps = telemetry.spans("step", rank)
        assert [one.attributes["syncline.step"] for one in steps] == [1, 2, 3]
        assert all(one.attributes["syncline.module"] == "Sequential" for one in steps)
        assert all(one.parent is None for one in steps)
        # A step begins when the former one ends: the time in between is for its data.
        assert all(after.start_time == before.end_time for before, after in pairwise(steps))
        backwards = telemetry.spans("backward", rank)
        for name, parts in (
            ("forward", telemetry.spans("forward", rank)),
            ("backward", backwards),
            ("optimizer", telemetry.spans("optimizer", rank)),
        ):
            assert [is_inside(part, step) for part, step in zip(parts, steps, strict=True)] == [True] * 3, (
                name
            )
        last = found[rank].last_step
        assert last is not None
        buckets = [one for one in telemetry.spans("bucket", rank) if is_inside(one, backwards[-1])]
        sent = {one.attributes["syncline.bucket"]: one.attributes["syncline.bytes"] for one in buckets}
        assert sent == {one.index: one.payload_bytes for one in last.buckets}
        waits = [one for one in telemetry.spans("wait", rank) if is_inside(one, backwards[-1])]
        assert {one.attributes["syncline.bucket"] for one in waits} <= sent.keys()


def test_opentelemetry_gets_the_spans_of_each_tenth_step_and_all_metrics(telemetry: Telemetry) -> None:
    with sl.exporters.OpenTelemetry():
        run_ranks(2, lambda t: train(t, 12))
    assert [one.attributes["syncline.step"] for one in telemetry.spans("step")] == [1, 11]
    assert len(telemetry.spans("backward", 1)) == 2
    (steps,) = telemetry.points("steps", rank=1, module="Sequential")
    assert steps.value == 12


def test_opentelemetry_gets_metrics(telemetry: Telemetry) -> None:
    with sl.exporters.OpenTelemetry():
        found = run_ranks(2, train)
    last = found[1].last_step
    assert last is not None
    (steps,) = telemetry.points("steps", rank=1, module="Sequential")
    (length,) = telemetry.points("step.duration", rank=1, module="Sequential")
    (wait,) = telemetry.points("wait.duration", rank=1, module="Sequential")
    (sent,) = telemetry.points("sent", rank=1, what="gradients")
    (ranks,) = telemetry.points("ranks", rank=1)
    (loss,) = telemetry.points("metric", rank=1)
    assert (steps.value, length.count, wait.count) == (3, 2, 3)
    assert (sent.value, ranks.value) == (3 * sizes(found[1]), 2)
    assert (loss.value, loss.attributes["syncline.metric.name"]) == (last.metrics["loss"], "loss")


def test_opentelemetry_gets_saves_and_parameter_syncs(telemetry: Telemetry, tmp_path: Path) -> None:
    def rank(transport: Transport) -> None:
        ddp = train(transport, 4, strategy=sl.LocalSGD(2))
        with sl.Checkpointer(tmp_path, group=transport) as saves:
            saves.save(sl.TrainState(model=ddp))

    with sl.exporters.OpenTelemetry():
        run_ranks(2, rank)
    (save,) = telemetry.spans("Checkpointer.save", 1)
    assert save.end_time > save.start_time
    assert len(telemetry.spans("step", 1)) == 1  # a save has a span although its step has none
    assert telemetry.spans("parameter_sync", 1) == []
    with sl.exporters.OpenTelemetry(every=1):
        run_ranks(2, lambda t: train(t, 4, strategy=sl.LocalSGD(2)))
    steps, synced = telemetry.spans("step", 1)[-4:], telemetry.spans("parameter_sync", 1)
    assert [is_inside(one, steps[at]) for one, at in zip(synced, (1, 3), strict=True)] == [True, True]


@pytest.mark.filterwarnings("ignore:.*not finite:RuntimeWarning")
def test_opentelemetry_gets_what_went_wrong(telemetry: Telemetry) -> None:
    with sl.exporters.OpenTelemetry():
        run_ranks(3, train_and_diverge)
        run_ranks(2, train_with_a_discarded_step)
        change_ranks()
    (found,) = telemetry.spans("replicas_diverged", 2)
    assert (found.attributes["syncline.tensor"], found.attributes["syncline.outcome"]) == ("1.bias", "raised")
    assert not found.status.is_ok
    assert "In the minority: rank 1" in found.status.description
    (count,) = telemetry.points("divergences", rank=2)
    assert (count.value, count.attributes["syncline.outcome"]) == (1, "raised")
    (discarded,) = telemetry.points("steps.discarded", rank=1, module="Linear")
    assert discarded.value == 1
    (lost,) = telemetry.points("ranks.lost", rank=0)
    assert lost.value == 1
    (changed,) = telemetry.spans("ranks_changed")
    assert changed.end_time - changed.start_time == pytest.approx(1e9, rel=0.01)


def test_a_metric_that_is_not_finite_is_left_out_and_logged_nowhere(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport)
        ddp.report(loss=float("nan"), accuracy=0.5)
        ddp(torch.ones(1, 1)).sum().backward()

    with sl.exporters.OpenTelemetry():
        run_ranks(1, rank)
    (metric,) = telemetry.points("metric", rank=0)
    assert metric.attributes["syncline.metric.name"] == "accuracy"
    assert caplog.records == []


def test_forwards_of_an_evaluation_have_no_spans(telemetry: Telemetry) -> None:
    def rank(transport: Transport) -> None:
        ddp = train(transport, 1)
        ddp.eval()
        for _ in range(5):
            ddp(torch.ones(2, 2))

    with sl.exporters.OpenTelemetry(every=1):
        run_ranks(1, rank)
    assert len(telemetry.spans("forward")) == 1


def test_training_goes_on_when_opentelemetry_fails(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = sl.exporters.OpenTelemetry()
    monkeypatch.setattr(exporter._spans, "_tracer", None)
    with (
        pytest.warns(
            RuntimeWarning, match="OpenTelemetry stops.*AttributeError.*Training continues"
        ) as warned,
        exporter,
    ):
        run_ranks(2, train)
    assert len(warned.list) == 1
    assert exporter._has_failed


def test_without_an_sdk_everything_is_dropped() -> None:
    pytest.importorskip("opentelemetry")
    with sl.exporters.OpenTelemetry(every=1):
        run_ranks(2, train)
