"""How long until a validation loss is reached over a slow link, against torch's DistributedDataParallel?

    sudo python benchmarks/slow_link.py [--megabits 100] [--target 2.4] [--only torch diloco-20 ...] [--limit 120]
    sudo python benchmarks/slow_link.py --final-steps 1500 --only torch diloco-10-4bit --limit 60
    sudo python benchmarks/slow_link.py --quick      # does it all run?

Two hosts with a rank each: network namespaces of this machine, joined by a cable of that speed (root, Linux). Each way
trains the same GPT from the same values on the same Shakespeare samples, AdamW with a learning rate of its own, until
the mean loss over validation samples is at the target. The clock runs during steps only, from a barrier to a barrier;
it stands while the loss is evaluated, which each way does where its ranks hold the same values (after a meeting). So a
way's steps are a multiple of the steps between two of its evaluations.

Bytes are those of the cable's counters, headers and acknowledgements included, the larger of both directions.
"compute" is what a step takes over a cable without a limit. "pays below" is the bandwidth below which a way is faster
than torch's class: there steps * (compute + bytes * 8 / bandwidth) is as large as torch's (loss_against_bytes.py).
This takes nothing to overlap; torch's class hides a part of a backward, so it is a little too high, and "by formula",
what the formula says for this cable, shows by how much it errs.

With --limit, ways that average every gradient exactly (torch, every-step) are stopped after so many seconds. They need
as many steps as every-step over a cable without a limit, and their time is that by their measured seconds a step: such
a time is marked with a ~.

With --final-steps, each way trains for so many steps instead, its learning rate goes down along a cosine, and the
losses at the end are compared. That of the exact ways is every-step's over a cable without a limit, and their time is
estimated as above.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import syncline as sl
from loss_against_bytes import Pace, crossover, rate_text
from models import GPT, GPTConfig
from syncline.compression import PowerSGD, Quantize
from syncline.session import transport_of
from syncline.testing import HostsUnavailable, SimulatedHosts, simulated_hosts
from syncline.tools.bench.results import describe_machine
from tables import table
from tasks import Batch, characters, seed_of, shakespeare_text, share_of_rate

RANKS = "ab"
CONTEXT = 64
NUM_VALIDATION = 128  # samples, over both ranks
WARM_UP = 20  # steps, along a straight line
RIVAL, EXACT = "torch", "every-step"
MAX_NORM = 1.0
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.8, nesterov=True)


def torch_ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def torch_ddp_fp16(module: nn.Module) -> nn.Module:
    """With the one of its hooks that sends less and runs over Gloo."""
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def ours(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: sl.DistributedDataParallel(module, **options)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train."""

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    learning_rate: float
    every: int = 10
    """Steps from one evaluation to the next, after which all ranks hold the same."""
    is_exact: bool = False
    """Whether each step applies the exact mean of all gradients, so that steps to the target are known."""


WAYS = {
    way.name: way
    for way in (
        Way(name=RIVAL, wrap=torch_ddp, learning_rate=1e-3, is_exact=True),
        Way(name="torch-fp16", wrap=torch_ddp_fp16, learning_rate=1e-3),
        Way(name=EXACT, wrap=ours(), learning_rate=1e-3, is_exact=True),
        Way(name="quantize-4", wrap=ours(compression=Quantize(4)), learning_rate=1e-3),
        Way(name="powersgd-2", wrap=ours(compression=PowerSGD(2)), learning_rate=1e-3),
        Way(name="local-8", wrap=ours(strategy=sl.LocalSGD(8)), learning_rate=1e-3, every=8),
        Way(name="diloco-20", wrap=ours(strategy=sl.DiLoCo(20, outer=OUTER)), learning_rate=1e-3, every=20),
        Way(
            name="diloco-20-4bit",
            wrap=ours(strategy=sl.DiLoCo(20, outer=OUTER, compression=Quantize(4))),
            learning_rate=1e-3,
            every=20,
        ),
        Way(
            name="diloco-10-4bit",
            wrap=ours(
                strategy=sl.DiLoCo(10, outer=OUTER, compression=Quantize(4), warmup=400),
                compression=Quantize(4),
            ),
            learning_rate=1e-3,
        ),
    )
}


# ---------------------------------------------------------------------- as one of the ranks


