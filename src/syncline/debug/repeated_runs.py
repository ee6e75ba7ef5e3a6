"""Run a computation repeatedly from one state, compare the runs on each rank and between ranks, and report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline._torch.modules import is_compiler_loaded
from syncline.checkpoint.objects import positions
from syncline.checkpoint.rollback import failing_together
from syncline.debug.compare import FirstDifference, first_difference, first_nan
from syncline.debug.diagnosis import (
    MAX_NAMED,
    Evidence,
    between_ranks,
    never_written,
    notes_on_generators,
    of_gradients,
    put_together,
    within_a_rank,
)
from syncline.debug.recording import Recorder, Recording, named_modules, qualified
from syncline.debug.report import Finding, OwnFinding, OwnReport, Report, facts
from syncline.debug.run_state import (
    Subject,
    Synchronization,
    align_generators,
    align_inputs,
    copied_inputs,
    deterministic,
    uncompiled_code,
)
from syncline.debug.values import Kept, how_they_differ, values_of_named
from syncline.equality.fingerprint import digest_of, fingerprint_of
from syncline.equality.locate import differences
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport
from syncline.words import describe_ranks, groups_of


@dataclass(frozen=True, kw_only=True)
class Step:
    """A computation, and the settings for the comparison of its runs."""

    title: str
    """The name of the function that the user called, for reports and errors."""
    run: Callable[[Any], tuple[Any, Mapping[str, Tensor | None]]]
    """A function of the inputs that returns the result of the computation and the parameters' gradients."""
    inputs: Any
    """The inputs of this rank."""
    roots: Mapping[str, nn.Module]
    """The modules to record, without their wrappers, by the prefix for the names of their parts."""
    subject: Subject
    """The state to restore after each run."""
    synchronization: Synchronization
    """A description of the tensors that wrappers keep equal on all ranks."""
    transport: Transport
    """The transport between the ranks."""
    repeats: int = 2
    """The number of runs on each rank that must have the same results."""
    aligns_inputs: bool = False
    """Whether all ranks use rank 0's inputs when ranks are compared with one another."""
    same_inputs: bool = False
    """Whether all ranks already have the same inputs."""
    align_rng: bool = True
    """Whether all ranks use rank 0's random numbers when ranks are compared with one another."""
    needs_warm_up: bool = False
    """Whether to leave the first run out of the comparison. Wrappers change their buckets in that run."""


def examine(step: Step) -> Report:
    """Run a computation repeatedly, and return the report on the differences between the runs. A collective call.

    Raises:
        ContractMismatch: the ranks have different modules, or different arguments.
        SynclineError, TypeError, ValueError: the computation failed on a rank. The text is the same on every rank.
    """
    report = _Examination(step).report
    if is_compiler_loaded():
        # Compiled code cannot change how torch compiles, as `uncompiled_code` does, so this must not be traced.
        report = torch.compiler.disable(report)
    with step.transport.board.called(step.title):
        return report()


