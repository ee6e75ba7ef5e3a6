"""The program that each rank of `syncline bench` runs: `python -m syncline.tools.bench.ranks PLAN OUTPUT`.

PLAN is a `Plan` as JSON. OUTPUT is the path of the file for the results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from syncline.session.world import init, shutdown, transport_of
from syncline.tools.bench.machine import describe_machine
from syncline.tools.bench.tables import size_text
from syncline.tools.bench.timing import Timer, alternate, calls_for, timer
from syncline.tools.bench.workloads import backend_group, checked, engines, num_parameters_of, steps_of
from syncline.transport.base import Transport

_SILENT_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a benchmark: what it measures, and how often."""

    sizes_bytes: Sequence[int]
    """The sizes of the tensors that all_reduce is measured with, in bytes."""
    num_rounds: int = 20
    """The number of rounds in which all_reduce is measured, for each size."""
    turn_seconds: float = 0.01
    """The desired duration of one competitor's turn with all_reduce. A turn has at least one call."""
    models: Sequence[str] = ()
    """The names of the models whose training steps are measured."""
    num_step_rounds: int = 20
    """The number of rounds in which training steps are measured, for each model."""
    num_steps: int = 2
    """The number of training steps in one competitor's turn."""
    with_sum: bool = False
    """Whether to measure also a plain sum, without division by the number of ranks."""
    transport: str | None = None
    """The name of the transport that the ranks must have. None accepts any. With another one, nothing is measured."""


class Peer(Protocol):
    """A competitor whose ranks are other processes. Rank 0 tells them when it is their turn."""

    def prepare(self, numel: int) -> None:
        """Set the number of fp32 elements that later calls reduce."""

    def timer(self, op: Literal["sum", "mean"], transport: Transport) -> Timer:
        """Return a timer of reductions. It waits for the barrier with which rank 0 begins a turn."""


def main(argv: Sequence[str]) -> None:
    """Measure according to a plan. Rank 0 writes the results to a file.

    Args:
        argv: the arguments PLAN and OUTPUT.
    """
    found = measure(Plan(**json.loads(argv[0])))
    if found is not None:
        Path(argv[1]).write_text(json.dumps(found))


def measure(plan: Plan, peers: Mapping[str, Peer] | None = None) -> dict[str, Any] | None:
    """Perform the measurement `plan`. All ranks call this function together.

    Args:
        plan: what to measure.
        peers: further competitors for all_reduce, by name. Only those of rank 0 count.

    Returns:
        On rank 0, the raw results, which `timing.summarize` reads. They are empty if the plan expects another
        transport than the ranks have. On other ranks, None.
    """
    torch.set_num_threads(1)
    machine = describe_machine()  # now, so that its load does not include the benchmark
    world = init(device="cpu")
    transport = transport_of(None)
    notes: list[str] = []
    found = {
        "machine": machine,
        "plan": asdict(plan),
        "num_ranks": world.size,
        "transport": transport.name,
        "all_reduce": [],
        "steps": [],
        "notes": notes,
    }
    if plan.transport in (None, transport.name):
        backend = backend_group(notes)
        found["all_reduce"] = _all_reduce(plan, transport, backend, peers or {})
        found["steps"] = [_steps(model, plan, transport, backend, notes) for model in plan.models]
    shutdown()
    return found if world.rank == 0 else None


def _all_reduce(
    plan: Plan, transport: Transport, backend: dist.ProcessGroup | None, peers: Mapping[str, Peer]
) -> list[dict[str, Any]]:
    rows = []
    names = json.loads(transport.all_gather_bytes(json.dumps(list(peers)).encode())[0])
    here = {name: peers[name] if transport.rank == 0 else None for name in names}
    for number, size_bytes in enumerate(plan.sizes_bytes, start=1):
        _say(f"all_reduce of {size_text(size_bytes)}, {number} of {len(plan.sizes_bytes)}", transport)
        numel = size_bytes // 4
        calls = checked(
            engines(numel, transport=transport, backend=backend, with_sum=plan.with_sum),
            rank=transport.rank,
            size=transport.size,
        )
        timers = {name: timer(call, transport) for name, call in calls.items()}
        timers |= _timers_of_peers(here, numel, plan, transport)
        num_calls = calls_for(timers, seconds=plan.turn_seconds, most=2000, transport=transport)
        seconds = _in_turns(timers, plan.num_rounds, num_calls, transport)
        rows.append({"payload_bytes": size_bytes, "num_calls": num_calls, "seconds": seconds})
    return rows


def _timers_of_peers(
    peers: Mapping[str, Peer | None], numel: int, plan: Plan, transport: Transport
) -> dict[str, Timer]:
    def watch(_: int) -> float:
        transport.barrier().wait()
        return 0.0

    found: dict[str, Timer] = {}
    ops: list[Literal["mean", "sum"]] = ["mean", "sum"] if plan.with_sum else ["mean"]
    for name, peer in peers.items():
        if peer is not None:
            peer.prepare(numel)
        for op in ops:
            shown = name if op == "mean" else f"{name}, sum only"
            found[shown] = peer.timer(op, transport) if peer is not None else watch
    return found


def _steps(
    model: str, plan: Plan, transport: Transport, backend: dist.ProcessGroup | None, notes: list[str]
) -> dict[str, Any]:
    _say(f"training steps of a GPT of {model} parameters", transport)
    steps = steps_of(model, rank=transport.rank, backend=backend, notes=notes)
    timers = {name: timer(step, transport) for name, step in steps.items()}
    num_calls = dict.fromkeys(timers, plan.num_steps)
    seconds = _in_turns(timers, plan.num_step_rounds, num_calls, transport)
    return {
        "model": f"GPT {model}",
        "num_parameters": num_parameters_of(model),
        "num_steps": plan.num_steps,
        "seconds": seconds,
    }


def _in_turns(
    timers: Mapping[str, Timer], num_rounds: int, num_calls: Mapping[str, int], transport: Transport
) -> dict[str, list[float]]:
    """Measure competitors in turns, and say how many rounds are over. See `timing.alternate`."""
    return alternate(
        timers,
        num_rounds=num_rounds,
        num_calls=num_calls,
        transport=transport,
        after_round=_rounds_said(num_rounds, transport),
    )


def _rounds_said(num_rounds: int, transport: Transport) -> Callable[[int], None]:
    """Return a function that says how many rounds are over, if it has said nothing for 5 s."""
    said_at = time.monotonic()

    def after_round(number: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > _SILENT_SECONDS and 0 < number < num_rounds:
            said_at = time.monotonic()
            _say(f"  round {number} of {num_rounds}", transport)

    return after_round


def _say(text: str, transport: Transport) -> None:
    if transport.rank == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
