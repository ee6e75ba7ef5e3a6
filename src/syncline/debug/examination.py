"""Run a computation repeatedly from one state, compare the runs on each rank and between ranks, and report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncline._torch.modules import is_compiler_loaded
from syncline.checkpoint.objects import unwrapped
from syncline.checkpoint.rollback import failing_together, restore_all
from syncline.debug.diagnosis import (
    FirstDifference,
    OwnFinding,
    between_ranks,
    first_difference,
    merged,
    of_gradients,
    own_findings,
)
from syncline.debug.recording import Event, Recorder, Recording, Value, how_they_differ
from syncline.debug.report import Finding, Report, by_value, facts
from syncline.debug.run_state import (
    copied_inputs,
    deterministic,
    gathered,
    inputs_of_rank_0,
    restorers_of,
    seed_alike,
    stepping_only,
)
from syncline.equality.fingerprint import digest_of, fingerprint_of
from syncline.equality.locate import differences
from syncline.gradients.wrapper_protocol import replica_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport


def _qualified(*parts: str) -> str:
    """Join the parts of a qualified name with dots. Empty parts are left out."""
    return ".".join(filter(None, parts))


def _event(stage: Any, call: int, parent: int, where: str, values: Sequence[Any]) -> Event:
    return Event(stage, call, parent, where, tuple(Value(*value) for value in values))


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
        self._restorers = restorers_of([*self.objects.values()])

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
        findings = merged([[OwnFinding(*one) for one in of_rank] for of_rank in found])
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
        uncompiled = torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()
        with failing_together(self.transport, self.title):
            try:
                if is_aligned:
                    buffers = [tensor for tensor in self._state if not isinstance(tensor, nn.Parameter)]
                    TensorBroadcaster(buffers, self.transport).start(0).wait()
                    seed_alike()
                compared = [(name, one) for one, name in self._state.items() if name not in self._exempt]
                recorder = Recorder(self._modules, compared)
                with stepping_only([*self.objects.values()]), uncompiled, recorder:
                    result = self.run(copied_inputs(inputs))
                named = self._state.items()
                gradients = {name: one.grad for one, name in named if isinstance(one, nn.Parameter)}
                recording = recorder.finish(result, gradients, are_own=not self._reduced)
            finally:
                restore_all(self._restorers)
        return recording

    def _own_runs(self) -> tuple[Any, ...]:
        """Run the computation with this rank's own inputs and random numbers. A collective call.

        Returns:
            The facts about this rank; the random number generators from which a run drew, with their positions; the
            fingerprints of the input tensors of the module that is called first, and of the gradients that are reduced;
            and the differences between the runs.
        """
        runs = [self._run(self.inputs) for _ in range(2)]
        with deterministic(), contextlib.suppress(Exception):
            runs += [self._run(self.inputs) for _ in range(2)]
        first = runs[0]
        gradients, inputs = first.events[-1].values, first.events[1].values
        self._checked.append(
            f"2 runs on each rank from the same state: {len(first.calls)} calls of "
            f"{len({call.module for call in first.calls})} modules, {len(gradients)} gradients; and 2 runs with "
            "deterministic algorithms, in which memory that was never written is filled with NaN"
            + ("" if len(runs) > 2 else " (these runs failed, so they show nothing)")
        )
        batch = [value.bits for value in inputs if first.calls and value.about.startswith("(")]
        reduced = [value.bits for value in gradients if value.name in self._reduced]
        findings = own_findings(runs, is_reduced=bool(self._reduced))
        return facts(), first.drew, batch, reduced, findings

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
        found = self._first_between(recording)
        if not found:
            aligned = "rank 0's buffers" if inputs is None else "rank 0's buffers and inputs"
            self._checked.append(
                f"ranks with one another, with {aligned} and the same random numbers: parameters, calls, outputs and "
                "gradients"
            )
            return []
        if found.stage != "state" and found.blamed < 0 and inputs is None:
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
        settings = recording.settings[recording.calls[found.blamed].module] if found.blamed >= 0 else []
        held = [{row[0]: Value(*row) for row in of_rank} for of_rank in gathered(settings, self.transport)]
        size = self._how_ranks_differ(found, recording.copies.get((found.event, found.place)))
        return [between_ranks(found, recording.calls, size, settings=held, facts=facts_of_ranks)]

    def _first_between(self, mine: Recording) -> FirstDifference | None:
        """Return the first difference between the recordings of the ranks. A collective call."""
        digest = digest_of([fingerprint_of(mine.events)])
        if len(set(exchange(self.transport, self.title, [], payload=digest))) == 1:
            return None
        rows = gathered(mine.events, self.transport)
        return first_difference([[_event(*event) for event in row] for row in rows])

    def _how_ranks_differ(self, found: FirstDifference, mine: Tensor | None) -> str:
        """Describe how much the second-largest group of ranks differs from the largest group; "" if unknown.

        Args:
            found: the first difference.
            mine: the copy of this rank's value; None if there is none.
        """
        abouts = [value.about if value else "nothing" for value in found.values]
        if len(set(abouts)) > 1:
            return by_value(abouts)
        if not abouts or mine is None:  # on all ranks, because all that was copied before is equal
            return ""
        expected = mine.clone()  # overwritten below by the value of a rank of the largest group
        TensorBroadcaster([expected], self.transport).start(found.groups[0][0]).wait()
        texts = self.transport.all_gather_bytes(how_they_differ(expected, mine).encode())
        return texts[found.groups[1][0]].decode()
