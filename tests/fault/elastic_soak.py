"""Random faults while ranks train in `sl.steps`: do the others go on, does the loss go down, does anything leak?

    python tests/fault/elastic_soak.py --kills 200 --seed 1
    python tests/fault/elastic_soak.py --seconds 600 --seed 1

Four ranks train under `syncline run --resilient --max-restarts`. A random rank gets SIGKILL, or is stopped for half a
second, or is stopped for good. When its successor has joined, the next one follows. The report at the end is one line
of JSON. The exit status is 1 if another rank has ended than the lost ones, if replicas differ, if a sample was used
twice in an epoch, if the loss has not fallen to a tenth, or if threads, files or memory of a process grow.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RANKS = 4
SAMPLES = 4096
PATIENCE_SECONDS = 2.0
_DEADLINE_SECONDS = 90.0


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Points of a smooth function, with their numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(SAMPLES, 4, generator=generator)
        self.y = torch.sin(3 * self.x).sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


# ---------------------------------------------------------------------- a rank


def one_rank(folder: Path, transport: str) -> None:
    """Train until the folder has a file `stop`, and write down each committed step."""
    import syncline as sl

    torch.set_num_threads(1)
    sl.init(transport=transport)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    ddp = sl.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    data = Waves()
    sampler = sl.DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    state = sl.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)
    file = (folder / str(os.getpid())).open("w")
    stop = folder / "stop"
    for step in sl.steps(state, until=10**9, data=loader, patience=PATIENCE_SECONDS):
        with step:
            x, y, ids = step.next_batch()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), y)
            ddp.report(loss=loss, stops=float(stop.exists()))
            loss.backward()
            optimizer.step()
        if not step.is_committed:
            continue
        metrics = ddp.last_step.metrics
        note = {
            "step": step.number, "at": time.monotonic(), "ids": ids.tolist(), "loss": metrics["loss"],
            "epoch": sampler.epoch, "weights": digest(net) if step.number % 20 == 0 else "",
        }  # fmt: skip
        if step.number % 100 == 0:
            note["held"] = held()
        file.write(json.dumps(note) + "\n")
        file.flush()
        if metrics["stops"] > 0:
            break
    sl.shutdown()


def digest(net: nn.Module) -> str:
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in net.parameters())).hexdigest()[
        :16
    ]


def held() -> list[int]:
    """The numbers of threads and files of this process, and its memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
    return [*counts, pages * os.sysconf("SC_PAGE_SIZE") // 2**20]


# ---------------------------------------------------------------------- the faults


class Job:
    """The running job, as its notes show it."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.folder = folder
        self._sizes: dict[Path, int] = {}
        self._lines: dict[Path, list[dict[str, Any]]] = defaultdict(list)
        self.stopped_at: dict[int, float] = {}
        """When each process was stopped that the others have left behind. What it commits later does not stand."""
        program = [__file__, "--rank", transport, "--folder", str(folder)]
        options = ["--resilient", "--max-restarts", "100000", "-n", str(RANKS)]
        command = [Path(sys.executable).with_name("syncline"), "run", *options, *program]
        with (folder / "log").open("w") as log:
            self.launcher = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def notes(self) -> dict[int, list[dict[str, Any]]]:
        """Return what each process has written down, by process number. Only new lines are read."""
        for path in self.folder.glob("[0-9]*"):
            with path.open() as file:
                file.seek(self._sizes.get(path, 0))
                for line in file:
                    if not line.endswith("\n"):
                        break
                    self._lines[path].append(json.loads(line))
                    self._sizes[path] = self._sizes.get(path, 0) + len(line)
        return {int(path.name): lines for path, lines in self._lines.items()}

    def notes_that_stand(self) -> dict[int, list[dict[str, Any]]]:
        """Return the notes, without the steps that a rank has committed after the others had left it behind."""
        return {
            pid: [line for line in lines if line["at"] < self.stopped_at.get(pid, math.inf)]
            for pid, lines in self.notes().items()
        }

    def running(self) -> list[int]:
        return [pid for pid in self.notes() if self.is_running(pid)]

    def is_running(self, pid: int) -> bool:
        """Whether it is still a process of this job: the number of one that has ended may belong to another one."""
        try:
            return str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not is_so():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "log").read_text()[-4000:]
                sys.exit(
                    f"{what}: not within {_DEADLINE_SECONDS:g} s, exit code {self.launcher.poll()}\n{log}"
                )
            time.sleep(0.02)

    def is_whole(self) -> bool:
        """Whether all ranks train, and have made a step in the last second."""
        running = self.running()
        notes, now = self.notes(), time.monotonic()
        live = [pid for pid in running if notes[pid] and now - notes[pid][-1]["at"] < 1.0]
        return len(live) == RANKS == len(running)


def one_fault(job: Job, lots: random.Random, kind: str) -> float:
    """Let a fault happen to a random rank. Return the time until each other rank has made a new step."""
    job.wait("all ranks train", job.is_whole)
    time.sleep(lots.uniform(0.0, 0.3))
    everyone = job.running()
    victim = lots.choice(everyone)
    others = [pid for pid in everyone if pid != victim]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    last = max(job.notes()[pid][-1]["step"] for pid in others)

    def go_on() -> bool:
        return all(job.notes()[pid][-1]["step"] > last + 1 for pid in others)

    if kind == "pause":
        time.sleep(0.5)
        os.kill(victim, signal.SIGCONT)
        others = everyone
    job.wait(f"{kind} of {victim}: the others go on", go_on)
    seconds = max(
        next(line["at"] for line in job.notes()[pid] if line["step"] > last + 1) - began for pid in others
    )
    if kind == "stop":
        job.stopped_at[victim] = began
        os.kill(victim, signal.SIGCONT)  # it finds out that it was left behind, and its successor is started
        job.wait("the rank that was left behind ends", lambda: not job.is_running(victim))
    gone = [pid for pid in others if not job.is_running(pid)]
    if gone:
        sys.exit(
            f"after the {kind} of {victim}, {gone} have ended, too:\n{(job.folder / 'log').read_text()[-4000:]}"
        )
    return seconds


def faults_in(notes: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Return what is wrong with the notes of a whole job."""
    found = []
    digests: dict[int, set[str]] = defaultdict(set)
    used: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for lines in notes.values():
        for line in lines:
            digests[line["step"]].add(line["weights"])
            used[line["epoch"]][line["step"]] += line["ids"]
    found += [f"step {step}: replicas differ" for step, seen in digests.items() if len(seen) > 1]
    for epoch, steps in used.items():
        *before_last, _ = sorted(steps)  # the last step of an epoch is filled up
        ids = [index for step in before_last for index in steps[step]]
        if len(set(ids)) < len(ids):
            found.append(f"epoch {epoch}: {len(ids) - len(set(ids))} samples were used twice")
    losses = {line["step"]: line["loss"] for lines in notes.values() for line in lines}
    first, last = (
        statistics.mean([losses[step] for step in part])
        for part in (sorted(losses)[:20], sorted(losses)[-20:])
    )
    if last > first / 10:
        found.append(f"the loss has gone from {first:.4f} to {last:.4f} only")
    for pid, lines in notes.items():
        kept = [line["held"] for line in lines if "held" in line]
        if len(kept) > 10:
            (threads, files, mb), (threads_now, files_now, mb_now) = kept[5], kept[-1]
            if threads_now > threads + 12 or files_now > files + 24 or mb_now > mb + 100:
                found.append(f"process {pid} held {kept[5]} threads, files and MB, and now {kept[-1]}")
    return found


def soak(options: argparse.Namespace) -> int:
    """Run the job and the faults, and print the report."""
    lots = random.Random(options.seed)
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), options.transport)
        began = time.monotonic()
        try:
            for number in range(options.kills if options.seconds is None else sys.maxsize):
                if options.seconds is not None and time.monotonic() - began > options.seconds:
                    break
                kind = (
                    "kill"
                    if options.seconds is None
                    else lots.choice(["kill", "kill", "kill", "pause", "stop"])
                )
                seconds[kind].append(one_fault(job, lots, kind))
                if number % 20 == 19:
                    print(
                        f"{number + 1} faults",
                        {k: round(statistics.median(v), 3) for k, v in seconds.items()},
                        flush=True,
                    )
            job.wait("all ranks train", job.is_whole)
            (job.folder / "stop").touch()
            job.launcher.wait(60)
            notes, log = job.notes_that_stand(), (job.folder / "log").read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.launcher.pid, signal.SIGTERM)
    found = faults_in(notes)
    if job.launcher.returncode:
        found.append(f"the launcher ended with exit code {job.launcher.returncode}: {log[-2000:]}")
    report = {
        "faults": {kind: len(times) for kind, times in seconds.items()},
        "median_seconds": {kind: round(statistics.median(times), 3) for kind, times in seconds.items()},
        "slowest_seconds": {kind: round(max(times), 3) for kind, times in seconds.items()},
        "steps": max(line["step"] for lines in notes.values() for line in lines),
        "processes": len(notes),
        "wrong": found,
    }
    print(json.dumps(report))
    return 1 if found else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, help="faults of all kinds for so long, instead of --kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=["shm", "c10d"], default="shm")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        one_rank(options.folder, options.rank)
        return 0
    return soak(options)


if __name__ == "__main__":
    sys.exit(main())
