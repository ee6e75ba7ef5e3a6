"""Loss against bytes: what does a strategy or a compression cost in validation loss, and what does it save?

    syncline run -n 4 benchmarks/strategies.py [--task gpt|python|mnist] [--steps 1500] [--seeds 0 1 2]
        [--only NAME ...] [--results FILE.jsonl] [--plot FILE.png] [--learning-rates 0.004 0.008] [--device cuda:0]
    syncline run -n 4 benchmarks/strategies.py --quick      # does it all run?

A run trains the model of an example from scratch, with one setting of strategy_settings.py; all runs of a seed begin
with the same parameters, and rank r sees the same samples at step t. Each clips its own gradients (those that are
averaged in backward after that). At the end the ranks meet, unless they just have, and the loss is measured on
validation samples that are dealt out to them. Steps include synchronous warm-up, where a setting has one; the learning
rate warms up and goes down along a cosine, multiplied by a setting's own factor when its ranks step alone.

"sent a rank" is what one rank has sent from the first step to the last meeting, warm-up and control data included, by
the rule of `sl.Statistics.sent_bytes` (rings; shared memory itself sends nothing); "times fewer" is what
every-step sends, divided by that. The broadcast of initial values at construction is left out: it is the same for all,
and --results has it ("setup_bytes").

With --results each run is written down as it ends, and those that are there already are not made again: a long sweep
can be interrupted, and go on. With --learning-rates each setting runs with each of these.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import syncline as sl
from loss_against_bytes import frontier, frontier_table, plot_frontier
from strategy_settings import BAR, SETTINGS, Setting
from syncline import Statistics
from syncline.session import transport_of
from syncline.tools.bench.results import SUFFIXES, can_plot, describe_machine
from syncline.transport import Transport
from tasks import TASKS, Task, seed_of, share_of_rate

KEY = (
    "task",
    "setting",
    "strategy",
    "compression",
    "learning_rate",
    "alone",
    "decay",
    "seed",
    "steps",
    "batch_size",
    "num_ranks",
)
MAX_NORM = 1.0
Run = dict[str, Any]


def described(setting: Setting, rate: float, seed: int, task: Task, arguments: argparse.Namespace) -> Run:
    """What tells a run from others."""
    return {
        "task": arguments.task,
        "setting": setting.name,
        "strategy": str(setting.strategy),
        "compression": None if setting.compression is None else setting.compression.in_words(),
        "learning_rate": rate,
        "alone": setting.alone,
        "decay": setting.decay,
        "seed": seed,
        "steps": arguments.steps,
        "batch_size": task.batch_size,
        "num_ranks": sl.world().size,
    }


def key_of(run: Run) -> str:
    return json.dumps([run.get(name) for name in KEY])


def trained(
    setting: Setting, rate: float, seed: int, task: Task, num_steps: int, transport: Transport
) -> Run:
    """Train once, on all ranks together; what came out."""
    world = sl.world()
    torch.manual_seed(seed_of(seed))
    before = transport.statistics()
    model = task.model().to(world.device)
    ddp = sl.DistributedDataParallel(model, strategy=setting.strategy, compression=setting.compression)
    optimizer = ddp.attach(task.optimizer(ddp.parameters(), rate))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: setting.factor(step) * share_of_rate(step, num_steps)
    )
    transport.barrier().wait()
    ready, start = transport.statistics(), time.perf_counter()
    for step in range(num_steps):
        if step == setting.num_together:
            for group in optimizer.param_groups:
                beta1, beta2 = group["betas"]
                group["betas"] = setting.betas(beta1, beta2, world.size)
        optimizer.zero_grad()
        loss = task.loss(ddp, task.batch(seed, world.rank, world.size, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        say(f"{setting.name}, seed {seed}: step {step + 1}/{num_steps}, loss {loss.item():.3f}", end="\r")
    make_equal(ddp)
    transport.barrier().wait()
    seconds = time.perf_counter() - start
    done = transport.statistics()
    say("", end="\r")
    means, num_items = task.evaluate(ddp.module, world.rank, world.size)
    sent = largest([sent_by(done - ready), sent_by(ready - before)], transport)
    return {
        **sl.mean(means, weight=num_items),
        "sent_bytes": sent[0],
        "setup_bytes": sent[1],
        "payload_bytes": (done - ready).payload_bytes,
        "seconds": seconds,
        "num_parameters": sum(parameter.numel() for parameter in ddp.parameters()),
    }


def make_equal(ddp: sl.DistributedDataParallel) -> None:
    """Let the replicas meet, unless they just have: a second outer step would send as much again for nothing."""
    try:
        sl.check_replicas(ddp.module)
    except sl.ReplicaDivergence:
        ddp.sync_parameters_()


def sent_by(statistics: Statistics) -> float:
    return statistics.sent_bytes(sl.world().size)


def largest(values: Sequence[float], transport: Transport) -> list[float]:
    """Over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    transport.all_reduce(tensor, "max").wait()
    return [float(value) for value in tensor.tolist()]


