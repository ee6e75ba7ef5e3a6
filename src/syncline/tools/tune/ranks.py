"""The part of a trial that runs in each rank (`tools/launch/worker.py --before`)."""

from __future__ import annotations

import json

from syncline.events import ForwardEnded, Observer
from syncline.tracing.trace import trace


class TrialEnded(SystemExit):
    """The end of a program that has run for enough steps. `finally` blocks and context managers run."""


class Limit(Observer):
    """An observer that ends the program in the forward after the last step of a trial.

    All ranks have synchronized the step before by then, so that none waits for another one.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def forward_ended(self, event: ForwardEnded) -> None:
        if event.is_training and event.step > self._num_steps:
            raise TrialEnded(0)


def main(argument: str) -> None:
    """Trace this process, and end it after some steps.

    Args:
        argument: the directory of the trace and the number of steps, as JSON.
    """
    directory, num_steps = json.loads(argument)
    trace(directory, max_mb=16)
    Limit(num_steps).start()
