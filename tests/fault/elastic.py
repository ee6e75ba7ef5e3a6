"""Ranks that train in `sl.steps` and are lost at chosen moments; and what the weights must then be.

All numbers are small multiples of powers of two, so that every sum and product is exact, in any order. The weights
depend on the order of the steps (momentum, a schedule) and on the samples of each step. So a step that was lost, made
twice, or made with other samples gives other weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import signal
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import syncline as sl
from syncline import environment
from syncline.launchers import Environment
from syncline.resilience import group, handover, steps
from syncline.session import begin_in_fork
from syncline.testing import RankPool, Task

__all__ = ["Fault", "Plan", "one_rank"]

STEPS = 8
SAMPLES = 60
BATCH = 2

PLACES = ("forward", "first bucket", "last bucket", "optimizer", "after optimizer", "averaging")
"""Where a rank can be lost in the body of a step, in order."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a rank."""

    rank: int
    """The first rank of the process."""
    step: int
    place: str
    kind: str = "kill"
    attempt: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run."""

    size: int
    transport: str
    faults: tuple[Fault, ...]
    port: int
    timeout_seconds: float = 30.0
    patience_seconds: float = 5.0
    min_ranks: int = 1
    training: str = "every step"
    """A key of `TRAININGS`."""
    steps: int = STEPS


TRAININGS: dict[str, dict[str, Any]] = {
    "every step": {},
    "PowerSGD": {"compression": sl.compression.PowerSGD(1)},
    "4 bit": {"compression": sl.compression.Quantize(4)},
    "sharded": {"sharded": True},
    "LocalSGD": {"strategy": sl.LocalSGD(3)},
    "warm-up": {"strategy": sl.LocalSGD(3, warmup=7)},
    "groups": {"strategy": sl.DiLoCo(3, every_step_within="host")},
    "DiLoCo": {"strategy": sl.DiLoCo(3)},
    "streaming": {"strategy": sl.DiLoCo(4, fragments=2, delay=1, compression=sl.compression.Quantize(4))},
    "Gossip": {"strategy": sl.Gossip("ring")},
    "ParameterServer": {"strategy": sl.ParameterServer(1)},
}
"""The arguments of the wrapper, by name of a training."""


def is_drifting(plan: Plan) -> bool:
    return "strategy" in TRAININGS[plan.training]


class Net(nn.Module):
    """A module with two buckets, a buffer that each forward changes, and exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4).double()
        self.last = nn.Linear(3, 2).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.5)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.first(x).sum(dim=1) + 2 * self.last(x).sum(dim=1)


def sample(index: int) -> Tensor:
    return torch.tensor([index % 7, index % 5, 1], dtype=torch.float64)


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples that know their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return sample(index), index


