"""Threads of Syncline that may be inside C++ code when Python shuts down, which would abort the process."""

from __future__ import annotations

import sys

import pytest

import hangs

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
from syncline.liveness.at_exit import AT_EXIT

class Last:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)  # Python is shutting down, and the wait would return meanwhile

def wait():
    while True:
        with contextlib.suppress(dist.DistStoreError):
            AT_EXIT.wait_in_torch(store.wait, ["never"], timedelta(milliseconds=20))
        began.set()

sys.modules["last"] = Last()
began, store = threading.Event(), dist.HashStore()
threading.Thread(target=wait, daemon=True).start()
began.wait()
raise SystemExit(3)
"""

GROUP = """
import syncline as sl, sys, torch, torch.distributed as dist

class Last:
    def __init__(self, group):
        self.group, self.me = group, self
    def __del__(self, write=sys.stdout.write):
        write(f"{self.group.size()}\\n")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x, last = torch.ones(1), Last(dist.group.WORLD)
sl.average_(x)
if destroys:
    dist.destroy_process_group()
import atexit
from syncline.liveness.at_exit import AT_EXIT

def count():
    print(x._use_count() > 1, sys.getrefcount(last.group) > 3, flush=True)

atexit.unregister(AT_EXIT.end)
atexit.register(count)
atexit.register(AT_EXIT.end)
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
    done = hangs.run([sys.executable, "-c", program])
    return done.returncode, done.stdout, done.stderr


def test_the_end_of_the_process_waits_for_a_destructor_under_way() -> None:
    assert ended(DESTRUCTOR) == (0, "destroyed\n", "")


def test_a_thread_that_waits_in_torch_again_and_again_stays_outside_of_it_while_python_shuts_down() -> None:
    assert ended(WAIT) == (3, "", "")


@pytest.mark.parametrize("destroys", [False, True])
def test_a_group_that_is_left_is_never_destroyed_and_its_threads_need_no_python(destroys: bool) -> None:
    program = f"destroys = {destroys}\n{GROUP}"
    assert ended(program) == (0, "True True\n1\n", "")


def test_the_end_of_the_process_waits_for_the_callback_of_a_future() -> None:
    assert ended(CALLBACK) == (0, "completed\n", "")


def test_an_exit_handler_of_the_program_can_wait_for_a_future() -> None:
    assert ended(EXIT_HANDLER) == (0, "completed\n", "")
