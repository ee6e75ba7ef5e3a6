"""The process that starts the ranks of one trial: `python -m syncline.tools.tune.job JOB`. JOB is a `Job` as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from syncline import environment
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.supervise import run_on_this_host
from syncline.tools.launch.worker import worker_command


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """What one trial runs."""

    num_ranks: int
    num_threads: int
    """The threads of each rank."""
    program: Sequence[str]
    """A script and its arguments."""
    directory: str
    """The directory of the trace."""
    num_steps: int


def main(argv: Sequence[str]) -> int:
    """Run a trial.

    Args:
        argv: the argument JOB.

    Returns:
        The exit code of the job.
    """
    job = TrialJob(**json.loads(argv[0]))
    before = ("syncline.tools.tune.ranks", json.dumps([job.directory, job.num_steps]))
    with Guardian(environment.for_child({})) as guardian:
        command = worker_command(job.program, before=before)
        return run_on_this_host(job.num_ranks, command, guardian, num_threads=job.num_threads)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
