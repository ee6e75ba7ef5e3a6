"""From the SIGKILL of a rank to the next committed step, against torchrun and torchft; how long a process that joins
stops the others; and what `sl.steps` costs.

    python benchmarks/recovery.py [--ranks 3] [--kills 12] [--parameters 1000000] [--torchft PYTHON]
        [--only shm gloo torchrun torchft join cost]

Each job begins with three ranks (--ranks), each with one thread. All but one are killed, one after the other, at random
moments from outside. The time runs from the kill until each rank that is left has committed a new step, whose forward
began after the kill: a step in flight does not count, because its gradients may have arrived already. "lost_steps" is
the number of steps that had been committed before the kill, and were made again.

torchrun (torch's class, Gloo) starts all ranks anew when one is lost; they load a checkpoint of every 20th step.

torchft (its class, Gloo, its defaults) runs with the Python of a virtual environment that has it: `--torchft PYTHON`.

"failed" counts the kills after which all other ranks have ended with an error.

"join" kills one rank of three with `--max-restarts`, and gives the longest time between two committed steps of the
other ranks while the new process joins, less a median step. The model has 20 times as many parameters as --parameters.

"cost" compares a plain loop with `sl.steps` when nobody is lost: two ranks take turns of 40 steps with each loop.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SAVE_EVERY = 20
WAYS = ("shm", "gloo", "torchrun", "torchft")
JOIN_FACTOR = 20
_DEADLINE_SECONDS = 60.0


def net_of(num_parameters: int) -> nn.Module:
    width = max(8, round((num_parameters / 4) ** 0.5))
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def width_of(net: nn.Module) -> int:
    return next(net.parameters()).shape[1]


# ---------------------------------------------------------------------- ranks


def note_of(folder: Path) -> Callable[[int, float], None]:
    """Return a function that records a committed step, when its forward began, and the time."""
    file = (folder / str(os.getpid())).open("w")

    def note(step: int, began: float) -> None:
        file.write(f"{step} {began} {time.monotonic()}\n")
        file.flush()

    return note


def train_with_syncline(folder: Path, way: str, num_parameters: int) -> None:
    import syncline as sl

    sl.init(transport="c10d" if way == "gloo" else "shm")
    ddp = sl.DistributedDataParallel(net_of(num_parameters))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    x = torch.randn(16, width_of(ddp.module))
    note = note_of(folder)
    for step in sl.steps(state, until=10**9):
        with step:
            began = time.monotonic()
            optimizer.zero_grad()
            ddp(x * sl.world().rank).square().mean().backward()
            optimizer.step()
        if step.is_committed:
            note(step.number, began)


def train_with_torch(folder: Path, num_parameters: int) -> None:
    dist.init_process_group("gloo")
    net = net_of(num_parameters)
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
    saved, first = folder / "saved.pt", 0
    if saved.exists():
        content = torch.load(saved)
        net.load_state_dict(content["net"])
        optimizer.load_state_dict(content["optimizer"])
        first = content["step"]
    x = torch.randn(16, width_of(net))
    note = note_of(folder)
    for step in range(first + 1, 10**9):
        began = time.monotonic()
        optimizer.zero_grad()
        ddp(x * dist.get_rank()).square().mean().backward()
        optimizer.step()
        note(step, began)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            draft = folder / "draft.pt"
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
            draft.replace(saved)


def cost(num_parameters: int) -> None:
    """Compare the loops on the ranks of this job. Rank 0 prints the ratios."""
    import syncline as sl

    rank = sl.init().rank
    ddp = sl.DistributedDataParallel(net_of(num_parameters))
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    state = sl.TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler)
    x = torch.randn(256, width_of(ddp.module)) + rank

    def body() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        scheduler.step()

    def plain() -> list[float]:
        times = []
        for _ in range(40):
            start = time.perf_counter()
            body()
            state.commit()
            times.append(time.perf_counter() - start)
        return times

    def resilient() -> list[float]:
        times, start = [], 0.0
        for step in sl.steps(state, until=state.step + 41):
            now = time.perf_counter()
            if start:
                times.append(now - start)
            start = now
            with step:
                body()
        return times

    ratios, medians = [], []
    for number in range(30):
        loops = (plain, resilient) if number % 2 else (resilient, plain)
        found = {loop: statistics.median(loop()) for loop in loops}
        ratios.append(found[resilient] / found[plain])
        medians.append(found[plain])
    if rank == 0:
        print(
            f"cost without a loss: a step of {1000 * statistics.median(medians):.1f} ms takes "
            f"{statistics.median(ratios):.3f} times as long in sl.steps "
            f"(rounds: {min(ratios):.3f} to {max(ratios):.3f})"
        )


# ---------------------------------------------------------------------- the jobs


def commits(folder: Path) -> dict[int, list[tuple[int, float, float]]]:
    """Return what each process has recorded of its steps, by process number: the number, the begin and the end."""
    found = {}
    for path in folder.glob("[0-9]*"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.name)] = [
            (int(step), float(began), float(when))
            for step, began, when in (one for one in lines if len(one) == 3)
        ]
    return found


def running(found: dict[int, Any]) -> list[int]:
    return [pid for pid in sorted(found) if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def commands(way: str, num_ranks: int, num_parameters: int, folder: Path, torchft: str) -> list[list[str]]:
    """Return the commands that start the ranks of a job."""
    program = [__file__, "--rank", way, "--folder", str(folder), "--parameters", str(num_parameters)]
    here = Path(sys.executable).parent
    if way == "torchrun":
        counts = ["--nproc-per-node", str(num_ranks), "--max-restarts", str(num_ranks)]
        return [[str(here / "torchrun"), *counts, *program]]
    if way == "torchft":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        one = Path(__file__).with_name("recovery_torchft.py")
        lighthouse = str(Path(torchft).with_name("torchft_lighthouse"))
        ranks = [
            [torchft, str(one), f"http://127.0.0.1:{port}", str(folder), str(index), str(num_parameters)]
            for index in range(num_ranks)
        ]
        return [[lighthouse, "--min_replicas", "1", "--bind", f"127.0.0.1:{port}"], *ranks]
    restarts = ["--max-restarts", "1"] if way == "join" else []
    return [[str(here / "syncline"), "run", "--resilient", *restarts, "-n", str(num_ranks), *program]]


@contextlib.contextmanager
def running_job(way: str, num_ranks: int, num_parameters: int, torchft: str) -> Iterator[Path]:
    """Run a job. The value is the folder in which its processes record their steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (folder / "log").open("w") as log:
            processes = [
                subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
                for command in commands(way, num_ranks, num_parameters, folder, torchft)
            ]
        try:
            yield folder
        except TimeoutError:
            sys.exit((folder / "log").read_text()[-3000:])
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL if way == "torchft" else signal.SIGTERM)
                process.wait()


