"""Rider: one warning if gradients are NaN or infinite, which changes nothing and costs nothing that can be measured.

This is the default. A step without NaN and infinity must not become slower by it, so

- gradients are checked while they are copied into their buckets (`copying.py`), and the result is one bit behind the
  last bucket;
- an accelerator checks them in its own time. A rank reports the result with the gradients of a later step;
- gradients that are not sent (in a world of one rank, or under a strategy with local steps) are in no bucket. Of these,
  only one small gradient is checked, and only in the first steps and in each eighth step after them. If the loss is
  NaN, this gradient is NaN, too, and it stays so in the steps that follow;
- after the warning, the checks end, because the weights are no longer finite either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from syncline._torch.optimizers import is_scaler_in_use, note_scalers
from syncline.gradients.backward import Backward
from syncline.gradients.bucket_plan import LARGE_GRADIENT_NUMEL
from syncline.gradients.riders.base import Holder, Reduced, Words
from syncline.gradients.riders.finite import Found, LateResult, OwnGradients, describe, is_finite
from syncline.gradients.riders.nonfinite import Findings, NonFinite, NonFiniteReport, exchange_found, present
from syncline.records import NonFiniteRecord
from syncline.transport.base import Transport

_NUM_FIRST_STEPS, _EVERY = 16, 8
"""In which steps a gradient that is not sent is checked. The check takes 18 us."""


class NonFiniteNotice(NonFinite):
    """The rider of the policy `on_nonfinite="warn"`."""

    def __init__(self) -> None:
        self._report = NonFiniteReport("warn")
        self._is_open = True
        """Whether gradients are still checked. All ranks have the same value, unless gradients are not sent."""
        self._own = OwnGradients()
        self._reported: Found = {}
        """The findings that this rank reports in the present step."""
        self._age = 0
        """The number of steps since the step of `_reported`."""
        self._late: LateResult | None = None
        """The result of an accelerator's checks in an earlier step, which this rank has not reported yet."""
        self._num_steps_late = 0
        """The number of steps since that step."""

    def use(
        self, names: Sequence[str], transport: Transport, gradients: Callable[[], Iterable[Tensor | None]]
    ) -> None:
        """Check these gradients from now on, unless the warning was given. See `NonFinite.use`."""
        super().use(names, transport, gradients)
        self._own, self._reported, self._late = OwnGradients(), {}, None

    def backward_begins(self, *, has_hook: bool) -> None:
        """Forget what was found in the last backward."""
        self._own, self._reported, self.last = OwnGradients(), {}, None

    def look_at(self, bucket: Holder) -> None:
        """Check a bucket that this rank is about to send."""
        if self._is_open:
            self._own.check(bucket)

    def word(self, backward: Backward) -> int:
        """Return 1 if gradients of this rank were not finite, in this step or, on an accelerator, in an earlier one."""
        self._reported, self._age = self._own.found, 0
        self._num_steps_late += 1
        if self._late is not None and self._late.is_there:
            if not self._reported:
                self._reported, self._age = self._late.nonfinite(), self._num_steps_late
            self._late = None
        if self._late is None:  # otherwise this step is left out, because the program must not wait
            self._late, self._num_steps_late = self._own.leave(), 0
        return int(bool(self._reported))

    def receive(self, words: Words) -> None:
        """Store whether any rank reported that its own gradients are not finite."""
        self.was_reported = words.any_set

    def receive_nothing(self, step: int) -> None:
        """Store that no rank reported gradients that are not finite."""
        self.was_reported = False

    def conclude(self, reduced: Reduced) -> None:
        """If some rank reported gradients that are not finite, exchange their names. This is then a collective call."""
        if not self.was_reported:
            return
        note_scalers()
        rows = exchange_found(self._transport, self._reported, age=self._age)
        # An accelerator finds the consequences in the same step as the cause, one step later.
        oldest = max(age for _, age, found in rows if found)
        own = [found if age == oldest else {} for _, age, found in rows]
        if not any(scaler for scaler, _, _ in rows):
            self._close(own, step=reduced.step - oldest, warns=not self._transport.rank)

    def conclude_alone(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check one small gradient of this rank. If it is not finite, find all that are not. Nothing is exchanged."""
        if not self._is_open or (step > _NUM_FIRST_STEPS and step % _EVERY):
            return
        rest = iter(gradients)
        seen = []
        for index, gradient in rest:
            seen.append((index, gradient))
            if (
                gradient is not None
                and not gradient.is_sparse
                and 0 < gradient.numel() < LARGE_GRADIENT_NUMEL
            ):
                break
        else:
            return
        found: Found = {}
        if gradient.is_cpu:
            if not is_finite(gradient):
                found = describe(present([*seen, *rest]))
        else:
            if self._late is not None and self._late.is_there:
                found, self._late = self._late.nonfinite(), None
            if self._late is None:
                self._own.check_later([(index, gradient)])
                self._late = self._own.leave()
        if found:
            note_scalers()
            if not is_scaler_in_use():
                rank = self._transport.rank
                self._close(
                    [found if r == rank else {} for r in range(self._transport.size)], step=step, warns=True
                )

    def _close(self, own: Sequence[Found], *, step: int, warns: bool) -> None:
        """Record the findings, prepare the warning, and check no more gradients.

        Args:
            own: the findings of each rank.
            step: the step of the findings.
            warns: whether this rank shows the warning.
        """
        self._is_open, self._late = False, None
        named = {
            rank: tuple(self._names[index] for index in sorted(row)) for rank, row in enumerate(own) if row
        }
        self.last = NonFiniteRecord(found=named, in_mean=(), outcome="warned", num_steps=1)
        self._report.use(self._names, warns=warns)
        self._report.prepare(Findings(own=own), self.last, step=step)

    def act(self) -> None:
        """Give the warning, if it has been prepared."""
        if self.last is not None:
            self._report.give(num_steps=1)