def say(text: str, end: str = "\n") -> None:
    """On rank 0; a line that is written over only where somebody looks at it."""
    if sl.world().rank == 0 and (end == "\n" or sys.stderr.isatty()):
        print(f"{text:<78}" if end == "\r" else text, end=end, file=sys.stderr, flush=True)


def known_runs(path: Path | None, transport: Transport) -> list[Run]:
    """What rank 0 finds in the file, on all ranks."""
    mine = path.read_text() if path is not None and transport.rank == 0 and path.exists() else ""
    text = transport.all_gather_bytes(mine.encode())[0].decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def measure(task: Task, settings: Sequence[Setting], arguments: argparse.Namespace) -> list[Run]:
    """All runs that are asked for: those of the file, and the others now."""
    transport = transport_of(None)
    known = {key_of(run): run for run in known_runs(arguments.results, transport)}
    machine = describe_machine()
    runs = []
    for seed, setting in itertools.product(arguments.seeds, settings):
        for rate in arguments.learning_rates or [setting.learning_rate(arguments.task)]:
            run = described(setting, rate, seed, task, arguments)
            if key_of(run) in known:
                runs.append(known[key_of(run)])
                continue
            run |= trained(setting, rate, seed, task, arguments.steps, transport)
            run["machine"] = machine
            runs.append(run)
            say(
                f"{setting.name}, lr {rate:g}, seed {seed}: {run['loss']:.4f} nats, "
                f"{run['sent_bytes'] / 1e6:.2f} MB, {run['seconds']:.0f} s"
            )
            if arguments.results is not None and transport.rank == 0:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(run) + "\n")
    return runs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--task", choices=list(TASKS), default="gpt")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--device", default="cpu", help="cuda:0 for all ranks on one GPU (cpu)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}".replace("%", "%%")
    )
    parser.add_argument("--learning-rates", type=float, nargs="+", help="instead of each setting's own")
    parser.add_argument("--results", type=Path, help="JSON lines: runs are added, and not made again")
    parser.add_argument("--plot", type=Path, help="where to draw loss against bytes (.png, .svg)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="5 steps of one sample a rank: no meaning")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = 5
    if arguments.steps < 1:
        parser.error(f"--steps: expected 1 at least, got {arguments.steps}")
    if arguments.plot is not None and arguments.plot.suffix not in SUFFIXES:
        parser.error(
            f"--plot: expected a file name that ends in {' or '.join(SUFFIXES)}, got {arguments.plot}"
        )
    if arguments.plot is not None and not can_plot():
        parser.error("--plot needs matplotlib: pip install 'syncline[bench]'")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    world = sl.init(device=arguments.device)
    small = {"batch_size": world.size, "num_validation": 8 * world.size} if arguments.quick else {}
    task = TASKS[arguments.task](**small)
    if task.batch_size % world.size:
        sys.exit(f"{task.batch_size} samples a step cannot be dealt out evenly to {world.size} ranks")
    settings = [s for s in SETTINGS if arguments.only is None or s.name in arguments.only]
    runs = measure(task, settings, arguments)
    if world.rank == 0:
        print(
            f"{arguments.task}, {arguments.steps} steps of {task.batch_size} samples over {world.size} ranks, "
            f"{len(arguments.seeds)} seed(s), {runs[0]['num_parameters'] / 1e6:.2f} M parameters"
        )
        rows = frontier(runs, bar=BAR)
        print(frontier_table(rows, bar=BAR))
        if arguments.plot is not None:
            plot_frontier(rows, arguments.plot, bar=BAR)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"runs": runs}, indent=2) + "\n")
    sl.shutdown()


if __name__ == "__main__":
    main()
