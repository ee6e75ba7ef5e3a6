"""Rider: gradients that are NaN or infinite. Each rank checks its own gradients, and all ranks react in the same way.

If a mean is not finite, it does not show which rank caused this. So each rank checks its own gradients, bucket by
bucket, after a bucket is filled and before it is sent (`finite.py`). The result is one bit behind the last bucket
(`tail.py`). Only if some rank has set its bit do the ranks exchange the indices of the parameters. All ranks decide by
the same facts, before any optimizer steps.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from syncline._torch.optimizers import is_scaler_in_use, note_scalers
from syncline._torch.tensors import stored_values
from syncline.errors import NonFiniteGradient
from syncline.gradients.backward import Backward
from syncline.gradients.options import OnNonFinite
from syncline.gradients.riders.base import Holder, Reduced, Rider, Words
from syncline.gradients.riders.finite import Found, OwnGradients, Parts, describe, is_finite, zero_nonfinite_
from syncline.records import NonFiniteRecord
from syncline.transport.base import Transport
from syncline.user_code import warn_user

_MAX_SHOWN = 4
"""The largest number of parameters that a message names per rank."""

OVERFLOWED = (
    "Each rank's own gradients are finite, but the reduced gradients (a sum, or the result of a compression or of a "
    "communication hook) do not fit in their dtype. The largest float16 is 65,504: use bfloat16, "
    "reduce_dtype=torch.float32 or a smaller loss"
)

REDUCED_OUTSIDE = (
    "The gradients were reduced by sl.sync_gradients_, which does not check each rank's own gradients. To find out "
    "which rank has gradients that are not finite, run the last backward outside of no_sync"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The elements that the checks of one step's gradients found to be not finite. All ranks have the same findings."""

    own: Sequence[Found] = ()
    """The findings in each rank's own gradients, in rank order. It is empty if no rank reported any."""
    in_mean: Found = field(default_factory=dict)
    """The findings in the mean. There, each rank's own gradients are finite, were set to zero, or were not checked."""
    has_scaler: bool = False
    """Whether any rank uses a GradScaler, which then handles the step."""
    cause_in_mean: str = OVERFLOWED
    """The sentences of the message that explain the findings in the mean."""

    @property
    def is_any(self) -> bool:
        return bool(self.in_mean) or any(self.own)


class NonFiniteReport:
    """The error or warning about gradients that are not finite. It is prepared first, and shown when a backward ends.

    A warning is shown if it names a rank or parameter that no warning has named before, or if the number of affected
    steps has doubled since the last warning.

    Args:
        policy: "warn", "raise", "skip" or "zero".
    """

    def __init__(self, policy: OnNonFinite) -> None:
        self._policy = policy
        self._names: Sequence[str] = ()
        self._warns = False
        self._error: NonFiniteGradient | None = None
        """The prepared error. Under all policies but "raise", its text is the warning.

        It is None if there is nothing to report.
        """
        self._warned: set[tuple[int, str]] = set()
        """Pairs of a rank (-1 for the mean) and a parameter that a warning has already named."""
        self._warns_from = 1
        """The number of affected steps at which the next warning is shown, even if it names no new parameter."""

    def use(self, names: Sequence[str], *, warns: bool) -> None:
        """Report about these parameters from now on, and drop a prepared error.

        Args:
            names: names of all parameters, by index.
            warns: whether this rank shows the warnings.
        """
        self._names, self._warns, self._error = names, warns, None

    def clear(self) -> None:
        """Drop a prepared error."""
        self._error = None

    def prepare(self, findings: Findings, record: NonFiniteRecord, *, step: int) -> None:
        """Compose the message about the findings of a step, and keep it until `give` is called.

        Args:
            findings: the findings of the checks.
            record: the record of the step.
            step: the number of the step.
        """
        text = self._text(findings, step=step, num_steps=record.num_steps)
        self._error = NonFiniteGradient(text, step=step, found=record.found, in_mean=record.in_mean)

    def give(self, *, num_steps: int) -> None:
        """Raise the prepared error, or warn on rank 0. Without a prepared error, do nothing.

        Args:
            num_steps: the number of affected steps so far.

        Raises:
            NonFiniteGradient: gradients are not finite, and the policy is "raise".
        """
        error, self._error = self._error, None
        if error is None:
            return
        if self._policy == "raise":
            raise error
        found: Mapping[int, Sequence[str]] = {**error.found, -1: error.in_mean}
        names = {(rank, name) for rank, row in found.items() for name in row}
        if names <= self._warned and num_steps < self._warns_from:
            return
        self._warned |= names
        self._warns_from = 2 * num_steps
        if self._warns:
            warn_user(str(error))

    def _text(self, findings: Findings, *, step: int, num_steps: int) -> str:
        so_far = f'on_nonfinite="{self._policy}", {num_steps} step{"s" if num_steps != 1 else ""} so far'
        outcome = {
            "warn": "gradients are not finite, and the weights will not be either",
            "raise": "gradients are not finite, so no optimizer may step with them",
            "skip": f"gradients are not finite, so no rank steps ({so_far})",
            "zero": f"elements of gradients that are not finite count as zero ({so_far})",
        }[self._policy]
        lines = [f"step {step}, backward: {outcome}:"]
        lines += [f"  rank {rank}: {self._shown(row)}" for rank, row in enumerate(findings.own) if row]
        if findings.in_mean:
            lines.append(f"  in the mean: {self._shown(findings.in_mean)}")
        if any(findings.own):
            lines.append(
                "To find the operation, use torch.autograd.set_detect_anomaly(True) on such a rank. If values grow "
                "without bound, use a lower learning rate or ddp.clip_grad_norm_(max_norm). With float16, use a "
                "torch.amp.GradScaler"
            )
        else:
            lines.append(findings.cause_in_mean)
        if self._policy == "raise":
            lines[-1] += '. on_nonfinite="skip" skips such steps on all ranks'
        if self._policy == "warn":
            lines[-1] += (
                '. To stop all ranks before they step, use on_nonfinite="raise". on_nonfinite="skip" skips such steps '
                'on all ranks, and on_nonfinite="ignore" leaves out this check. This warning comes only once'
            )
        return "\n".join(lines)

    def _shown(self, found: Found) -> str:
        shown = [f"{self._names[index]} ({found[index]})" for index in sorted(found)[:_MAX_SHOWN]]
        more = len(found) - len(shown)
        return ", ".join(shown) + (f", and {more} more parameter{'s' if more > 1 else ''}" if more else "")


