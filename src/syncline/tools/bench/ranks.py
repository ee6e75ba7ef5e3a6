"""The program that each rank of `syncline bench` runs: `python -m syncline.tools.bench.ranks PLAN OUTPUT`.

PLAN is a `Plan` as JSON. OUTPUT is the path of the file for the results.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from syncline.session.world import init, shutdown, transport_of
from syncline.tools.bench.machine import describe_machine
from syncline.tools.bench.mpi import MPI, MPIPeer
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
    mpis: Sequence[Mapping[str, str]] = ()
    """The MPIs to measure. Each is a mapping of the fields of `MPI`."""
    with_sum: bool = False
    """Whether to measure Syncline and the MPIs also with a plain sum, without division by the number of ranks."""
    transport: str | None = None
    """The name of the transport that the ranks must have. None accepts any. With another one, nothing is measured."""


def main(argv: Sequence[str]) -> None:
    """Measure according to a plan. Rank 0 writes the results to a file.

    Args:
        argv: the arguments PLAN and OUTPUT.
    """
    found = measure(Plan(**json.loads(argv[0])))
    if found is not None:
        Path(argv[1]).write_text(json.dumps(found))


def measure(plan: Plan) -> dict[str, Any] | None:
    """Perform the measurement `plan`. All ranks call this function together.

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
        found["all_reduce"] = _all_reduce(plan, transport, backend, notes)
        found["steps"] = [_steps(model, plan, transport, backend, notes) for model in plan.models]
    shutdown()
    return found if world.rank == 0 else None


def _all_reduce(
    plan: Plan, transport: Transport, backend: dist.ProcessGroup | None, notes: list[str]
) -> list[dict[str, Any]]:
    rows = []
    with _peers(plan, transport, notes) as peers:
        for number, size_bytes in enumerate(plan.sizes_bytes, start=1):
            _say(f"all_reduce of {size_text(size_bytes)}, {number} of {len(plan.sizes_bytes)}", transport)
            numel = size_bytes // 4
            calls = checked(
                engines(numel, transport=transport, backend=backend, with_sum=plan.with_sum),
                rank=transport.rank,
                size=transport.size,
            )
            timers = {name: timer(call, transport) for name, call in calls.items()}
            timers |= _timers_of_peers(peers, numel, plan, transport)
            num_calls = calls_for(timers, seconds=plan.turn_seconds, most=2000, transport=transport)
            seconds = alternate(
                timers,
                num_rounds=plan.num_rounds,
                num_calls=num_calls,
                transport=transport,
                after_round=_rounds_said(plan.num_rounds, transport),
            )
            rows.append({"payload_bytes": size_bytes, "num_calls": num_calls, "seconds": seconds})
    return rows


@contextlib.contextmanager
def _peers(plan: Plan, transport: Transport, notes: list[str]) -> Iterator[dict[str, MPIPeer | None]]:
    """Start the MPIs of the plan on rank 0, and end them when the context ends.

    Yields:
        The MPIs that have started, by name. On ranks other than 0, the values are None.
    """
    with contextlib.ExitStack() as stack:
        mine: dict[str, MPIPeer | None] = {}
        for fields in plan.mpis if transport.rank == 0 else ():
            mpi = MPI(**fields)
            _say(f"starting {mpi.name}", transport)
            try:
                mine[mpi.name] = stack.enter_context(MPIPeer(mpi, num_ranks=transport.size))
            except RuntimeError as error:
                notes.append(str(error))
        names = json.loads(transport.all_gather_bytes(json.dumps(list(mine)).encode())[0])
        yield {name: mine.get(name) for name in names}


def _timers_of_peers(
    peers: Mapping[str, MPIPeer | None], numel: int, plan: Plan, transport: Transport
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
    seconds = alternate(
        timers,
        num_rounds=plan.num_step_rounds,
        num_calls=num_calls,
        transport=transport,
        after_round=_rounds_said(plan.num_step_rounds, transport),
    )
    return {
        "model": f"GPT {model}",
        "num_parameters": num_parameters_of(model),
        "num_steps": plan.num_steps,
        "seconds": seconds,
    }


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
