"""Two deaths close together in `sl.steps`: by the clock, and at each await of a change of the ranks.

    PYTHONPATH=tests python tests/fault/elastic_pairs.py --pairs 200 --seed 0
    PYTHONPATH=tests python tests/fault/elastic_pairs.py --awaits

A pair: two processes are killed at most 60 ms apart, by the clock and not at a place, as the kernel kills them when
memory runs out. In a third of the runs a process joins meanwhile, which may be one of the two. An await: a rank is
lost, or a process joins, and another rank, or the joining process, is killed at the first, second, ... place where it
waits for another process or for the store, until the ranks train again.

No job may be lost. The command prints how long the others took until their next step, from the second death on.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace

import elastic
from elastic import Fault, Plan
from elastic_cases import Runs

from syncline.testing import RankPool

PAIR_SECONDS = 0.060

PAIR_STEPS = 40
"""Enough that ranks still train when the second one is killed."""


def drawn_pair(seed: int) -> Plan:
    """Return the run of a seed in which two processes are killed close together."""
    lots = random.Random(seed)
    size, joins = lots.choice([3, 4]), lots.random() < 1 / 3
    first = lots.uniform(0.0001, 0.010)
    moments = [first, first + lots.uniform(0, PAIR_SECONDS)]
    lots.shuffle(moments)
    if joins:  # all are asked to stop when the process joins, and the clocks begin there
        ranks = lots.sample(range(size + 1), 2)
        hold = (Fault(rank=0, step=3, place="forward", kind="await newcomers"),)
        places = [(0, "meeting") if rank == size else (3, "agreeing") for rank in ranks]
    else:
        ranks, hold = lots.sample(range(size), 2), ()
        places = [(3, "forward")] * 2
    faults = [
        Fault(rank=rank, step=step, place=place, after_seconds=seconds)
        for rank, (step, place), seconds in zip(ranks, places, moments, strict=True)
    ]
    return Plan(
        size=size, transport=lots.choice(["shm", "c10d"]), faults=(*hold, *faults), steps=PAIR_STEPS,
        kills_late=True, num_newcomers=int(joins), max_ranks=size + 1 if joins else None,
    )  # fmt: skip


def run(plan: Plan, runs: Runs) -> tuple[float, str | None]:
    """Run a plan, and check all invariants.

    Returns:
        The seconds from the last death until the slowest of the others has stepped, and the await at which a process
        was killed. None if none was, because it has not come to so many awaits.
    """
    notes = runs.of(plan).notes
    for lines in notes:  # a process that is killed after its last step has finished like the others
        ends = [at for at, line in enumerate(lines) if "done" in line]
        del lines[ends[0] + 1 if ends else len(lines) :]
    finals = elastic.check(notes, steps=plan.steps)
    dead = {rank: lines[-1]["at"] for rank, lines in enumerate(notes) if "fault" in lines[-1]}
    assert len(finals) + len(dead) == len(notes), f"a job was lost: {plan}\n{notes}"
    last = [fault for fault in plan.faults if fault.rank in dead and dead[fault.rank] == max(dead.values())]
    awaits = [line["awaits"] for lines in notes for line in lines if "awaits" in line]
    return elastic.seconds_after(last[0], notes) if last else 0.0, awaits[0] if awaits else None


def run_pairs(seeds: range, runs: Runs) -> int:
    """Run the pairs of some seeds, print how long the others took, and return how many runs failed."""
    took, num_failed = [], 0
    for seed in seeds:
        plan = drawn_pair(seed)
        try:
            took.append((run(plan, runs)[0], f"seed {seed}"))
        except Exception:
            num_failed += 1
            print(f"seed {seed}: {plan}\n{traceback.format_exc()}", flush=True)
    _print(took)
    return num_failed


# ---------------------------------------------------------------------- the second death at each await


CHANGES = {
    "a rank is lost": Plan(
        size=4, transport="", faults=(Fault(rank=3, step=3, place="last bucket"),), kills_late=True
    ),
    "a process joins": Plan(
        size=2,
        transport="",
        faults=(Fault(rank=0, step=3, place="forward", kind="await newcomers"),),
        kills_late=True,
        num_newcomers=1,
        max_ranks=3,
    ),
}
"""What makes the ranks change."""

VICTIMS = [("a rank is lost", 0), ("a rank is lost", 1), *(("a process joins", rank) for rank in range(3))]


def at_awaits(change: str, rank: int, transport: str, step: int = 1) -> Iterator[Plan]:
    """Yield the plans in which a rank is killed at each await of a change, or at each `step`th of them.

    Close the generator when the rank has not come to so many awaits.
    """
    plan = CHANGES[change]
    # A process that joins is in no step. The others are held until it has asked, which is its first await.
    begins, first = (0, 2) if rank >= plan.size else (3, 1)
    for nth in itertools.count(first, step):
        death = Fault(rank=rank, step=begins, place="await", nth=nth)
        yield replace(plan, transport=transport, faults=(*plan.faults, death))


def run_awaits(
    change: str, rank: int, transport: str, runs: Runs, step: int = 1
) -> tuple[list[tuple[float, str]], int]:
    """Run these plans until there is no such await. Return how long the others took, and how many runs failed."""
    took, num_failed = [], 0
    for plan in at_awaits(change, rank, transport, step):
        try:
            seconds, name = run(plan, runs)
        except Exception:
            num_failed += 1
            print(f"{plan}\n{traceback.format_exc()}", flush=True)
            continue
        if name is None:
            break
        took.append((seconds, f"{change}, {transport}, rank {rank} at {name}"))
    return took, num_failed


def _print(took: list[tuple[float, str]]) -> None:
    took.sort()
    of_parts = ", ".join(
        f"{part:.0%}: {took[int(part * (len(took) - 1))][0]:.3f}" for part in (0.5, 0.9, 0.99, 1)
    )
    slowest = ", ".join(f"{seconds:.3f} {what}" for seconds, what in took[:-4:-1])
    print(f"{len(took)} times, in seconds: {of_parts}; the slowest: {slowest}", flush=True)


def main() -> int:
    """Run pairs, or the deaths at each await."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--pairs", type=int, default=0, help="how many random pairs to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--awaits", action="store_true", help="whether to kill at each await")
    arguments = parser.parse_args()
    runs, num_failed = Runs(RankPool()), 0
    if arguments.pairs:
        num_failed += run_pairs(range(arguments.seed, arguments.seed + arguments.pairs), runs)
    for change, rank in VICTIMS if arguments.awaits else ():
        for transport in ("shm", "c10d"):
            took, failed = run_awaits(change, rank, transport, runs)
            num_failed += failed
            _print(took)
    print(f"{num_failed} runs failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
