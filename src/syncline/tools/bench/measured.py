"""Runs ranks of this host that measure something for a plan, and reads what they have found."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from syncline import environment
from syncline.tools.bench.machine import describe_machine
from syncline.tools.launch.command import worker_command
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.supervise import run_on_this_host
from syncline.tools.plan import Calls, Coding, Cost, Job, Machine

NUMS_RANKS = (2, 4, 8)
"""The numbers of ranks with which a machine is measured."""


class MeasurementFailed(Exception):
    """The ranks of a measurement have failed, and have printed why.

    Args:
        code: the exit code of the rank that failed first.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"the measurement failed with exit code {code}")
        self.code = code


def calibrated(say: Callable[[str], object] = lambda text: None) -> Machine:
    """Measure what synchronization costs on this machine.

    Args:
        say: a function that prints a line about what is measured.

    Raises:
        MeasurementFailed: a rank has failed.
    """
    found = {}
    for num in NUMS_RANKS:
        say(f"measuring with {num} ranks")
        found[num] = _measured(num, "syncline.tools.bench.calibrate", [], num_threads=1)
    return _machine(found)


def measured_model(model: str, *, num_ranks: int, num_threads: int) -> Job:
    """Measure how long a model computes on this host, without synchronization.

    Args:
        model: FILE.py:FUNCTION, as for `syncline plan`.
        num_ranks: the number of ranks that compute at once.
        num_threads: the number of threads of each rank.

    Raises:
        MeasurementFailed: a rank has failed.
    """
    found = _measured(num_ranks, "syncline.tools.bench.model_times", [model], num_threads=num_threads)
    return Job.from_json(found)


def _measured(num_ranks: int, module: str, arguments: Sequence[str], *, num_threads: int) -> dict[str, Any]:
    with Guardian(environment.for_child({})) as guardian:
        output: Path = guardian.folder / "measured.json"
        command = worker_command([module, *arguments, str(output)], is_module=True)
        code = run_on_this_host(num_ranks, command, guardian, num_threads=num_threads, prefix="syncline: ")
        if code:
            raise MeasurementFailed(code)
        measured: dict[str, Any] = json.loads(output.read_text())
        return measured


def _machine(found: dict[int, dict[str, Any]]) -> Machine:
    described = describe_machine()
    two = found[2]
    gloo = {num: Cost(*one["gloo"]) for num, one in found.items()}
    in_memory = {num: Cost(*one["shared_memory"]) for num, one in found.items() if one["shared_memory"]}
    return Machine(
        name=f"{described['num_cores']} cores of {described['cpu'] or 'an unnamed CPU'}, measured",
        shared_memory=in_memory or gloo,
        gloo=gloo,
        copy_per_byte=two["copy_per_byte"],
        calls={num: Calls(*one["calls"]) for num, one in found.items()},
        codings={code: Coding(*coding) for code, coding in two["codings"].items()},
        average_per_byte=two["average_per_byte"],
        outer_per_byte=two["outer_per_byte"],
    )
