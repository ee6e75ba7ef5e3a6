"""The error or warning that reports gradients that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from syncline.errors import NonFiniteGradient
from syncline.gradients.options import OnNonFinite
from syncline.gradients.riders.finite import Found
from syncline.records import NonFiniteRecord
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
