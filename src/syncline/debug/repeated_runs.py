"""Run a computation repeatedly from one state, within each rank and between ranks, and report what differs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline._torch.modules import is_compiler_loaded
from syncline.checkpoint.objects import positions
from syncline.debug.compare import Found, first_difference, first_nan
from syncline.debug.diagnosis import (
    Evidence,
    OwnFinding,
    between_ranks,
    never_written,
    of_gradients,
    put_together,
    within_a_rank,
)
from syncline.debug.recording import Recorder, Recording, named_modules
from syncline.debug.report import Finding, OwnReport, Report, facts
from syncline.debug.run_state import (
    Subject,
    Synchronization,
    align_generators,
    align_inputs,
    deterministic,
    uncompiled_code,
)
from syncline.debug.values import Kept, how_they_differ, values_of_named
from syncline.equality.fingerprint import digest_of, fingerprint_of
from syncline.equality.locate import differences
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport
from syncline.trees import map_leaves
from syncline.words import describe_ranks, groups_of

_MAX_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Step:
    """A computation, and the way in which to compare it."""

    title: str
    """The name of the public function, for reports and errors."""
    run: Callable[[Any], tuple[Any, Mapping[str, Tensor | None]]]
    """A function of the inputs that returns its result and the parameters' gradients."""
    inputs: Any
    """The inputs of this rank."""
    roots: Mapping[str, nn.Module]
    """Modules to record, not wrapped, by the prefix of their parts' names."""
    synchronization: Synchronization
    transport: Transport
    repeats: int = 2
    """Number of runs on each rank that must be the same."""
    aligns_inputs: bool = False
    """Whether ranks are compared with rank 0's inputs."""
    same_inputs: bool = False
    """Whether all ranks already have the same inputs."""
    align_rng: bool = True
    """Whether ranks are compared with rank 0's random numbers."""
    needs_warm_up: bool = False
    """Whether the first run differs from later ones, because wrappers then change the layout of their buckets."""


def examine(step: Step, subject: Subject) -> Report:
    """Run a computation repeatedly and compare the runs; a collective call.

    Args:
        step: the computation; the same on all ranks.
        subject: the state to restore after each run.

    Raises:
        ContractMismatch: the ranks have different modules, or different arguments.
        SynclineError, TypeError, ValueError: the computation failed on a rank; the same text on every rank.
    """
    report = _Examination(step, subject).report
    if is_compiler_loaded():
        # Compiled code cannot change how torch compiles, as `uncompiled_code` does, so this must not be traced.
        report = torch.compiler.disable(report)
    with step.transport.board.called(step.title):
        return report()


