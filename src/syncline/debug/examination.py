"""`compare_replicas`: run a step repeatedly from one state, compare the runs on each rank and between ranks, report."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from syncline._torch.modules import is_compiler_loaded
from syncline.checkpoint.objects import rng_state, set_rng_state, unwrapped
from syncline.checkpoint.rollback import failing_together, restore_all, restorer_of, restorer_of_tensor
from syncline.checkpoint.train_state import TrainState
from syncline.checks import checked_function, checked_kind, suggests_arguments
from syncline.debug.diagnosis import between_ranks, first_difference, merged, of_gradients, own_finding
from syncline.debug.recording import Event, Recording, Value, is_ordinary
from syncline.debug.report import Finding, Report, facts
from syncline.equality.fingerprint import digest_of, fingerprint_of
from syncline.equality.locate import differences
from syncline.gradients.wrapper_protocol import replica_of
from syncline.session.world import transport_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport
from syncline.trees import leaves, map_leaves
from syncline.user_code import calling
from syncline.verbs.common import Group, refuse_sharded


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
      sums of both, and the causes for which there is evidence.
    - Between ranks, parameters must be equal, and so must gradients that a DistributedDataParallel (torch's or
      Syncline's) reduces. In one more run, all ranks use rank 0's `inputs` and buffers, and the same random numbers;
      the results must be the same on all ranks. Without `inputs`, ranks may have different data, and values that depend
      on these data are not compared.

    Args:
        fn: the function that computes the step. It must take its data from `inputs`, or hold a fixed batch: an iterator
            would return other data in each run. `fn` may step an optimizer only if `module` is a `TrainState` with that
            optimizer. `fn` is run three times, and once more if the module is wrapped.
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
        rank 0, two runs from the same state: Counting returns another output for equal inputs (rank 0: sum 0 | ...
    """

    def run(arguments: tuple[Any, ...] | None) -> Any:
        with calling("the function"):
            return fn(*arguments or ())

    transport = transport_of(group)
    with failing_together(transport, "sl.debug.compare_replicas"):
        checked_function("fn", fn, "a function that computes a step")
        checked_kind("module", module, (nn.Module, TrainState), "a Module or a TrainState")
        if inputs is not None:
            checked_kind("inputs", inputs, tuple, "a tuple of the arguments of fn")
        named = {"": module} if isinstance(module, nn.Module) else module.named
        for one in named.values():
            refuse_sharded(one, "so there is nothing to compare")
        examination = Examination(
            title="sl.debug.compare_replicas", run=run, inputs=inputs, objects=named, transport=transport
        )
    return examination.report()


def _qualified(*parts: str) -> str:
    """Join the parts of a qualified name with dots. Empty parts are left out."""
    return ".".join(filter(None, parts))