_OUTCOMES = {"raise": "raised", "skip": "discarded", "zero": "zeroed"}

_MARK = "_syncline_discarded"
"""The attribute of a gradient that marks it as discarded. Its value is the number of the mark."""

_numbers = itertools.count(1)


class NonFinite(Rider):
    """The rider of the policy `on_nonfinite="ignore"`, which checks no gradients and reports nothing."""

    subject = "gradients that are not finite"
    num_bits = 1

    last: NonFiniteRecord | None = None
    """The record of the last reduction. It is None if gradients are not checked."""
    was_reported = False
    """Whether some rank reported in the last step that its own gradients were not finite."""

    def use(
        self, names: Sequence[str], transport: Transport, gradients: Callable[[], Iterable[Tensor | None]]
    ) -> None:
        """Check these gradients from now on.

        Args:
            names: names of all parameters, by index.
            transport: the transport between the ranks.
            gradients: a function that returns the `.grad` of each parameter. With `sharded=True` these are stand-ins.
        """
        self._names, self._transport, self._gradients = names, transport, gradients

    def backward_begins(self, *, has_hook: bool) -> None:
        """Prepare for a backward, whether it will be reduced or not."""

    def conclude_alone(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check all gradients in `.grad` in place of `look_at`, because there is only one rank."""

    def conclude_outside(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check gradients that were reduced outside of a backward."""

    def act(self) -> None:
        """Raise an error or warn if gradients were not finite."""

    def failed(self) -> None:
        """Handle a backward that ended with an error."""

    def record(self) -> Mapping[str, Any]:
        """Return the record of the last reduction."""
        return {"nonfinite": self.last}

    def discards_step(self) -> bool:
        """Return whether an optimizer must skip its step, because the gradients are not finite."""
        return False


class NonFiniteWatch(NonFinite):
    """A check of one module's gradients, which applies a policy if they are not finite.

    A backward makes these calls: `backward_begins`; `look_at` for each bucket; `word` when the last bucket is sent;
    `conclude` when `.grad` holds the mean; and `act`, which raises an error or warns when everything else is done. If
    the backward ends with an error, the last call is `failed`.

    Args:
        policy: "raise", "skip" or "zero".
    """

    def __init__(self, policy: OnNonFinite) -> None:
        note_scalers()
        self.last: NonFiniteRecord = _not_reduced(num_steps=0)
        self._policy = policy
        self._discarded = DiscardedGradients()
        self._is_bad: bool | None = None
        """Whether the result of the present backward is discarded. It is None before the decision."""
        self._own = OwnGradients()
        self._replaces = False
        """Whether this rank sends zeros in place of elements that are not finite."""
        self._report = NonFiniteReport(policy)

    def use(
        self, names: Sequence[str], transport: Transport, gradients: Callable[[], Iterable[Tensor | None]]
    ) -> None:
        """Check these gradients from now on. What is discarded stays discarded. See `NonFinite.use`."""
        super().use(names, transport, gradients)
        self._own, self._is_bad = OwnGradients(), None  # a backward may have been interrupted
        self._report.use(names, warns=not transport.rank)

    # ------------------------------------------------------------------ this rank's own gradients

    def backward_begins(self, *, has_hook: bool) -> None:
        """Prepare for a backward, whether it will be reduced or not.

        Args:
            has_hook: whether a communication hook or a compression gets the gradients. It may keep values that
                it could not send, so it must never get values that are not finite.
        """
        self._replaces = self._policy == "zero" or has_hook
        self._own = OwnGradients()
        self._is_bad = None
        self._report.clear()
        self.last = _not_reduced(num_steps=self.last.num_steps)

    def look_at(self, bucket: Holder) -> None:
        """Check a bucket that this rank is about to send. Set its elements that are not finite to zero if necessary."""
        if not self._own.check(bucket) and self._replaces:
            zero_nonfinite_(bucket.own())

    def word(self, backward: Backward) -> int:
        """Wait for the checks. Return 1 if this rank's own gradients are not finite, else 0."""
        return int(bool(self._own.wait()))

    def receive(self, words: Words) -> None:
        """Store whether any rank reported that its own gradients are not finite."""
        self.was_reported = words.any_set

    def receive_nothing(self, step: int) -> None:
        """Record that no rank reported gradients that are not finite."""
        self.was_reported = False

    # ------------------------------------------------------------------ the decision of all ranks

    def conclude(self, reduced: Reduced) -> None:
        """Decide by the policy what to do about this step. The decision is the same on all ranks.

        This is a collective call if some rank reported gradients that are not finite, or if the result may overflow.
        """
        findings = self._exchange(self._own.found) if self.was_reported else Findings()
        # A step that is already discarded needs no second check.
        if reduced.can_overflow and not findings.has_scaler and (not findings.own or self._policy == "zero"):
            findings = self._with_mean(findings, reduced.buckets)
        parts = (part for bucket in reduced.buckets for part in bucket.handed_out()[1])
        self._decide(findings, parts, step=reduced.step)

    def conclude_alone(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check the gradients and decide by the policy. There is only one rank, and its gradients are in no bucket."""
        parts = present(gradients)
        self._own.check_gradients(parts)
        findings = Findings()
        if found := self._own.wait():
            findings = Findings(own=[found], has_scaler=is_scaler_in_use())
            if self._replaces:
                for _, values in parts:
                    zero_nonfinite_(values)
        self._decide(findings, parts, step=step)

    def conclude_outside(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check the mean of gradients that were reduced outside of a backward, and decide by the policy.

        No rank has checked its own gradients before. The mean is the same on every rank. If it is not finite, this is a
        collective call.
        """
        self.backward_begins(has_hook=False)
        parts = present(gradients)
        findings = Findings(in_mean=describe([part for part in parts if not is_finite(part[1])]))
        if findings.in_mean:
            has_scaler = self._exchange(findings.in_mean).has_scaler
            findings = replace(findings, has_scaler=has_scaler, cause_in_mean=REDUCED_OUTSIDE)
        self._decide(findings, parts, step=step)

    def _with_mean(self, findings: Findings, buckets: Sequence[Holder]) -> Findings:
        """Return the findings together with the parameters whose mean is not finite. This is a collective call."""
        mine: dict[int, str] = {}
        for bucket in buckets:
            values, parts = bucket.handed_out()
            if parts and not is_finite(values, parts[0][1].dtype):
                mine.update(describe(parts))
        is_any = torch.tensor([int(bool(mine))], dtype=torch.int32, device=self._transport.control_device)
        self._transport.all_reduce(is_any, "max").wait()
        if not is_any.item():
            return findings
        reported = self._exchange(mine)
        # If ranks describe the same parameter, the description of the lowest rank is used.
        in_mean = {index: text for row in reversed(reported.own) for index, text in row.items()}
        return replace(findings, in_mean=in_mean, has_scaler=reported.has_scaler)

    def _exchange(self, mine: Found) -> Findings:
        """Gather the findings of all ranks, and whether any rank uses a GradScaler. This is a collective call.

        Args:
            mine: this rank's findings.
        """
        rows = exchange_found(self._transport, mine)
        return Findings(own=[found for _, _, found in rows], has_scaler=any(scaler for scaler, _, _ in rows))

    def _decide(self, findings: Findings, parts: Iterable[tuple[int, Tensor]], *, step: int) -> None:
        """Decide what to do about a step. The findings are the same on every rank, and so is the decision.

        Args:
            findings: the findings of the checks.
            parts: pairs of a parameter's index and its `.grad`, or a part of it, on this rank.
            step: the step that was reduced.
        """
        num_steps, outcome = self.last.num_steps, "finite"
        if findings.is_any and findings.has_scaler:
            outcome = "left to the GradScaler"
            if self._replaces:  # these values were sent as zeros, but the scaler has to find them
                hidden = {index for row in findings.own for index in row}
                for index, values in parts:
                    if index in hidden:
                        values[(0,) * values.dim()] = math.inf
        elif findings.is_any:
            num_steps, outcome = num_steps + 1, _OUTCOMES[self._policy]
            if self._policy == "zero" and findings.in_mean:
                for _, values in parts:
                    zero_nonfinite_(values)
        self._is_bad = outcome == "discarded"
        self.last = NonFiniteRecord(
            found={rank: self._named(row) for rank, row in enumerate(findings.own) if row},
            in_mean=self._named(findings.in_mean),
            outcome=outcome,
            num_steps=num_steps,
        )
        if outcome in _OUTCOMES.values():
            self._report.prepare(findings, self.last, step=step)

    def _named(self, found: Found) -> tuple[str, ...]:
        return tuple(self._names[index] for index in sorted(found))

    # ------------------------------------------------------------------ the end of the backward

    def act(self) -> None:
        """Mark the gradients if the step is discarded. Then raise an error, or warn on rank 0, if they are not finite.

        Raises:
            NonFiniteGradient: gradients are not finite, and the policy is "raise".
        """
        if self._is_bad is not None:
            self._settle(is_bad=self._is_bad)
        self._report.give(num_steps=self.last.num_steps)

    def failed(self) -> None:
        """Handle a backward that ended with an error.

        Under "skip", the gradients are marked as discarded unless all ranks have found that they are finite.
        """
        if self._policy == "skip":
            self._settle(is_bad=self._is_bad is not False)

    def _settle(self, *, is_bad: bool) -> None:
        """Mark the gradients as discarded if `is_bad`. Otherwise clear all marks.

        Call this method when `.grad` holds its final tensors.
        """
        self._is_bad = None
        self._discarded.mark(self._gradients() if is_bad else ())

    def discards_step(self) -> bool:
        """Return whether an optimizer must skip its step, because gradients in `.grad` are marked as discarded."""
        return self._discarded.has_any_of(self._gradients())


class DiscardedGradients:
    """Marks on the gradients of a discarded step. As long as these gradients are in `.grad`, the marks identify them.

    A marked tensor stays marked when it is changed in place (by clipping, for example). When `zero_grad()` has dropped
    it, the next tensor in `.grad` has no mark.

    The mark is an attribute of the tensor. So it moves with the tensor and keeps nothing alive. A weak reference to the
    tensor is not possible, because `torch.utils.swap_tensors` refuses tensors with weak references.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.full((2,), torch.nan)
        >>> discarded = DiscardedGradients()
        >>> discarded.mark([weight.grad])
        >>> discarded.has_any_of([weight.grad.clamp_(0, 1)]), discarded.has_any_of([torch.ones(2), None])
        (True, False)
        >>> discarded.mark([])
        >>> discarded.has_any_of([weight.grad])
        False
    """

    def __init__(self) -> None:
        self._number = 0
        """The number that is stored as the mark. It is 0 if no gradient is marked."""

    def mark(self, gradients: Iterable[Tensor | None]) -> None:
        """Mark these gradients as discarded. Marks that were set before no longer count."""
        self._number = 0
        for gradient in gradients:
            if gradient is not None:
                self._number = self._number or next(_numbers)
                setattr(gradient, _MARK, self._number)

    def has_any_of(self, gradients: Iterable[Tensor | None]) -> bool:
        """Return whether any of these gradients is marked."""
        return bool(self._number) and any(getattr(one, _MARK, 0) == self._number for one in gradients)


def exchange_found(transport: Transport, mine: Found, *, age: int = 0) -> list[tuple[bool, int, Found]]:
    """Gather from each rank whether it uses a GradScaler, `age`, and its findings. This is a collective call.

    Args:
        transport: the transport between the ranks.
        mine: this rank's findings.
        age: the number of steps since the step of the findings.
    """
    payload = json.dumps([is_scaler_in_use(), age, sorted(mine.items())]).encode()
    rows = [payload] if transport.size == 1 else transport.all_gather_bytes(payload)
    return [(scaler, age, dict(found)) for scaler, age, found in map(json.loads, rows)]


def present(gradients: Iterable[tuple[int, Tensor | None]]) -> Parts:
    """Return the gradients that are not None, with their indices. A sparse gradient is replaced by its stored rows."""
    return [(i, stored_values(g) if g.is_sparse else g) for i, g in gradients if g is not None]


def _not_reduced(*, num_steps: int) -> NonFiniteRecord:
    return NonFiniteRecord(found={}, in_mean=(), outcome="not reduced", num_steps=num_steps)
