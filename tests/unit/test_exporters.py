"""Exporters: what a run has done is read back from the real client libraries. Ranks are threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hangs
import syncline as sl
from syncline.events import OBSERVERS, RanksChanged
from syncline.exporters.base import MAX_METRICS, MAX_MODULES, import_client
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


def train_linear(transport: Transport, *values: float, num_micro_batches: int = 1, **settings: Any) -> None:
    """Train a linear layer with one value in each step."""
    ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport, **settings)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for value in values:
        x = torch.full((1, 1), value + transport.rank)
        optimizer.zero_grad()
        for _ in range(num_micro_batches - 1):
            with ddp.no_sync():
                ddp(x).sum().backward()
        ddp(x).sum().backward()
        optimizer.step()


def train_and_diverge(transport: Transport) -> None:
    """Train, write to a parameter of rank 1, and train until the check finds it."""
    ddp = train(transport, replica_check=sl.ReplicaCheck(every=1))
    with torch.no_grad():
        ddp.module[1].bias.data += float(transport.rank == 1)
    with pytest.raises(sl.ReplicaDivergence):
        ddp(torch.ones(2, 2)).sum().backward()


def let_go_wrong(exporter: sl.Observer) -> None:
    """Let replicas of three ranks differ in step 4, discard a step, and say as `sl.steps` that a rank was lost."""
    with exporter:
        run_ranks(3, train_and_diverge)
        run_ranks(2, lambda t: train_linear(t, 1.0, float("nan"), 2.0, on_nonfinite="skip"))
        for receive in OBSERVERS.ranks_changed:
            receive(RanksChanged(0, 1, 4, "rank 1 of 2 was lost", 1.0, 2.0, 1))


def sizes(ddp: sl.DistributedDataParallel) -> dict[int, int]:
    """The bytes of the buckets of the last step."""
    assert ddp.last_step is not None
    return {one.index: one.payload_bytes for one in ddp.last_step.buckets}


def loss_of(ddp: sl.DistributedDataParallel) -> float:
    assert ddp.last_step is not None
    return ddp.last_step.metrics["loss"]


# ---------------------------------------------------------------------- what all share


@pytest.mark.real
def test_importing_syncline_or_its_exporters_imports_no_client_library() -> None:
    program = """
