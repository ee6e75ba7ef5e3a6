"""Flips bits in the memory of a job that is running, through /proc/PID/mem: DIRECTORY NUM_FLIPS SEED.

Three ranks train with `sl.ReplicaCheck(every=8, on_divergence="repair")`; every flip hits one rank, at any moment, one
bit of a parameter or of AdamW's state. Prints a line of JSON for each flip: what was hit, at which step, and at which
step it was found, if it was.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

EVERY = 8
NUM_RANKS = 3
_STEP = struct.Struct("<q")


# ---------------------------------------------------------------------- a rank


def train(directory: Path) -> None:
    import torch

    import syncline as sl

    world = sl.init(device="cpu")
    torch.set_num_threads(1)
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


# ---------------------------------------------------------------------- what flips


class Job:
    """The job as it is seen from outside."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "progress").write_bytes(_STEP.pack(0))
        (directory / "events").touch()
        with (directory / "progress").open("r+b") as file:
            self._progress = mmap.mmap(file.fileno(), _STEP.size)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "syncline.cli", "run", "-n", str(NUM_RANKS), __file__, str(directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        paths = [directory / f"rank-{rank}" for rank in range(NUM_RANKS)]
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
            if self._process.poll() is not None:
                raise RuntimeError(f"the job has ended: {self._process.communicate()[1][-3000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError("the job does not go on")
            time.sleep(0.001)

    def flip(self, rank: int, address: int, bit: int) -> None:
        with open(f"/proc/{self.ranks[rank]['pid']}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            byte = memory.read(1)[0]
            memory.seek(address)
            memory.write(bytes([byte ^ (1 << bit)]))

    def end(self) -> int:
        (self._directory / "stop").touch()
        told = self._process.communicate(timeout=60)[1]
        if self._process.returncode:
            raise RuntimeError(told[-3000:])
        return self._process.returncode


def found_at(events: list[str]) -> int | None:
    """The step at which the first of these found a difference."""
    steps = [int(text.split(", step ")[1].split(",")[0]) for text in events if ", replica check:" in text]
    return min(steps, default=None)


def main() -> None:
    directory, num_flips, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
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
    job.end()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        train(Path(sys.argv[1]))
    else:
        main()
