"""Collectives over shared memory, drawn by lot, round after round; in some rounds a rank is killed or stopped.

    python tests/fault/soak.py --seconds 60 --seed 1

Every rank that is left ends with right results, or with an error that names who is lost, before its deadline. Each
round prints one line; `--seed` with the number that it shows begins at that round.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from syncline import PeerLost, SynclineError
from syncline.testing import RankPool, Task
from syncline.transport import C10dTransport, Transport, Work
from syncline.transport.shared_memory import SharedMemoryTransport

__all__ = ["Round", "one_round", "soak"]

_DEADLINE_SECONDS = 20.0
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "in place", "ring")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64)
_OPS = ("sum", "max", "min", "product")
_NUM_BUFFERS = 2
_BUFFER_NUMEL = 200_000


@dataclass(frozen=True)
class Round:
    """What happens in one round; the same for the same seed."""

    seed: int
    size: int
    num_batches: int
    victim: int | None
    """Who is killed."""
    stopped: int | None
    """Who is stopped for a while; rank 0 sees to it."""
    after_seconds: float
    """When a rank is killed or stopped."""
    for_seconds: float
    """How long it is stopped."""

    @staticmethod
    def drawn(seed: int) -> Round:
        lots = random.Random(seed)
        size = lots.randint(2, 6)
        fate = lots.choice(["", "", "killed", "stopped"])
        return Round(
            seed=seed,
            size=size,
            num_batches=lots.randint(5, 30),
            victim=lots.randrange(size) if fate == "killed" else None,
            stopped=lots.randrange(1, size) if fate == "stopped" else None,
            after_seconds=lots.uniform(0, 0.3),
            for_seconds=lots.uniform(0.05, 0.7),
        )

    def __str__(self) -> str:
        what = "all stay"
        if self.victim is not None:
            what = f"rank {self.victim} is killed after {self.after_seconds:.3f} s"
        if self.stopped is not None:
            what = f"rank {self.stopped} is stopped for {self.for_seconds:.2f} s"
        return f"seed {self.seed}: {self.size} ranks, {what}"


# ---------------------------------------------------------------------- one call


def _values(lots: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: sums and products of few are exact in every dtype."""
    generator = torch.Generator().manual_seed(lots * 64 + rank)
    return torch.randint(0, 3, (numel,), generator=generator).to(dtype)


def _reduced(lots: int, size: int, numel: int, dtype: torch.dtype, op: str) -> Tensor:
    stack = torch.stack([_values(lots, rank, numel, dtype).long() for rank in range(size)])
    results = {"sum": stack.sum, "max": stack.amax, "min": stack.amin, "product": stack.prod}
    return results[op](0).to(dtype)


def _begin(t: Transport, lots: random.Random, buffers: list[Tensor]) -> Callable[[], None]:
    """Start what is drawn; what is returned waits for it and checks it. `buffers` are those that are not in use."""
    kind, dtype, op = lots.choice(_KINDS), lots.choice(_DTYPES), lots.choice(_OPS)
    numel = lots.choice([0, 1, lots.randrange(100), lots.randrange(5000), lots.randrange(120_000)])
    seed, src = lots.randrange(2**40), lots.randrange(t.size)
    works: list[Work]
    if kind == "in place" and buffers:
        target, dtype = buffers.pop(), torch.float32
        target.copy_(_values(seed, t.rank, target.numel(), dtype))
        works, expected = [t.all_reduce(target, op)], _reduced(seed, t.size, target.numel(), dtype, op)  # type: ignore[arg-type]
    elif kind == "barrier":
        works, target, expected = [t.barrier()], torch.empty(0), torch.empty(0)
    elif kind == "broadcast":
        target, expected = _values(seed, t.rank, numel, dtype), _values(seed, src, numel, dtype)
        works = [t.broadcast(target, src)]
    elif kind == "all_gather":
        target = torch.zeros(t.size * numel, dtype=dtype)
        expected = torch.cat([_values(seed, rank, numel, dtype) for rank in range(t.size)])
        works = [t.all_gather(target, _values(seed, t.rank, numel, dtype))]
    elif kind == "reduce_scatter":
        target = torch.zeros(numel, dtype=dtype)
        expected = _reduced(seed, t.size, t.size * numel, dtype, op)[t.rank * numel : (t.rank + 1) * numel]
        works = [t.reduce_scatter(target, _values(seed, t.rank, t.size * numel, dtype), op)]  # type: ignore[arg-type]
    elif kind == "ring":
        target = torch.zeros(numel, dtype=dtype)
        after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
        expected = _values(seed, before, numel, dtype)
        works = [t.send(_values(seed, t.rank, numel, dtype), after), t.recv(target, before)]
    else:
        target, expected = _values(seed, t.rank, numel, dtype), _reduced(seed, t.size, numel, dtype, op)
        works = [t.all_reduce(target, op)]  # type: ignore[arg-type]

    def finish() -> None:
        for work in works:
            work.wait()
        assert torch.equal(target, expected), f"{kind} ({op}) of {target.numel()} {dtype}: wrong"

    return finish


