"""Ranks that train in `sl.steps` and are lost at chosen moments; and what the weights must then be.

All numbers are small multiples of powers of two, so that every sum and product is exact, in any order. The weights
depend on the order of the steps (momentum, a schedule) and on the samples of each step. So a step that was lost, made
twice, or made with other samples gives other weights.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pkgutil
import re
import signal
import threading
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
from meeting import meet_at_the_store
from support.inside import connecting_again_within, set_clock
from support.states import wait_until
from syncline import environment
from syncline.launchers import Environment
from syncline.resilience import group, handover, training
from syncline.session import begin_in_fork
from syncline.testing import RankPool, Task
from syncline.transport import Transport

__all__ = ["Fault", "Plan", "one_rank"]

HANG_SECONDS = 300.0
"""After this time, the ranks are ended. It is far above what a busy machine needs."""

LONG_SECONDS = 10 * HANG_SECONDS
"""A wait that lasts so long is a hang."""

STEPS = 8
SAMPLES = 60
BATCH = 2

PLACES = ("forward", "first bucket", "last bucket", "verdict", "optimizer", "after optimizer", "averaging")
"""Where a rank can be lost in the body of a step, in order."""


WRITING = ("saving", "writing", "committing")
"""Where a rank can be lost while a thread of it writes a save."""

CONNECTING = ("agreeing", "meeting", "connecting", "opening lanes", "handing over", "loading")
"""Where a rank can be lost while it follows the loss of another one."""

SYNCING = ("sync", "confirmed")
"""Where a rank can be lost in a parameter sync."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a rank."""

    rank: int
    """The first rank of the process."""
    step: int
    place: str
    kind: str = "kill"
    attempt: int = 1
    nth: int = 1
    """Which await of a change, if the place is "await". A place such as "await send_file 2" names it."""
    after_seconds: float = 0.0
    """How long after this place a rank is killed, while it goes on."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank that is slow in each step, by a clock that only this program moves."""

    rank: int
    """The first rank of the process."""
    phase: str
    """"data" or "forward"."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run."""

    size: int
    transport: str
    faults: tuple[Fault, ...]
    port: int = 0
    timeout_seconds: float = 30.0
    patience_seconds: float = 5.0
    connect_seconds: float = 10.0
    """The time in which all ranks connect to each other again. Gloo waits so long for a rank that does not come."""
    min_ranks: int = 1
    max_ranks: int | None = None
    num_newcomers: int = 0
    """The number of further processes, which want to join."""
    keeps_global_batch: bool = False
    needs_majority: bool = True
    saves: str = ""
    """The folder of the saves, which are made before each second step; empty if none is made."""
    is_blocking: bool = True
    asked_to_stop: int | None = None
    """The first rank of the process that is asked to stop in step 6; None if none is."""
    slow: Slow | None = None
    on_straggler: str | None = None
    training: str = "every step"
    """A key of `TRAININGS`."""
    steps: int = STEPS
    keeps_gradients: int | None = None
    """The rank that keeps its gradients of step 3; None if no rank does."""
    kills_late: bool = False
    """Whether a rank that was to be killed at a place that it has not reached is killed when it has finished."""


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


def is_drifting(training: str) -> bool:
    return "strategy" in TRAININGS[training]


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


class Work:
    """The work of a rank, on a clock that nothing else moves: 10 ms in each phase, and 40 ms more if it is slow."""

    def __init__(self, slow: Slow | None, first: int) -> None:
        self.seconds = 0.0
        self._slow_phase = None if slow is None or slow.rank != first else slow.phase

    def do(self, phase: str) -> None:
        self.seconds += 0.050 if phase == self._slow_phase else 0.010