class _Examination:
    """An examination of one computation, which runs it repeatedly and composes the report."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._transport = step.transport
        self._modules = named_modules(step.roots)
        roots = step.roots.items()
        self._parameters = _distinct((prefix, root.named_parameters()) for prefix, root in roots)
        self._buffers = _distinct((prefix, root.named_buffers()) for prefix, root in roots)
        self._compared = [
            (name, tensor)
            for name, tensor in (*self._parameters, *self._buffers)
            if name not in step.synchronization.exempt
        ]
        """The parameters and buffers that must be equal in all runs."""
        self._is_reduced = self._transport.size > 1 and bool(step.synchronization.reduced)
        """Whether the gradients of parameters are means over ranks."""
        self._checked: list[str] = []
        self._notes: list[str] = []
        self._doubts: list[str] = []

    def report(self) -> Report:
        """Run the computation repeatedly, and return the report, which is the same on all ranks. A collective call."""
        step, transport = self._step, self._transport
        self._exchange(
            [
                f"repeats: {step.repeats}",
                f"passes inputs: {step.aligns_inputs}",
                f"same_inputs: {step.same_inputs}",
                f"align_rng: {step.align_rng}",
                *describe_tensors(self._parameters, layout=False),
                *describe_tensors(self._buffers, kind="buffer", layout=False),
            ]
        )
        if step.needs_warm_up:
            self._run(step.inputs)
        rows = transport.all_gather_bytes(json.dumps(asdict(self._own_runs())).encode())
        reports = [OwnReport(**json.loads(row)) for row in rows]
        findings = put_together([[OwnFinding(*row) for row in one.findings] for one in reports])
        if transport.size > 1:
            findings += self._between(reports, is_deterministic=not findings)
        return Report(
            title=step.title,
            num_ranks=transport.size,
            checked=tuple(self._checked),
            findings=tuple(findings),
            notes=tuple(self._notes),
            doubts=tuple(self._doubts),
            facts=tuple(one.facts for one in reports),
        )

    def _exchange(self, lines: Sequence[str] = (), *, payload: bytes = b"") -> list[bytes]:
        """Check that all ranks have the same lines, and return the payloads of all ranks. A collective call."""
        return exchange(self._transport, self._step.title, lines, payload=payload)

    def _flags(self, mine: bool) -> list[bool]:
        """Return the value of `mine` on each rank, in rank order. A collective call."""
        return [bool(one[0]) for one in self._exchange(payload=bytes([mine]))]

    # ------------------------------------------------------------------ runs

    def _run(self, inputs: Any, *, prepare: Callable[[], None] | None = None, **options: Any) -> Recorder:
        """Run the computation once, and restore the state. A collective call: if any rank fails, all ranks raise.

        Args:
            inputs: the inputs of the run.
            prepare: a function that is called before the run, and can change the state.
            options: further arguments of the `Recorder`.
        """
        with failing_together(self._transport, self._step.title):
            try:
                if prepare is not None:
                    prepare()
                recorder = Recorder(self._modules, values_of_named(self._compared), **options)
                with self._step.subject.guarded(), uncompiled_code(), recorder:
                    result, gradients = self._step.run(copied_inputs(inputs))
                recorder.finish(result, gradients)
            finally:
                self._step.subject.restore()
        return recorder

    def _own_runs(self) -> OwnReport:
        """Run the computation several times with this rank's own inputs and random numbers, and report on the runs."""
        step = self._step
        before = positions()
        kept = Kept()
        first = self._run(step.inputs, kept=kept).recording
        others = [self._run(step.inputs, against=(first, kept)) for _ in range(step.repeats - 1)]
        filled, operations = self._deterministic_run()
        findings = self._own_findings(first, others, filled, operations)
        self._checked.append(
            f"{step.repeats} runs on each rank from the same state: {len(first.calls)} calls of "
            f"{len({call.module for call in first.calls})} modules, {len(first.gradients)} gradients; and one run "
            "in which memory that was never written is filled with NaN"
            + ("" if filled is not None else " (this run failed, so it shows nothing)")
        )
        reduced = step.synchronization.reduced
        inputs = first.events[0].values if first.events else ()
        return OwnReport(
            facts=facts(),
            positions=before,
            batch=[value.bits for value in inputs if value.about.startswith("(")],
            drew=list(dict.fromkeys(call.module or call.kind for call in first.calls if call.drew)),
            generators=sorted({name for call in first.calls for name in call.drew}),
            state=[value.bits for value in first.state],
            gradients=[value.bits for value in first.gradients if value.name in reduced],
            findings=findings,
        )

    def _own_findings(
        self, first: Recording, others: list[Recorder], filled: Recording | None, operations: tuple[str, ...]
    ) -> list[OwnFinding]:
        """Return the differences between this rank's own runs. A collective call.

        Args:
            first: the recording of the first run.
            others: the recorders of the other runs, which were compared with the first run.
            filled: the recording of the run with deterministic algorithms, in which uninitialized memory was filled
                with NaN. Pass None if that run failed.
            operations: the operations in that run without a deterministic implementation.
        """
        differing = [
            (found, other)
            for other in others
            if (found := first_difference([first, other.recording], is_reduced=self._is_reduced))
        ]
        nan_call = None if filled is None else first_nan(filled, first)
        agrees = None
        if any(self._flags(bool(differing))):
            again, _ = self._deterministic_run()
            if filled is not None and again is not None:
                agrees = first_difference([filled, again], is_reduced=self._is_reduced) is None
        findings = []
        for found, other in differing[:1]:
            evidence = Evidence(
                nan_call=nan_call,
                agrees_when_deterministic=agrees,
                without_determinism=operations,
                is_reduced=self._is_reduced,
            )
            difference = other.difference if found.stage in ("input", "output") else ""
            findings.append(within_a_rank(found, first, difference, evidence))
        if nan_call is not None and not any(found.call == nan_call for found, _ in differing[:1]):
            findings.append(never_written(first.calls[nan_call] if nan_call >= 0 else None))
        return findings

    def _deterministic_run(self) -> tuple[Recording | None, tuple[str, ...]]:
        """Run the computation with deterministic algorithms, and with uninitialized memory filled with NaN.

        Returns:
            The recording, or None if the run failed; and the operations without a deterministic implementation.
        """
        with deterministic() as operations, contextlib.suppress(Exception):
            return self._run(self._step.inputs).recording, operations()
        return None, ()

    # ------------------------------------------------------------------ comparison between ranks

    def _between(self, reports: list[OwnReport], *, is_deterministic: bool) -> list[Finding]:
        """Return the differences between the ranks. Every rank returns the same list. A collective call."""
        step = self._step
        self._note_batches(reports)
        self._notes += notes_on_generators(reports)
        self._note_buffers(reports)
        if step.synchronization.why_apart:
            self._notes.append(f"{step.synchronization.why_apart}: ranks were not compared with one another")
            self._doubts.append("ranks were not compared with one another")
            return []
        findings = self._differing_gradients(reports)
        inputs, has_same, aligned = step.inputs, step.same_inputs, ["rank 0's buffers"]
        if step.align_rng:
            aligned.append("random numbers")
        if step.aligns_inputs:
            inputs, why_not = align_inputs(step.inputs, self._transport)
            has_same = not why_not
            if why_not:
                self._notes.append(f"the ranks could not be compared with rank 0's inputs: {why_not}")
            else:
                aligned.append("inputs")
        kept = Kept()
        recording = self._run(inputs, prepare=self._align, kept=kept).recording
        found, recordings = self._first_between(recording)
        if found is None:
            self._checked.append(
                f"ranks with one another, with {', '.join(aligned)}: parameters, calls, outputs and gradients"
            )
            return findings
        if self._may_differ(found, recordings, has_same=has_same, is_deterministic=is_deterministic):
            return findings
        between = between_ranks(
            found,
            recordings,
            self._how_ranks_differ(found, recordings, kept),
            facts=[one.facts for one in reports],
            positions=None if step.align_rng else [one.positions for one in reports],
        )
        return [*findings, between]

    def _may_differ(
        self,
        found: FirstDifference,
        recordings: list[Recording],
        *,
        has_same: bool,
        is_deterministic: bool,
    ) -> bool:
        """Return whether ranks are allowed to differ in this way. If so, add the reason to the notes.

        Args:
            found: the first difference between ranks.
            recordings: the recordings of all ranks.
            has_same: whether all ranks had the same inputs.
            is_deterministic: whether the runs on each rank were the same.
        """
        # If so, the function itself passes other inputs, or calls other modules.
        is_from_outside = found.call < 0 or (
            found.stage == "input" and recordings[0].calls[found.call].parent < 0
        )
        if found.stage in ("input", "calls") and not has_same and is_from_outside:
            self._checked.append("ranks with one another: parameters only, because each rank has other data")
            self._notes.append(
                "the ranks have different data, as they should in data-parallel training, so their results were not "
                "compared. To compare them, pass the batch as inputs=(...)"
            )
            self._doubts.append("the ranks' results for their own data were not compared")
            return True
        if found.stage != "state" and not is_deterministic:
            self._notes.append(
                "the ranks' results were not compared, because they already differ between runs on one rank"
            )
            return True
        return False

    def _align(self) -> None:
        """Give all ranks the buffers of rank 0. With `align_rng`, also give them rank 0's random number generators.

        A collective call.
        """
        TensorBroadcaster([buffer for _, buffer in self._buffers], self._transport).start(0).wait()
        if self._step.align_rng:
            align_generators(self._transport)

    def _first_between(self, mine: Recording) -> tuple[FirstDifference | None, list[Recording]]:
        """Return the first difference between the recordings of the ranks, and the recordings of all ranks.

        Returns None and an empty list if all recordings agree. A collective call.

        Args:
            mine: the recording of this rank.
        """
        digest = digest_of([fingerprint_of(mine.compared())])
        if len(set(self._exchange(payload=digest))) == 1:
            return None, []
        recordings = [Recording.loaded(row) for row in self._transport.all_gather_bytes(mine.dumped())]
        return first_difference(recordings), recordings

    def _how_ranks_differ(self, found: FirstDifference, recordings: list[Recording], kept: Kept) -> str:
        """Describe how much the second-largest group of ranks differs from the largest group; "" if unknown."""
        if found.stage not in ("input", "output"):
            return ""
        places = [recording.events[found.event].values for recording in recordings]
        if len({len(values) for values in places}) > 1 or found.place >= len(places[0]):
            return ""
        abouts = [values[found.place].about for values in places]
        if len(set(abouts)) > 1:
            return " | ".join(f"{abouts[group[0]]} on {describe_ranks(group)}" for group in found.groups)
        mine = kept.get(found.event, found.place)
        if not all(self._flags(mine is not None)) or mine is None:
            return ""
        expected = mine.clone()  # overwritten below by the value of a rank of the largest group
        TensorBroadcaster([expected], self._transport).start(found.groups[0][0]).wait()
        texts = self._transport.all_gather_bytes(how_they_differ(expected, mine).encode())
        return texts[found.groups[1][0]].decode()

    # ------------------------------------------------------------------ evaluation of the ranks' reports

    def _differing_gradients(self, reports: list[OwnReport]) -> list[Finding]:
        """Return a list with a finding if reduced gradients differ between ranks; else an empty list."""
        reduced = self._step.synchronization.reduced
        names = [name for name, _ in self._parameters if name in reduced]
        rows = [one.gradients for one in reports]
        if not names or any(len(row) != len(names) for row in rows):
            return []
        self._checked.append(f"ranks with one another: {len(names)} gradients after they were reduced")
        found = differences(names, rows)
        return [of_gradients([one.name for one in found], found[0].groups, len(names))] if found else []

    def _note_batches(self, reports: list[OwnReport]) -> None:
        batches = groups_of([tuple(one.batch) for one in reports])
        if len(batches) == 1 and reports[0].batch and not self._step.same_inputs:
            self._notes.append(
                "all ranks were given the same batch. In data-parallel training each rank has samples of its own: is "
                "the sampler distributed (sl.DistributedSampler), and does it know its rank?"
            )
            self._doubts.append("all ranks were given the same batch")

    def _note_buffers(self, reports: list[OwnReport]) -> None:
        of_buffers = {name for name, _ in self._buffers}
        found = differences([name for name, _ in self._compared], [one.state for one in reports])
        apart = [one.name for one in found if one.name in of_buffers]
        if apart:
            shown = ", ".join(apart[:MAX_NAMED]) + (", ..." if apart[MAX_NAMED:] else "")
            self._notes.append(
                f"{len(apart)} buffers differ between ranks ({shown}), because each rank has its own batches. For the "
                "comparison all ranks used rank 0's buffers"
            )
        if self._step.synchronization.exempt:
            self._notes.append("parameters and buffers that the wrapper ignores were not compared")


def _distinct(named: Iterable[tuple[str, Iterable[tuple[str, Tensor]]]]) -> list[tuple[str, Tensor]]:
    """Return each tensor once, with its qualified name. A tensor with several names gets the first of them.

    Args:
        named: pairs of a prefix and named tensors. The qualified name begins with the prefix.
    """
    seen: dict[int, tuple[str, Tensor]] = {}
    for prefix, tensors in named:
        for name, tensor in tensors:
            seen.setdefault(id(tensor), (qualified(prefix, name), tensor))
    return list(seen.values())
