"""What a trace costs: a step with `sl.trace`, against the same step without, and the cost of events that nobody wants.

    python benchmarks/tracing.py [--ranks 2] [--rounds 30]

The ranks take turns of 40 steps with and without a trace, in the same processes, in both orders. A ratio is that of the
medians of two turns; printed is the median of all ratios, and their quartiles. "Looks" are the places in the code at
which a step asks whether an observer wants an event. They are counted in a step, and one look is timed alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from torch import nn

NUM_STEPS = 40


def train(num_rounds: int) -> None:
    """Measure on one rank of several. Rank 0 prints."""
    import syncline as sl
    from syncline.events.observer import KINDS, OBSERVERS

    torch.set_num_threads(1)
    rank = sl.init().rank
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU())]
    ddp = sl.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
    x = torch.randn(256, 256) + rank

    def step() -> None:
        loss = ddp(x).square().mean()
        ddp.report(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def turn() -> float:
        times = []
        for _ in range(NUM_STEPS):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    turn()
    ratios, plain = [], []
    with tempfile.TemporaryDirectory() as folder:

        def traced(number: int) -> float:
            with sl.trace(Path(folder, str(number))):
                return turn()

        for number in range(num_rounds):
            sl.barrier()
            if number % 2:
                without, with_trace = turn(), traced(number)
            else:
                with_trace, without = traced(number), turn()
            ratios.append(with_trace / without)
            plain.append(without)
        num_bytes = (
            sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl")) / num_rounds / NUM_STEPS
        )
    last = ddp.last_step
    num_buckets = 0 if last is None else len(last.buckets)
    num_looks = looks_in(step, OBSERVERS, KINDS)
    look = timeit.timeit("if observers.bucket_sent: pass", globals={"observers": OBSERVERS}, number=1_000_000)
    if rank == 0:
        low, _, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1000 * statistics.median(plain)
        print(
            f"a step of {milliseconds:.1f} ms ({num_buckets} buckets) takes "
            f"{statistics.median(ratios):.3f} times as long with a trace (quartiles {low:.3f} to {high:.3f}), and "
            f"records {num_bytes / sl.world().size:.0f} bytes a rank"
        )
        print(
            f"without an observer a step looks {num_looks} times for one: {num_looks * look:.2f} us, "
            f"{100 * num_looks * look / 1000 / milliseconds:.4f} % of it"
        )


def looks_in(step: Callable[[], None], observers: object, kinds: tuple[str, ...]) -> int:
    """Return how often a step looks whether an observer wants an event."""
    count = 0

    class Nobody(tuple):  # type: ignore[type-arg]
        __slots__ = ()

        def __bool__(self) -> bool:
            nonlocal count
            count += 1
            return False

    with ExitStack() as patched:
        for kind in kinds:
            patched.enter_context(mock.patch.object(observers, kind, Nobody()))
        step()
    return count


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options.rounds)
        return
    command = [
        str(Path(sys.executable).parent / "syncline"),
        "run",
        "-n",
        str(options.ranks),
        __file__,
        "--rank",
    ]
    subprocess.run(
        [*command, "--rounds", str(options.rounds)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


if __name__ == "__main__":
    main()
