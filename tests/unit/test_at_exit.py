"""Threads of Syncline that may be inside C++ code when Python shuts down, which would abort the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from syncline.native import find_library

DESTRUCTOR = """
import time
from syncline.liveness.at_exit import Keeper

class Slow:
    def __del__(self):
        time.sleep(0.3)
        print("destroyed", flush=True)

keeper = Keeper([Slow()], 600.0)
keeper.drop()
"""

WAIT = """
import contextlib, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
import syncline.liveness.at_exit

class Last:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)  # Python is shutting down, and takes longer for it than the wait

def wait():
    began.set()
    with contextlib.suppress(dist.DistStoreError):  # if Python is slow, and does not shut down before
        dist.HashStore().wait(["never"], timedelta(seconds=0.5))

sys.modules["last"] = Last()
began = threading.Event()
threading.Thread(target=wait, daemon=True).start()
began.wait()
raise SystemExit(3)
"""

FUTURES = """
import syncline as sl, torch, torch.distributed as dist
from syncline.torch_backend.work import Finisher
from torch.futures import Future

class Done:
    def end(self):
        pass

finisher, num_done = Finisher("group"), 0

def count(_):
    global num_done
    num_done += 1

for _ in range(100_000):
    future = Future()
    future.then(count)
    finisher.complete(Done(), future)
while num_done < 100:  # now Python shuts down while the thread completes the others
    pass
"""


def ended(program: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_end_of_the_process_waits_for_a_destructor_under_way() -> None:
    assert ended(DESTRUCTOR) == (0, "destroyed\n", "")


@pytest.mark.skipif(find_library() is None, reason="the native library was not built")
def test_a_wait_of_torch_that_ends_while_python_shuts_down_does_not_abort_the_process() -> None:
    assert ended(WAIT) == (3, "", "")


@pytest.mark.skipif(find_library() is None, reason="the native library was not built")
def test_futures_that_are_completed_while_python_shuts_down_do_not_abort_the_process() -> None:
    assert ended(FUTURES) == (0, "", "")
