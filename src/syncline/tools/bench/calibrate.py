"""The program of each rank of `syncline bench --calibrate`: it measures what synchronization costs on this machine.

    python -m syncline.tools.bench.calibrate OUTPUT

Rank 0 writes the figures for this number of ranks to the file OUTPUT, as JSON. Each figure is a median.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline import compression
from syncline.compression import Compression
from syncline.compression.exchange import MeanExchange
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.session.world import init, shutdown, transport_of
from syncline.strategies import DiLoCo, LocalSGD
from syncline.tools.plan import CODECS
from syncline.transport.base import Transport

_SIZES_BYTES = (1 << 16, 1 << 20, 1 << 23)

_NUM_ROUNDS = 15

_IN_A_ROW = 8
"""The number of reductions in a row. Cores that have fallen asleep need milliseconds to wake up, but in a training step
they do not sleep."""

_CODED_SHAPES = ((256, 1024), (1024, 256), (1000, 256), (256, 256))
"""The tensors with which compressions are measured: those of a small transformer."""

_NUM_SMALL = 200
"""The number of small layers by which the calls for a gradient are measured."""


def main(argv: Sequence[str]) -> None:
    """Measure, and let rank 0 write the figures to a file.

    Args:
        argv: the argument OUTPUT.
    """
    torch.set_num_threads(1)
    world = init(device="cpu")
    transport = transport_of(None)
    found: dict[str, Any] = {
        "num_ranks": world.size,
        "shared_memory": _reductions(partial(_in_place, transport), transport)
        if transport.reduces_in_place
        else None,
        "gloo": _reductions(_over_gloo, transport),
        "copy_per_byte": _copy(transport),
        "calls": _calls(transport),
    }
    if world.size == 2:
        found["codings"] = {codec.code: _coding(codec.code, transport) for codec in CODECS}
        found |= _strategies(transport)
    if world.rank == 0:
        Path(argv[0]).write_text(json.dumps(found))
    shutdown()


# ---------------------------------------------------------------------- time


def _timed(
    call: Callable[[], object], transport: Transport, num_rounds: int = _NUM_ROUNDS
) -> tuple[float, float]:
    """Return how long a call takes, and how long it keeps cores of this process busy: medians of rounds, in seconds.

    The time is that of the slowest rank, and the work the mean of the ranks.
    """
    call()
    times, works = [], []
    for _ in range(num_rounds):
        transport.barrier().wait()
        began, worked = time.perf_counter(), time.process_time()
        call()
        times.append(time.perf_counter() - began)
        works.append(time.process_time() - worked)
    slowest = torch.tensor(times, dtype=torch.float64)
    transport.all_reduce(slowest, "max").wait()
    mean = torch.tensor(works, dtype=torch.float64)
    transport.all_reduce(mean, "mean").wait()
    return statistics.median(slowest.tolist()), statistics.median(mean.tolist())


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the fixed part and the slope of the line through points of a size and a time.

    Each point counts relative to its own time, so that small sizes count as much as large ones.
    """
    weights = [1 / max(time, 1e-9) ** 2 for _, time in points]
    total = sum(weights)
    size = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    slope = sum(w * (x - size) * (y - mean) for w, (x, y) in zip(weights, points, strict=True)) / sum(
        w * (x - size) ** 2 for w, (x, _) in zip(weights, points, strict=True)
    )
    slope = max(0.0, slope)
    return max(0.0, mean - slope * size), slope


# ---------------------------------------------------------------------- reductions


