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

CALLBACK = """
import threading, time
import syncline as sl, torch, torch.distributed as dist
from syncline.torch_backend.work import Finisher
from torch.futures import Future

class Done:
    def end(self):
        pass

def callback(_):
    began.set()
    time.sleep(0.3)
    print("completed", flush=True)

began, future = threading.Event(), Future()
future.then(callback)
Finisher("group").complete(Done(), future)
began.wait()
"""

EXIT_HANDLER = """
import atexit

@atexit.register  # before Syncline's, which therefore runs first
def wait_for_futures():
    for _ in range(2):
        complete().wait()
    print("completed", flush=True)

import syncline as sl, torch, torch.distributed as dist
from syncline.torch_backend import work
from torch.futures import Future

class Done:
    def end(self):
        pass

def complete():
    future = Future()
    finisher.complete(Done(), future)
    return future

work._AT_EXIT_SECONDS = 0.1
finisher = work.Finisher("group")
complete().wait()
"""


def ended(program: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_end_of_the_process_waits_for_a_destructor_under_way() -> None:
    assert ended(DESTRUCTOR) == (0, "destroyed\n", "")


@pytest.mark.skipif(find_library() is None, reason="the native library was not built")
def test_a_wait_of_torch_that_ends_while_python_shuts_down_does_not_abort_the_process() -> None:
    assert ended(WAIT) == (3, "", "")


def test_the_end_of_the_process_waits_for_the_callback_of_a_future() -> None:
    assert ended(CALLBACK) == (0, "completed\n", "")


def test_an_exit_handler_of_the_program_can_wait_for_a_future() -> None:
    assert ended(EXIT_HANDLER) == (0, "completed\n", "")
