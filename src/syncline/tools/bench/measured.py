"""Runs ranks of this host that measure something, and reads what they have found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from syncline import environment
from syncline.tools.bench.results import describe_machine
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.supervise import run_on_this_host
from syncline.tools.launch.worker import worker_command
from syncline.tools.plan.job import Job
from syncline.tools.plan.machine import Calls, Coding, Cost, Machine


def measured(
    num_ranks: int, program: str, *arguments: str, num_threads: int = 1, prefix: str = "syncline: "
) -> dict[str, Any]:
    """Run a program of this package on ranks of this host, and return what rank 0 has written.

    Args:
        num_ranks: the number of ranks.
        program: the name of the program.
        arguments: its arguments. One more follows them: the file to write.
        num_threads: the number of threads of each rank.
        prefix: the text before each line that the ranks print.

    Raises:
        SystemExit: a rank has failed, and has printed why. The code is that of the rank that failed first.
    """
    with Guardian(environment.for_child({})) as guardian:
        output = guardian.folder / "measured.json"
        module = f"syncline.tools.bench.{program}"
        command = worker_command([module, *arguments, str(output)], is_module=True)
        code = run_on_this_host(num_ranks, command, guardian, num_threads=num_threads, prefix=prefix)
        if code:
            raise SystemExit(code)
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def calibrated(say: Callable[[str], object] = lambda text: None) -> Machine:
    """Measure what synchronization costs on this machine.

    Args:
        say: a function that prints a line about what is measured.

    Raises:
        SystemExit: a rank has failed, and has printed why. The code is that of the rank that failed first.
    """
    found = {}
    for num in (2, 4, 8):
        say(f"measuring with {num} ranks")
        found[num] = measured(num, "calibrate")
    described, two = describe_machine(), found[2]
    gloo = {num: Cost(*one["gloo"]) for num, one in found.items()}
    in_memory = {num: Cost(*one["shared_memory"]) for num, one in found.items() if one["shared_memory"]}
    return Machine(
        name=f"{described['num_cores']} cores of {described['cpu']}, measured",
        shared_memory=in_memory or gloo,
        gloo=gloo,
        copy_per_byte=two["copy_per_byte"],
        calls={num: Calls(*one["calls"]) for num, one in found.items()},
        codings={code: Coding(*coding) for code, coding in two["codings"].items()},
        average_per_byte=two["average_per_byte"],
        outer_per_byte=two["outer_per_byte"],
    )


def measured_model(model: str, *, num_ranks: int, num_threads: int) -> Job:
    """Measure how long a model computes on this host, without synchronization.

    Args:
        model: FILE.py:FUNCTION, as for `syncline plan`.
        num_ranks: the number of ranks that compute at once.
        num_threads: the number of threads of each rank.

    Raises:
        SystemExit: a rank has failed, and has printed why. The code is that of the rank that failed first.
    """
    return Job.from_json(measured(num_ranks, "model_times", model, num_threads=num_threads))