def _reductions(make: Callable[[int], Callable[[], object]], transport: Transport) -> list[float]:
    """Return the four figures of a `Cost`."""
    points = []
    for size in _SIZES_BYTES:
        took, work = _timed(partial(_repeated, make(size // 4)), transport)
        points.append((size, took / _IN_A_ROW, work / _IN_A_ROW))
    fixed, per_byte = _line([(size, took) for size, took, _ in points])
    work_fixed, work_per_byte = _line([(size, work) for size, _, work in points])
    return [fixed, per_byte, work_fixed, work_per_byte]


def _repeated(call: Callable[[], object]) -> None:
    for _ in range(_IN_A_ROW):
        call()


def _in_place(transport: Transport, numel: int) -> Callable[[], object]:
    tensor = transport.allocate(numel, torch.float32, torch.device("cpu"))
    return lambda: transport.all_reduce(tensor.fill_(1.0), "mean").wait()


def _over_gloo(numel: int) -> Callable[[], object]:
    tensor = torch.ones(numel)
    return lambda: dist.all_reduce(tensor)


def _copy(transport: Transport) -> float:
    """Return how long a copy takes for each byte while all ranks copy tensors that are in no cache."""
    pairs = [(torch.ones(1 << 18), torch.empty(1 << 18)) for _ in range(32)]

    def copy() -> None:
        for source, target in pairs:
            target.copy_(source)

    took, _ = _timed(copy, transport, 7)
    return took / (len(pairs) << 20)


# ---------------------------------------------------------------------- calls


def _calls(transport: Transport) -> list[float]:
    """Return the four figures of `Calls`."""
    few, many = (_sync_time(num, 25.0, transport) for num in (1, _NUM_SMALL))
    per_gradient = max(0.0, (many - few) / (2 * _NUM_SMALL - 2))
    divided = _sync_time(_NUM_SMALL, 0.001, transport)
    num_buckets = _NUM_SMALL * 2
    per_bucket = max(0.0, (divided - many) / (num_buckets - 1))
    return [per_gradient, per_bucket, max(0.0, few), _update_time(transport)]


def _update_time(transport: Transport) -> float:
    """Return how long the step of an optimizer takes for one small parameter."""
    small = [nn.Parameter(torch.ones(8)) for _ in range(2 * _NUM_SMALL)]
    for one in small:
        one.grad = torch.ones(8)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(small, fused=True)
    took, _ = _timed(optimizer.step, transport)
    return took / len(small)


def _sync_time(num_layers: int, cap_mb: float, transport: Transport) -> float:
    """Return how much longer a step of small layers is when it is synchronized."""

    def step(module: nn.Module) -> None:
        module(x).sum().backward()
        module.zero_grad()

    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(transport.rank))
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    wrapped = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers))), bucket_cap_mb=cap_mb
    )
    for _ in range(3):
        step(wrapped)
    differences = []
    for _ in range(_NUM_ROUNDS):
        _, with_sync = _timed(partial(step, wrapped), transport, 1)
        _, without = _timed(partial(step, plain), transport, 1)
        differences.append(with_sync - without)
    return statistics.median(differences)


# ---------------------------------------------------------------------- compressions and strategies


def _coding(code: str, transport: Transport) -> list[float]:
    """Return what a compression costs for each value before its first message, and after it.

    The work of the transport is part of it. In shared memory it is small for the few bytes that are sent.
    """
    made: Compression = eval(f"compression.{code}", {"compression": compression})  # a constant of ours
    exchange = MeanExchange(
        made, _CODED_SHAPES, dtype=torch.float32, device=torch.device("cpu"), transport=transport
    )
    numel = exchange.layout.numel
    values = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
    encoding, decoding = [], []
    for number in range(-2, _NUM_ROUNDS):
        flat = values.clone()
        transport.barrier().wait()
        began = time.perf_counter()
        exchange.start(flat)
        started = time.perf_counter()
        exchange.wait()
        if number >= 0:
            encoding.append(started - began)
            decoding.append(time.perf_counter() - started)
    both = torch.tensor([statistics.median(encoding), statistics.median(decoding)], dtype=torch.float64)
    transport.all_reduce(both, "mean").wait()
    return [one / numel for one in both.tolist()]


def _strategies(transport: Transport) -> dict[str, float]:
    """Return what an average of parameters and an outer step cost for each byte, besides the reduction."""
    numel = sum(rows * columns for rows, columns in _CODED_SHAPES)
    flat = torch.ones(numel)
    reduction, _ = _timed(lambda: transport.all_reduce(flat, "mean").wait(), transport)
    found = {}
    for name, strategy in (("average_per_byte", LocalSGD(2)), ("outer_per_byte", DiLoCo(2))):
        found[name] = max(0.0, _round_time(strategy, transport) - reduction) / (4 * numel)
    return found


def _round_time(strategy: Any, transport: Transport) -> float:
    """Return how much longer every second step of a strategy is, which synchronizes parameters."""
    module = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in _CODED_SHAPES)
    wrapped = DistributedDataParallel(_Sum(module), strategy=strategy)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)
    optimizer = wrapped.attach(optimizer)
    (wrapped() * (1.0 + transport.rank)).backward()

    def seconds_of_step() -> float:
        transport.barrier().wait()
        began = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - began

    for _ in range(4):
        optimizer.step()
    differences = []
    for _ in range(_NUM_ROUNDS):
        local = seconds_of_step()
        differences.append(seconds_of_step() - local)
    return statistics.median(differences)


class _Sum(nn.Module):
    """A module whose forward is the sum of its parameters, so that each gets a gradient."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.kept = parameters

    def forward(self) -> Tensor:
        return torch.stack([parameter.sum() for parameter in self.kept]).sum()


if __name__ == "__main__":
    main(sys.argv[1:])
