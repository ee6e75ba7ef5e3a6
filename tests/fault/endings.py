"""Short programs on two ranks that end in all ways: does every process end, with the right exit code?

    PYTHONPATH=tests python tests/fault/endings.py --runs 1000

Up to Python 3.13, a thread that is inside C++ code of torch when Python shuts down can abort the process (exit code
-6), or leave a mutex locked for ever. Four programs run at a time, so that threads are late. The output is a table.
For each way of ending, it has the number of wrong runs, and the longest time from a rank's last line to its end. A line
for each 50 runs comes before it.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

import hangs
from syncline.testing import variables_of_rank

__all__ = ["ENDINGS", "Outcome", "run"]

_HEAD = """
import atexit, os, signal, sys, threading, time, types
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, transport, peer = int(os.environ["RANK"]), sys.argv[1], 1 - int(os.environ["RANK"])
import syncline as sl

class Holder:
    def __init__(self):
        self.me, self.group, self.ddp = self, dist.group.WORLD, globals().get("ddp")

def train():
    ddp = sl.DistributedDataParallel(torch.nn.Linear(64, 1))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(8, 64)).square().mean().backward()
    return ddp

def gather():
    for k in range(6):
        dist.barrier()
        dist.all_gather([torch.empty(5) for _ in range(2)], torch.ones(5))
        dist.all_gather_object([None, None], k)

def end(code=None):
    print("end", time.monotonic(), flush=True)
    if code is not None:
        sys.exit(code)
"""

_INIT = "sl.init(transport=transport)\n"
_GLOO = "dist.init_process_group('gloo')\n"
_TRAIN = "ddp = train()\ngather()\n"
_ALL = f"{_INIT}{_TRAIN}"


@dataclass(frozen=True)
class Ending:
    """A way in which a program ends."""

    program: str
    codes: tuple[int, int] = (0, 0)
    """The right exit codes of the two ranks."""


ENDINGS = {
    "alone, without a group": Ending("end()"),
    "sl.init": Ending(f"{_ALL}end()"),
    "sl.init and sl.shutdown": Ending(f"{_ALL}sl.shutdown()\nend()"),
    "torch's init": Ending(f"{_GLOO}{_TRAIN}end()"),
    "torch's init, destroyed": Ending(f"{_GLOO}{_TRAIN}dist.destroy_process_group()\nend()"),
    "the group in a global": Ending(f"{_ALL}group = dist.group.WORLD\nend()"),
    "the group in a cycle": Ending(f"{_ALL}keep = [Holder() for _ in range(3)]\nend()"),
    "the group in a cycle, torch's init": Ending(f"{_GLOO}{_TRAIN}keep = [Holder() for _ in range(3)]\nend()"),
    "the group in a cycle, shut down": Ending(f"{_ALL}keep = Holder()\nsl.shutdown()\nend()"),
    "all in another module": Ending(
        f"{_ALL}sys.modules['other'] = types.ModuleType('other')\nsys.modules['other'].keep = Holder()\nend()"
    ),
    "an exit handler that gathers": Ending(f"{_GLOO}{_TRAIN}atexit.register(gather)\nend()"),
    "an exception on one rank": Ending(
        f"{_ALL}if rank == 1:\n    end()\n    raise ValueError\ntry:\n    gather()\nfinally:\n    end()", (1, 1)
    ),
    "sys.exit(3)": Ending(f"{_ALL}keep = Holder()\nend(3)", (3, 3)),
    "Ctrl-C": Ending(f"{_ALL}keep = Holder()\nend()\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)", (-2, -2)),
    "Ctrl-C in a collective": Ending(
        f"{_ALL}told = os.path.join(os.path.dirname(__file__), 'told')\n"
        "def interrupt():\n    os.kill(os.getpid(), signal.SIGINT)\n    open(told, 'w').close()\n"
        "if rank == 0:\n    threading.Timer(0.2, interrupt).start()\n"
        "try:\n"
        "    if rank == 0:\n        dist.barrier()\n"
        "    while not os.path.exists(told):\n        time.sleep(0.01)\n"  # rank 0 is interrupted before rank 1 ends
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\nfinally:\n    end()",
        (-2, -2),
    ),
    "a lost rank before the end": Ending(
        f"{_ALL}keep = Holder()\nend()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)", (0, -9)
    ),
    "a lost rank in a collective": Ending(
        f"{_ALL}end()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n    gather()\nfinally:\n    end()",
        (1, -9),
    ),
    "workers of a DataLoader": Ending(
        f"{_ALL}loader = iter(torch.utils.data.DataLoader(range(64), num_workers=2, persistent_workers=True))\n"
        "next(loader)\nkeep = Holder()\nend()"
    ),
    "torch.compile": Ending(
        f"{_INIT}double = torch.compile(lambda x: 2 * x, backend='eager')\ndouble(torch.ones(3))\n{_TRAIN}end()"
    ),
    "callbacks of the backend": Ending(
        "sl.register_backend()\ndist.init_process_group('cpu:syncline')\nddp = train()\n"
        "tensors = [torch.ones(1000) for _ in range(20)]\nfor x in tensors:\n"
        "    future = dist.all_reduce(x, async_op=True).get_future()\n"
        "    future.then(lambda f: torch.ones(3) + 1)\nend()"
    ),
    "a collective that nobody waits for": Ending(
        f"{_GLOO}{_TRAIN}work = dist.all_reduce(torch.ones(1000), async_op=True)\nend()"
    ),
    "a collective that the other rank never joins": Ending(
        f"{_GLOO}{_TRAIN}if rank == 0:\n    work = dist.all_reduce(torch.ones(1000), async_op=True)\nend()"
    ),
    "a thread that waits in a collective": Ending(
        f"{_ALL}other = dist.new_group([0, 1])\nsl.barrier(group=other)\nbegan = threading.Event()\n"
        "def wait():\n    began.set()\n    sl.average_(torch.ones(1000), group=other)\n"
        "if rank == 0:\n    threading.Thread(target=wait, daemon=True).start()\n    began.wait()\n"
        "    time.sleep(0.3)\nend()"
    ),
    "torchmetrics": Ending(
        f"{_INIT}import torchmetrics\nmetric = torchmetrics.MeanMetric()\n{_TRAIN}"
        "for k in range(5):\n    metric.update(torch.ones(3))\n    metric.compute()\n    metric.reset()\nend()"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How one run has ended."""

    ending: str
    transport: str
    codes: tuple[int, ...]
    seconds: float
    """From the last line of a rank to the end of its process, of the slower rank."""
    text: str
    """What the ranks have written, if something was wrong."""

    @property
    def is_right(self) -> bool:
        return self.codes == ENDINGS[self.ending].codes