@dataclass
class Moments:
    """The places at which faults of this process happen."""

    faults: list[Fault]
    note: Callable[..., None]
    folder: Path
    step: int = 0
    attempt: int = 0
    generation: int = 0
    num_newcomers: int = 0
    register: Any = None
    saved: int = 0
    """The step before which the save was begun that a thread writes now."""
    begun_in: int = 0
    """The generation in which the body has begun."""
    is_changing: bool = False
    """Whether this process agrees with others, connects to them, or gets the state."""
    awaits: list[str] = field(default_factory=list)
    """The awaits of the present change so far, each once: a process that waits for long asks again and again."""
    timers: list[threading.Timer] = field(default_factory=list)
    """Threads that kill this process."""
    connected_at: list[int] = field(default_factory=list)
    """The steps in which this process has opened a connection to the store."""

    def at(self, place: str) -> None:
        for fault in list(self.faults):
            step = self.saved if place in WRITING else self.step
            # Under a strategy that lets replicas drift, a rank can be a step ahead when it connects anew. One that is a
            # step behind then makes its next sync later.
            is_then = step == fault.step or (place in (*CONNECTING, *SYNCING) and step > fault.step)
            if is_then and fault.place == place and fault.attempt <= self.attempt:
                self.faults.remove(fault)
                self.happen(fault)

    def at_await(self, name: str) -> None:
        """This process is about to wait for another one, or for the store."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not self.is_changing or name in self.awaits:
            return
        self.awaits.append(name)
        for fault in list(self.faults):
            is_nth = (fault.place, fault.nth) == ("await", len(self.awaits))
            is_here = is_nth or fault.place == f"await {name}"
            if is_here and self.step >= fault.step:
                self.note(awaits=name)
                self.happen(fault)

    def happen(self, fault: Fault) -> None:
        if fault.after_seconds:
            later = threading.Timer(fault.after_seconds, self.happen, [replace(fault, after_seconds=0.0)])
            later.daemon = True
            later.start()
            self.timers.append(later)
            return
        self.note(fault=fault.kind, pid=os.getpid(), generation=self.generation)
        if fault.kind == "wait":  # for the test
            wait_until((self.folder / "go").exists)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.kind == "exception":
            raise ZeroDivisionError("a defect of this rank's program")
        if fault.kind == "lost connection":  # what a rank sees if a collective fails for it alone
            raise sl.PeerLost("simulated")
        if fault.kind == "await newcomers":
            wait_until(self.newcomers_wait)
        if fault.kind == "slow":
            torch.ones(300, 300).matrix_power(200)

    def newcomers_wait(self) -> bool:
        """Whether all newcomers have asked to join the next generation."""
        names = self.register.newcomers()
        keys = [f"report {self.generation + 1} {name}" for name in names]
        return len(self.register._read(keys)) == self.num_newcomers


def one_rank(plan: Plan, folder: str) -> None:
    """Train, and write down what this process draws and commits."""
    first = dist.get_rank()
    dist.destroy_process_group()
    begin_in_fork()
    joins = first >= plan.size
    rank = first - plan.size if joins else first
    place = Environment(
        launcher="environment", rank=rank, size=plan.size, local_rank=rank, local_size=plan.size,
        master_addr="127.0.0.1", master_port=plan.port,
    )  # fmt: skip
    own = {
        "TORCHELASTIC_RUN_ID": "elastic",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "",
        environment.JOINS: str(int(joins)),
    }
    if joins:
        wait_until_awaited(Path(folder))
    before = environment.export(place.variables() | own, replace=True)
    try:
        with ExitStack() as stack:
            if plan.num_newcomers:
                # Small tensors are not in memory of the transport, and small gradients not lent.
                for module in ("engine", "transport"):
                    name = f"syncline.transport.shared_memory.{module}.IN_PLACE_BYTES"
                    stack.enter_context(mock.patch(name, 1))
                stack.enter_context(mock.patch("syncline.gradients.bucket_plan.LARGE_GRADIENT_NUMEL", 1))
            stack.enter_context(connecting_again_within(plan.connect_seconds))
            file = stack.enter_context(Path(folder, f"{first}").open("a"))
            train_or_leave(plan, first, Path(folder), file)
    finally:
        environment.restore(before)


def train_or_leave(plan: Plan, first: int, folder: Path, file: TextIO) -> None:
    def note(**what: Any) -> None:
        file.write(json.dumps({**what, "at": time.monotonic()}) + "\n")
        file.flush()

    faults = [fault for fault in plan.faults if fault.rank == first]
    moments = Moments(faults, note, folder, num_newcomers=plan.num_newcomers)
    sl.init(transport=plan.transport, timeout=plan.timeout_seconds)
    if dist.is_initialized():  # a newcomer has not met the others yet
        meet_at_the_store("has joined")
    try:
        train(plan, moments, note)
    except ZeroDivisionError:
        sl.shutdown()  # tells the others of the error, as the end of a program does
        return
    except (sl.PeerLost, sl.PeerFailed) as error:
        note(left=str(error))
    except SystemExit as end:
        note(ended=end.code)
    wake_the_stopped(folder)
    sl.shutdown()
    for timer in moments.timers:
        timer.join()
    if plan.kills_late and any(fault.kind == "kill" for fault in moments.faults):
        os.kill(os.getpid(), signal.SIGKILL)


def wait_until_awaited(folder: Path) -> None:
    """Wait until rank 0 awaits newcomers, so that none joins before."""
    notes = folder / "0"
    wait_until(lambda: notes.exists() and "await newcomers" in notes.read_text())


def notes_in(path: Path) -> list[dict[str, Any]]:
    """What a rank has written down so far, without a last line of which only a part is there."""
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def wake_the_stopped(folder: Path) -> None:
    for path in filter(Path.is_file, folder.iterdir()):
        for found in notes_in(path):
            if found.get("fault") == "stop":
                os.kill(found["pid"], signal.SIGCONT)


def train(plan: Plan, moments: Moments, note: Callable[..., None]) -> None:
    net = Net()
    moments.at("construction")
    ddp = sl.DistributedDataParallel(net, bucket_cap_mb=1e-4, **TRAININGS[plan.training])
    optimizer, scheduler = optimizer_of(net)
    sampler = sl.DistributedSampler(Samples(), seed=3)
    state = sl.TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    optimizer.register_step_pre_hook(lambda *_: moments.at("optimizer"))

    def stepped(*_: Any) -> None:
        note(stepped=moments.step, generation=moments.begun_in)
        moments.at("after optimizer")

    optimizer.register_step_post_hook(stepped)
    for layer, moment in ((net.last, "first bucket"), (net.first, "last bucket")):
        # Not by torch's method: a hook of the program waits for the end of the backward.
        hooks = layer.weight._post_accumulate_grad_hooks
        OrderedDict.__setitem__(hooks, -1000, lambda _, moment=moment: moments.at(moment))
    loader = DataLoader(Samples(), batch_size=BATCH, sampler=sampler)
    first = sl.world().rank
    work = Work(plan.slow, first)
    net.register_forward_pre_hook(lambda *_: work.do("forward"))
    if plan.slow is not None:
        set_clock(ddp, lambda: work.seconds, has_waits=False)
    checkpointer = sl.Checkpointer(plan.saves, stop_signals=()) if plan.saves else None
    kept: list[tuple[Tensor, Tensor]] = []
    awaits = any(fault.place.startswith("await") for fault in plan.faults)
    around = watched_awaits(moments) if awaits else nullcontext()
    with watched_places(moments), around, warnings.catch_warnings(record=True) as caught:
        loop = sl.steps(
            state,
            plan.steps,
            data=loader,
            min_ranks=plan.min_ranks,
            max_ranks=plan.max_ranks,
            keep_global_batch=plan.keeps_global_batch,
            needs_majority=plan.needs_majority,
            patience=plan.patience_seconds,
            on_straggler=plan.on_straggler,
            straggler_steps=5,
        )
        for step in loop:
            moments.step, moments.attempt = step.number, step.attempt + 1
            with step:
                if checkpointer is not None and plan.asked_to_stop is not None:
                    if (plan.asked_to_stop, step.number) == (first, 6):
                        checkpointer.ask_to_stop()
                    checkpointer.stop_if_asked(state)
                elif checkpointer is not None and step.number % 2 == 0:
                    moments.at("before saving")
                    checkpointer.save(state, blocking=plan.is_blocking)
                moments.begun_in = moments.generation
                work.do("data")
                optimizer.zero_grad()
                if plan.keeps_global_batch:
                    for x, ids in step.batches():
                        note(step=step.number, generation=moments.generation, ids=ids.tolist())
                        moments.at("forward")
                        ddp(x).mean().backward()
                else:
                    x, ids = step.next_batch()
                    note(step=step.number, generation=moments.generation, ids=ids.tolist())
                    moments.at("forward")
                    # One item on all ranks together, so that the gradients of all ranks are added.
                    one = ddp.normalize_by(int(sl.world().rank == 0))
                    with nullcontext() if is_drifting(plan.training) else one:
                        ddp(x).sum().backward()
                if (plan.keeps_gradients, step.number) == (first, 3):
                    kept += [(p.grad, p.grad.clone()) for p in net.parameters() if p.grad is not None]
                optimizer.step()
                scheduler.step()
                moments.at("averaging")
                if plan.training == "every step":
                    assert sl.mean(1.0) == 1.0
    if is_drifting(plan.training):
        ddp.sync_parameters_()
    saved = optimizer.state_dict()["state"]
    assert all(torch.equal(gradient, values) for gradient, values in kept)
    note(
        done=state.step,
        weights=digest([p.detach() for p in net.parameters()]),
        momentum=digest([saved[index]["momentum_buffer"] for index in sorted(saved)]),
        forwards=int(net.num_forwards),
        lr=scheduler.get_last_lr(),
        world=[sl.world().rank, sl.world().size],
        group=dist.get_world_size() if dist.is_initialized() else 1,
        warned=[str(one.message) for one in caught],
        stragglers=[[one.rank, one.phase, one.from_step] for one in ddp.statistics().stragglers],
        threads=[thread.name for thread in threading.enumerate()],
        connected_at=[step for step in moments.connected_at if step],
        values=torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(),
    )


@contextmanager
def watched_places(moments: Moments) -> Any:
    """Make faults possible while the ranks agree and connect, while a state is handed over, and at the end."""

    def before(place: str, what: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if place == "meeting":
                moments.generation = args[1].generation
                moments.note(member=moments.generation)
            if place == "at the store":
                moments.connected_at.append(moments.step)
            if place == "enrolling":
                moments.register = args[0]
            if place == "saving":
                moments.saved = args[1] + 1
            moments.at(place)
            if place == "confirmed":
                is_outer = isinstance(args[0]._prepared, partial)
                moments.note(sync=args[0].num_written, generation=moments.generation, is_outer=is_outer)
            result = what(*args, **kwargs)
            if place == "moving shards":
                moments.note(lost=result, generation=moments.generation)
            return result

        return call

    shards = pkgutil.resolve_name("syncline.sharded.attached:AttachedShards")
    standing = pkgutil.resolve_name("syncline.strategies.execution.standing:Standing")
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(group, "_NEWCOMER_SECONDS", 0.0))
        for owner, name, place in (
            (group.Group, "agree", "agreeing"),
            (group.Group, "wait_for_all", "the end"),
            (group.Group, "connect", "meeting"),
            (group, "regroup", "connecting"),
            (group.Register, "enrol", "enrolling"),
            (pkgutil.resolve_name("syncline.liveness.connection"), "clone_of", "at the store"),
            (pkgutil.resolve_name("syncline.checkpoint.store:SaveStore"), "write", "saving"),
            (pkgutil.resolve_name("syncline.checkpoint.store"), "write_tensors", "writing"),
            (pkgutil.resolve_name("syncline.checkpoint.store:SaveDirectory"), "commit", "committing"),
            (training, "send_state", "handing over"),
            (handover, "decode", "loading"),
            (pkgutil.resolve_name("syncline.ddp.replica:Replica"), "use_transport", "opening lanes"),
            (pkgutil.resolve_name("syncline.gradients.riders.roster:Riders"), "receive", "verdict"),
            (standing, "write", "sync"),
            (standing, "_write_prepared", "confirmed"),
            (pkgutil.resolve_name("syncline.sharded.sharing:OneCopy"), "wait_to_read", "received"),
            (shards, "follow", "moving shards"),
            (shards, "dissolve", "moving shards"),
        ):
            patched.enter_context(mock.patch.object(owner, name, before(place, getattr(owner, name))))
        yield


@contextmanager
def watched_awaits(moments: Moments) -> Any:
    """Make faults possible at every await of a change."""
    counts: Counter[str] = Counter()

    def begin(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            moments.is_changing = name == "agree" or args[0].joins
            moments.awaits.clear()
            counts.clear()
            return change(*args)

        return call

    def end(_: str, settle: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            moments.is_changing = False
            return settle(*args)

        return call

    def at_store(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: Any, *args: Any, **kwargs: Any) -> Any:
            keys = kwargs["keys"] if "keys" in kwargs else args[0] if args else "none"
            key = keys if isinstance(keys, str) else (*keys, "none")[0]
            moments.at_await(f"{name} {re.sub('[ /]?[0-9].*', '', key)}")
            return ask(store, *args, **kwargs)

        return call

    def at_call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            moments.at_await(f"{name} {counts[name]}")
            return function(*args, **kwargs)

        return call

    hub = pkgutil.resolve_name("syncline.transport.shared_memory.hub")
    store = pkgutil.resolve_name("syncline.liveness.store:SignedStore")
    with ExitStack() as patched:
        for owner, around, *names in (
            (group.Group, begin, "agree", "begin"),
            (group.Group, end, "settle"),
            (store, at_store, "set", "set_first", "multi_get", "get", "readable", "has"),
            (hub, at_call, "connected", "accepted", "send_rows", "receive_rows", "send_file", "receive_file"),
            (dist, at_call, "init_process_group"),
            (pkgutil.resolve_name("syncline._torch.process_groups"), at_call, "_own_address"),
            (pkgutil.resolve_name("syncline.transport.c10d_groups"), at_call, "new_group_of"),
            (Transport, at_call, "all_reduce", "all_gather", "broadcast", "send", "recv", "barrier"),
        ):
            for name in names:
                patched.enter_context(mock.patch.object(owner, name, around(name, getattr(owner, name))))
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
        timeout_seconds=HANG_SECONDS,
    )
    killed = [fault.rank for fault in plan.faults if fault.kind == "kill"]
    outcomes = pool.run(plan.size + plan.num_newcomers, task, killed)
    bad = [
        f"rank {rank} {one.kind}:\n{one.text}"
        for rank, one in enumerate(outcomes)
        if one.kind not in ("passed", "killed")
    ]
    assert not bad, "\n".join([str(plan), *bad])
    notes = [
        [json.loads(line) for line in Path(folder, str(rank)).read_text().splitlines()]
        for rank in range(plan.size + plan.num_newcomers)
    ]
    # Not above: a rank that is a program of its own, as under a launcher, has only this folder in its path.
    from failure_rows import record_in_steps

    # Only these runs have the weights of a run without a failure, as the page says. A time after the first of two
    # faults would be that after both.
    for fault in plan.faults[-1:] if plan.training == "every step" and not plan.kills_late else ():
        record_in_steps(fault.place, fault.kind, plan.transport, seconds_after(fault, notes))
    return notes


def seconds_after(fault: Fault, notes: list[list[dict[str, Any]]]) -> float:
    """Return the time from a fault until the slowest of the other ranks has made a step in a new group, or has ended.

    A slow rank is not lost: then it is the time until the next step in the same group.
    """
    began = [line for line in notes[fault.rank] if line.get("fault") == fault.kind][-1]
    seconds = []
    for rank, lines in enumerate(notes):
        if rank != fault.rank:
            in_group = [
                line["at"] - began["at"]
                for line in lines
                if "done" in line
                or "left" in line
                or ("stepped" in line and (fault.kind == "slow" or line["generation"] > began["generation"]))
            ]
            seconds += [one for one in in_group if one > 0][:1]
    return max(seconds)


def check(
    notes: list[list[dict[str, Any]]],
    *,
    takes_mean: bool = False,
    may_miss: bool = False,
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """Check all invariants, and return the last note of each process that has finished.

    Args:
        notes: what each process has written down.
        takes_mean: whether the loss of a step is the mean over its samples, and not their sum.
        may_miss: whether the shard of a lost rank may have missed its last step.
        steps: the number of steps.
    """
    finals = check_ends(notes, steps, num_forwards=None if takes_mean else steps)
    used, lost = committed_samples(notes), lost_before_step(notes)
    net, momentum = reference(used, steps, lost, takes_mean=takes_mean)
    for final in finals:
        assert "syncline-pulse" not in final["threads"]  # which could abort the process at its end
        assert not final["connected_at"]  # a new connection to the store can wait for the DNS
        assert final["momentum"] == digest(momentum)
    if not may_miss:
        assert finals[0]["weights"] == digest([p.detach() for p in net.parameters()])
    else:  # each element of a lost shard has made the step or not
        end = torch.tensor(finals[0]["values"], dtype=torch.float64)
        is_right = torch.zeros_like(end, dtype=torch.bool)
        for number in range(len(lost) + 1):
            for missed in itertools.combinations(lost, number):
                net, _ = reference(used, steps, lost, missed=missed)
                is_right |= end == torch.cat([p.detach().flatten() for p in net.parameters()])
        assert bool(is_right.all())
    epoch: list[int] = []
    for number in sorted(used):
        assert len(set(epoch)) == len(epoch), epoch  # only the last step of an epoch is filled up
        epoch += used[number]
        if len(set(epoch)) == SAMPLES:
            epoch = []
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
                found[first] = sorted({*found.get(first, ()), *line["lost"]})
    return found


def reference(
    used: dict[int, list[int]],
    num_steps: int,
    lost: dict[int, list[str]],
    *,
    takes_mean: bool = False,
    missed: Collection[int] = (),
) -> tuple[Net, list[Tensor]]:
    """Return the module and the momenta after these steps in one process.

    Args:
        used: the samples of each step.
        num_steps: the number of steps.
        lost: the parameters whose momentum begins anew, by step.
        takes_mean: whether the loss of a step is the mean over its samples, and not their sum.
        missed: the keys of `lost` whose parameters miss the step before.
    """
    net = Net()
    optimizer, scheduler = optimizer_of(net)
    for number in range(1, num_steps + 1):
        for name in lost.get(number, ()):
            optimizer.state.pop(net.get_parameter(name), None)  # none if it has missed the first step
        optimizer.zero_grad()
        losses = net(torch.stack([sample(index) for index in used[number]]))
        (losses.mean() if takes_mean else losses.sum()).backward()
        for name in lost[number + 1] if number + 1 in missed else ():
            net.get_parameter(name).grad = None
        optimizer.step()
        scheduler.step()
    return net, [optimizer.state[p]["momentum_buffer"] for p in net.parameters()]


def check_last_save(plan: Plan, notes: list[list[dict[str, Any]]]) -> None:
    """Check that the newest save is the one before the last step, and has the right weights."""
    net = Net()
    optimizer, scheduler = optimizer_of(net)
    sampler = sl.DistributedSampler(Samples(), seed=3)
    state = sl.TrainState(
        model=sl.DistributedDataParallel(net), optimizer=optimizer, scheduler=scheduler, sampler=sampler
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the number of ranks, and damaged saves
        assert sl.Checkpointer(plan.saves, read_only=True).load(state) == STEPS - 1
    expected, _ = reference(committed_samples(notes), STEPS - 1, {})
    assert digest([p.detach() for p in net.parameters()]) == digest(
        [p.detach() for p in expected.parameters()]
    )


def check_ends(
    notes: list[list[dict[str, Any]]], steps: int, *, num_forwards: int | None
) -> list[dict[str, Any]]:
    """Check how the processes have ended, and return the last note of each process that has finished.

    Args:
        notes: what each process has written down.
        steps: the number of steps.
        num_forwards: the number of forwards that stand; None if ranks have made unequal numbers of them.
    """
    finals = [lines[-1] for lines in notes if lines and "done" in lines[-1]]
    assert finals, notes
    assert len({final["weights"] for final in finals}) == 1
    for final in finals:
        assert final["done"] == steps
        assert num_forwards in (None, final["forwards"])
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
