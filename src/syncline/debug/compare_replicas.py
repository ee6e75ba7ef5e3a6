"""`compare_replicas` and `assert_replicas_agree`: compare the results of a step between runs and between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.checkpoint.objects import unwrapped
from syncline.checkpoint.rollback import failing_together
from syncline.checkpoint.train_state import TrainState
from syncline.checks import checked_count, checked_flag, checked_function, checked_kind, what_it_is
from syncline.data import DistributedSampler
from syncline.debug.recording import named_roots, qualified, watching_for_roots
from syncline.debug.repeated_runs import Step, examine
from syncline.debug.report import Disagreement, Report
from syncline.debug.run_state import Subject, synchronization_of
from syncline.session.world import transport_of
from syncline.suggestions import suggests_arguments
from syncline.transport.base import Transport
from syncline.user_code import calling
from syncline.verbs.common import Group, refuse_sharded


@suggests_arguments
def assert_replicas_agree(
    fn: Callable[..., Any],
    module: nn.Module | TrainState | None = None,
    *,
    inputs: tuple[Any, ...] | None = None,
    repeats: int = 2,
    same_inputs: bool | None = None,
    align_rng: bool = True,
    group: Group = None,
) -> Report:
    """Check that a step has the same results, bit for bit, in each run and on each rank. Raise an error if not.

    `fn(*inputs)` computes a step: forward, loss, backward. It can return any nested container of tensors. The function
    is run several times from the same state, and the inputs and outputs of every module are recorded. Afterwards
    parameters, buffers, gradients, random number generators and the state of the wrapper are restored, so that training
    can continue. A collective call.

    - On each rank, `repeats` runs with the rank's own data and random numbers must have the same results. If not, the
      report names the first module that returns another output for equal inputs (or another gradient for equal
      gradients), the size of the difference, and the causes for which there is evidence.
    - Between ranks, parameters must be equal, and so must gradients that a DistributedDataParallel (torch's or
      Syncline's) reduces. In one more run, all ranks use rank 0's random numbers, buffers and `inputs`; the results
      must be the same on all ranks. Without `inputs`, ranks may have different data, and values that depend on these
      data are not compared.

    Args:
        fn: the function that computes the step. It must take its data from `inputs`, or hold a fixed batch: an iterator
            would return other data in each run. `fn` may step an optimizer only if `module` is a `TrainState` with that
            optimizer. `fn` is run `repeats` + 2 times, once more if the module is wrapped, and once more if runs on one
            rank differ.
        module: the module that `fn` computes with, wrapped or not; or a `TrainState`, whose optimizer and other objects
            are then restored as well. Pass None to find the modules in one more run.
        inputs: the arguments of `fn`: nested dicts, lists and tuples of tensors and plain values. Ranks are compared
            only if they have the same plain values, and tensors of the same dtypes. `fn` gets copies of the tensors.
        repeats: the number of runs on each rank that must have the same results, at least 2.
        same_inputs: whether all ranks already have the same data. If True, different data are a disagreement. None
            means False.
        align_rng: whether all ranks use rank 0's random numbers when they are compared. If False, each rank uses its
            own, and different random numbers (of a dropout, for example) count as a disagreement.
        group: the group of ranks that are compared; see `broadcast_`.

    Returns:
        The report on all checks, with notes.

    Raises:
        Disagreement: runs or ranks differ. Its `report` has all findings, and its text is the same on every rank.
        ContractMismatch: the ranks have different modules, or different arguments.
        TypeError, ValueError, SynclineError: an argument is invalid; or, on some rank, `fn` failed or stepped an
            optimizer that is not in `module`. Raised on every rank.

    Examples:
        >>> import torch, syncline as sl
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
        >>> x = torch.ones(3, 2)
        >>> report = sl.debug.assert_replicas_agree(lambda x: net(x).sum().backward(), net, inputs=(x,))
        >>> report.agrees
        True
    """
    report = _compared(
        "sl.debug.assert_replicas_agree", fn, module, inputs, repeats, same_inputs, align_rng, group
    )
    if not report.agrees:
        raise Disagreement(report)
    return report


@suggests_arguments
def compare_replicas(
    fn: Callable[..., Any],
    module: nn.Module | TrainState | None = None,
    *,
    inputs: tuple[Any, ...] | None = None,
    repeats: int = 2,
    same_inputs: bool | None = None,
    align_rng: bool = True,
    group: Group = None,
) -> Report:
    """Make the checks of `assert_replicas_agree`, but return the report even if runs or ranks differ.

    See `report.agrees` and `print(report)`.

    Examples:
        >>> import itertools, torch, syncline as sl
        >>> class Counting(torch.nn.Module):
        ...     numbers = itertools.count()
        ...     def forward(self, x):
        ...         return x + next(self.numbers)
        >>> report = sl.debug.compare_replicas(Counting(), inputs=(torch.zeros(2),))
        >>> print(report.findings[0].what)
        rank 0, two runs from the same state: Counting returns another output for equal inputs: 2 of 2 elements ...
    """
    return _compared("sl.debug.compare_replicas", fn, module, inputs, repeats, same_inputs, align_rng, group)


def _compared(
    title: str,
    fn: Callable[..., Any],
    module: nn.Module | TrainState | None,
    inputs: tuple[Any, ...] | None,
    repeats: int,
    same_inputs: bool | None,
    align_rng: bool,
    group: Group,
) -> Report:
    transport = transport_of(group)
    with failing_together(transport, title) as lines:
        checked_function("fn", fn, "a function that computes a step")
        checked_count("repeats", repeats, at_least=2)
        if same_inputs is not None:
            checked_flag("same_inputs", same_inputs)
        checked_flag("align_rng", align_rng)
        if inputs is not None:
            checked_kind("inputs", inputs, tuple, "a tuple of the arguments of fn")
        modules, optimizers, others = _parts(module)
        lines.append(f"found by a run: {module is None}")
    arguments = inputs or ()
    if not modules:
        subject = Subject([], optimizers, others)
        modules = _found_by_a_run(title, lambda: fn(*arguments), transport, subject)
    roots = named_roots(modules)
    with failing_together(transport, title):
        synchronization = synchronization_of(roots)
    bare = {name: unwrapped(root) for name, root in roots.items()}
    step = Step(
        title=title,
        run=_with_gradients(fn, bare),
        inputs=arguments,
        roots=bare,
        subject=Subject(modules, optimizers, others),
        synchronization=synchronization,
        transport=transport,
        repeats=repeats,
        aligns_inputs=inputs is not None and same_inputs is not True,
        same_inputs=bool(same_inputs),
        align_rng=align_rng,
        needs_warm_up=any(
            isinstance(part, DistributedDataParallel) for root in modules for part in root.modules()
        ),
    )
    return examine(step)


def _with_gradients(
    fn: Callable[..., Any], roots: Mapping[str, nn.Module]
) -> Callable[[tuple[Any, ...]], tuple[Any, Mapping[str, Tensor | None]]]:
    """Return a function that calls `fn`, and returns the result of `fn` and the gradients of the parameters."""
    parameters = {
        qualified(prefix, name): parameter
        for prefix, root in roots.items()
        for name, parameter in root.named_parameters()
    }

    def run(inputs: tuple[Any, ...]) -> tuple[Any, Mapping[str, Tensor | None]]:
        with calling("the function"):
            result = fn(*inputs)
        return result, {name: parameter.grad for name, parameter in parameters.items()}

    return run


def _parts(target: nn.Module | TrainState | None) -> tuple[list[nn.Module], list[Optimizer], list[Any]]:
    """Return the modules, the optimizers, and the other objects in `target` whose state must be restored."""
    if target is None:
        return [], [], []
    if isinstance(target, nn.Module):
        return [target], [], []
    if not isinstance(target, TrainState):
        raise TypeError(f"expected module to be a Module or a TrainState, got {what_it_is(target)}")
    named = target.named.values()
    for one in named:
        refuse_sharded(one, "so there is nothing to compare")
    return (
        [one for one in named if isinstance(one, nn.Module)],
        [one for one in named if isinstance(one, Optimizer)],
        # Loading a sampler's state in the middle of an epoch would begin another epoch.
        [one for one in named if not isinstance(one, nn.Module | Optimizer | DistributedSampler)],
    )


def _found_by_a_run(
    title: str, fn: Callable[[], Any], transport: Transport, before: Subject
) -> list[nn.Module]:
    """Run `fn` once to find the modules that it calls directly. If `fn` is a module, return only `fn`.

    The state before the run is restored.
    """
    found: dict[nn.Module, Subject] = {}

    def on_root(module: nn.Module) -> None:
        found[module] = Subject([module])  # with the state before its first forward

    with failing_together(transport, title) as lines:
        try:
            with before.guarded(), watching_for_roots(on_root), calling("the function"):
                fn()
        finally:
            for subject in (*found.values(), before):
                subject.restore()
        if not found:
            raise ValueError(
                "the function calls no module, so there is nothing to compare: pass the module that it computes with "
                "as module="
            )
        lines += [f"module {name}" for name in named_roots(list(found))]
    return list(found)
