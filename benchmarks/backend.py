"""The torch.distributed backend "syncline" against Gloo: torch's own calls, and torch's own wrappers.

    syncline run -n 2 benchmarks/backend.py [--sizes 1K 64K 1M 25M] [--rounds 20] [--json FILE]
    syncline run -n 2 benchmarks/backend.py --quick      # does it run?

Both groups have the same ranks, and take turns round by round, as in `syncline bench` (docs/inside/benchmarks.md). The
size of a call is that of its larger tensor on one rank. Steps are those of a GPT with fused AdamW: torch's
DistributedDataParallel with bucket views, and `fully_shard` by block.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import syncline as sl
from models import GPT, SIZES, random_batch
from rounds import RoundsParser
from syncline.session import transport_of
from syncline.tools.bench.results import parse_size, ratio
from syncline.tools.bench.timing import Timer, alternate, calls_for, timer
from syncline.transport import Transport
from tables import seconds_text, size_text, table

Call = Callable[[], object]
Group = dist.ProcessGroup
MODEL = "0.3M"

# torch 2.13 renamed them, and warns of the old names.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def calls(group: Group, numel: int) -> dict[str, Call]:
    """torch's calls with tensors of `numel` fp32 elements."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    part_numel = max(1, numel // size)
    whole, part = torch.zeros(part_numel * size), torch.zeros(part_numel)
    parts_in, parts_out = list(torch.zeros(size, part_numel)), list(torch.zeros(size, part_numel))

    def around() -> None:
        sent = dist.isend(whole, (rank + 1) % size, group=group)
        dist.recv(other, (rank - 1) % size, group=group)
        assert sent is not None
        sent.wait()

    other = torch.zeros_like(whole)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "all_gather": lambda: all_gather(whole, part, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_to_all": lambda: dist.all_to_all(parts_out, parts_in, group=group),
        "send to the next, recv": around,
    }


def wrapped_by_ddp(module: nn.Module, group: Group) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)


def wrapped_by_fsdp(module: nn.Module, group: Group) -> nn.Module:
    assert isinstance(module, GPT)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


WRAPPERS: dict[str, Callable[[nn.Module, Group], nn.Module]] = {
    "DistributedDataParallel": wrapped_by_ddp,
    "fully_shard": wrapped_by_fsdp,
}


def step_of(module: nn.Module, rank: int) -> Call:
    """One training step."""
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    batch = random_batch(SIZES[MODEL], seed=rank)

    def step() -> None:
        module(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_turns(
    timers: Mapping[str, Timer], transport: Transport, *, num_rounds: int, seconds: float
) -> dict[str, list[float]]:
    num_calls = calls_for(timers, seconds=seconds, most=2000, transport=transport)
    return alternate(timers, num_rounds=num_rounds, num_calls=num_calls, transport=transport)


def measure(
    groups: Mapping[str, Group], arguments: argparse.Namespace, transport: Transport
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by backend, by what is called."""
    often = {"num_rounds": arguments.rounds, "seconds": 0.002 if arguments.quick else 0.01}
    jobs: dict[str, dict[str, Call]] = {}
    barrier: dict[str, Call] = {name: partial(dist.barrier, group) for name, group in groups.items()}
    jobs["barrier"] = barrier
    for size_bytes in arguments.sizes:
        by_backend = {name: calls(group, size_bytes // 4) for name, group in groups.items()}
        for operation in next(iter(by_backend.values())):
            what = f"{operation}, {size_text(size_bytes)}"
            jobs[what] = {name: found[operation] for name, found in by_backend.items()}
    torch.manual_seed(0)
    base = GPT(SIZES[MODEL])
    for wrapper, wrap in WRAPPERS.items():
        jobs[f"a step of {wrapper}, GPT {MODEL}"] = {
            name: step_of(wrap(copy.deepcopy(base), group), transport.rank) for name, group in groups.items()
        }
    found = {}
    for what, steps in jobs.items():
        timers = {name: timer(call, transport) for name, call in steps.items()}
        found[what] = in_turns(timers, transport, **often)
    return found


def report(seconds: Mapping[str, Mapping[str, list[float]]]) -> str:
    rows = [["", "syncline", "gloo", "times as fast [95 % interval]"]]
    for what, by_backend in seconds.items():
        medians = [seconds_text(statistics.median(by_backend[name])) for name in ("syncline", "gloo")]
        middle, low, high = ratio(by_backend["gloo"], by_backend["syncline"])
        rows.append([what, *medians, f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    return table(rows)


def parse_arguments() -> argparse.Namespace:
    parser = RoundsParser(__doc__, rounds=20, quick=2)
    parser.add_argument("--sizes", nargs="+", default=["1K", "64K", "1M", "25M"])
    arguments = parser.parse_figures()
    try:
        arguments.sizes = sorted({parse_size(text) for text in arguments.sizes})
    except ValueError as error:
        sys.exit(f"--sizes: {error}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    world = sl.init(device="cpu")
    if world.size == 1:
        sys.exit("expected at least 2 ranks: syncline run -n 2 benchmarks/backend.py")
    sl.register_backend()
    groups: dict[str, Any] = {name: dist.new_group(backend=name) for name in ("syncline", "gloo")}
    seconds = measure(groups, arguments, transport_of(None))
    if world.rank == 0:
        print(f"{world.size} ranks x 1 thread, torch {torch.__version__}, {arguments.rounds} rounds")
        print(report(seconds))
        if arguments.json:
            found = {"num_ranks": world.size, "rounds_seconds": seconds}
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    sl.shutdown()


if __name__ == "__main__":
    main()
