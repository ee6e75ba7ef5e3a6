"""Two or three faults of one job in `sl.steps`, drawn by chance: does every step and sample count once?

    PYTHONPATH=tests python tests/fault/elastic_drawn.py --runs 500 --seed 0

Each run draws a training, a transport, a number of ranks, and faults: which rank, in which step, at which place, and
whether it is killed or only loses its connection. In some runs a process joins meanwhile, and may be killed, too. A
fault at a place that its rank never reaches does nothing. The run that fails is printed, with its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback

from elastic import PLACES, STEPS, TRAININGS, Fault, Plan, is_drifting
from elastic_cases import Runs

from syncline.testing import RankPool

CONNECTING = ("agreeing", "meeting", "connecting", "opening lanes", "handing over", "loading", "the end")
"""Places outside of the body of a step, at which the second loss happens while the ranks follow the first one."""

PLACES_OF = {
    "sharded": (*PLACES, *CONNECTING, "received", "moving shards"),
    "LocalSGD": (*PLACES, *CONNECTING, "sync", "confirmed"),
    "DiLoCo": (*PLACES, *CONNECTING, "sync", "confirmed"),
    "streaming": (*PLACES, *CONNECTING, "sync", "confirmed"),
}

DRIFTING_STEPS = 18


def drawn(seed: int) -> Plan:
    """Return the run of a seed."""
    lots = random.Random(seed)
    training = lots.choice([*TRAININGS, "every step", "sharded", "sharded", "LocalSGD", "DiLoCo"])
    # After the last loss, there must be time for the samples of lost steps, which come again.
    steps, latest = (DRIFTING_STEPS, 12) if is_drifting(training) else (STEPS, STEPS)
    size = lots.choice([3, 4])
    faults = []
    joins = training != "sharded" and lots.random() < 0.4
    earliest = 3 if joins else 2
    about = lots.randrange(earliest, latest)
    for rank in lots.sample(range(size), lots.choice([2, 2, 2, 3]) if size == 4 else 2):
        step = about if lots.random() < 0.7 else lots.randrange(earliest, latest)
        place = lots.choice(PLACES_OF.get(training, (*PLACES, *CONNECTING)))
        kind = lots.choice(["kill", "kill", "lost connection"])
        if place in ("handing over", "loading", "the end", "agreeing"):  # only a loss interrupts a rank there
            kind = "kill"
        faults.append(Fault(rank=rank, step=step, place=place, kind=kind, attempt=lots.choice([1, 1, 2])))
    if joins:
        faults.insert(0, Fault(rank=0, step=3, place="forward", kind="await newcomers"))
        if lots.random() < 0.3:  # the process that joins has not begun a step
            faults.append(Fault(rank=size, step=0, place=lots.choice(["meeting", "connecting", "loading"])))
    return Plan(
        size=size, transport=lots.choice(["shm", "c10d"]), faults=tuple(faults), training=training,
        steps=steps, kills_late=True, num_newcomers=int(joins), max_ranks=size + 1 if joins else None,
    )  # fmt: skip


def run(seed: int, runs: Runs) -> None:
    """Run the plan of a seed, and check all invariants."""
    runs.of(drawn(seed)).finals(may_miss=True)


def main() -> int:
    """Run drawn plans, one after the other."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    runs, failed = Runs(RankPool()), []
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        try:
            run(seed, runs)
        except Exception:
            failed.append(seed)
            print(f"seed {seed}: {drawn(seed)}\n{traceback.format_exc()}", flush=True)
    print(f"{arguments.runs} runs, {len(failed)} failed{': seeds ' if failed else ''}{failed or ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
