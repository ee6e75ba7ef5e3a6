"""The program of each rank of `syncline bench --calibrate`: it measures what synchronization costs on this machine.

    python -m syncline.tools.bench.calibrate OUTPUT

Rank 0 writes the figures for this number of ranks to the file OUTPUT, as JSON. Each figure is a median.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline import compression
from syncline.compression import Compression
from syncline.compression.exchange import MeanExchange
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.session.world import init, shutdown, transport_of
from syncline.strategies import DiLoCo, LocalSGD, Strategy
from syncline.tools.plan.options import CODECS
from syncline.transport.base import Transport

_SIZES_BYTES = (1 << 16, 1 << 20, 1 << 23)

_NUM_ROUNDS = 15

_IN_A_ROW = 8
"""The number of reductions in a row. Cores that have fallen asleep need milliseconds to wake up, but in a training step
they do not sleep."""

_CODED_SHAPES = ((256, 256), (1024, 256), (256, 1024), (1000, 256))
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


def _timed(call: Callable[[], object], transport: Transport, num: int = _NUM_ROUNDS) -> tuple[float, float]:
    """Return how long a call takes, and how long it keeps cores of this process busy: medians of rounds, in seconds.

    The time is that of the slowest rank, and the work the mean of the ranks.
    """
    call()
    rounds = []
    for _ in range(num):
        transport.barrier().wait()
        began, worked = time.perf_counter(), time.process_time()
        call()
        rounds.append((time.perf_counter() - began, time.process_time() - worked))
    slowest, mean = torch.tensor(rounds, dtype=torch.float64).T.contiguous()
    transport.all_reduce(slowest, "max").wait()
    transport.all_reduce(mean, "mean").wait()
    return median(slowest.tolist()), median(mean.tolist())


def _line(times: Sequence[float]) -> list[float]:
    """Return the fixed part and the slope of the line through times of `_SIZES_BYTES`.

    Each time counts relative to itself, so that small sizes count as much as large ones.
    """
    seconds = torch.tensor(times, dtype=torch.float64).clamp(min=1e-9)
    relative = torch.stack([1 / seconds, torch.tensor(_SIZES_BYTES) / seconds], dim=1)
    found = torch.linalg.lstsq(relative, torch.ones(len(times), 1, dtype=torch.float64)).solution
    return [max(0.0, one) for one in found.flatten().tolist()]


# ---------------------------------------------------------------------- reductions


def _reductions(make: Callable[[int], Callable[[], object]], transport: Transport) -> list[float]:
    """Return the four figures of a `Cost`."""
    found = [_timed(partial(_repeated, make(size // 4)), transport) for size in _SIZES_BYTES]
    times, works = zip(*found, strict=True)
    return [one / _IN_A_ROW for one in (*_line(times), *_line(works))]


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

    def copy_all() -> None:
        for source, target in pairs:
            target.copy_(source)

    return _timed(copy_all, transport, 7)[0] / (len(pairs) << 20)


# ---------------------------------------------------------------------- calls


def _calls(transport: Transport) -> list[float]:
    """Return the four figures of `Calls`."""
    few, many = (_sync_time(num, 25.0, transport) for num in (1, _NUM_SMALL))
    per_gradient = max(0.0, (many - few) / (2 * _NUM_SMALL - 2))
    divided = _sync_time(_NUM_SMALL, 0.001, transport)
    per_bucket = max(0.0, (divided - many) / (2 * _NUM_SMALL - 1))
    return [per_gradient, per_bucket, max(0.0, few), _update_time(transport)]


def _update_time(transport: Transport) -> float:
    """Return how long the step of an optimizer takes for one small parameter."""
    small = [nn.Parameter(torch.ones(8)) for _ in range(2 * _NUM_SMALL)]
    for one in small:
        one.grad = torch.ones(8)
    return _timed(torch.optim.AdamW(small, fused=True).step, transport)[0] / len(small)


def _sync_time(num_layers: int, cap_mb: float, transport: Transport) -> float:
    """Return how much longer a step of small layers is when it is synchronized."""
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(transport.rank))
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    wrapped = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=cap_mb)

    def work(module: nn.Module) -> float:
        def step() -> None:
            module(x).sum().backward()
            module.zero_grad()

        return _timed(step, transport, 1)[1]

    work(wrapped)  # the buckets are laid out anew
    return median(work(wrapped) - work(plain) for _ in range(_NUM_ROUNDS))


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
    rounds = []
    for _ in range(_NUM_ROUNDS):
        flat = values.clone()
        transport.barrier().wait()
        began = time.perf_counter()
        exchange.start(flat)
        started = time.perf_counter()
        exchange.wait()
        rounds.append((started - began, time.perf_counter() - started))
    both = torch.tensor([median(one) for one in zip(*rounds, strict=True)], dtype=torch.float64)
    transport.all_reduce(both, "mean").wait()
    return [one / numel for one in both.tolist()]


def _strategies(transport: Transport) -> dict[str, float]:
    """Return what an average of parameters and an outer step cost for each byte, besides the reduction."""
    numel = sum(rows * columns for rows, columns in _CODED_SHAPES)
    flat = torch.ones(numel)
    reduction, _ = _timed(lambda: transport.all_reduce(flat, "mean").wait(), transport)
    found = {}
    for name, make in (("average_per_byte", LocalSGD), ("outer_per_byte", DiLoCo)):
        took = _time_of_two_steps(make(2), transport) - _time_of_two_steps(make(1000), transport)
        found[name] = max(0.0, took - reduction) / (4 * numel)
    return found


def _time_of_two_steps(strategy: Strategy[Any], transport: Transport) -> float:
    module = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in _CODED_SHAPES))
    wrapped = DistributedDataParallel(module, strategy=strategy)
    optimizer = wrapped.attach(torch.optim.SGD(wrapped.parameters(), lr=1e-6))
    wrapped(torch.full((1, 256), 1.0 + transport.rank)).sum().backward()

    def two_steps() -> None:
        optimizer.step()
        optimizer.step()

    return _timed(two_steps, transport)[0]


if __name__ == "__main__":
    main(sys.argv[1:])