import sys, torch, syncline as sl
sl.exporters, sl.exporters.TensorBoard, sl.exporters.OpenTelemetry, sl.exporters.Prometheus
clients = "tensorboard", "torch.utils.tensorboard", "prometheus", "opentelemetry"
print([name for name in sys.modules if name.startswith(clients)])
"""
    result = hangs.run([sys.executable, "-c", program])
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_a_package_that_is_not_installed_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for exporter, module, extra, arguments in (
        ("TensorBoard", "torch.utils.tensorboard", "tensorboard", (tmp_path,)),
        ("OpenTelemetry", "opentelemetry.trace", "opentelemetry", ()),
        ("Prometheus", "prometheus_client", "prometheus", ()),
    ):
        assert f"\n{extra} = [" in project
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=rf"exporters\.{exporter} needs .*'syncline\[{extra}\]'"):
            getattr(sl.exporters, exporter)(*arguments)
    assert import_client("json", exporter="X").dumps(1) == "1"


# ---------------------------------------------------------------------- Prometheus

Sample = Callable[..., Any]


@pytest.fixture
def registry() -> Any:
    return pytest.importorskip("prometheus_client").CollectorRegistry()


@pytest.fixture
def sample(registry: Any) -> Sample:
    """Return the value of a sample with these labels."""
    return lambda name, /, **labels: registry.get_sample_value(f"syncline_{name}", labels)


def test_prometheus_counts_steps_waits_and_bytes_of_each_rank(registry: Any, sample: Sample) -> None:
    with sl.exporters.Prometheus(registry):
        found = run_ranks(2, train)
    for rank in "01":
        labels = {"rank": rank, "module": "Sequential"}
        for name, value in (
            ("steps_total", 3),
            ("step_seconds_count", 2),  # the length of the first step is unknown
            ("exposed_wait_seconds_count", 3),
            ("step_number", 3),
        ):
            assert sample(name, **labels) == value, name
        assert sample("step_seconds_sum", **labels) > 0
        assert sample("ranks", rank=rank) == 2
        ddp = found[int(rank)]
        assert sample("sent_bytes_total", rank=rank, what="gradients") == 3 * sum(sizes(ddp).values())
        assert sample("sent_bytes_total", rank=rank, what="buffers") > 0
        assert sample("metric", rank=rank, name="loss") == loss_of(ddp)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_prometheus_counts_what_went_wrong(registry: Any, sample: Sample) -> None:
    let_go_wrong(sl.exporters.Prometheus(registry))
    assert sample("divergences_total", rank="2", outcome="raised") == 1
    assert sample("discarded_steps_total", rank="1", module="Linear") == 1
    assert sample("steps_total", rank="1", module="Linear") == 3
    assert sample("ranks_lost_total", rank="0") == 1
    assert sample("ranks", rank="0") == 1
    assert sample("ranks", rank="2") is None  # the numbers of ranks have changed


def test_prometheus_measures_calls_and_parameter_syncs_and_micro_batches_are_one_step(
    registry: Any, sample: Sample
) -> None:
    def rank(transport: Transport) -> None:
        train(transport, 4, strategy=sl.LocalSGD(2))
        sl.mean(1.0, group=transport)
        train_linear(transport, 1.0, 1.0, num_micro_batches=2)

    with sl.exporters.Prometheus(registry):
        run_ranks(2, rank)
    assert sample("parameter_sync_seconds_count", rank="1", module="Sequential") == 2
    assert sample("steps_total", rank="1", module="Sequential") == 4
    assert sample("steps_total", rank="1", module="Linear") == 2
    assert sample("call_seconds_count", rank="1", name="mean") == 1
    assert sample("sent_bytes_total", rank="1", what="parameters") > 0


def test_prometheus_keeps_at_most_so_many_series(registry: Any, sample: Sample) -> None:
    def rank(transport: Transport) -> None:
        for _ in range(MAX_MODULES + 5):
            ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport)
            for number in range(4):
                ddp.report(**{f"{number}_{one}": 1.0 for one in range(20)})
                ddp(torch.ones(1, 1)).sum().backward()

    with sl.exporters.Prometheus(registry):
        run_ranks(1, rank)
    samples = [one for family in registry.collect() for one in family.samples]
    assert len({one.labels["module"] for one in samples if "module" in one.labels}) == MAX_MODULES + 1
    assert sum(one.name == "syncline_metric" for one in samples) == MAX_METRICS
    assert sample("steps_total", rank="0", module="other") == 4 * 5


def test_a_registry_takes_one_exporter(registry: Any, sample: Sample) -> None:
    exporter = sl.exporters.Prometheus(registry)
    with pytest.raises(ValueError, match=r"Duplicated timeseries.*syncline_step_seconds"):
        sl.exporters.Prometheus(registry)
    for _ in range(2):
        with exporter:
            run_ranks(1, lambda t: train(t, 1))
    assert sample("steps_total", rank="0", module="Sequential") == 2


# ---------------------------------------------------------------------- TensorBoard

Read = Callable[[Path], Any]


@pytest.fixture
def read() -> Read:
    """Return what TensorBoard reads of a directory."""
    client = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return lambda directory: client.EventAccumulator(str(directory)).Reload()


def steps_of(events: Any, tag: str) -> list[int]:
    return [one.step for one in events.Scalars(tag)]


def test_tensorboard_writes_the_numbers_of_rank_0(read: Read, tmp_path: Path) -> None:
    with sl.exporters.TensorBoard(tmp_path, every=1):
        found = run_ranks(2, train)
    assert len(list(tmp_path.iterdir())) == 1
    events = read(tmp_path)
    assert steps_of(events, "loss") == [1, 2, 3]
    assert events.Scalars("loss")[-1].value == pytest.approx(loss_of(found[0]))
    assert events.Scalars("backward/payload_bytes")[-1].value == sum(sizes(found[0]).values())
    assert steps_of(events, "step/duration_seconds") == [2, 3]
    of_backward = {f"backward/{name}" for name in ("duration_seconds", "payload_bytes", "waited_seconds")}
    assert {*events.Tags()["scalars"]} == {"loss", "step/duration_seconds", *of_backward}


def test_tensorboard_writes_each_tenth_step_and_keeps_modules_apart(read: Read, tmp_path: Path) -> None:
    def rank(transport: Transport) -> None:
        train(transport, 21)
        train(transport, 1)

    with sl.exporters.TensorBoard(str(tmp_path)):
        run_ranks(1, rank)
    events = read(tmp_path)
    assert steps_of(events, "loss") == [1, 11, 21]
    assert steps_of(events, "Sequential 2/loss") == [1]


def test_tensorboard_writes_parameter_syncs_and_all_ranks_if_asked(read: Read, tmp_path: Path) -> None:
    with sl.exporters.TensorBoard(tmp_path, every=3, all_ranks=True):
        run_ranks(2, lambda t: train(t, 8, strategy=sl.LocalSGD(2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    first, second = (read(tmp_path / f"rank-{rank}") for rank in range(2))
    assert steps_of(first, "loss") == steps_of(second, "loss") == [1, 4, 7]
    assert steps_of(second, "parameter_sync/payload_bytes") == [2, 6]


def test_tensorboard_writes_into_a_writer_of_the_user(read: Read, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with sl.exporters.TensorBoard(writer, every=1):
        run_ranks(2, train)
    writer.add_scalar("mine", 1.0, 1)
    writer.close()
    assert {"mine", "loss"} <= {*read(tmp_path).Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore:.*not finite:RuntimeWarning")
def test_tensorboard_shows_what_went_wrong(read: Read, tmp_path: Path) -> None:
    let_go_wrong(sl.exporters.TensorBoard(tmp_path))
    events = read(tmp_path)
    texts = events.Tensors("syncline/events/text_summary")
    words = [one.tensor_proto.string_val[0].decode() for one in texts]
    assert [one.step for one in texts] == [4, 4]
    assert "1.bias" in words[0]
    assert words[1] == "rank 1 of 2 was lost; the ranks, now 1, continued after 1 s"
    (discarded,) = events.Scalars("Linear/step/num_discarded")
    assert (discarded.step, discarded.value) == (2, 1.0)


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

    def point(self, name: str, **attributes: Any) -> Any:
        """The only point of a metric with these attributes."""
        wanted = {f"syncline.{key}": value for key, value in attributes.items()}
        scopes = [
            one for each in self._reader.get_metrics_data().resource_metrics for one in each.scope_metrics
        ]
        metrics = [one for scope in scopes for one in scope.metrics if one.name == f"syncline.{name}"]
        points = [one for metric in metrics for one in metric.data.data_points]
        (found,) = [one for one in points if wanted.items() <= dict(one.attributes).items()]
        return found


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
        steps, backwards = telemetry.spans("step", rank), telemetry.spans("backward", rank)
        assert [one.attributes["syncline.step"] for one in steps] == [1, 2, 3]
        assert {(one.attributes["syncline.module"], one.parent) for one in steps} == {("Sequential", None)}
        # A step ends when the next one begins.
        assert all(after.start_time == before.end_time for before, after in pairwise(steps))
        for name in ("forward", "backward", "optimizer"):
            parts = telemetry.spans(name, rank)
            assert all(is_inside(part, step) for part, step in zip(parts, steps, strict=True)), name
        buckets = [one for one in telemetry.spans("bucket", rank) if is_inside(one, backwards[-1])]
        sent = {one.attributes["syncline.bucket"]: one.attributes["syncline.bytes"] for one in buckets}
        assert sent == sizes(found[rank])
        waits = [one for one in telemetry.spans("wait", rank) if is_inside(one, backwards[-1])]
        assert {one.attributes["syncline.bucket"] for one in waits} <= sent.keys()


def test_opentelemetry_gets_the_spans_of_each_tenth_step_and_all_metrics(telemetry: Telemetry) -> None:
    with sl.exporters.OpenTelemetry():
        found = run_ranks(2, lambda t: train(t, 12))
    assert [one.attributes["syncline.step"] for one in telemetry.spans("step")] == [1, 11]
    assert len(telemetry.spans("backward", 1)) == 2
    module = {"rank": 1, "module": "Sequential"}
    assert telemetry.point("steps", **module).value == 12
    assert telemetry.point("step.duration", **module).count == 11
    assert telemetry.point("wait.duration", **module).count == 12
    assert telemetry.point("sent", rank=1, what="gradients").value == 12 * sum(sizes(found[1]).values())
    assert telemetry.point("ranks", rank=1).value == 2
    loss = telemetry.point("metric", rank=1)
    assert (loss.value, loss.attributes["syncline.metric.name"]) == (loss_of(found[1]), "loss")


def test_opentelemetry_gets_saves_and_parameter_syncs(telemetry: Telemetry, tmp_path: Path) -> None:
    def rank(transport: Transport) -> None:
        ddp = train(transport, 4, strategy=sl.LocalSGD(2))
        with sl.Checkpointer(tmp_path, group=transport, stop_signals=()) as saves:
            saves.save(sl.TrainState(model=ddp))
            saves.stop_if_asked(sl.TrainState(model=ddp))  # which is called in each step, and does nothing

    with sl.exporters.OpenTelemetry():
        run_ranks(2, rank)
    assert telemetry.spans("Checkpointer.stop_if_asked", 1) == []
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
    let_go_wrong(sl.exporters.OpenTelemetry())
    (found,) = telemetry.spans("replicas_diverged", 2)
    assert (found.attributes["syncline.tensor"], found.attributes["syncline.outcome"]) == ("1.bias", "raised")
    assert not found.status.is_ok
    assert "In the minority: rank 1" in found.status.description
    assert telemetry.point("divergences", rank=2, outcome="raised").value == 1
    assert telemetry.point("steps.discarded", rank=1, module="Linear").value == 1
    assert telemetry.point("ranks.lost", rank=0).value == 1
    (changed,) = telemetry.spans("ranks_changed")
    assert changed.end_time - changed.start_time == pytest.approx(1e9, rel=0.01)


def test_metrics_that_are_not_finite_and_forwards_of_an_evaluation_are_left_out(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport)
        ddp.report(loss=float("nan"), accuracy=0.5)
        ddp(torch.ones(1, 1)).sum().backward()
        ddp.eval()
        ddp(torch.ones(1, 1))

    with sl.exporters.OpenTelemetry(every=1):
        run_ranks(1, rank)
    assert telemetry.point("metric", rank=0).attributes["syncline.metric.name"] == "accuracy"
    assert caplog.records == []
    assert len(telemetry.spans("forward")) == 1


def test_without_an_sdk_everything_is_dropped() -> None:
    pytest.importorskip("opentelemetry")
    with sl.exporters.OpenTelemetry(every=1):
        run_ranks(2, train)


# ---------------------------------------------------------------------- clients that fail


class Full:
    """A writer on a full disk."""

    def add_scalar(self, *values: object) -> None:
        raise OSError(28, "No space left on device")

    flush = add_scalar


@pytest.mark.parametrize("name", ["Prometheus", "TensorBoard", "OpenTelemetry"])
def test_training_goes_on_when_a_client_library_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter: sl.Observer
    if name == "Prometheus":
        client = pytest.importorskip("prometheus_client")
        exporter = sl.exporters.Prometheus(client.CollectorRegistry())
        monkeypatch.delattr(client.Counter, "inc")
    elif name == "TensorBoard":
        pytest.importorskip("tensorboard")
        exporter = sl.exporters.TensorBoard(Full())  # type: ignore[arg-type]
    else:
        client = pytest.importorskip("opentelemetry.trace")
        monkeypatch.setattr(client, "get_tracer", lambda name: None)
        exporter = sl.exporters.OpenTelemetry()
    error = "OSError.*No space left" if name == "TensorBoard" else "AttributeError"
    with exporter:
        with pytest.warns(RuntimeWarning, match=f"{name} stops, because of {error}") as warned:
            run_ranks(2, train)
        assert OBSERVERS.backward_ended == ()
    (one,) = warned.list
    assert "Training continues" in str(one.message)
    assert one.filename == __file__  # it shows a line of the program
