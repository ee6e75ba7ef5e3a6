"""The ranks of one trial: what starts them, and the part that runs in each of them (`tools/launch/worker.py --before`).

    python -m syncline.tools.tune.ranks JOB

starts them. JOB is JSON with the arguments of `start`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from syncline import environment
from syncline.events import ForwardEnded, Observer
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.worker import worker_command
from syncline.tracing.trace import trace


def start(*, num_ranks: int, num_threads: int, program: Sequence[str], directory: str, num_steps: int) -> int:
    """Run a trial, and return the exit code of its ranks.

    Args:
        num_ranks: the number of ranks.
        num_threads: the number of threads of each rank.
        program: a script and its arguments.
        directory: the directory for the trace.
        num_steps: the number of steps after which the program is ended.
    """
    from syncline.tools.launch.supervise import run_on_this_host  # ranks do not need it

    before = ("syncline.tools.tune.ranks", json.dumps([directory, num_steps]))
    with Guardian(environment.for_child({})) as guardian:
        command = worker_command(program, before=before)
        return run_on_this_host(num_ranks, command, guardian, num_threads=num_threads)


class Limit(Observer):
    """An observer that ends the program in the forward after the last step of a trial.

    All ranks have synchronized the step before by then, so that none waits for another one.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def forward_ended(self, event: ForwardEnded) -> None:
        if event.is_training and event.step > self._num_steps:
            raise SystemExit(0)  # `finally` blocks and context managers run


def main(argument: str) -> None:
    """Trace this process, and end it after some steps.

    Args:
        argument: the directory of the trace and the number of steps, as JSON.
    """
    directory, num_steps = json.loads(argument)
    trace(directory, max_mb=16)
    Limit(num_steps).start()


if __name__ == "__main__":
    sys.exit(start(**json.loads(sys.argv[1])))
