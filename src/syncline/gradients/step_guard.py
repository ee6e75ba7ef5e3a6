"""The guard that no optimizer steps with gradients which should have been averaged and were not.

It is called before each step of any `torch.optim.Optimizer`, attached or not. In a healthy step it reads three flags.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from syncline._torch.autograd import NO_TASK, current_graph_task_id
from syncline.errors import SynclineError
from syncline.gradients.backward import BackwardState, GraphTasks
from syncline.gradients.hooks import ParameterHooks
from syncline.gradients.reduction import Reduction
from syncline.optimizers.attached import weakly
from syncline.optimizers.contents import parameters_of
from syncline.words import format_names


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
        hooks: the hooks on the parameters.
        finish: `GradientSync.finish`.
    """

    def __init__(
        self,
        reduction: Reduction,
        tasks: GraphTasks,
        hooks: ParameterHooks,
        finish: Callable[[str, bool], object],
    ) -> None:
        self._reduction, self._tasks, self._hooks, self._finish = reduction, tasks, hooks, finish
        self._seen = reduction.backward
        """The last backward that had begun when an optimizer of these parameters stepped last."""
        self._own = frozenset(map(id, reduction.parameters))
        _CHECKS.add(self, weakly(self._check))

    def remove(self) -> None:
        """Guard no longer."""
        _CHECKS.remove(self)

    def _check(self, optimizer: Optimizer) -> None:
        """Check that the gradients that an optimizer is about to use were reduced.

        Raises:
            UnreducedGradients, SynclineError: they were not.
        """
        reduction, tasks = self._reduction, self._tasks
        backward, seen = reduction.backward, self._seen
        if backward is not seen and not backward.is_local_by_forward and not tasks.is_running:
            # Not all parameters are looked at: it would cost each step of other optimizers a time that grows with them.
            if any(
                id(group["params"][0]) in self._own for group in optimizer.param_groups if group["params"]
            ):
                self._seen = backward
            return
        stepped = {id(parameter) for parameter in parameters_of(optimizer)}
        own = [index for index, parameter in enumerate(reduction.parameters) if id(parameter) in stepped]
        if own:
            self._seen = backward
        if not own or (not reduction.sends and not tasks.is_unfinished):
            return
        what = f"{type(optimizer).__name__}.step()"
        if tasks.is_running:
            self._check_backward(what)
        elif backward.is_local_by_forward and not reduction.unreduced.isdisjoint(own):
            raise self._error(
                f"{what}: expected reduced gradients, but the forward of the last backward ran under no_sync, so that "
                "backward was not reduced. Run the forward of the last micro-batch of each step outside of no_sync"
            )
        elif backward is seen and any(reduction.parameters[index].grad is not None for index in own):
            self._check_hooks(own, what)

    def _check_backward(self, what: str) -> None:
        if current_graph_task_id() == NO_TASK:
            self._finish(what, True)
        elif self._reduction.backward.state is not BackwardState.LOCAL:
            raise self._error(
                f"{what} was called inside of a backward, before the gradients were averaged over the ranks. Call "
                "it after loss.backward(), or in a hook of register_post_accumulate_grad_hook, which runs when .grad "
                "holds the mean"
            )

    def _check_hooks(self, own: list[int], what: str) -> None:
        if lost := self._hooks.restore(own):
            names = format_names([self._reduction.names[index] for index in lost])
            raise self._error(
                f"{what}: the gradients were not averaged over the ranks, because the contents of parameters were "
                f"swapped (by torch.utils.swap_tensors, or by a conversion of the module), and the backward did not "
                f"begin at an output of the wrapper: {names}. Call the wrapper instead of its module. The next "
                "backward averages these gradients again"
            )

    def _error(self, text: str) -> SynclineError:
        reduction = self._reduction
        return SynclineError(f"rank {reduction.transport.rank}, step {reduction.backward.step}, {text}")