@dataclass(kw_only=True)
class Examination:
    """An examination of one computation, which runs it repeatedly and composes the report."""

    title: str
    """The name of the function that the user called, for reports and errors."""
    run: Callable[[Any], object]
    """A function of the inputs that returns the result of the computation, and writes gradients to `.grad`."""
    inputs: Any
    """The inputs of this rank; None if the function has no inputs, so that ranks may have other data."""
    objects: Mapping[str, Any]
    """The objects to restore after each run, by name. The modules among them, wrapped or not, are recorded."""
    transport: Transport
    """The transport between the ranks."""
    reduces: bool = True
    """Whether wrappers reduce gradients in `run`."""

    def __post_init__(self) -> None:
        self._modules: dict[nn.Module, str] = {}
        self._state: dict[Tensor, str] = {}
        self._exempt: set[str] = set()
        """The names of the parameters and buffers that wrappers ignore, so they may differ between ranks."""
        self._reduced: set[str] = set()
        """The names of the parameters whose gradients are the same mean on all ranks after a backward."""
        self._why_apart = ""
        """The reason why replicas may differ at present; "" if replicas must be equal."""
        self._checked: list[str] = []
        self._notes: list[str] = []
        self._doubts: list[str] = []
        roots = {name: one for name, one in self.objects.items() if isinstance(one, nn.Module)}
        for name, root in roots.items():
            self._add_root(name if len(roots) > 1 else "", root)
        if not self.reduces or self._why_apart or self.transport.size == 1:
            self._reduced.clear()
        self._restore = restorer_of_run([*self.objects.values()])

    def _add_root(self, prefix: str, root: nn.Module) -> None:
        bare = unwrapped(root)
        for name, module in bare.named_modules():
            self._modules.setdefault(module, _qualified(prefix, name))
        for name, tensor in (*bare.named_parameters(), *bare.named_buffers()):
            self._state.setdefault(tensor, _qualified(prefix, name))
        for path, module in root.named_modules():
            if not isinstance(module, DistributedDataParallel):
                continue
            # The names of a wrapped root are those of the module inside it.
            parts = (prefix,) if module is root else (prefix, path, "module")
            ignored = {_qualified(*parts, name) for name in module.parameters_to_ignore}
            trained = [name for name, one in module.module.named_parameters() if one.requires_grad]
            self._exempt |= ignored
            self._reduced |= {_qualified(*parts, name) for name in trained} - ignored
            if (replica := replica_of(module)) is not None:
                if self.reduces:
                    replica.refuse_sharded("no rank has all gradients, so they cannot be compared")
                self._why_apart = replica.drift_reason or self._why_apart

    def report(self) -> Report:
        """Run the computation repeatedly, and return the report, which is the same on all ranks. A collective call.

        Raises:
            ContractMismatch: the ranks have different modules, or different arguments.
            SynclineError, TypeError, ValueError: the computation failed on a rank. The text is the same on every rank.
        """
        # The stance of torch.compile cannot be changed inside of compiled code, so this must not be traced.
        report = torch.compiler.disable(self._report) if is_compiler_loaded() else self._report
        with self.transport.board.called(self.title):
            return report()

    def _report(self) -> Report:
        with failing_together(self.transport, self.title) as lines:
            lines.append(f"passes inputs: {self.inputs is not None}")
            named = [(name, tensor) for tensor, name in self._state.items()]
            lines += describe_tensors(named, "tensor", layout=False)
        if self._reduced:
            self._run(self.inputs)  # wrappers change their buckets in their first run
        rows = gathered(self._own_runs(), self.transport)
        facts_of_ranks, drew, batches, gradients, found = zip(*rows, strict=True)
        findings = merged(found)
        if self.transport.size > 1:
            self._take_notes(drew, batches)
            findings += self._differing_gradients(gradients)
            if not self._why_apart:
                findings += self._between(facts_of_ranks, is_deterministic=not any(found))
        return Report(
            title=self.title,
            num_ranks=self.transport.size,
            checked=tuple(self._checked),
            findings=tuple(findings),
            notes=tuple(self._notes),
            doubts=tuple(self._doubts),
            facts=facts_of_ranks,
        )

    # ------------------------------------------------------------------ runs

    def _run(self, inputs: Any, *, is_aligned: bool = False) -> Recording:
        """Run the computation once, and restore the state. A collective call: if any rank fails, all ranks raise.

        Args:
            inputs: the inputs of the run.
            is_aligned: whether all ranks use the buffers of rank 0, and the same random numbers.
        """
        is_compiled = is_compiler_loaded()  # compiled code would call no hooks of inner modules
        uncompiled = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        with failing_together(self.transport, self.title):
            try:
                if is_aligned:
                    buffers = [tensor for tensor in self._state if not isinstance(tensor, nn.Parameter)]
                    TensorBroadcaster(buffers, self.transport).start(0).wait()
                    seed_alike()
                compared = [(name, one) for one, name in self._state.items() if name not in self._exempt]
                recording = Recording(self._modules, compared)
                with stepping_only([*self.objects.values()]), uncompiled, recording:
                    result = self.run(copied_inputs(inputs))
                named = self._state.items()
                gradients = {name: one.grad for one, name in named if isinstance(one, nn.Parameter)}
                recording.finish(result, gradients, are_own=not self._reduced)
            finally:
                self._restore()
        return recording

    def _own_runs(self) -> tuple[Any, ...]:
        """Run the computation with this rank's own inputs and random numbers. A collective call.

        Returns:
            The facts about this rank; the random number generators from which a run drew, with their positions; the
            fingerprints of the input tensors of the module that is called first, and of the gradients that are reduced;
            and the difference between two runs.
        """
        first, second = self._run(self.inputs), self._run(self.inputs)
        gradients, inputs = first.events[-1].values, first.events[1].values
        self._checked.append(
            f"2 runs on each rank from the same state: {len(first.calls)} calls of "
            f"{len({call.module for call in first.calls})} modules, {len(gradients)} gradients"
        )
        batch = [value.bits for value in inputs if first.calls and value.about.startswith("(")]
        reduced = [value.bits for value in gradients if value.name in self._reduced]
        return facts(), first.drew, batch, reduced, own_finding(first, second, is_reduced=bool(self._reduced))

    # ------------------------------------------------------------------ comparison between ranks

    def _take_notes(self, drew: Sequence[Mapping[str, str]], batches: Sequence[list[int]]) -> None:
        if batches[0] and all(batch == batches[0] for batch in batches):
            self._notes.append(
                "all ranks were given the same batch. In data-parallel training each rank has samples of its own: is "
                "the sampler distributed (sl.DistributedSampler), and does it know its rank?"
            )
            self._doubts.append("all ranks were given the same batch")
        if any(drew):
            self._notes.append(
                "random numbers are drawn, as in dropout. All ranks draw the same ones (the same dropout masks). If "
                "each rank is to draw its own, seed each with its rank: torch.manual_seed(seed + rank)"
                if all(one == drew[0] for one in drew)
                else "random numbers are drawn, as in dropout. Each rank draws its own, because their generators are "
                "at different positions"
            )
        if self._exempt:
            self._notes.append("parameters and buffers that the wrapper ignores were not compared")
        if self._why_apart:
            self._notes.append(f"{self._why_apart}: ranks were not compared with one another")
            self._doubts.append("ranks were not compared with one another")

    def _differing_gradients(self, rows: Sequence[list[int]]) -> list[Finding]:
        """Return a list with a finding if reduced gradients differ between ranks; else an empty list."""
        names = [name for name in self._state.values() if name in self._reduced]
        if not names:
            return []
        self._checked.append(f"ranks with one another: {len(names)} gradients after they were reduced")
        found = differences(names, rows)
        return [of_gradients([one.name for one in found], found[0].groups, len(names))] if found else []

    def _between(
        self, facts_of_ranks: Sequence[Mapping[str, str]], *, is_deterministic: bool
    ) -> list[Finding]:
        """Run the computation with the same conditions on all ranks, and compare the ranks. A collective call.

        Returns:
            A list with a finding if ranks differ; else an empty list. It is the same on every rank.
        """
        inputs = None if self.inputs is None else inputs_of_rank_0(self.inputs, self.transport)
        recording = self._run(self.inputs if inputs is None else inputs, is_aligned=True)
        digest = digest_of([fingerprint_of(recording.events)])
        rows: list[Sequence[Event]] = [recording.events]
        if len(set(exchange(self.transport, self.title, [], payload=digest))) > 1:
            rows = [
                [
                    Event(stage, call, where, [Value(*one) for one in values])
                    for stage, call, where, values in events
                ]
                for events in gathered(recording.events, self.transport)
            ]
        found = first_difference(rows, recording.calls)
        if not found:
            aligned = "rank 0's buffers" if inputs is None else "rank 0's buffers and inputs"
            self._checked.append(
                f"ranks with one another, with {aligned} and the same random numbers: parameters, calls, outputs and "
                "gradients"
            )
            return []
        if found.stage != "state" and not found.blamed and inputs is None:
            self._checked.append("ranks with one another: parameters only, because each rank has other data")
            self._notes.append(
                "the ranks have different data, as they should in data-parallel training, so their results were not "
                "compared. To compare them, pass the batch as inputs=(...): nested dicts, lists and tuples of tensors "
                "(of the same dtypes on all ranks) and of plain values (the same on all ranks)"
            )
            self._doubts.append("the ranks' results for their own data were not compared")
            return []
        if found.stage != "state" and not is_deterministic:
            self._notes.append(
                "the ranks' results were not compared, because they already differ between runs on one rank"
            )
            return []
        settings = recording.settings[found.blamed.module] if found.blamed else {}
        of_ranks = gathered(settings, self.transport)
        held = [{name: Value(*row) for name, row in of_rank.items()} for of_rank in of_ranks]
        return [between_ranks(found, recording.calls, settings=held, facts=facts_of_ranks)]


