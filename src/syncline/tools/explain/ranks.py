"""The part of `syncline explain` that runs in each rank (`tools/launch/worker.py --before`).

It observes the steps by the events of the library, and the steps of all optimizers by torch's hooks. When the wanted
step is complete, each rank raises `StepShown` in its next forward, so that the script ends there. All ranks have
synchronized the step by then, so that none waits for another one. Rank 0 writes a report before.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from syncline import environment, launchers
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.events import (
    BackwardEnded,
    CallEnded,
    ForwardEnded,
    GradientReady,
    Observer,
    OptimizerStepped,
    ParametersSynced,
)
from syncline.tools.explain.report import Options, Report
from syncline.tools.explain.rows import Backward, StepEvents, Update, rows_of


class StepShown(SystemExit):
    """The end of a script whose step was shown. `finally` blocks and context managers run; the exit code is 0."""


def main(argument: str) -> None:
    """Observe this process, and end the script after one step.

    Args:
        argument: the fields of `Options`, as JSON.
    """
    environment.export({environment.EXPLAIN: "1"}, replace=True)
    observer = StepObserver(Options(**json.loads(argument)))
    register_optimizer_step_pre_hook(observer.before_update)
    register_optimizer_step_post_hook(observer.after_update)
    observer.start()
    atexit.register(observer.end_of_script)


class StepObserver(Observer):
    """An observer that divides the events of a rank into steps, and ends the script after one of them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._reports = launchers.current().rank == 0
        self._pid = os.getpid()
        self._current = StepEvents()
        self._last: StepEvents | None = None
        """The last complete step."""
        self._num_steps = 0
        self._has_reported = False
        self._updates_under_way: dict[int, float] = {}
        """The begin of each optimizer step that has not ended, by the id of the optimizer."""

    # ------------------------------------------------------------------ events

    def forward_ended(self, event: ForwardEnded) -> None:
        if not event.is_training or not torch.is_grad_enabled():
            return  # one rank may evaluate alone, while the others wait for it
        if self._has_reported:  # the script has caught the first StepShown
            raise StepShown(0)
        if self._current.is_complete_for(event.source.module):
            self._end_step()
        self._current.forwards.append(event)

    def gradient_ready(self, event: GradientReady) -> None:
        self._current.ready.append(event)

    def backward_ended(self, event: BackwardEnded) -> None:
        self._current.backwards.append(Backward(event, event.record().buckets))

    def before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note when a step of an optimizer begins. Torch calls this for every optimizer."""
        self._updates_under_way[id(optimizer)] = time.perf_counter()

    def after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note when a step of an optimizer has ended."""
        began_at = self._updates_under_way.pop(id(optimizer), None)
        if began_at is not None:
            self._current.updates.append(Update(type(optimizer).__name__, began_at, time.perf_counter()))

    def optimizer_stepped(self, event: OptimizerStepped) -> None:
        self._current.attached.append(event)

    def parameters_synced(self, event: ParametersSynced) -> None:
        self._current.rounds.append(event)

    def call_ended(self, event: CallEnded) -> None:
        if self._current.forwards:
            self._current.calls.append(event)

    # ------------------------------------------------------------------ steps

    def _end_step(self) -> None:
        """End the present step. If it is the wanted one, report it and end the script."""
        self._num_steps += 1
        self._last, self._current = self._current, StepEvents()
        if self._options.is_enough(self._num_steps, meets_others=self._last.meets_others):
            self._report()
            raise StepShown(0)

    def end_of_script(self) -> None:
        """Report the last complete step, unless one was reported. It is called when the process ends."""
        if self._has_reported or os.getpid() != self._pid:  # forks inherit the call
            return
        if self._current.is_complete:
            self._num_steps += 1
            self._last = self._current
        self._report()

    def _report(self) -> None:
        self._has_reported = True
        if not self._reports:
            return
        step = self._last
        report = Report(step=0, uses_torch_class=_uses_torch_class())
        if step is not None:
            last_forwards = {one.source: one for one in step.forwards}.values()
            report = Report(
                step=self._num_steps,
                num_ranks=self._options.num_ranks,
                seconds=step.ended_at - step.began_at,
                modules=[f"{one.contract()}\n\n{one.explain()}" for one in last_forwards],
                rows=rows_of(step),
                meets_others=step.meets_others,
            )
        Path(self._options.report).write_text(report.encode(), encoding="utf-8")


def _uses_torch_class() -> bool:
    torch_class = torch.nn.parallel.DistributedDataParallel
    return any(
        issubclass(type(one), torch_class) and not issubclass(type(one), DistributedDataParallel)
        for one in gc.get_objects()
    )