def optimizer_of(net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


# ---------------------------------------------------------------------- a rank


@dataclass
class Moments:
    """The places at which faults of this process happen."""

    faults: list[Fault]
    note: Callable[..., None]
    step: int = 0
    attempt: int = 0
    generation: int = 0
    begun_in: int = 0
    """The generation in which the body has begun."""

    def at(self, place: str) -> None:
        for fault in list(self.faults):
            if (fault.step, fault.place) == (self.step, place) and fault.attempt <= self.attempt:
                self.faults.remove(fault)
                self.happen(fault)

    def happen(self, fault: Fault) -> None:
        self.note(fault=fault.kind, pid=os.getpid())
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.kind == "exception":
            raise ZeroDivisionError("a defect of this rank's program")
        if fault.kind == "lost connection":  # what a rank sees if a collective fails for it alone
            raise sl.PeerLost("simulated")
        if fault.kind == "slow":
            torch.ones(300, 300).matrix_power(200)


def one_rank(plan: Plan, folder: str) -> None:
    """Train, and write down what this process draws and commits."""
    first = dist.get_rank()
    dist.destroy_process_group()
    begin_in_fork()
    place = Environment(
        launcher="environment", rank=first, size=plan.size, local_rank=first, local_size=plan.size,
        master_addr="127.0.0.1", master_port=plan.port,
    )  # fmt: skip
    own = {
        "TORCHELASTIC_RUN_ID": "elastic",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "",
    }
    before = environment.export(place.variables() | own, replace=True)
    try:
        with Path(folder, f"{first}").open("a") as file:
            train_or_leave(plan, first, Path(folder), file)
    finally:
        environment.restore(before)


def train_or_leave(plan: Plan, first: int, folder: Path, file: TextIO) -> None:
    def note(**what: Any) -> None:
        file.write(json.dumps(what) + "\n")
        file.flush()

    moments = Moments([fault for fault in plan.faults if fault.rank == first], note)
    sl.init(transport=plan.transport, timeout=plan.timeout_seconds)
    try:
        train(plan, moments, note)
    except ZeroDivisionError:
        sl.shutdown()  # tells the others of the error, as the end of a program does
        return
    except sl.PeerLost as error:
        note(left=str(error))
    wake_the_stopped(folder)
    sl.shutdown()


def wake_the_stopped(folder: Path) -> None:
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            found = json.loads(line)
            if found.get("fault") == "stop":
                os.kill(found["pid"], signal.SIGCONT)


def train(plan: Plan, moments: Moments, note: Callable[..., None]) -> None:
    net = Net()
    ddp = sl.DistributedDataParallel(net, bucket_cap_mb=1e-4, **TRAININGS[plan.training])
    optimizer, scheduler = optimizer_of(net)
    sampler = sl.DistributedSampler(Samples(), seed=3)
    state = sl.TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    optimizer.register_step_pre_hook(lambda *_: moments.at("optimizer"))

    def stepped(*_: Any) -> None:
        note(stepped=moments.step, generation=moments.begun_in)
        moments.at("after optimizer")

    optimizer.register_step_post_hook(stepped)
    net.last.weight.register_post_accumulate_grad_hook(lambda _: moments.at("first bucket"))
    net.first.weight.register_post_accumulate_grad_hook(lambda _: moments.at("last bucket"))
    loader = DataLoader(Samples(), batch_size=BATCH, sampler=sampler)
    with watched_places(moments, ddp):
        loop = sl.steps(
            state, plan.steps, data=loader, min_ranks=plan.min_ranks, patience=plan.patience_seconds
        )
        for step in loop:
            moments.step, moments.attempt = step.number, step.attempt + 1
            with step:
                x, ids = step.next_batch()
                ranks, moments.begun_in = [sl.world().rank, sl.world().size], moments.generation
                note(step=step.number, generation=moments.generation, ids=ids.tolist(), ranks=ranks)
                optimizer.zero_grad()
                moments.at("forward")
                # One item on all ranks together, so that the gradients of all ranks are added.
                shares = ddp.normalize_by(int(sl.world().rank == 0))
                with nullcontext() if is_drifting(plan) else shares:
                    ddp(x).sum().backward()
                optimizer.step()
                scheduler.step()
                moments.at("averaging")
                if plan.training == "every step":
                    assert sl.mean(1.0) == 1.0
    if is_drifting(plan):
        ddp.sync_parameters_()
    saved = optimizer.state_dict()["state"]
    note(
        done=state.step,
        weights=digest([p.detach() for p in net.parameters()]),
        momentum=digest([saved[index]["momentum_buffer"] for index in sorted(saved)]),
        forwards=int(net.num_forwards),
        lr=scheduler.get_last_lr(),
        world=[sl.world().rank, sl.world().size],
        group=dist.get_world_size() if dist.is_initialized() else 1,
        values=torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(),
    )


@contextmanager
def watched_places(moments: Moments, ddp: sl.DistributedDataParallel) -> Any:
    """Make faults possible while the ranks agree and connect, while a state is handed over, and at the end."""

    def before(place: str, what: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if place == "meeting":
                moments.generation = args[1].generation
                moments.note(member=moments.generation)
            moments.at(place)
            if place == "confirmed":
                is_outer = isinstance(args[0]._prepared, partial)
                moments.note(sync=args[0].num_written, generation=moments.generation, is_outer=is_outer)
            result = what(*args, **kwargs)
            if place == "moving shards":
                moments.note(lost=result, generation=moments.generation)
            return result

        return call

    rounds = ddp._replica.drift.rounds
    shards = pkgutil.resolve_name("syncline.sharded.attached:AttachedShards")
    standing = None if rounds is None else type(rounds.standing)
    syncs = (
        [] if standing is None else [(standing, "write", "sync"), (standing, "_write_prepared", "confirmed")]
    )
    with ExitStack() as patched:
        patched.enter_context(mock.patch("syncline.session.session._REGROUP_SECONDS", 1.0))
        for owner, name, place in (
            (group.Group, "agree", "agreeing"),
            (group.Group, "wait_for_all", "the end"),
            (group.Group, "connect", "meeting"),
            (group, "regroup", "connecting"),
            (steps, "send_state", "handing over"),
            (handover, "decode", "loading"),
            (type(ddp._replica), "use_transport", "opening lanes"),
            *syncs,
            (pkgutil.resolve_name("syncline.sharded.sharing:OneCopy"), "wait_to_read", "received"),
            (shards, "follow", "moving shards"),
            (shards, "dissolve", "moving shards"),
        ):
            patched.enter_context(mock.patch.object(owner, name, before(place, getattr(owner, name))))
        yield


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()[:16]


# ---------------------------------------------------------------------- what must come out


def run(plan: Plan, folder: str, pool: RankPool) -> list[list[dict[str, Any]]]:
    """Run the ranks, and return what each has written down."""
    task = Task(
        module="elastic",
        qualname="one_rank",
        arguments={"plan": plan, "folder": folder},
        timeout_seconds=60.0,
    )
    killed = [fault.rank for fault in plan.faults if fault.kind == "kill"]
    outcomes = pool.run(plan.size, task, killed)
    bad = [
        f"rank {rank} {one.kind}:\n{one.text}"
        for rank, one in enumerate(outcomes)
        if one.kind not in ("passed", "killed")
    ]
    assert not bad, "\n".join([str(plan), *bad])
    return [
        [json.loads(line) for line in Path(folder, str(rank)).read_text().splitlines()]
        for rank in range(plan.size)
    ]


def check(notes: list[list[dict[str, Any]]], *, may_miss: bool = False) -> list[dict[str, Any]]:
    """Check all invariants, and return the last note of each process that has finished.

    Args:
        notes: what each process has written down.
        may_miss: whether the shard of a lost rank may have missed its last step.
    """
    finals = check_ends(notes, STEPS)
    used = committed_samples(notes)
    net, momentum = reference(used, lost_before_step(notes))
    for final in finals:
        assert final["momentum"] == digest(momentum)
    if not may_miss:
        assert finals[0]["weights"] == digest([p.detach() for p in net.parameters()])
    else:  # each element of the lost shard has made the step or not
        lost = lost_before_step(notes)
        other, _ = reference(used, lost, are_missed=True)
        made, missed = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (net, other))
        end = torch.tensor(finals[0]["values"], dtype=torch.float64)
        assert bool(((end == made) | (end == missed)).all())
    every = [index for number in sorted(used) for index in used[number]]
    for begin in range(0, len(every), SAMPLES):  # an epoch
        epoch = every[begin : begin + SAMPLES]
        assert len(set(epoch)) == len(epoch), epoch
    return finals


def lost_before_step(notes: list[list[dict[str, Any]]]) -> dict[int, list[str]]:
    """Return the parameters whose momentum begins anew, by the first step that was made without the lost rank."""
    generations = generations_of(notes)
    found: dict[int, list[str]] = {}
    for lines in notes:
        for line in lines:
            if line.get("lost"):
                first = min((n for n, made in generations.items() if made >= line["generation"]), default=0)
                found[first] = line["lost"]
    return found


def reference(
    used: dict[int, list[int]], lost: dict[int, list[str]], *, are_missed: bool = False
) -> tuple[Net, list[Tensor]]:
    """Return the module and the momenta after these steps in one process.

    Args:
        used: the samples of each step.
        lost: the parameters whose momentum begins anew, by step.
        are_missed: whether these parameters miss the step before.
    """
    net = Net()
    optimizer, scheduler = optimizer_of(net)
    for number in sorted(used):
        for name in lost.get(number, ()):
            del optimizer.state[net.get_parameter(name)]
        optimizer.zero_grad()
        net(torch.stack([sample(index) for index in used[number]])).sum().backward()
        for name in lost.get(number + 1, ()) if are_missed else ():
            net.get_parameter(name).grad = None
        optimizer.step()
        scheduler.step()
    return net, [optimizer.state[p]["momentum_buffer"] for p in net.parameters()]


def check_ends(notes: list[list[dict[str, Any]]], steps: int) -> list[dict[str, Any]]:
    """Check how the processes have ended, and return the last note of each process that has finished."""
    finals = [lines[-1] for lines in notes if "done" in lines[-1]]
    assert finals, notes
    assert len({final["weights"] for final in finals}) == 1
    for final in finals:
        assert final["done"] == final["forwards"] == steps
        assert final["world"][1] == final["group"] == len(finals)
        assert final["lr"] == [0.5 * 0.5 ** (steps // 3)]
    assert sorted(final["world"][0] for final in finals) == list(range(len(finals)))
    return finals


def generations_of(notes: list[list[dict[str, Any]]]) -> dict[int, int]:
    """Return the generation in which each step was made."""
    generations: dict[int, int] = {}
    for line in (line for of_rank in notes for line in of_rank if "stepped" in line):
        number = line["stepped"]
        generations[number] = max(line["generation"], generations.get(number, 0))
    return generations


def committed_samples(notes: list[list[dict[str, Any]]]) -> dict[int, list[int]]:
    """Return the samples of each step, of all ranks that took part in the attempt that stands.

    If several attempts came to the optimizer's step, the last one stands: only ranks that were lost had made the step
    of the others.
    """
    lines = [(rank, line) for rank, of_rank in enumerate(notes) for line in of_rank]
    return {
        number: [
            index
            for _, line in lines
            if (line.get("step"), line.get("generation")) == (number, generation)
            for index in line["ids"]
        ]
        for number, generation in generations_of(notes).items()
    }


def held_store() -> dist.TCPStore:
    """A store as a launcher has it."""
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