# ---------------------------------------------------------------------- the conditions of a run


def restorer_of_run(objects: Sequence[Any]) -> Callable[[], None]:
    """Return a function that writes back the present state of a computation.

    The state is parameters, buffers, gradients (values and objects), training flags, the state of Syncline's wrappers,
    optimizers, and random number generators. A tensor is written only if it has changed. The backup takes as much
    memory as the state.

    Args:
        objects: modules (wrapped or not), optimizers, and other objects that have `state_dict` and `load_state_dict`.

    Examples:
        >>> net = torch.nn.BatchNorm1d(2)
        >>> restore = restorer_of_run([net])
        >>> y = net(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        >>> restore()
        >>> net.running_mean
        tensor([0., 0.])
    """
    rng = rng_state()  # first, because a state_dict of the user may draw random numbers
    modules = [one for one in objects if isinstance(one, nn.Module)]
    parameters = [parameter for one in modules for parameter in one.parameters()]
    restorers: list[Callable[[], object]] = [
        *(restorer_of(one, is_stepped=True) for one in objects),
        *(partial(setattr, part, "training", part.training) for one in modules for part in one.modules()),
        *(partial(one.requires_grad_, one.requires_grad) for one in parameters),
        *(partial(setattr, one, "grad", one.grad) for one in parameters),
        # Of other classes are the placeholders of sharded gradients, which have no values.
        *(restorer_of_tensor(one.grad) for one in parameters if type(one.grad) is Tensor),
        partial(set_rng_state, rng),
    ]
    return partial(restore_all, restorers)


