"""`compare_replicas` and `assert_replicas_agree`: check that a step is the same run twice, and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.checkpoint.train_state import TrainState
from syncline.checks import checked_count, checked_flag, checked_function, what_it_is
from syncline.data import DistributedSampler
from syncline.debug.recording import named_roots, watching_for_roots
from syncline.debug.repeated_runs import Step, examine
from syncline.debug.report import Disagreement, Report
from syncline.debug.run_state import Subject, Synchronization, synchronization_of, unwrapped
from syncline.session.world import transport_of
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.user_code import calling
from syncline.verbs.common import Group, refuse_sharded


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
    """Raise if a step is not the same, bit for bit, when it is computed twice, or on every rank.

    `fn(*inputs)` computes a step: forward, loss, backward. It may return any tree of tensors. It is run several times
    from one state, and every module inside is recorded. Afterwards parameters, buffers, gradients, random number
    generators, and the state of the wrapper are restored, so that training can continue. A collective call.

    - On each rank, `repeats` runs with the rank's own data and random numbers must be the same. If not, the report
      names the first module that returns another output for equal inputs (or other gradients for equal ones), how much
      it differs, and the causes for which there is evidence.
    - Between ranks, parameters must be equal, and so must gradients that a DistributedDataParallel (torch's or
      Syncline's) reduces. One more run, with rank 0's random numbers, buffers and `inputs` on every rank, must be the
      same. Without `inputs` each rank has other data; the values that ranks compute from it are then not compared.

    Args:
        fn: the step. It takes its data from `inputs`, or holds a fixed batch; an iterator would return other data in
            each run. It may step an optimizer only if `module` is a `TrainState` with that optimizer. It is run
            `repeats` + 2 times, once more if wrapped, and once more if something differs.
        module: the module that `fn` computes with, wrapped or not, or a `TrainState`, whose optimizer and other parts
            are then restored too. None: the modules are found by an additional run.
        inputs: the arguments of `fn`: nested dicts, lists and tuples of tensors and plain values, of the same kinds on
            all ranks. `fn` gets copies of the tensors.
        repeats: number of runs on each rank that must be the same, at least 2.
        same_inputs: whether all ranks already have the same data, so that different data are a disagreement. None: no.
        align_rng: whether ranks are compared with rank 0's random numbers. With False, a module that draws different
            numbers is a disagreement (dropout under different seeds).
        group: see `broadcast_`.

    Returns:
        The report of the checks, with notes.

    Raises:
        Disagreement: something differs; its `report` has all findings. The same text on every rank.
        ContractMismatch: the ranks have different modules, or different arguments.
        TypeError, ValueError, SynclineError: `fn` failed on a rank, or steps an unknown optimizer; on every rank.

    Example:
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
    """Return the report of `assert_replicas_agree` without raising; see `report.agrees` and `print(report)`.

    Example:
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
    fault: Exception | None = None
    modules: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    others: list[Any] = []
    try:
        checked_function("fn", fn, "a function that computes a step")
        checked_count("repeats", repeats, at_least=2)
        if same_inputs is not None:
            checked_flag("same_inputs", same_inputs)
        checked_flag("align_rng", align_rng)
        if inputs is not None and not isinstance(inputs, tuple):
            raise TypeError(f"expected inputs to be a tuple, the arguments of fn, got {what_it_is(inputs)}")
        modules, optimizers, others = _parts(module)
    except (TypeError, ValueError) as error:
        fault = error
    exchange(transport, title, [f"found by a run: {module is None}"], fault=fault)
    arguments = () if inputs is None else inputs
    if not modules:
        modules = _found_by_a_run(title, fn, arguments, transport, optimizers, others)
    roots = named_roots(modules)
    synchronization = Synchronization()
    try:
        synchronization = synchronization_of(roots)
    except ValueError as error:
        fault = error
    exchange(transport, title, [], fault=fault)
    bare = {name: unwrapped(root) for name, root in roots.items()}
    parameters = {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, root in bare.items()
        for name, parameter in root.named_parameters()
    }

    def run(given: tuple[Any, ...]) -> tuple[Any, Mapping[str, Tensor | None]]:
        with calling("the function"):
            result = fn(*given)
        return result, {name: parameter.grad for name, parameter in parameters.items()}

    step = Step(
        title=title,
        run=run,
        inputs=arguments,
        roots=bare,
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
    return examine(step, Subject(modules, optimizers, others))


def _parts(target: nn.Module | TrainState | None) -> tuple[list[nn.Module], list[Optimizer], list[Any]]:
    """Return the modules, the optimizers, and other objects whose state must be restored."""
    if target is None:
        return [], [], []
    if isinstance(target, nn.Module):
        return [target], [], []
    if not isinstance(target, TrainState):
        raise TypeError(f"expected module to be a Module or a TrainState, got {what_it_is(target)}")
    named = list(target.named.values())
    for one in named:
        refuse_sharded(one, "so there is nothing to compare")
    return (
        [one for one in named if isinstance(one, nn.Module)],
        [one for one in named if isinstance(one, Optimizer)],
        # A sampler's position is that between two steps; loading it in the middle of an epoch would begin another one.
        [one for one in named if not isinstance(one, nn.Module | Optimizer | DistributedSampler)],
    )


def _found_by_a_run(
    title: str,
    fn: Callable[..., Any],
    arguments: tuple[Any, ...],
    transport: Transport,
    optimizers: list[Optimizer],
    others: list[Any],
) -> list[nn.Module]:
    """Return the modules that `fn` calls directly, or `fn` itself if it is a module."""
    before = Subject([], optimizers, others)
    found: dict[nn.Module, Subject] = {}

    def on_root(module: nn.Module) -> None:
        found[module] = Subject([module])  # with the state before its first forward

    fault: Exception | None = None
    try:
        with before.guarded(), watching_for_roots(on_root), calling("the function"):
            fn(*arguments)
    except Exception as error:
        fault = error
    finally:
        for subject in found.values():
            subject.restore()
        before.restore()
    if fault is None and not found:
        fault = ValueError("the function calls no module: pass the module that it computes with")
    exchange(transport, title, [f"module {name}" for name in named_roots(list(found))], fault=fault)
    return list(found)