class _Examination:
    def __init__(self, step: Step, subject: Subject) -> None:
        self._step = step
        self._subject = subject
        self._transport = step.transport
        self._modules = named_modules(step.roots)
        named = [
            (prefix, root.named_parameters(), root.named_buffers()) for prefix, root in step.roots.items()
        ]
        self._parameters = _distinct((prefix, parameters) for prefix, parameters, _ in named)
        self._buffers = _distinct((prefix, buffers) for prefix, _, buffers in named)
        self._compared = [
            (name, tensor)
            for name, tensor in (*self._parameters, *self._buffers)
            if name not in step.synchronization.exempt
        ]
        """The parameters and buffers that must be equal in all runs."""
        self._checked: list[str] = []
        self._notes: list[str] = []
        self._doubts: list[str] = []

    def report(self) -> Report:
        step, transport = self._step, self._transport
        lines = [
            f"repeats: {step.repeats}",
            f"passes inputs: {step.aligns_inputs}",
            f"same_inputs: {step.same_inputs}",
            f"align_rng: {step.align_rng}",
            *describe_tensors(self._parameters, layout=False),
            *describe_tensors(self._buffers, kind="buffer", layout=False),
        ]
        exchange(transport, step.title, lines)
        if step.needs_warm_up:
            self._run(step.inputs)
        rows = transport.all_gather_bytes(json.dumps(asdict(self._own_runs())).encode())
        reports = [OwnReport(**json.loads(row)) for row in rows]
        findings = put_together(
            [
                [OwnFinding(**{**row, "causes": tuple(row["causes"])}) for row in one.findings]
                for one in reports
            ]
        )
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

    # ------------------------------------------------------------------ runs

    def _run(self, inputs: Any, *, prepare: Callable[[], None] | None = None, **options: Any) -> Recorder:
        """Run once from the saved state and restore it. A collective call: all ranks raise if one fails."""
        fault: Exception | None = None
        recorder = Recorder(self._modules)
        try:
            if prepare is not None:
                prepare()
            recorder = Recorder(self._modules, values_of_named(self._compared), **options)
            with self._subject.guarded(), uncompiled_code(), recorder:
                result, gradients = self._step.run(_copied(inputs))
            recorder.finish(result, gradients)
        except Exception as error:
            fault = error
        finally:
            self._subject.restore()
        exchange(self._transport, self._step.title, [], fault=fault)
        return recorder

    def _own_runs(self) -> OwnReport:
        """Run several times with this rank's inputs and random numbers, and return its report."""
        step = self._step
        before = positions()
        kept = Kept()
        first = self._run(step.inputs, kept=kept).recording
        others = [self._run(step.inputs, against=(first, kept)) for _ in range(step.repeats - 1)]
        filled, operations = self._filled_run()
        found, other = None, None
        for other in others:
            found = first_difference([first, other.recording], is_reduced=self._is_reduced)
            if found is not None:
                break
        nan_call = None if filled is None else first_nan(filled, first)
        differs = any(self._flags(found is not None))
        agrees = self._agrees_when_deterministic(filled) if differs else None
        findings = []
        if found is not None and other is not None:
            evidence = Evidence(
                nan_call=nan_call,
                agrees_when_deterministic=agrees,
                without_determinism=operations,
                is_reduced=self._is_reduced,
            )
            difference = other.difference if found.stage in ("input", "output") else ""
            findings.append(within_a_rank(found, first, difference, evidence))
        if nan_call is not None and (found is None or found.call != nan_call):
            call = first.calls[nan_call] if nan_call >= 0 else None
            findings.append(never_written(call))
        self._checked.append(
            f"{step.repeats} runs on each rank from the same state: {len(first.calls)} calls of "
            f"{len({call.module for call in first.calls})} modules, {len(first.gradients)} gradients; and one with "
            "memory that was never written filled with NaN"
            + ("" if filled is not None else " (which failed, so it shows nothing)")
        )
        reduced = step.synchronization.reduced
        return OwnReport(
            facts=facts(),
            positions=before,
            batch=_bits_of_batch(first),
            drew=list(dict.fromkeys(call.module or call.kind for call in first.calls if call.drew)),
            generators=sorted({name for call in first.calls for name in call.drew}),
            state=[value.bits for value in first.state],
            gradients=[value.bits for value in first.gradients if value.name in reduced],
            findings=[asdict(finding) for finding in findings],
        )

    @property
    def _is_reduced(self) -> bool:
        return self._transport.size > 1 and bool(self._step.synchronization.reduced)

    def _filled_run(self) -> tuple[Recording | None, tuple[str, ...]]:
        """Run with uninitialized memory filled with NaN; also return the operations that are not deterministic."""
        with deterministic() as operations, contextlib.suppress(Exception):
            return self._run(self._step.inputs).recording, operations()
        return None, ()

    def _agrees_when_deterministic(self, filled: Recording | None) -> bool | None:
        with deterministic(), contextlib.suppress(Exception):
            again = self._run(self._step.inputs).recording
            if filled is not None:
                return first_difference([filled, again], is_reduced=self._is_reduced) is None
        return None

    def _flags(self, mine: bool) -> list[bool]:
        """Return the flags of all ranks. A collective call."""
        return [
            bool(one[0]) for one in exchange(self._transport, self._step.title, [], payload=bytes([mine]))
        ]

    # ------------------------------------------------------------------ comparison between ranks

    def _between(self, reports: list[OwnReport], *, is_deterministic: bool) -> list[Finding]:
        """Return the differences between the ranks; the same on every rank."""
        step = self._step
        self._note_data_and_generators(reports)
        if step.synchronization.why_apart:
            self._notes.append(f"{step.synchronization.why_apart}: ranks were not compared with one another")
            self._doubts.append("ranks were not compared with one another")
            return []
        findings = self._differing_gradients(reports)
        aligned = align_inputs(step.inputs, self._transport) if step.aligns_inputs else None
        if aligned is not None and aligned.why_not:
            self._notes.append(f"ranks were not given rank 0's inputs: {aligned.why_not}")
        has_same = step.same_inputs if aligned is None else not aligned.why_not
        kept = Kept()
        recording = self._run(
            step.inputs if aligned is None else aligned.inputs, prepare=self._align, kept=kept
        ).recording
        found, recordings = self._first_between(recording)
        if found is None:
            of = ", ".join(
                ["rank 0's buffers"]
                + ["random numbers"] * step.align_rng
                + ["inputs"] * (aligned is not None and has_same)
            )
            self._checked.append(
                f"ranks with one another, with {of}: parameters, calls, outputs and gradients"
            )
            return findings
        # The function itself passes other inputs, or calls other modules.
        is_from_outside = found.call < 0 or (
            found.stage == "input" and recording.calls[found.call].parent < 0
        )
        if found.stage in ("input", "calls") and not has_same and is_from_outside:
            self._checked.append("ranks with one another: parameters only, because each rank has other data")
            self._notes.append(
                "the ranks have different data, as they should in data-parallel training, so their results were not "
                "compared. To compare them, pass the batch as inputs=(...)"
            )
            self._doubts.append("the ranks' results for their own data were not compared")
        elif found.stage != "state" and not is_deterministic:
            self._notes.append(
                "the ranks' results were not compared, because they already differ between runs on one rank"
            )
        else:
            difference = self._how_ranks_differ(found, recordings, kept)
            own_positions = None if step.align_rng else [one.positions for one in reports]
            facts_of_ranks = [one.facts for one in reports]
            findings.append(
                between_ranks(found, recordings, difference, facts=facts_of_ranks, positions=own_positions)
            )
        return findings

    def _align(self) -> None:
        TensorBroadcaster([buffer for _, buffer in self._buffers], self._transport).start(0).wait()
        if self._step.align_rng:
            align_generators(self._transport)

    def _first_between(self, mine: Recording) -> tuple[Found | None, list[Recording]]:
        digest = digest_of([fingerprint_of(mine.compared())])
        if len(set(exchange(self._transport, self._step.title, [], payload=digest))) == 1:
            return None, []
        recordings = [Recording.loaded(row) for row in self._transport.all_gather_bytes(mine.dumped())]
        return first_difference(recordings), recordings

    def _how_ranks_differ(self, found: Found, recordings: list[Recording], kept: Kept) -> str:
        """Describe how far the first rank of the second-largest group is from one of the largest."""
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
        """Return findings for gradients that should be the same mean on all ranks, but differ."""
        reduced = self._step.synchronization.reduced
        names = [name for name, _ in self._parameters if name in reduced]
        rows = [one.gradients for one in reports]
        if not names or any(len(row) != len(names) for row in rows):
            return []
        self._checked.append(f"ranks with one another: {len(names)} gradients after they were reduced")
        found = differences(names, rows)
        return [of_gradients([one.name for one in found], found[0].groups, len(names))] if found else []

    def _note_data_and_generators(self, reports: list[OwnReport]) -> None:
        step = self._step
        batches = groups_of([tuple(one.batch) for one in reports])
        if len(batches) == 1 and reports[0].batch and not step.same_inputs:
            self._notes.append(
                "all ranks were given the same batch. In data-parallel training each rank has samples of its own: is "
                "the sampler distributed (sl.DistributedSampler), and does it know its rank?"
            )
            self._doubts.append("all ranks were given the same batch")
        drew = reports[0].drew
        if drew:
            names = ", ".join(drew[:_MAX_NAMED]) + (
                f" and {len(drew) - _MAX_NAMED} more" if drew[_MAX_NAMED:] else ""
            )
            generators = {name for one in reports for name in one.generators}
            same = all(len({one.positions.get(name) for one in reports}) == 1 for name in generators)
            self._notes.append(
                f"random numbers are drawn by {names}. "
                + (
                    "All ranks draw the same ones (the same dropout masks), because their generators are at the "
                    "same position; "
                    "if each is to draw its own, seed each with its rank: torch.manual_seed(seed + rank)"
                    if same
                    else "Each rank draws its own, because their generators are at different positions"
                )
            )
        self._note_buffers(reports)

    def _note_buffers(self, reports: list[OwnReport]) -> None:
        of_buffers = {name for name, _ in self._buffers}
        found = differences([name for name, _ in self._compared], [one.state for one in reports])
        apart = [one.name for one in found if one.name in of_buffers]
        if apart:
            shown = ", ".join(apart[:_MAX_NAMED]) + (", ..." if apart[_MAX_NAMED:] else "")
            self._notes.append(
                f"{len(apart)} buffers differ between ranks ({shown}), because each rank has its own batches; for the "
                "comparison all ranks had rank 0's"
            )
        if self._step.synchronization.exempt:
            self._notes.append("parameters and buffers that the wrapper ignores were not compared")


def _distinct(named: Iterable[tuple[str, Iterable[tuple[str, Tensor]]]]) -> list[tuple[str, Tensor]]:
    """Return each tensor once, under its first name, which begins with the prefix of its root."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for prefix, tensors in named:
        for name, tensor in tensors:
            seen.setdefault(id(tensor), (f"{prefix}.{name}" if prefix else name, tensor))
    return list(seen.values())


def _copied(inputs: Any) -> Any:
    """Copy the tensors among the inputs, so that a step may write to them."""
    return map_leaves(inputs, lambda _, leaf: _copy(leaf) if isinstance(leaf, Tensor) else leaf)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _bits_of_batch(recording: Recording) -> list[int]:
    """Return the fingerprints of the input tensors of the first module."""
    for event in recording.events[:1]:
        return [value.bits for value in event.values if value.about.startswith("(")]
    return []
