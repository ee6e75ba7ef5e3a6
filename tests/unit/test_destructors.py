"""Threads in which destructors run, when the process ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import time
from syncline.liveness.destructors import Keeper

class Slow:
    def __del__(self):
        time.sleep(0.3)
        print("destroyed", flush=True)

keeper = Keeper([Slow()], 600.0)
keeper.drop()
"""


def test_the_end_of_the_process_waits_for_a_destructor_under_way() -> None:
    """A thread that is in the destructor of a Gloo group while Python shuts down aborts the process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "destroyed\n", "")
