"""How much memory does a rank take at its peak: while a module is wrapped, and in its first steps?

    python benchmarks/memory.py [--ranks 2] [--parameters 100M] [--rounds 3] [--json FILE]
    python benchmarks/memory.py --quick      # 4 M parameters, one round: does it run?

Each way to train is a job of its own: fresh processes, a chain of linear layers in fp32, AdamW, 2 steps (DiLoCo: 4
steps, a round after every second one). The jobs take turns, round by round. This process reads the PSS of all ranks
from /proc/PID/smaps_rollup, again and again: in the sum over ranks, memory that several of them have mapped counts
once. The peak is the largest sum. "held" is the sum after the last step, before the gradients are dropped. What Python
and torch take before there is a module is measured in the same way and subtracted, except in the last column.

malloc keeps freed memory for the next call, more or less of it by chance. So that a freed tensor leaves the figures at
once, the jobs have MALLOC_MMAP_THRESHOLD_=1048576; --keep-freed measures with malloc as it comes.

"computed" counts tensors. A rank has parameters, gradients and buckets of 4 bytes a parameter each, and AdamW's state
of 8. Of N ranks with sharded=True, each has an Nth of all but the buckets, which take turns in 96 MiB. Before that,
while the module is wrapped, a rank has the parameters that the program made, an Nth of the shared ones, and the
buckets: with 4 ranks and more, this is the peak. DiLoCo has no buckets, and two more copies: the common parameters and
the outer momentum. Beside them come the autograd engine and what torch imports and allocates at the first step: torch's
class shows how much that is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import syncline as sl
from goals import goals_table
from rounds import Figure, write_figures
from syncline.gradients.bucket_plan import POOL_BYTES
from syncline.tools.bench.results import quotients, total_memory_bytes
from tables import size_text, table

LAYER_WIDTH = 1024
BYTES_PER_PARAMETER = 28
"""The most that a way to train may take here, for the check that the memory of this host is enough."""
TIMES_COMPUTED = 1.05
"""What sharding and DiLoCo may take at their peak, in times of what is computed."""
NO_MORE_THAN_TORCH = 1.005
"""What the other ways may take, in times of torch's class: not more, up to the noise of the measurement."""

Wrapped = tuple[nn.Module, torch.optim.Optimizer]
UNITS = {"K": 10**3, "M": 10**6}


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


def torch_ddp(module: nn.Module) -> Wrapped:
    """torch's class with its defaults."""
    ddp: nn.Module = nn.parallel.DistributedDataParallel(module)
    return ddp, adamw(ddp)


def ours(module: nn.Module, **options: Any) -> Wrapped:
    """Our class with some options."""
    wrap: Any = sl.DistributedDataParallel
    ddp = wrap(module, **options)
    return ddp, ddp.attach(adamw(ddp))


class Way(NamedTuple):
    """A way to train, and the memory that its tensors take by our count."""

    wrap: Callable[[nn.Module], Wrapped]
    transport: str
    whole: float
    """Bytes a parameter that each rank has."""
    divided: float = 0.0
    """Bytes a parameter that all ranks have together."""
    pool_bytes: int = 0
    """Bytes of the buckets if they take turns, and all of them are larger."""
    num_steps: int = 2

    def computed_bytes(self, num_parameters: int, num_ranks: int) -> float:
        """The bytes that the tensors of one rank take at most.

        Example:
            >>> [WAYS["syncline, sharded"].computed_bytes(1_000_000, num_ranks) for num_ranks in (2, 4)]
            [12000000.0, 9000000.0]
            >>> WAYS["torch's class, Gloo"].computed_bytes(1, 2)
            20.0
        """
        pool = min(self.pool_bytes, 4 * num_parameters)
        in_steps = self.whole + self.divided / num_ranks
        in_wrapping = 4 + 4 / num_ranks if self.divided else 0
        return max(in_steps, in_wrapping) * num_parameters + pool