class Text:
    """Shakespeare, in samples of CONTEXT characters."""

    def __init__(self) -> None:
        self.num_characters, self._training, self._validation = characters(shakespeare_text())

    def batch(self, seed: int, rank: int, step: int, num_samples: int) -> Batch:
        """A rank's samples of a step: what is read, and what comes next."""
        chance = torch.Generator().manual_seed(seed_of(seed, rank, step))
        starts = torch.randint(len(self._training) - CONTEXT, (num_samples,), generator=chance)
        return _samples(self._training, starts)

    @torch.no_grad()
    def loss(self, module: nn.Module) -> float:
        """Over the validation samples, dealt out to the ranks; a collective call."""
        world = sl.world()
        last = len(self._validation) - CONTEXT - 1
        starts = torch.linspace(0, last, NUM_VALIDATION, dtype=torch.float64).long()[world.rank :: world.size]
        losses = [module(*_samples(self._validation, part)).item() * len(part) for part in starts.split(16)]
        mean: float = sl.mean(sum(losses) / len(starts), weight=len(starts))
        return mean


def _samples(text: Tensor, starts: Tensor) -> Batch:
    pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def link_bytes() -> tuple[int, int]:
    """What this host has sent and received over its cable so far."""
    sent, received = 0, 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() != "lo":
            received += int(counts.split()[0])
            sent += int(counts.split()[8])
    return sent, received


class Trainer:
    """A replica under way."""

    def __init__(self, way: Way, text: Text, arguments: argparse.Namespace) -> None:
        config = GPTConfig(
            vocabulary=text.num_characters,
            width=arguments.width,
            num_layers=arguments.layers,
            num_heads=arguments.width // 32,
            context=CONTEXT,
            batch_size=arguments.batch_size,
        )
        torch.manual_seed(arguments.seed)
        self.module = GPT(config)
        self.num_parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self._replica = way.wrap(self.module)
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=way.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        if isinstance(self._replica, sl.DistributedDataParallel):
            self._optimizer = self._replica.attach(self._optimizer)
        final = arguments.final_steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: share_of_rate(step, final) if final else min(1.0, (step + 1) / WARM_UP),
        )
        self._batch = partial(text.batch, arguments.seed, sl.world().rank, num_samples=arguments.batch_size)
        self.num_steps = 0

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._replica(*self._batch(self.num_steps)).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
        self._optimizer.step()
        self._schedule.step()
        self.num_steps += 1


def train(way: Way, arguments: argparse.Namespace) -> None:
    """Until the target, the limit or the last step; rank 0 prints what happened as a line of JSON."""
    torch.set_num_threads(1)
    world = sl.init(device="cpu")
    transport = transport_of(None)
    text = Text()
    trainer = Trainer(way, text, arguments)
    blocks: list[dict[str, float | None]] = []
    reached, total_seconds = False, 0.0
    while not reached and trainer.num_steps < arguments.max_steps and total_seconds < arguments.limit:
        transport.barrier().wait()
        before, start = link_bytes(), time.perf_counter()
        for _ in range(way.every):
            trainer.step()
        transport.barrier().wait()
        seconds = sl.mean(time.perf_counter() - start)  # the same on all ranks, for they decide by it
        moved = max(now - then for now, then in zip(link_bytes(), before, strict=True))
        loss = text.loss(trainer.module) if arguments.target is not None else None
        blocks.append({"steps": way.every, "seconds": seconds, "bytes": moved, "loss": loss})
        total_seconds += seconds
        reached = loss is not None and loss <= arguments.target
    final_loss = text.loss(trainer.module) if trainer.num_steps == arguments.final_steps else None
    if world.rank == 0:
        found = {"blocks": blocks, "reached": reached, "num_parameters": trainer.num_parameters}
        print(json.dumps({**found, "transport": transport.name, "final_loss": final_loss}))
    sl.shutdown()