@contextmanager
def stepping_only(objects: Sequence[Any]) -> Iterator[None]:
    """Inside the `with` block, refuse the step of an optimizer that is not among `objects`.

    Raises:
        ValueError: such an optimizer was about to step. Nothing was changed.
    """

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(one is optimizer for one in objects):
            raise ValueError(
                f"the function steps an optimizer of class {type(optimizer).__name__} that was not passed here, so its "
                "state could not be restored: pass sl.TrainState(model=..., optimizer=...), or do not step it"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def copied_inputs(inputs: Any) -> Any:
    """Return the inputs with copies of their tensors, so that a step can write to them."""

    def copied(_: str, leaf: Any) -> Any:
        is_tensor = isinstance(leaf, Tensor)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_tensor else leaf

    return map_leaves(inputs, copied)


def gathered(value: Any, transport: Transport) -> list[Any]:
    """Return the values of all ranks, which are sent as JSON. A collective call."""
    return [json.loads(row) for row in transport.all_gather_bytes(json.dumps(value).encode())]


def inputs_of_rank_0(inputs: Any, transport: Transport) -> Any | None:
    """Return rank 0's inputs on every rank. A collective call. The shapes of the tensors may differ between the ranks.

    Returns None on every rank if a rank has other plain values or tensors of other dtypes than rank 0.

    Examples:
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     x = torch.full((2 + transport.rank,), 1.0 + transport.rank)
        ...     return inputs_of_rank_0((x, "mean"), transport)
        >>> run_ranks(2, program)[1]
        (tensor([1., 1.]), 'mean')
    """
    own = dict(leaves(copied_inputs(inputs)))
    sent = {name: leaf for name, leaf in own.items() if isinstance(leaf, Tensor) and is_ordinary(leaf)}
    kinds = {name: str(leaf.dtype) if name in sent else repr(leaf) for name, leaf in own.items()}
    rows = gathered([kinds, [list(tensor.shape) for tensor in sent.values()]], transport)
    if any(row[0] != rows[0][0] for row in rows):
        return None
    if transport.rank:
        shapes = zip(sent.items(), rows[0][1], strict=True)
        sent = {name: one.new_empty(shape, requires_grad=one.requires_grad) for (name, one), shape in shapes}
    TensorBroadcaster(list(sent.values()), transport).start(0).wait()
    return map_leaves(inputs, lambda name, leaf: sent.get(name, leaf))


def seed_alike() -> None:
    """Set Python's, NumPy's and torch's random number generators to a state that is the same on all ranks."""
    random.seed(0)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