# ---------------------------------------------------------------------- one rank


def _talk(lanes: list[Transport], buffers: list[Tensor], seed: int, num_batches: float) -> None:
    """Batches of calls on some lanes, the same on all ranks; each waits for them in an order of its own."""
    lots, own = random.Random(seed), random.Random(seed + 1000 + lanes[0].rank)
    batch = 0
    while batch < num_batches:
        free = list(buffers)
        calls = [_begin(lots.choice(lanes), lots, free) for _ in range(lots.randint(1, 6))]
        own.shuffle(calls)
        for finish in calls:
            finish()
        batch += 1


def one_round(plan: Round) -> None:
    """One rank's part of a round; raises where something is not as it should be."""
    t = SharedMemoryTransport.over(C10dTransport(timeout_seconds=_DEADLINE_SECONDS))
    assert isinstance(t, SharedMemoryTransport)
    lanes = [t, t.lane("more"), t.lane("another thread")]
    cpu = torch.device("cpu")
    buffers = [t.allocate(_BUFFER_NUMEL, torch.float32, cpu) for _ in range(_NUM_BUFFERS)]
    t.barrier().wait()
    _arrange(plan, t)
    # Who waits for a peer's end goes on until it comes.
    num_batches = plan.num_batches if plan.victim is None else float("inf")
    errors: list[BaseException] = []

    def run(lanes: list[Transport], buffers: list[Tensor], seed: int) -> None:
        try:
            _talk(lanes, buffers, seed, num_batches)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, args=(lanes[2:], [], plan.seed + 1), daemon=True)
    thread.start()
    run(lanes[:2], buffers, plan.seed)
    thread.join(_DEADLINE_SECONDS)
    assert not thread.is_alive(), "a thread did not end before its deadline"
    if plan.victim is None:
        for error in errors:
            raise error
        t.barrier().wait()
    else:
        assert len(errors) == 2, errors
        for error in errors:
            if not isinstance(error, PeerLost) or f"rank {plan.victim}" not in str(error):
                raise error
    t.close()


def _arrange(plan: Round, t: SharedMemoryTransport) -> None:
    """Let happen what is to happen."""
    if plan.victim == t.rank:
        after(plan.after_seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if plan.stopped is not None and t.rank == 0:
        pid = t.peers.processes[plan.stopped].pid

        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            after(plan.for_seconds, lambda: os.kill(pid, signal.SIGCONT), daemon=False)

        after(plan.after_seconds, stop)


def after(seconds: float, action: Callable[[], object], *, daemon: bool = True) -> None:
    """Do something in a while, whatever this thread does then."""
    timer = threading.Timer(seconds, action)
    timer.daemon = daemon
    timer.start()


# ---------------------------------------------------------------------- all rounds


def soak(seconds: float, seed: int, tell: Callable[[str], object], pool: RankPool) -> int:
    """Rounds until the time is up.

    Args:
        seconds: no round begins later.
        seed: of the first round; the next has the next number.
        tell: called with one line per round.
        pool: the ranks.

    Returns:
        The number of rounds.

    Raises:
        SynclineError: a round went wrong.
    """
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    until = time.monotonic() + seconds
    num_rounds = 0
    while time.monotonic() < until:
        plan = Round.drawn(seed + num_rounds)
        began = time.monotonic()
        task = Task(
            module="soak",
            qualname="one_round",
            arguments={"plan": plan},
            timeout_seconds=2 * _DEADLINE_SECONDS,
            warning_filters=("error", "ignore:.*whose process is stopped:RuntimeWarning"),
        )
        outcomes = pool.run(plan.size, task, [] if plan.victim is None else [plan.victim])
        bad = [
            f"rank {rank} {outcome.kind}:\n{outcome.text}"
            for rank, outcome in enumerate(outcomes)
            if outcome.kind != ("killed" if rank == plan.victim else "passed")
        ]
        if bad:
            raise SynclineError("\n".join([f"{plan}:", *bad]))
        tell(f"{plan}: right, {time.monotonic() - began:.2f} s")
        num_rounds += 1
    return num_rounds


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # The ranks look for the module by this name; pickled plans must name it, too.
    from soak import soak as run

    try:
        with closing(RankPool()) as pool:
            num_rounds = run(options.seconds, options.seed, lambda line: print(line, flush=True), pool)
    except SynclineError as error:
        sys.exit(str(error))
    print(f"{num_rounds} rounds, all right")


if __name__ == "__main__":
    main()