def run(ending: str, transport: str, folder: Path, python: str = sys.executable) -> Outcome:
    """Run the program of one way of ending on two ranks.

    Args:
        ending: a key of `ENDINGS`.
        transport: "shm" or "c10d".
        folder: for the program.
        python: the interpreter.
    """
    program = Path(tempfile.mkdtemp(dir=folder)) / "program.py"
    program.write_text(_HEAD + ENDINGS[ending].program + "\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", **hangs.FAULTHANDLER}
    ranks = [
        subprocess.Popen(
            [python, program, transport],
            env=os.environ | variables_of_rank(rank, 2, store.port) | agent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as waiting:
        ended = [waiting.submit(_time_of_end, rank) for rank in ranks]
        try:
            outputs = [out for out, _ in hangs.communicate_with_all(ranks, 120.0)]
        except TimeoutError as error:
            return Outcome(ending, transport, (), 120.0, str(error))
        seconds = [
            time_of_end.result() - _time_of_last_line(out)
            for time_of_end, out in zip(ended, outputs, strict=True)
        ]
    codes = tuple(rank.returncode for rank in ranks)
    text = "" if codes == ENDINGS[ending].codes else "".join(outputs)
    return Outcome(ending, transport, codes, max(seconds), text)


def _time_of_end(rank: subprocess.Popen[str]) -> float:
    ended = select.poll()
    descriptor = os.pidfd_open(rank.pid)
    ended.register(descriptor)
    ended.poll()
    os.close(descriptor)
    return time.monotonic()


def _time_of_last_line(output: str) -> float:
    times = [line.split()[1] for line in output.splitlines() if line.startswith("end ")]
    return float(times[-1]) if times else time.monotonic()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--only", default="", help="a part of the names of the ways of ending")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the ranks")
    parser.add_argument("--at-once", type=int, default=4)
    args = parser.parse_args(arguments)
    # Background jobs of a shell, and what they start, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    has_metrics = (
        subprocess.run([args.python, "-c", "import torchmetrics"], capture_output=True).returncode == 0
    )
    names = [name for name in ENDINGS if args.only in name and (has_metrics or name != "torchmetrics")]
    plan = [(names[k % len(names)], ("shm", "c10d")[k // len(names) % 2]) for k in range(args.runs)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        found: list[Outcome] = []
        for one in pool.map(lambda one: run(*one, Path(folder), args.python), plan):
            found.append(one)
            if len(found) % 50 == 0:
                print(
                    f"{len(found)} have ended, {sum(not each.is_right for each in found)} wrong", flush=True
                )
    for name in names:
        these = [one for one in found if one.ending == name]
        wrong = [one for one in these if not one.is_right]
        slowest = max((one.seconds for one in these if one.is_right), default=0.0)
        print(f"{name:45} {len(these):4} runs, {len(wrong)} wrong, slowest end {slowest:.2f} s")
        for one in wrong:
            print(f"    {one.transport}: exit codes {one.codes or 'none: hung'}\n{one.text}")
    num_hung = sum(not one.codes for one in found)
    num_aborted = sum(-6 in one.codes for one in found)
    num_wrong = sum(not one.is_right for one in found)
    print(f"{len(found)} runs: {num_hung} hung, {num_aborted} aborted, {num_wrong} wrong in all")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
