"""Do the planner's predictions hold? Predicted against measured steps, and its choice against an exhaustive sweep.

    sudo python benchmarks/plan_audit.py [--only shm-2 link-100 ...] [--rounds 7] [--json FILE]

Each configuration is a number of ranks, what connects them, and a way to synchronize. First the machine is calibrated
(as `syncline bench --calibrate` does). Then the ranks of a configuration measure what a step computes without any
synchronization, and from this the planner predicts the step. Then each bucket size takes turns in the same processes.

"error" is the predicted step divided by the measured one, minus 1, for the automatic bucket size. "choice" is by how
much the measured step with the planner's bucket size (for the exact ways also its choice of sharded=True) is longer
than the shortest of all measured ones; "automatic" is the same for the defaults. Sizes that make the same buckets count
as one setting. Links are cables between network namespaces, limited by tc tbf (root, Linux).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import syncline as sl
from models import GPT, SIZES, random_batch
from syncline.session import transport_of
from syncline.testing import simulated_hosts
from syncline.tools.bench.measured import calibrated
from syncline.tools.bench.model_times import measure_job
from syncline.tools.bench.results import describe_machine
from syncline.tools.plan.advice import best_of
from syncline.tools.plan.cluster import Cluster
from syncline.tools.plan.job import Job
from syncline.tools.plan.machine import Machine
from syncline.tools.plan.options import Option, codec_of, with_caps
from syncline.tools.plan.predict import Planner
from tables import seconds_text, table


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What is measured."""

    name: str
    model: str = "5M"
    hosts: int = 1
    ranks: int
    engine: str = "shm"
    megabits: float | None = None
    options: tuple[Option, ...] = (Option(),)

    def cluster(self, num_cores: int) -> Cluster:
        """All ranks share the cores of this machine, also those of different hosts."""
        return Cluster(
            hosts=self.hosts,
            ranks_per_host=self.ranks // self.hosts,
            cores_per_host=max(1, num_cores // self.hosts),
            engine="gloo" if self.engine == "gloo" else "shm",
            link_bytes_per_second=None if self.megabits is None else self.megabits * 1e6 / 8,
            latency_seconds=50e-6,
        )


EXACT = (Option(), Option(sharded=True))

CONFIGURATIONS = (
    Configuration(name="shm-2", ranks=2, options=EXACT),
    Configuration(name="shm-4", ranks=4, options=EXACT),
    Configuration(name="shm-8", ranks=8, model="0.3M", options=EXACT),
    Configuration(name="gloo-2", ranks=2, engine="gloo"),
    Configuration(name="gloo-4", ranks=4, engine="gloo"),
    Configuration(name="hierarchy-1000", ranks=4, hosts=2, megabits=1000),
    Configuration(name="hierarchy-200", ranks=4, hosts=2, megabits=200),
    Configuration(name="link-100", ranks=2, hosts=2, megabits=100),
    Configuration(name="link-200", ranks=2, hosts=2, megabits=200),
    Configuration(name="link-1000", ranks=2, hosts=2, megabits=1000),
    Configuration(
        name="link-200-quantize",
        ranks=2,
        hosts=2,
        megabits=200,
        options=(Option(compression=codec_of("Quantize(4)")),),
    ),
    Configuration(
        name="link-100-powersgd",
        ranks=2,
        hosts=2,
        megabits=100,
        options=(Option(compression=codec_of("PowerSGD(2)")),),
    ),
    Configuration(
        name="hierarchy-200-cast",
        ranks=4,
        hosts=2,
        megabits=200,
        options=(Option(compression=codec_of("Cast()")),),
    ),
    Configuration(
        name="link-200-diloco", ranks=2, hosts=2, megabits=200, options=(Option(strategy="DiLoCo", every=10),)
    ),
)

# ---------------------------------------------------------------------- as one of the ranks


def wrapped(module: nn.Module, option: Option) -> tuple[nn.Module, torch.optim.Optimizer]:
    arguments: dict[str, Any] = {"bucket_cap_mb": option.cap_mb, "sharded": option.sharded}
    if option.compression is not None:
        arguments["compression"] = eval(f"sl.compression.{option.compression.code}")
    if option.strategy == "DiLoCo":
        arguments = {"strategy": sl.DiLoCo(option.every)}
    replica = sl.DistributedDataParallel(module, **arguments)
    optimizer = replica.attach(torch.optim.AdamW(replica.parameters(), fused=True))
    return replica, optimizer


def as_rank(configuration: Configuration, num_rounds: int) -> None:
    """Measure the computation, then all options in turn; rank 0 prints a line of JSON."""
    torch.set_num_threads(1)
    world = sl.init(device="cpu", transport="c10d" if configuration.engine == "gloo" else "auto")
    transport = transport_of(None)
    torch.manual_seed(0)
    base = GPT(SIZES[configuration.model])
    batch = random_batch(SIZES[configuration.model], seed=world.rank)

    def turn_of(module: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> Callable[[], float]:
        def seconds() -> float:
            transport.barrier().wait()
            began = time.perf_counter()
            for _ in range(num):
                module(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            transport.barrier().wait()
            return (time.perf_counter() - began) / num

        return seconds

    plain = copy.deepcopy(base)
    plain_optimizer: torch.optim.Optimizer = torch.optim.AdamW(plain.parameters(), fused=True)

    job = measure_job(configuration.model, plain, batch, plain_optimizer, transport, num_steps=20)
    turns = {"local": turn_of(plain, plain_optimizer, 2)}
    num = 2 if configuration.megabits is None else 1
    for option in configuration.options:
        for one in with_caps(option):
            turns[one.words] = turn_of(*wrapped(copy.deepcopy(base), one), max(num, one.every))
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(-2, num_rounds):
        for name, seconds in turns.items():
            took = seconds()
            if number >= 0:
                times[name].append(took)
    if world.rank == 0:
        print(json.dumps({"job": asdict(job), "times": times, "transport": transport.name}))
    sl.shutdown()


# ---------------------------------------------------------------------- as the one who measures


@contextmanager
def started(configuration: Configuration, command: list[str]) -> Iterator[str]:
    if configuration.hosts == 1:
        run = [sys.executable, "-m", "syncline", "run", "-n", str(configuration.ranks)]
        done = subprocess.run([*run, *command[1:]], capture_output=True, text=True, timeout=900)
        if done.returncode:
            sys.exit(f"{configuration.name}: {done.stderr}")
        yield next(line for line in done.stdout.splitlines() if "{" in line).partition("{")[2]
        return
    with simulated_hosts(megabits_per_second=configuration.megabits) as hosts:
        per_host = configuration.ranks // 2
        hosts.start(command, "a" * per_host + "b" * per_host)
        outputs = hosts.outputs(timeout_seconds=900)
        for rank, (code, _, err) in enumerate(outputs):
            if code:
                sys.exit(f"{configuration.name}: rank {rank} ended with {code}:\n{err}")
        yield outputs[0][1].strip().splitlines()[-1].partition("{")[2]


def audited(configuration: Configuration, machine: Machine, num_rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--as-rank", configuration.name, "--rounds", str(num_rounds)]
    with started(configuration, command) as line:
        return judged(configuration, json.loads("{" + line), machine)


def judged(configuration: Configuration, found: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Compare what the ranks have measured with what the planner predicts."""
    num_cores = describe_machine()["num_cores"]
    cluster = configuration.cluster(num_cores)
    # The unsynchronized steps take turns with the others, so that other load on the machine affects all of them.
    local = statistics.median(found["times"]["local"])
    job = Job.from_json(found["job"])
    planner = Planner.of(job.slower(local / job.compute), cluster, machine)
    rows = [
        {
            "option": one.words,
            "layout": [option.words, planner.predict(one).num_buckets],
            "predicted": planner.predict(one).step,
            "measured": statistics.median(found["times"][one.words]),
            "rounds": found["times"][one.words],
        }
        for option in configuration.options
        for one in with_caps(option)
    ]
    # Bucket sizes with the same buckets are the same setting: their rounds count together.
    pooled: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        pooled.setdefault(tuple(row["layout"]), []).extend(row["rounds"])
    medians = {layout: statistics.median(times) for layout, times in pooled.items()}
    best = min(medians.values())
    chosen = min((best_of(planner, option) for option in configuration.options), key=lambda one: one.step)
    of_chosen = next(row for row in rows if row["option"] == chosen.option.words)
    return {
        "name": configuration.name,
        "transport": found["transport"],
        "local": local,
        "compute": planner.job.compute,
        "job": asdict(planner.job),
        "rows": rows,
        "chosen": chosen.option.words,
        "choice": medians[tuple(of_chosen["layout"])] / best - 1,
        "default": medians[tuple(rows[0]["layout"])] / best - 1,
        "error": rows[0]["predicted"] / rows[0]["measured"] - 1,
    }


def report(audits: list[dict[str, Any]], *, shows_all: bool) -> str:
    head = ["", "computes", "predicted", "measured", "error", "planner's choice", "choice", "automatic"]
    body = [
        [
            one["name"],
            seconds_text(one["compute"]),
            seconds_text(one["rows"][0]["predicted"]),
            seconds_text(one["rows"][0]["measured"]),
            f"{one['error']:+.0%}",
            one["chosen"],
            f"{one['choice']:+.1%}",
            f"{one['default']:+.1%}",
        ]
        for one in audits
    ]
    parts = [table([head, *body])]
    for one in audits if shows_all else ():
        rows = [
            [
                row["option"],
                str(row["layout"][1]),
                seconds_text(row["predicted"]),
                seconds_text(row["measured"]),
                f"{row['predicted'] / row['measured'] - 1:+.0%}",
            ]
            for row in one["rows"]
        ]
        parts.append(
            f"{one['name']} ({one['transport']}), local {seconds_text(one['local'])}\n"
            + table([["", "buckets", "predicted", "measured", "error"], *rows])
        )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [one.name for one in CONFIGURATIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--machine", type=Path, help="use the figures in this file, and do not calibrate")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--all", action="store_true", help="show each bucket size")
    parser.add_argument("--as-rank", choices=names, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {one.name: one for one in CONFIGURATIONS}
    if arguments.as_rank:
        as_rank(by_name[arguments.as_rank], arguments.rounds)
        return
    path = arguments.machine
    machine = calibrated() if path is None else Machine.from_json(json.loads(path.read_text()))
    audits = []
    for name in arguments.only:
        audits.append(audited(by_name[name], machine, arguments.rounds))
        print(report(audits[-1:], shows_all=arguments.all), flush=True)
    print(report(audits, shows_all=False))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine.to_json(), "audits": audits}, indent=1))


if __name__ == "__main__":
    main()