TORCH = "torch's class, Gloo"
WAYS = {
    TORCH: Way(torch_ddp, "c10d", 20),
    "syncline, Gloo": Way(ours, "c10d", 20),
    "syncline, shared memory": Way(ours, "shm", 20),
    "syncline, sharded": Way(lambda m: ours(m, sharded=True), "shm", 0, 16, POOL_BYTES),
    "syncline, DiLoCo": Way(lambda m: ours(m, strategy=sl.DiLoCo(every=2)), "shm", 24, num_steps=4),
}


def chain(num_parameters: int) -> nn.Sequential:
    """Linear layers without bias of about so many parameters together."""
    num_layers = max(1, round(num_parameters / LAYER_WIDTH**2))
    return nn.Sequential(*(nn.Linear(LAYER_WIDTH, LAYER_WIDTH, bias=False) for _ in range(num_layers)))


def pss_bytes(rollup: str) -> int:
    """The proportional set size that /proc/PID/smaps_rollup tells.

    Example:
        >>> pss_bytes("Rss:  20 kB\\nPss:  12 kB\\nPss_Anon:  3 kB\\n")
        12288
    """
    (line,) = (line for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def pss_of(pid: str) -> int:
    """The proportional set size of a process; 0 if it has ended."""
    try:
        return pss_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except (ProcessLookupError, FileNotFoundError, ValueError):
        return 0


def pss_of_all_ranks() -> int:
    """The sum over the ranks, all of which wait until all have read."""
    sl.barrier()
    mine = torch.tensor(pss_of("self"), dtype=torch.float64)
    sl.barrier()
    torch.distributed.all_reduce(mine)
    return int(mine)


def warm_up() -> None:
    """Let torch import what it imports at the first optimizer and the first backward."""
    layer = nn.Linear(1, 1)
    optimizer = adamw(layer)
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def run_rank(name: str, num_parameters: int, folder: Path) -> None:
    """Train in one way, and let rank 0 write what all ranks took before and after."""
    way = WAYS[name]
    torch.set_num_threads(1)
    world = sl.init(device="cpu", transport=way.transport)
    warm_up()
    before = pss_of_all_ranks()
    hidden = folder / f"{world.rank}.new"
    hidden.write_text(str(os.getpid()))
    hidden.rename(folder / f"{world.rank}.pid")  # from now on its memory counts
    sl.barrier()
    torch.manual_seed(0)
    module, optimizer = way.wrap(chain(num_parameters))
    batch: Tensor = torch.randn(4, LAYER_WIDTH)
    for _ in range(way.num_steps):
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()
    held = pss_of_all_ranks()
    if world.rank == 0:
        count = sum(parameter.numel() for parameter in module.parameters())
        figures = {"num_parameters": count, "held_bytes": held, "before_bytes": before}
        (folder / "figures.json").write_text(json.dumps(figures))
    sl.shutdown()


def run_job(name: str, arguments: argparse.Namespace) -> dict[str, int]:
    """A job of its own for one way to train.

    Raises:
        SystemExit: it failed; its words are on stderr.
    """
    variables = {} if arguments.keep_freed else {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "syncline", "run", "-n", str(arguments.ranks), __file__]
        options = ["--way", name, "--parameters", str(arguments.parameters), "--output", folder]
        ends_at = time.monotonic() + arguments.timeout
        job = subprocess.Popen([*launcher, *options], env=os.environ | variables)
        peak = 0
        try:
            while job.poll() is None and time.monotonic() < ends_at:
                peak = max(peak, sum(pss_of(file.read_text()) for file in Path(folder).glob("*.pid")))
                time.sleep(0.003)
        finally:
            job.terminate()
        if job.wait():
            sys.exit(f"{name}: the job failed with exit code {job.returncode}")
        figures: dict[str, int] = json.loads((Path(folder) / "figures.json").read_text())
        return figures | {"peak_bytes": peak}


Rounds = Mapping[str, Sequence[Mapping[str, int]]]
"""The figures of each round, by way to train."""


def net(figures: Mapping[str, int], what: str) -> int:
    return figures[what] - figures["before_bytes"]


def report(rounds: Rounds, num_ranks: int) -> str:
    """A line for each way to train, with medians over rounds."""
    cells = [["a rank, at its peak", "memory", "B/parameter", "computed", "held", "of torch's", "gross"]]
    for name, found in rounds.items():
        count = found[0]["num_parameters"]
        shares = count * num_ranks
        peak, held = (
            statistics.median(net(one, what) for one in found) / shares
            for what in ("peak_bytes", "held_bytes")
        )
        of_torch, gross = (
            statistics.median(of(one) / of(other) for one, other in zip(found, rounds[TORCH], strict=True))
            for of in (lambda one: net(one, "peak_bytes"), lambda one: one["peak_bytes"])
        )
        cells.append(
            [
                name,
                size_text(round(peak * count)),
                f"{peak:.2f}",
                f"{WAYS[name].computed_bytes(count, num_ranks) / count:.2f}",
                f"{held:.2f}",
                f"{of_torch:.3f}",
                f"{gross:.2f}",
            ]
        )
    return table(cells)


def figures_of(rounds: Rounds, num_ranks: int) -> list[Figure]:
    """The peak of each way to train, by that of torch's class, or by what is computed, with its goal."""
    figures = []
    for name, found in rounds.items():
        peaks = [net(one, "peak_bytes") for one in found]
        if WAYS[name].whole == WAYS[TORCH].whole:
            theirs = [net(one, "peak_bytes") for one in rounds[TORCH]]
            by, goal = "torch's class", NO_MORE_THAN_TORCH
        else:
            computed = WAYS[name].computed_bytes(found[0]["num_parameters"], num_ranks)
            theirs = [round(computed) * num_ranks] * len(peaks)
            by, goal = "computed", TIMES_COMPUTED
        values = quotients(peaks, theirs)
        if name != TORCH:
            figures.append(Figure(f"memory at the peak: {name} / {by}", values, at_most=goal, form="{:.3f}"))
    return figures


def parse_count(text: str) -> int:
    """A number such as 100M or 4000000.

    Example:
        >>> parse_count("100M"), parse_count("4000000")
        (100000000, 4000000)
    """
    unit = UNITS.get(text[-1:].upper(), 1)
    count = int(float(text[:-1] if unit > 1 else text) * unit)
    if count < 1:
        raise ValueError(text)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=parse_count, default=100_000_000, help="100M, say")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="4 M parameters: ratios without meaning")
    parser.add_argument("--keep-freed", action="store_true", help="malloc as it comes")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one job")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        run_rank(arguments.way, arguments.parameters, arguments.output)
        return
    if arguments.quick:
        arguments.parameters, arguments.rounds = 4_000_000, 1
    needed = arguments.ranks * arguments.parameters * BYTES_PER_PARAMETER
    if needed > total_memory_bytes():
        sys.exit(
            f"{arguments.ranks} ranks with {arguments.parameters} parameters take about {size_text(needed)}, and "
            f"this host has {size_text(total_memory_bytes())}: choose fewer"
        )
    found: dict[str, list[dict[str, int]]] = {name: [] for name in WAYS}
    for _ in range(arguments.rounds):
        for name, jobs in found.items():
            jobs.append(run_job(name, arguments))
    count = found[TORCH][0]["num_parameters"]
    print(
        f"{arguments.ranks} ranks, {count / 1e6:.1f} M parameters, fp32, AdamW, medians of {arguments.rounds} rounds; "
        "gross: of torch's, with Python and torch"
    )
    figures = figures_of(found, arguments.ranks)
    print(f"{report(found, arguments.ranks)}\n\n{goals_table(figures)}")
    write_figures(arguments, figures, {}, num_ranks=arguments.ranks, rounds=found)


if __name__ == "__main__":
    main()