# ---------------------------------------------------------------------- as the one who measures


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen of one way over the slow link."""

    way: Way
    pace: Pace
    seconds: float | None
    """To the target; None: it was not reached."""
    is_estimate: bool
    """Whether it was stopped before."""


def way_of(name: str, arguments: argparse.Namespace) -> Way:
    """As it was asked for."""
    rate = arguments.learning_rate
    return WAYS[name] if rate is None else replace(WAYS[name], learning_rate=rate)


def job(hosts: SimulatedHosts, way: Way, arguments: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """Train on the hosts; what rank 0 says."""
    options = (
        "width",
        "layers",
        "batch_size",
        "seed",
        "max_steps",
        "final_steps",
        "target",
        "limit",
        "learning_rate",
    )
    values = {name: getattr(arguments, name) for name in options} | changes
    command = [sys.executable, __file__, "--as-rank", way.name]
    for name, value in values.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    hosts.start(command, RANKS)
    outputs = hosts.outputs(timeout_seconds=arguments.timeout)
    for rank, (code, _, err) in enumerate(outputs):
        if code:
            sys.exit(f"{way.name}: rank {rank} ended with {code}:\n{err}")
    told: dict[str, Any] = json.loads(outputs[0][1].splitlines()[-1])
    return told


def step_seconds(told: dict[str, Any]) -> float:
    """A step's, the median over blocks; the first one does not count where there are more."""
    blocks = told["blocks"][1:] or told["blocks"]
    return float(statistics.median(block["seconds"] / block["steps"] for block in blocks))


def num_steps(told: dict[str, Any]) -> int:
    return sum(block["steps"] for block in told["blocks"])


def measured(ways: list[Way], arguments: argparse.Namespace) -> tuple[list[Outcome], dict[str, Any]]:
    """All ways: first over a cable without a limit, then over the slow one."""
    raw: dict[str, Any] = {"fast": {}, "slow": {}}
    with simulated_hosts() as hosts:
        for way in ways:
            say(f"{way.name}: a step over a cable without a limit")
            raw["fast"][way.name] = job(
                hosts, way, arguments, target=None, max_steps=3 * way.every, limit=1e9
            )
        exact_steps = None
        if arguments.limit < 1e9:
            say(f"{EXACT}: how many steps it takes, over a cable without a limit")
            told = job(hosts, WAYS[EXACT], arguments, limit=1e9)
            exact_steps = num_steps(told) if told["reached"] else None
            raw["exact"] = told
    with simulated_hosts(megabits_per_second=arguments.megabits) as hosts:
        for way in ways:
            say(f"{way.name}: to {arguments.target} nats at {arguments.megabits:g} Mbit/s")
            raw["slow"][way.name] = job(hosts, way, arguments, limit=arguments.limit if way.is_exact else 1e9)
            say(f"  {sum(block['seconds'] for block in raw['slow'][way.name]['blocks']):.1f} s")
    outcomes = [outcome(way, raw["fast"][way.name], raw["slow"][way.name], exact_steps) for way in ways]
    return outcomes, raw


def trained_to_the_end(
    ways: list[Way], arguments: argparse.Namespace
) -> tuple[list[list[str]], dict[str, Any]]:
    """The table of whole trainings, and what it is made from."""
    with simulated_hosts() as hosts:
        say(f"{EXACT}: the final loss, over a cable without a limit")
        exact = job(hosts, WAYS[EXACT], arguments, limit=1e9)
    raw: dict[str, Any] = {"exact": exact, "slow": {}}
    rows = [["", "final loss, nats", f"above {EXACT}", "seconds", "times as fast", "MB a step"]]
    rival_seconds = float("nan")
    with simulated_hosts(megabits_per_second=arguments.megabits) as hosts:
        for way in ways:
            say(f"{way.name}: {arguments.final_steps} steps at {arguments.megabits:g} Mbit/s")
            told = job(hosts, way, arguments, limit=arguments.limit if way.is_exact else 1e9)
            raw["slow"][way.name] = told
            is_whole = told["final_loss"] is not None
            loss = told["final_loss"] if is_whole else exact["final_loss"]
            spent = sum(block["seconds"] for block in told["blocks"])
            seconds = spent if is_whole else step_seconds(told) * arguments.final_steps
            rival_seconds = seconds if way.name == RIVAL else rival_seconds
            num_bytes = sum(block["bytes"] for block in told["blocks"])
            rows.append(
                [
                    way.name,
                    f"{loss:.4f}",
                    f"{loss - exact['final_loss']:+.4f}",
                    ("" if is_whole else "~") + f"{seconds:.1f}",
                    f"{rival_seconds / seconds:.1f}x",
                    f"{num_bytes / num_steps(told) / 1e6:.3f}",
                ]
            )
    return rows, raw