def job(
    way: str, num_ranks: int, num_parameters: int, lots: random.Random, torchft: str
) -> list[tuple[float, int]]:
    """Return for each kill the seconds until the next new step, and the number of steps that were made again.

    The seconds are infinite if all other ranks have ended with an error. Then the job ends, too.
    """
    found: list[tuple[float, int]] = []
    with running_job(way, num_ranks, num_parameters, torchft) as folder:
        wait_until(lambda: len(commits(folder)) == num_ranks)  # torchft begins before all are there
        while len(found) < num_ranks - 1 and not (found and math.isinf(found[-1][0])):
            found.append(one_kill(folder, lots, starts_again=way == "torchrun"))
    return found


def join(num_ranks: int, num_parameters: int) -> tuple[float, float]:
    """Return how long a process that joins has stopped the others, and the time of a median step, in seconds."""
    with running_job("join", num_ranks, num_parameters, "") as folder:
        wait_until(lambda: len(commits(folder)) == num_ranks and all(map(len, commits(folder).values())))
        first = {*running(commits(folder))}
        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: any(len(steps) > 20 for pid, steps in commits(folder).items() if pid not in first))
        found = commits(folder)
    [newcomer] = found.keys() - first
    joined = found[newcomer][0][2]
    stops, gaps = [], []
    for pid in first - {victim}:
        times = [when for *_, when in found[pid]]
        of_pid = [(later, later - when) for when, later in itertools.pairwise(times)]
        stops.append(max(gap for when, gap in of_pid if abs(when - joined) < 0.5))
        gaps += [gap for _, gap in of_pid]
    return max(stops) - statistics.median(gaps), statistics.median(gaps)


