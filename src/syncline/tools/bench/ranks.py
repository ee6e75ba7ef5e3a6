"""The program that each rank of `syncline bench` runs: `python -m syncline.tools.bench.ranks PLAN OUTPUT`.

PLAN is JSON: the "sizes" of all_reduce and the names of the "models" to measure, the number of rounds "num_rounds", and
"turn_seconds", which a turn of at least one call should take. OUTPUT is the file for the times of all rounds.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.ddp.wrapper import DistributedDataParallel
from syncline.session.world import init, shutdown, transport_of
from syncline.tools.bench.results import describe_machine, parse_size
from syncline.tools.bench.timing import alternate, calls_for, timer
from syncline.transport.base import Transport

Calls = Mapping[str, Callable[[], object]]

_MODELS = {"0.3M": (84, 96, 3, 4), "5M": (1000, 256, 6, 2)}
"""By name: the words, the width, the layers and the sequences of a batch."""


def main(argv: Sequence[str]) -> None:
    """Measure according to a plan. Rank 0 writes the results to a file.

    Args:
        argv: the arguments PLAN and OUTPUT.
    """
    torch.set_num_threads(1)
    plan: dict[str, Any] = json.loads(argv[0])
    machine = describe_machine()  # now, so that its load does not include the benchmark
    world = init(device="cpu")
    transport = transport_of(None)

    def measured(what: str, calls: Calls) -> dict[str, list[float]]:
        if world.rank == 0:
            print(what, file=sys.stderr, flush=True)
        timers = {name: timer(call, transport) for name, call in calls.items()}
        num_calls = calls_for(timers, seconds=plan["turn_seconds"], most=2000, transport=transport)
        return alternate(timers, num_rounds=plan["num_rounds"], num_calls=num_calls, transport=transport)

    found = {
        "machine": machine,
        "num_ranks": world.size,
        "transport": transport.name,
        "num_rounds": plan["num_rounds"],
        "all_reduce_seconds": {
            size: measured(f"all_reduce of {size}", _engines(parse_size(size) // 4, transport))
            for size in plan["sizes"]
        },
        "step_seconds": {
            model: measured(f"a step of {model} parameters", _steps(model, world.rank))
            for model in plan["models"]
        },
    }
    if world.rank == 0:
        Path(argv[1]).write_text(json.dumps(found))
    shutdown()


def _engines(numel: int, transport: Transport) -> Calls:
    """Return functions that make one all_reduce each, a mean of fp32. The function "copy" copies the tensor instead."""
    plain, target = torch.zeros(numel), torch.empty(numel)

    def over_gloo() -> None:
        dist.all_reduce(plain)
        plain.div_(transport.size)

    found: dict[str, Callable[[], object]] = {"syncline": lambda: transport.all_reduce(plain, "mean").wait()}
    if transport.reduces_in_place:
        allocated = transport.allocate(numel, torch.float32, torch.device("cpu")).zero_()
        found["in place"] = lambda: transport.all_reduce(allocated, "mean").wait()
    return found | {"gloo": over_gloo, "copy": lambda: target.copy_(plain)}


def _steps(model: str, rank: int) -> Calls:
    """Return functions that make one training step of a transformer each: forward, backward, fused AdamW."""
    words, width, num_layers, num_sequences = _MODELS[model]
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
    base = nn.Sequential(nn.Embedding(words, width), layers, nn.Linear(width, words))
    tokens = torch.randint(words, (num_sequences, 64), generator=torch.Generator().manual_seed(rank))

    def step_of(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
        module = wrap(copy.deepcopy(base))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        if isinstance(module, DistributedDataParallel):
            optimizer = module.attach(optimizer)

        def step() -> None:
            nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {
        "not synchronized": step_of(lambda module: module),
        "syncline": step_of(DistributedDataParallel),
        "bucket view": step_of(partial(DistributedDataParallel, gradient_as_bucket_view=True)),
        "sharded": step_of(partial(DistributedDataParallel, sharded=True)),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
