"""Runs of a training program whose ranks are forks of one process that has imported torch: they begin at once.

Imported, `Forks` is for tests; started, this is that process. A test of the launcher starts the launcher instead.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import syncline as sl  # noqa: F401  (for the ranks)
from syncline.session.process import end_with_parent
from syncline.testing.ports import variables_of_rank

__all__ = ["Forks"]

_SLOW_TO_IMPORT = "torch._dynamo"
"""torch does so at the first step of an optimizer."""
_DEADLINE_SECONDS = 100.0
"""A rank that runs on for as long prints its stacks, and ends."""


class Forks:
    """The process that is forked, until `close`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, num_ranks: int, program: Path, *arguments: object) -> tuple[list[int], str]:
        """Run a program on so many ranks, and return their exit codes and what they have printed."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            job = {
                "num_ranks": num_ranks,
                "argv": [str(program), *map(str, arguments)],
                "port": store.port,
                "output": output.name,
            }
            print(json.dumps(job), file=self._process.stdin, flush=True)
            codes: list[int] = json.loads(self._process.stdout.readline())
            return codes, output.read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    """Fork the ranks of one job after another. Returns in a rank whose program has ended."""
    parent = os.getpid()
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(job["num_ranks"]):
            pid = os.fork()
            if not pid:
                end_with_parent(parent)
                _be(rank, job)
                return
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


def _be(rank: int, job: dict[str, Any]) -> None:
    for number, path, flags in [
        (0, os.devnull, os.O_RDONLY),
        (1, job["output"], os.O_WRONLY | os.O_APPEND),
    ]:
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    faulthandler.dump_traceback_later(_DEADLINE_SECONDS, exit=True)
    os.environ |= variables_of_rank(rank, job["num_ranks"], job["port"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the test's
    sys.argv = job["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module(_SLOW_TO_IMPORT)
    _serve()
