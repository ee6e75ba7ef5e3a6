"""Flips bits in the memory of a job that is running, through /proc/PID/mem: DIRECTORY NUM_FLIPS SEED.

Three ranks train with `sl.ReplicaCheck(every=8, on_divergence="repair")`; every flip hits one rank, at any moment, one
bit of a parameter or of AdamW's state. Prints a line of JSON for each flip: what was hit, at which step, and at which
step it was found, if it was; and fails at the end if one was not found as it had to be.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import mmap
import os
import random
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

import syncline as sl
from syncline.session import end_with_parent
from syncline.testing import held_port, variables_of_rank

EVERY = 8
NUM_RANKS = 3
_DEADLINE_SECONDS = 1000.0
_STEP = struct.Struct("<q")


# ---------------------------------------------------------------------- a rank


def train(directory: Path) -> None:
    world = sl.init(device="cpu")
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )
    check = sl.ReplicaCheck(every=EVERY, on_divergence="repair")
    ddp = sl.DistributedDataParallel(module, replica_check=check, on_nonfinite="skip")
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=1e-3))
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2 + world.rank)
    if world.rank == 0:
        events = (directory / "events").open("a", buffering=1)
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: print(json.dumps(str(message)), file=events)  # type: ignore[assignment]
        with (directory / "progress").open("r+b") as file:
            progress = mmap.mmap(file.fileno(), _STEP.size)
    is_over = torch.zeros(1)
    while not is_over:
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        (ddp(x) - x @ teacher).square().mean().backward()
        optimizer.step()
        state.commit()
        if state.step == 3:
            tell(directory / f"rank-{world.rank}", ddp, optimizer)
        if world.rank == 0:
            progress[:] = _STEP.pack(state.step)
        if state.step % 20 == 0:
            is_over.fill_((directory / "stop").exists())
            sl.broadcast_(is_over)
    sl.check_replicas(state)
    assert all(bool(p.isfinite().all()) for p in ddp.parameters())
    sl.shutdown()


def tell(path: Path, ddp: Any, optimizer: Any) -> None:
    """Where this rank has what."""
    regions = []
    for name, parameter in ddp.module.named_parameters():
        regions.append(("parameter", name, parameter.data_ptr(), parameter.nbytes))
        for key, value in optimizer.state[parameter].items():
            if value.dim():
                regions.append(("state", f"{name}.{key}", value.data_ptr(), value.nbytes))
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"pid": os.getpid(), "regions": regions}))
    draft.rename(path)


def started(directory: Path, rank: int, port: int) -> int:
    """The pid of a rank that trains: a fork of this process, so that torch is imported once."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        end_with_parent(parent)
        faulthandler.dump_traceback_later(_DEADLINE_SECONDS, exit=True)
        os.environ |= variables_of_rank(rank, NUM_RANKS, port)
        train(directory)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# ---------------------------------------------------------------------- what flips


class Job:
    """The job as it is seen from outside."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "progress").write_bytes(_STEP.pack(0))
        (directory / "events").touch()
        with (directory / "progress").open("r+b") as file:
            self._progress = mmap.mmap(file.fileno(), _STEP.size)
        with held_port() as port:
            self._pids = [started(directory, rank, port) for rank in range(NUM_RANKS)]
            self._wait_until_they_train()

    def _wait_until_they_train(self) -> None:
        paths = [self._directory / f"rank-{rank}" for rank in range(NUM_RANKS)]
        self.wait_until(lambda: all(path.exists() for path in paths))
        self.ranks = [json.loads(path.read_text()) for path in paths]

    def step(self) -> int:
        """The last step that rank 0 has done."""
        return int(_STEP.unpack(self._progress[:])[0])

    def events(self) -> list[str]:
        """What was said on rank 0."""
        return [json.loads(line) for line in (self._directory / "events").read_text().splitlines()]

    def wait_until(self, is_so: Any) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            if any(os.waitpid(pid, os.WNOHANG)[0] for pid in self._pids):
                raise RuntimeError("a rank has ended; it has printed why")
            if time.monotonic() > deadline:
                raise TimeoutError("the job does not go on")
            time.sleep(0.001)

    def flip(self, rank: int, address: int, bit: int) -> None:
        with open(f"/proc/{self.ranks[rank]['pid']}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            byte = memory.read(1)[0]
            memory.seek(address)
            memory.write(bytes([byte ^ (1 << bit)]))

    def end(self) -> None:
        (self._directory / "stop").touch()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._pids]
        assert codes == [0] * NUM_RANKS


def found_at(events: list[str]) -> int | None:
    """The step at which the first of these found a difference."""
    steps = [int(text.split(", step ")[1].split(",")[0]) for text in events if ", replica check:" in text]
    return min(steps, default=None)


def judge(flips: list[dict[str, Any]]) -> None:
    """All but the state's were found in time, on the right rank."""
    parameters = [flip for flip in flips if flip["kind"] == "parameter"]
    # The last places of a number may be rounded away by the optimizer's step, before their turn.
    parameters = [flip for flip in parameters if flip["found_at"] is not None or flip["bit"] > 1]
    late = [
        {key: value for key, value in flip.items() if key != "told"}
        for flip in parameters
        if flip["found_at"] is None or flip["found_at"] > flip["flipped_until"] + EVERY
    ]
    assert not late, f"each bit of a parameter is found within so many steps: {late}"
    for flip in parameters:
        text = flip["told"][0]
        assert f"rank {flip['rank']}" in text.split("In the minority: ")[1], text
    named = [flip for flip in parameters if f"\n  {flip['name']}, element" in flip["told"][0]]
    assert len(named) >= 0.9 * len(parameters) - 1, (
        "by the name of its tensor, unless more came of it than is shown"
    )
    state = [flip for flip in flips if flip["kind"] == "state"]
    found = [flip for flip in state if flip["found_at"] is not None]
    assert found, "of those in an optimizer's state some are found"


def main() -> None:
    directory, num_flips, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    flips = []
    rng = random.Random(seed)
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # as the first step of an optimizer does
    job = Job(directory)
    for number in range(num_flips):
        kind = ("parameter", "state")[number % 2]
        rank = rng.randrange(NUM_RANKS)
        regions = [region for region in job.ranks[rank]["regions"] if region[0] == kind]
        _, name, address, num_bytes = rng.choices(regions, [region[3] for region in regions])[0]
        at, bit = rng.randrange(num_bytes), rng.randrange(8)
        time.sleep(rng.uniform(0, 0.01))
        num_events, before = len(job.events()), job.step()
        job.flip(rank, address + at, bit)
        # Rank 0 may not have told its last step yet, while this rank has begun the next backward but one.
        after = job.step() + 2
        job.wait_until(lambda after=after: job.step() > after + 2 * EVERY)
        told = job.events()[num_events:]
        found = {
            "kind": kind,
            "name": name,
            "rank": rank,
            "element": at // 4,
            "bit": 8 * (at % 4) + bit,
            "flipped_after": before,
            "flipped_until": after,
            "found_at": found_at(told),
            "told": [text for text in told if ", replica check:" in text],
        }
        print(json.dumps(found), flush=True)
        flips.append(found)
    job.end()
    judge(flips)


if __name__ == "__main__":
    main()
