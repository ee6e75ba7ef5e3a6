"""The guard that no optimizer steps with gradients which should have been averaged and were not.

It is called before each step of any `torch.optim.Optimizer`, attached or not. In a healthy step it reads two flags.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from syncline._torch.autograd import NO_TASK, current_graph_task_id
from syncline.errors import SynclineError
from syncline.gradients.backward import BackwardState, GraphTasks
from syncline.gradients.reduction import Reduction
from syncline.gradients.state import StepState
from syncline.optimizers.attached import weakly
from syncline.optimizers.contents import parameters_of


class _Checks:
    """The checks of all guards of this process, which one hook of torch calls.

    Torch iterates over its hooks while they run. Meanwhile, the garbage collector may free a wrapper, which removes its
    guard. So each guard has no hook of its own, and the one hook is never removed.
    """

    def __init__(self) -> None:
        self._by_guard: dict[int, Callable[..., object]] = {}
        self._is_registered = False

    def add(self, guard: StepGuard, check: Callable[..., object]) -> None:
        if not self._is_registered:
            self._is_registered = True
            register_optimizer_step_pre_hook(self._call)
        self._by_guard[id(guard)] = check

    def remove(self, guard: StepGuard) -> None:
        self._by_guard.pop(id(guard), None)

    def _call(self, optimizer: Optimizer, *_: object) -> None:
        for check in list(self._by_guard.values()):
            check(optimizer)


_CHECKS = _Checks()


class StepGuard:
    """The guard of one wrapper's parameters, until `remove` is called.

    Args:
        reduction: the reduction, which holds the present backward.
        tasks: the graph tasks of the present backward.
        state: the state of the wrapper's steps.
        finish: `GradientSync.finish`.
    """

    def __init__(
        self,
        reduction: Reduction,
        tasks: GraphTasks,
        state: StepState,
        finish: Callable[[str, bool], object],
    ) -> None:
        self._reduction, self._tasks, self._state, self._finish = reduction, tasks, state, finish
        _CHECKS.add(self, weakly(self._check))

    def remove(self) -> None:
        """Guard no longer."""
        _CHECKS.remove(self)

    def _check(self, optimizer: Optimizer) -> None:
        """Check that the gradients that an optimizer is about to use were reduced.

        If the forward ran under `no_sync`, this is only a warning: the program may average gradients or parameters by
        itself.

        Raises:
            UnreducedGradients, SynclineError: a backward runs, or has not ended.
        """
        reduction, tasks = self._reduction, self._tasks
        backward = reduction.backward
        if not tasks.is_running and not backward.is_local_by_forward:
            return
        stepped = {id(parameter) for parameter in parameters_of(optimizer)}
        own = [index for index, parameter in enumerate(reduction.parameters) if id(parameter) in stepped]
        if not own or (not reduction.sends and not tasks.is_unfinished):
            return
        what = f"{type(optimizer).__name__}.step()"
        if not tasks.is_running:
            if not reduction.unreduced.isdisjoint(own):
                self._state.warn_once(
                    "local step",
                    f"step {backward.step}, {what}: the gradients were not averaged, because each forward since the "
                    "last reduction ran under no_sync. Run the forward of the last micro-batch of each step outside of "
                    "no_sync. If the program averages gradients or parameters itself, run the backward inside of "
                    "no_sync, too. This warning comes only once",
                )
        elif current_graph_task_id() == NO_TASK:
            self._finish(what, True)
        elif backward.state is not BackwardState.LOCAL:
            raise SynclineError(
                f"rank {reduction.transport.rank}, step {backward.step}, {what} was called inside of a backward, "
                "before the gradients were averaged over the ranks. Call it after loss.backward(), or in a hook of "
                "register_post_accumulate_grad_hook, which runs when .grad holds the mean"
            )
