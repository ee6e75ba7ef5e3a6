"""`compare_replicas`: compare the results of a step between runs and between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from syncline.checkpoint.rollback import failing_together
from syncline.checkpoint.train_state import TrainState
from syncline.checks import checked_function, checked_kind
from syncline.debug.examination import Examination
from syncline.debug.report import Report
from syncline.session.world import transport_of
from syncline.suggestions import suggests_arguments
from syncline.user_code import calling
from syncline.verbs.common import Group, refuse_sharded

_TITLE = "sl.debug.compare_replicas"


@suggests_arguments
def compare_replicas(
    fn: Callable[..., Any],
    module: nn.Module | TrainState,
    *,
    inputs: tuple[Any, ...] | None = None,
    group: Group = None,
) -> Report:
    """Check that a step has the same results, bit for bit, in each run and on each rank, and name the first difference.

    `fn(*inputs)` computes a step: forward, loss, backward. It can return any nested container of tensors. The function
    is run several times from the same state, and the inputs and outputs of every module are recorded. Afterwards
    parameters, buffers, gradients, random number generators and the state of the wrapper are restored, so that training
    can continue. A collective call.

    - On each rank, two runs with the rank's own data and random numbers must have the same results. If not, the report
      names the first module that returns another output for equal inputs (or another gradient for equal gradients), the
      size of the difference, and the causes for which there is evidence.
    - Between ranks, parameters must be equal, and so must gradients that a DistributedDataParallel (torch's or
      Syncline's) reduces. In one more run, all ranks use rank 0's `inputs` and buffers, and the same random numbers;
      the results must be the same on all ranks. Without `inputs`, ranks may have different data, and values that depend
      on these data are not compared.

    Args:
        fn: the function that computes the step. It must take its data from `inputs`, or hold a fixed batch: an iterator
            would return other data in each run. `fn` may step an optimizer only if `module` is a `TrainState` with that
            optimizer. `fn` is run five times, and once more if the module is wrapped.
        module: the module that `fn` computes with, wrapped or not; or a `TrainState`, whose optimizer and other objects
            are then restored as well.
        inputs: the arguments of `fn`: nested dicts, lists and tuples of tensors and plain values. Ranks are compared
            only if they have the same plain values, and tensors of the same dtypes. `fn` gets copies of the tensors.
        group: the group of ranks that are compared; see `broadcast_`.

    Returns:
        The report on all checks, the same on every rank. `report.agrees` is the verdict, `print(report)` shows all, and
        `assert report.agrees, report` raises an error with that text.

    Raises:
        ContractMismatch: the ranks have different modules, or different arguments.
        TypeError, ValueError, SynclineError: an argument is invalid; or, on some rank, `fn` failed or stepped an
            optimizer that is not in `module`. Raised on every rank.

    Examples:
        >>> import itertools, torch, syncline as sl
        >>> class Counting(torch.nn.Module):
        ...     numbers = itertools.count()
        ...     def forward(self, x):
        ...         return x + next(self.numbers)
        >>> counting = Counting()
        >>> report = sl.debug.compare_replicas(counting, counting, inputs=(torch.zeros(2),))
        >>> print(report.findings[0].what)
        rank 0, two runs from the same state: Counting returns another output for equal inputs (rank 0: 2 ...
    """

    def run(arguments: tuple[Any, ...] | None) -> Any:
        with calling("the function"):
            return fn(*arguments or ())

    transport = transport_of(group)
    with failing_together(transport, _TITLE):
        checked_function("fn", fn, "a function that computes a step")
        checked_kind("module", module, (nn.Module, TrainState), "a Module or a TrainState")
        if inputs is not None:
            checked_kind("inputs", inputs, tuple, "a tuple of the arguments of fn")
        named = {"": module} if isinstance(module, nn.Module) else module.named
        for one in named.values():
            refuse_sharded(one, "so there is nothing to compare")
        examination = Examination(title=_TITLE, run=run, inputs=inputs, objects=named, transport=transport)
    return examination.report()