def one_kill(folder: Path, lots: random.Random, *, starts_again: bool) -> tuple[float, int]:
    wait_until(
        lambda: (
            all(len(commits(folder)[pid]) > 30 for pid in running(commits(folder)))
            and bool(running(commits(folder)))
        )
    )
    time.sleep(lots.uniform(0.0, 0.5))
    victims = running(commits(folder))
    victim = lots.choice(victims)
    known = set(commits(folder))
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    # A step that only the lost rank has committed does not stand.
    left = [steps for pid, steps in commits(folder).items() if pid != victim]
    before = max(step for steps in left for step, _, when in steps if when <= killed_at)

    def new_steps() -> dict[int, float]:
        """Return when each process that still runs has committed a step that none had before, begun after the kill."""
        found = commits(folder)
        return {
            pid: min(
                (when for step, began, when in found[pid] if step > before and began > killed_at), default=0.0
            )
            for pid in running(found)
            if pid != victim
        }

    def have_all_ended() -> bool:
        return not starts_again and not new_steps()

    wait_until(lambda: have_all_ended() or (bool(found := new_steps()) and all(found.values())))
    found = commits(folder)
    if have_all_ended():
        return math.inf, 0
    # A rank may have been a moment behind the others. Only a process that was started later makes a step again.
    again = {step for pid in found if pid not in known for step, *_ in found[pid] if step <= before}
    return max(new_steps().values()) - killed_at, len(again)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--torchft", default="", help="the Python of an environment with torchft")
    parser.add_argument("--only", nargs="+", choices=[*WAYS, "join", "cost"], default=[*WAYS, "join", "cost"])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank == "cost":
        return cost(options.parameters)
    if options.rank == "torchrun":
        return train_with_torch(options.folder, options.parameters)
    if options.rank:
        return train_with_syncline(options.folder, options.rank, options.parameters)
    lots = random.Random(1)
    ways = [way for way in WAYS if way in options.only and (options.torchft or way != "torchft")]
    results: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for _ in range(-(-options.kills // (options.ranks - 1))):
        for way, found in results.items():
            found += job(way, options.ranks, options.parameters, lots, options.torchft)
    for way, found in results.items():
        seconds = sorted(one for one, _ in found if not math.isinf(one)) or [math.nan]
        print(
            json.dumps(
                {
                    "way": way,
                    "kills": len(found),
                    "failed": sum(math.isinf(one) for one, _ in found),
                    "median_ms": round(1000 * statistics.median(seconds), 1),
                    "slowest_ms": round(1000 * seconds[-1], 1),
                    "lost_steps": sum(lost for _, lost in found),
                }
            )
        )
    if "join" in options.only:
        joins = [join(options.ranks, JOIN_FACTOR * options.parameters) for _ in range(3)]
        stop = [round(1000 * stop) for stop, _ in joins]
        median = round(1000 * statistics.median(step for _, step in joins))
        print(json.dumps({"way": "join", "stops_ms": stop, "a_step_ms": median}))
    if "cost" in options.only:
        here = Path(sys.executable).parent
        program = [__file__, "--rank", "cost", "--parameters", str(options.parameters)]
        subprocess.run(
            [here / "syncline", "run", "-n", "2", *program],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return None


if __name__ == "__main__":
    main()