def outcome(way: Way, fast: dict[str, Any], slow: dict[str, Any], exact_steps: int | None) -> Outcome:
    """From what was seen to what is shown; pure."""
    blocks = slow["blocks"]
    seen = num_steps(slow)
    steps: float = seen if slow["reached"] else (exact_steps if way.is_exact else None) or float("nan")
    seconds = sum(block["seconds"] for block in blocks) if slow["reached"] else steps * step_seconds(slow)
    pace = Pace(
        num_steps=steps,
        compute_seconds=step_seconds(fast),
        link_bytes=sum(block["bytes"] for block in blocks) / seen,
    )
    is_known = steps == steps
    return Outcome(
        way=way,
        pace=pace,
        seconds=seconds if is_known else None,
        is_estimate=is_known and not slow["reached"],
    )


def report(outcomes: Iterable[Outcome], bits_per_second: float) -> str:
    """The table."""
    rows = [
        [
            "",
            "lr",
            "steps",
            "seconds",
            "times as fast",
            "MB a step",
            "compute, s",
            "by formula, s",
            "pays below",
        ]
    ]
    outcomes = list(outcomes)
    rival = next((one for one in outcomes if one.way.name == RIVAL), None)
    for one in outcomes:
        is_known = one.seconds is not None
        rows.append(
            [
                one.way.name,
                f"{one.way.learning_rate:g}",
                f"{one.pace.num_steps:.0f}" if is_known else "not reached",
                ("~" if one.is_estimate else "") + f"{one.seconds:.1f}" if is_known else "-",
                f"{rival.seconds / one.seconds:.1f}x" if rival and rival.seconds and one.seconds else "-",
                f"{one.pace.link_bytes / 1e6:.3f}",
                f"{one.pace.compute_seconds:.3f}",
                f"{one.pace.seconds(bits_per_second):.1f}" if is_known else "-",
                rate_text(crossover(one.pace, rival.pace))
                if is_known and rival and one is not rival
                else "-",
            ]
        )
    return table(rows)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def exits_without_hosts() -> Iterator[None]:
    try:
        yield
    except HostsUnavailable as error:
        sys.exit(str(error))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabits", type=float, default=100, help="a second, each way")
    parser.add_argument("--target", type=float, help="validation loss in nats (2.4)")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="NAME")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for ways whose steps are known")
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument(
        "--final-steps", type=int, help="train for so many steps, and compare the final losses"
    )
    parser.add_argument("--batch-size", type=int, default=2, help="samples of one rank in a step")
    parser.add_argument("--width", type=int, default=256, help="of the GPT, a multiple of 32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, help="instead of each way's own")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for one way")
    parser.add_argument("--quick", action="store_true", help="a small model, a near target: no meaning")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--as-rank", choices=list(WAYS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank is None and arguments.target is None:
        arguments.target = None if arguments.final_steps else 2.4
    if arguments.quick:
        arguments.megabits, arguments.target, arguments.max_steps = 1000, 4.0, 40
        arguments.width, arguments.layers = 64, 2
    if arguments.final_steps:
        arguments.target, arguments.max_steps = None, arguments.final_steps
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.as_rank is not None:
        assert "RANK" in os.environ
        train(way_of(arguments.as_rank, arguments), arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the hosts are taken down
    ways = [way_of(name, arguments) for name in arguments.only]
    with exits_without_hosts():
        if arguments.final_steps:
            rows, raw = trained_to_the_end(ways, arguments)
            text, goal = table(rows), f"{arguments.final_steps} steps"
        else:
            outcomes, raw = measured(ways, arguments)
            text, goal = report(outcomes, arguments.megabits * 1e6), f"to {arguments.target} nats"
    told = next(iter(raw["slow"].values()))
    print(
        f"GPT of {told['num_parameters'] / 1e6:.2f} M parameters, {len(RANKS)} hosts with a rank each, "
        f"{arguments.megabits:g} Mbit/s, {goal}; syncline over {told['transport']}"
    )
    print(text)
    if arguments.json is not None:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        told = {"arguments": settings, "machine": describe_machine(), "runs": raw}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
