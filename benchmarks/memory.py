"""How much memory do the ranks of one host take, together?

    python benchmarks/memory.py [--ranks 4] [--parameters 100M] [--json FILE]
    python benchmarks/memory.py --quick      # 4 M parameters: does it run?

Each way to train is a job of its own: fresh processes, a chain of linear layers in fp32, AdamW, 2 steps. Then, before
the gradients are dropped, all ranks meet and read their PSS from /proc/self/smaps_rollup: memory that several processes
have mapped counts once in the sum over ranks. What Python and torch take before there is a model is measured in the
same way and taken off for the second figure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.tools.bench.machine import total_memory_bytes
from syncline.tools.bench.tables import size_text, table

LAYER_WIDTH = 1024
NUM_STEPS = 2
BYTES_PER_PARAMETER = 20
"""Parameter, gradient, two moments, and a bucket."""

Wrapped = tuple[nn.Module, torch.optim.Optimizer]
UNITS = {"K": 10**3, "M": 10**6}


def torch_ddp(module: nn.Module) -> Wrapped:
    """torch's class with its defaults, over Gloo."""
    ddp: nn.Module = nn.parallel.DistributedDataParallel(module)
    return ddp, torch.optim.AdamW(ddp.parameters())


def replicated(module: nn.Module) -> Wrapped:
    """Our class with its defaults."""
    ddp = sl.DistributedDataParallel(module)
    return ddp, torch.optim.AdamW(ddp.parameters())


def sharded(module: nn.Module) -> Wrapped:
    """Our class with one copy of the parameters, each rank stepping its share."""
    ours: Any = sl.DistributedDataParallel
    ddp = ours(module, sharded=True)
    return ddp, ddp.attach(torch.optim.AdamW(ddp.parameters()))


VARIANTS: dict[str, Callable[[nn.Module], Wrapped]] = {
    "torch DDP": torch_ddp,
    "syncline": replicated,
    "syncline, sharded": sharded,
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


def pss_of_all_ranks() -> int:
    """The sum over the ranks, all of which wait until all have read."""
    sl.barrier()
    mine = torch.tensor(pss_bytes(Path("/proc/self/smaps_rollup").read_text()), dtype=torch.float64)
    sl.barrier()
    torch.distributed.all_reduce(mine)
    return int(mine)


def warm_up() -> None:
    """Let torch import what it imports at the first optimizer and the first backward."""
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def run_rank(variant: str, num_parameters: int, output: Path) -> None:
    """Train as `variant` says and let rank 0 write what all took."""
    torch.set_num_threads(1)
    world = sl.init(device="cpu")
    warm_up()
    before = pss_of_all_ranks()
    torch.manual_seed(0)
    module, optimizer = VARIANTS[variant](chain(num_parameters))
    batch: Tensor = torch.randn(4, LAYER_WIDTH)
    after = before
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()
        after = pss_of_all_ranks()
    if world.rank == 0:
        count = sum(parameter.numel() for parameter in module.parameters())
        figures = {"num_parameters": count, "pss_bytes": after, "before_bytes": before}
        output.write_text(json.dumps(figures))
    sl.shutdown()


def run_job(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A job of its own for one variant.

    Raises:
        SystemExit: it failed; its words are on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        launcher = [sys.executable, "-m", "syncline.tools.cli", "run", "-n", str(arguments.ranks), __file__]
        options = ["--variant", variant, "--parameters", str(arguments.parameters), "--output", str(output)]
        ended = subprocess.run([*launcher, *options], timeout=arguments.timeout, check=False)
        if ended.returncode:
            sys.exit(f"{variant}: the job failed with exit code {ended.returncode}")
        figures: dict[str, Any] = json.loads(output.read_text())
        return figures


def report(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each variant."""
    first = next(iter(rows.values()))
    cells = [["", "PSS of all ranks", "ratio", "without Python and torch", "ratio"]]
    for name, row in rows.items():
        net, net_first = (one["pss_bytes"] - one["before_bytes"] for one in (row, first))
        cells.append(
            [
                name,
                size_text(row["pss_bytes"]),
                f"{row['pss_bytes'] / first['pss_bytes']:.2f}",
                size_text(net),
                f"{net / net_first:.2f}",
            ]
        )
    return table(cells)


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
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parameters", type=parse_count, default=100_000_000, help="100M, say")
    parser.add_argument("--quick", action="store_true", help="4 M parameters: ratios without meaning")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one job")
    parser.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant is not None:
        run_rank(arguments.variant, arguments.parameters, arguments.output)
        return
    if arguments.quick:
        arguments.parameters = 4_000_000
    needed = arguments.ranks * arguments.parameters * BYTES_PER_PARAMETER
    if needed > total_memory_bytes():
        sys.exit(
            f"{arguments.ranks} ranks with {arguments.parameters} parameters take about {size_text(needed)}, and "
            f"this host has {size_text(total_memory_bytes())}: choose fewer"
        )
    rows = {name: run_job(name, arguments) for name in VARIANTS}
    count = next(iter(rows.values()))["num_parameters"]
    print(f"{arguments.ranks} ranks, {count / 1e6:.1f} M parameters, fp32, AdamW, after {NUM_STEPS} steps")
    print(report(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"num_ranks": arguments.ranks, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
