"""What does the ledger cost, which is behind `ddp.last_step` and `ddp.explain()`?

    syncline run -n 1 benchmarks/ledger.py [--parameters 52 500] [--rounds 200] [--json out.json]
    syncline run -n 2 benchmarks/ledger.py
    syncline run -n 2 benchmarks/ledger.py --quick      # does it run?

Two answers for each model. Directly: nanoseconds of what a backward does for the ledger alone, called in a loop with
the arguments of a real step: `note`, the copy of the list that it is handed, and the time stamps, one at the first
gradient and three a bucket. And in the whole: one replica trains steps whose `note` works and steps whose `note` does
nothing, in turns within each round; the difference is the median over rounds, with its bootstrapped 95 % interval.
The machine's noise is far above the cost, so the second can only show that nothing larger was overlooked. Shares are of
a step of 15 ms. Reading `last_step` costs only those who read it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import syncline as sl
from models import Chain
from rounds import take_turns
from syncline.events import Source
from syncline.gradients.backward import Backward
from syncline.gradients.ledger import Ledger
from syncline.tools.bench.results import median_interval

STEP_MS = 15.0
GOAL = 0.01
"""The share of a step that keeping the ledger may cost."""


def nanoseconds_of(call: Callable[[], object], *, num_calls: int, num_repeats: int = 15) -> float:
    """Median over the repeats, the loop included."""
    seconds = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        seconds.append((time.perf_counter() - start) / num_calls)
    return statistics.median(seconds) * 1e9


def noted_in(step: Callable[[], None]) -> dict[str, Any]:
    """What one step hands to `note`."""
    calls = []
    note = Ledger.note

    def spy(ledger: Ledger, backward: Backward, **arguments: Any) -> None:
        calls.append({"backward": backward, **arguments})
        note(ledger, backward, **arguments)

    with mock.patch.object(Ledger, "note", spy):
        step()
    (arguments,) = calls
    return arguments


def with_and_without(
    step: Callable[[], None], arguments: argparse.Namespace, world: sl.World
) -> dict[str, list[float]]:
    """Seconds a step, by round, with `note` as it is and with one that does nothing."""

    def nothing(ledger: Ledger, backward: Backward, **_: Any) -> None:
        pass

    def step_by(note: Any) -> None:
        Ledger.note = note  # type: ignore[method-assign]
        step()

    original = Ledger.note
    try:
        return take_turns(
            {"with": lambda: step_by(original), "without": lambda: step_by(nothing)},
            num_rounds=arguments.rounds,
            num_steps=arguments.steps,
            world=world,
        )
    finally:
        Ledger.note = original  # type: ignore[method-assign]


def measure(num_parameters: int, arguments: argparse.Namespace, world: sl.World) -> dict[str, float]:
    """All figures for a chain of so many parameters."""
    torch.manual_seed(0)
    ddp = sl.DistributedDataParallel(Chain(num_parameters=num_parameters))
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
    batch = torch.randn(8, 16)

    def step() -> None:
        ddp(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    noted = noted_in(step)
    buckets = noted["backward"].sent
    spare, names = Ledger(), [name for name, _ in ddp.module.named_parameters()]
    spare.use(Source(world.rank, "Chain"), names, num_ranks=world.size, looks_for_unused=False)
    num_calls = arguments.calls

    def stamp_bucket() -> None:
        bucket = buckets[0]
        bucket.launched_at = time.perf_counter()
        start = time.perf_counter()
        bucket.waited_seconds = time.perf_counter() - start

    note_ns = nanoseconds_of(lambda: spare.note(**noted), num_calls=num_calls)
    stamps_ns = nanoseconds_of(time.perf_counter, num_calls=num_calls)
    if buckets:
        stamps_ns += len(buckets) * nanoseconds_of(stamp_bucket, num_calls=num_calls)
    read_ns = nanoseconds_of(lambda: ddp.last_step, num_calls=max(1, num_calls // 100))
    seconds = with_and_without(step, arguments, world)
    differences = [a - b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    middle, low, high = (x * 1e6 for x in median_interval(differences))
    return {
        "num_parameters": num_parameters,
        "num_buckets": len(buckets),
        "note_ns": note_ns,
        "stamps_ns": stamps_ns,
        "share": (note_ns + stamps_ns) / (STEP_MS * 1e6),
        "read_ns": read_ns,
        "read_share": read_ns / (STEP_MS * 1e6),
        "step_ms": statistics.median(seconds["with"]) * 1e3,
        "difference_us": middle,
        "difference_low_us": low,
        "difference_high_us": high,
    }


def report(rows: Sequence[dict[str, float]]) -> None:
    """Print what was measured."""
    for row in rows:
        figures = {name: row[f"difference{name}_us"] for name in ("", "_low", "_high")}
        shares = [us / (STEP_MS * 1e3) for us in figures.values()]
        print(f"\n{row['num_parameters']} parameters, {row['num_buckets']} bucket(s) sent a step")
        print(f"  note, with the copy handed to it   {row['note_ns']:8.0f} ns")
        print(f"  time stamps                        {row['stamps_ns']:8.0f} ns")
        met = "met" if row["share"] < GOAL else "missed"
        print(
            f"  share of a {STEP_MS:.0f} ms step              {row['share']:8.3%}  (goal < {GOAL:.0%}: {met})"
        )
        print(
            f"  steps with `note` minus without    {figures['']:8.1f} us  [{figures['_low']:.1f}, "
            f"{figures['_high']:.1f}]  = {shares[0]:.2%} [{shares[1]:.2%}, {shares[2]:.2%}]; "
            f"the step took {row['step_ms']:.2f} ms"
        )
        print(
            f"  reading last_step                  {row['read_ns'] / 1e3:8.1f} us  = {row['read_share']:.2%}, "
            "where a step reads it"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", nargs="+", type=int, default=[52, 500])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2, help="steps of one kind in one round")
    parser.add_argument("--calls", type=int, default=20_000, help="calls in one timed loop")
    parser.add_argument("--quick", action="store_true", help="2 rounds, 100 calls: figures without meaning")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.calls = 2, 1, 100
    if any(number < 2 or number % 2 for number in arguments.parameters):
        sys.exit(f"--parameters: expected even numbers from 2 on, got {arguments.parameters}")
    torch.set_num_threads(1)
    world = sl.init()
    rows = [measure(number, arguments, world) for number in arguments.parameters]
    if world.rank == 0:
        print(f"{world.size} rank(s) x 1 thread, {os.cpu_count()} cores, torch {torch.__version__}")
        report(rows)
        if arguments.json:
            arguments.json.write_text(json.dumps({"num_ranks": world.size, "rows": rows}, indent=2) + "\n")
    sl.shutdown()


if __name__ == "__main__":
    main()
