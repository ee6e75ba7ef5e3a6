"""Rider: gradients that hold NaN or infinity, detected on the rank that has them and handled by all ranks alike.

A mean that is not finite does not show which rank caused it. So each rank checks its own gradients, bucket by bucket,
after a bucket is filled and before it is sent. The result is one bit behind the last bucket (`tail.py`). Only if a
bit is set do the ranks exchange the names of the parameters. All ranks decide by the same facts, before any optimizer
steps.

On the CPU the first check is the sum of the bucket, which reads it once. The sum is not finite if an element is not.
Only then is there a second check, by the extremes, because a sum of finite numbers may overflow and extremes do not.
On an accelerator nothing may wait for a bucket. There, kernels compute the largest magnitude of each parameter's
gradient, and one wait for all of them follows just before the last bucket is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from syncline._torch.optimizers import ScalerFinder
from syncline._torch.tensors import foreach_norm, stored_values
from syncline.errors import NonFiniteGradient
from syncline.gradients.backward import Backward
from syncline.gradients.options import OnNonFinite
from syncline.gradients.riders.base import Holder, Reduced, Rider, Words
from syncline.gradients.riders.discarded import DiscardedGradients
from syncline.records import NonFiniteRecord
from syncline.transport.base import Transport
from syncline.user_code import warn_user

_Parts = Sequence[tuple[int, Tensor]]
"""Gradients with their parameter indices; several tensors of one index are parts of one gradient."""

_Found = Mapping[int, str]
"""A description of the elements that are not finite, by parameter index."""

_OUTCOMES = {"raise": "raised", "skip": "discarded", "zero": "zeroed"}

_LEFT = "left to the GradScaler"

_NUM_SHOWN = 4

_OVERFLOWED = (
    "Each rank's own gradients are finite, but their sum, or the result of a compression or of a communication hook, "
    "does not fit in its dtype. The largest float16 is 65,504: use bfloat16, reduce_dtype=torch.float32 or a smaller "
    "loss"
)

_REDUCED_OUTSIDE = (
    "They were reduced by sl.sync_gradients_, which does not check each rank's own: a backward outside of no_sync "
    "names the rank"
)


class NonFinite(Rider):
    """The policy `on_nonfinite="ignore"`: no gradients are checked, and nothing is reported."""

    num_bits = 1

    last: NonFiniteRecord | None = None
    """The record of the last reduction; None if gradients are not checked."""
    was_reported = False
    """Whether some rank reported in the last step that its own gradients are not finite."""

    def continues(self, former: NonFinite) -> None:
        """Take over the state of a former object, because the module has changed."""

    def backward_begins(self, *, has_hook: bool) -> None:
        """Prepare for a backward, reduced or not."""

    def conclude_alone(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check all of `.grad`, because there is one rank."""

    def conclude_outside(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check gradients that were reduced after a backward."""

    def act(self) -> None:
        """Raise or warn if gradients were not finite."""

    def failed(self) -> None:
        """Handle a backward that ended with an error."""

    def discards_step(self) -> bool:
        """Return whether an optimizer must skip its step."""
        return False


class NonFiniteWatch(NonFinite):
    """A check of one module's gradients, with a policy for those that are not finite.

    The calls of one backward are `backward_begins`, `look_at` for each bucket, `word` when the last bucket is sent,
    `conclude` when `.grad` holds the mean, and `act`, which raises or warns when everything else is done. If the
    backward ends with an error, the last call is `failed`.

    Args:
        policy: "raise", "skip" or "zero".
        names: names of all parameters, by index.
        gradients: called for the tensors in `.grad`, or for their stand-ins.
        transport: the transport between the ranks.
    """

    def __init__(
        self,
        policy: OnNonFinite,
        names: Sequence[str],
        gradients: Callable[[], Iterable[Tensor | None]],
        transport: Transport,
    ) -> None:
        self.last: NonFiniteRecord = _nothing_found("not reduced", num_steps=0)
        self._policy = policy
        self._names = names
        self._gradients = gradients
        self._discarded = DiscardedGradients()
        self._is_bad: bool | None = None
        """Whether the result of the present backward must not be applied; None while that is undecided."""
        self._transport = transport
        self._scalers = ScalerFinder()
        self._replaces = False
        """Whether elements that are not finite are sent as zeros."""
        self._own: dict[int, str] = {}
        self._sizes: list[tuple[int, Tensor]] = []
        """On accelerators: the largest magnitude of each parameter's gradient, not yet waited for."""
        self._step = 0
        self._text: str | None = None
        """The text of the error or warning that `act` gives; None if there is none."""
        self._why_in_mean = _OVERFLOWED
        self._told: set[tuple[int, str]] = set()
        """The ranks (-1 for the mean) and parameters that a warning has already named."""
        self._warns_from = 1
        """Number of affected steps at which the next warning comes, even if it names no new parameter."""

    def continues(self, former: NonFinite) -> None:
        """Take over the state of a former object, because the module has changed."""
        assert isinstance(former, NonFiniteWatch)
        self._discarded, self.last = former._discarded, former.last
        self._told, self._warns_from = former._told, former._warns_from

    # ------------------------------------------------------------------ this rank's own

    def backward_begins(self, *, has_hook: bool) -> None:
        """Prepare for a backward, reduced or not.

        Args:
            has_hook: whether a communication hook or a compression gets the gradients. It may remember what it could
                not send, so it must never get values that are not finite.
        """
        self._replaces = self._policy == "zero" or has_hook
        self._own = {}
        self._sizes = []
        self._text = None
        self._is_bad = None
        self.last = _nothing_found("not reduced", num_steps=self.last.num_steps)

    def look_at(self, bucket: Holder) -> None:
        """Check a bucket that this rank is about to send; replace values that must not be sent by zeros."""
        values = bucket.own()
        if values.device.type != "cpu":
            self._look_later(bucket.own_parts())
        elif is_finite(values):
            return
        else:
            self._own.update(describe(bucket.own_parts()))
        if self._replaces:
            _zero_nonfinite_(values)

    def _look_later(self, parts: _Parts) -> None:
        """Start to compute the largest magnitudes, without waiting."""
        parts = [(index, values) for index, values in parts if values.numel()]
        if parts:
            sizes = foreach_norm([_as_real(values) for _, values in parts], math.inf)
            self._sizes += zip((index for index, _ in parts), sizes, strict=True)

    def word(self, backward: Backward) -> int:
        """Return 1 if this rank's own gradients are not finite."""
        return int(self.has_found())

    def hear(self, words: Words) -> None:
        """Store whether any rank's own gradients are not finite."""
        self.was_reported = words.any_set

    def hear_silence(self, step: int) -> None:
        """Store that all ranks' own gradients are finite."""
        self.was_reported = False

    def has_found(self) -> bool:
        """Return whether this rank's own gradients are not finite; wait for the device, once for all buckets."""
        for device in {size.device for _, size in self._sizes}:
            here = [(index, size) for index, size in self._sizes if size.device == device]
            for (index, _), size in zip(here, torch.stack([size for _, size in here]).tolist(), strict=True):
                if not math.isfinite(size):
                    self._own[index] = "NaN" if math.isnan(size) else "infinity"
        self._sizes = []
        return bool(self._own)

    # ------------------------------------------------------------------ the decision of all ranks

    def conclude(self, reduced: Reduced) -> None:
        """Decide about this step; a collective call if some rank reported a bit, or if the result can overflow."""
        found: list[_Found] = []
        in_mean: _Found = {}
        self._why_in_mean = _OVERFLOWED
        has_scaler = False
        if self.was_reported:
            found, has_scaler = self._exchange(self._own)
        # A step that is already discarded needs no second check.
        if reduced.can_overflow and not has_scaler and (not found or self._policy == "zero"):
            in_mean, has_scaler = self._in_mean(reduced.buckets)
        parts = (part for bucket in reduced.buckets for part in bucket.handed_out()[1])
        self._decide(found, in_mean, parts, step=reduced.step, has_scaler=has_scaler)

    def conclude_alone(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check and decide where there is one rank, whose gradients are in no bucket."""
        parts = _present(gradients)
        on_cpu = [(index, values) for index, values in parts if values.device.type == "cpu"]
        self._own.update(describe([part for part in on_cpu if not is_finite(part[1])]))
        elsewhere: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for index, values in parts:
            if values.device.type != "cpu":
                elsewhere.setdefault((values.device, values.dtype), []).append((index, values))
        for group in elsewhere.values():
            self._look_later(group)
        found = [self._own] if self.has_found() else []
        if found and self._replaces:
            for _, values in parts:
                _zero_nonfinite_(values)
        has_scaler = bool(found) and self._scalers.is_any_in_use()
        self._decide(found, {}, parts, step=step, has_scaler=has_scaler)

    def conclude_outside(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Check and decide for gradients that were reduced after a backward, when no rank has checked its own.

        A collective call if the mean, which is the same on every rank, is not finite.
        """
        self.backward_begins(has_hook=False)
        parts = _present(gradients)
        in_mean: _Found = describe([part for part in parts if not is_finite(part[1])])
        has_scaler = False
        self._why_in_mean = _REDUCED_OUTSIDE
        if in_mean:
            _, has_scaler = self._exchange(in_mean)
        self._decide([], in_mean, parts, step=step, has_scaler=has_scaler)

    def _in_mean(self, buckets: Sequence[Holder]) -> tuple[_Found, bool]:
        """Return the parameters whose mean is not finite, and whether a scaler is in use; a collective call."""
        mine: dict[int, str] = {}
        for bucket in buckets:
            values, parts = bucket.handed_out()
            if parts and not is_finite(values, parts[0][1].dtype):
                mine.update(describe(parts))
        anybody = torch.tensor([int(bool(mine))], dtype=torch.int32, device=self._transport.control_device)
        self._transport.all_reduce(anybody, "max").wait()
        if not anybody.item():
            return {}, False
        told, has_scaler = self._exchange(mine)
        return {index: text for row in reversed(told) for index, text in row.items()}, has_scaler

    def _exchange(self, mine: _Found) -> tuple[list[_Found], bool]:
        """Return the findings of each rank, and whether any rank has a scaler in use; a collective call."""
        has_scaler = self._scalers.is_any_in_use()
        if self._transport.size == 1:
            return [mine], has_scaler
        payload = json.dumps([has_scaler, sorted(mine.items())]).encode()
        rows = [json.loads(row) for row in self._transport.all_gather_bytes(payload)]
        return [dict(row) for _, row in rows], any(scaler for scaler, _ in rows)

    def _decide(
        self,
        found: Sequence[_Found],
        in_mean: _Found,
        parts: Iterable[tuple[int, Tensor]],
        *,
        step: int,
        has_scaler: bool,
    ) -> None:
        """Decide about a step, by facts that are the same on every rank.

        Args:
            found: findings in the ranks' own gradients, by rank; empty if all of them are finite.
            in_mean: findings in the mean, though each rank's own gradients are finite.
            parts: parts of `.grad` on this rank.
            step: the step that was reduced.
            has_scaler: whether a GradScaler will handle the step.
        """
        num_steps, outcome = self.last.num_steps, "finite"
        is_any = bool(in_mean) or any(found)
        if is_any and has_scaler:
            outcome = _LEFT
            if self._replaces:  # these values were sent as zeros, but the scaler has to find them
                hidden = {index for row in found for index in row}
                for index, values in parts:
                    if index in hidden:
                        values[(0,) * values.dim()] = math.inf
        elif is_any:
            num_steps, outcome = num_steps + 1, _OUTCOMES[self._policy]
            if self._policy == "zero" and in_mean:
                for _, values in parts:
                    _zero_nonfinite_(values)
        self._is_bad = outcome == "discarded"
        self.last = NonFiniteRecord(
            found={rank: self._named(row) for rank, row in enumerate(found) if row},
            in_mean=self._named(in_mean),
            outcome=outcome,
            num_steps=num_steps,
        )
        if outcome in _OUTCOMES.values():
            self._step = step
            self._text = self._in_words(found, in_mean)

    def failed(self) -> None:
        """Handle a backward that ended with an error: mark gradients that were not checked as discarded."""
        if self._policy == "skip":
            self._settle(is_bad=self._is_bad is not False)

    def _settle(self, *, is_bad: bool) -> None:
        """Mark the gradients, or clear the mark. Called once `.grad` holds its final tensors."""
        self._is_bad = None
        self._discarded.are(self._gradients() if is_bad else ())

    def discards_step(self) -> bool:
        """Return whether an optimizer must skip its step, because `.grad` holds gradients marked as discarded."""
        return self._discarded.has_any_of(self._gradients())

    def _named(self, found: _Found) -> tuple[str, ...]:
        return tuple(self._names[index] for index in sorted(found))

    # ------------------------------------------------------------------ the error or warning

    def act(self) -> None:
        """Raise, or warn on rank 0, if gradients were not finite.

        A warning comes if it names a rank or parameter that no warning has named before, or if the number of affected
        steps has doubled since the last warning.

        Raises:
            NonFiniteGradient: gradients are not finite, under "raise".
        """
        if self._is_bad is not None:
            self._settle(is_bad=self._is_bad)
        text, self._text = self._text, None
        if text is None:
            return
        found, in_mean = self.last.found, self.last.in_mean
        if self._policy == "raise":
            raise NonFiniteGradient(text, step=self._step, found=found, in_mean=in_mean)
        names = {(rank, name) for rank, row in {**found, -1: in_mean}.items() for name in row}
        if names <= self._told and self.last.num_steps < self._warns_from:
            return
        self._told |= names
        self._warns_from = 2 * self.last.num_steps
        if self._transport.rank == 0:
            warn_user(text)

    def _in_words(self, found: Sequence[_Found], in_mean: _Found) -> str:
        num_steps = self.last.num_steps
        so_far = f'on_nonfinite="{self._policy}", {num_steps} step{"s" if num_steps != 1 else ""} so far'
        text = {
            "raise": "gradients are not finite, so no optimizer may step with them",
            "skip": f"gradients are not finite, so no rank steps ({so_far})",
            "zero": f"elements of gradients that are not finite count as zero ({so_far})",
        }[self._policy]
        lines = [f"step {self._step}, backward: {text}:"]
        lines += [f"  rank {rank}: {self._shown(row)}" for rank, row in enumerate(found) if row]
        if in_mean:
            lines.append(f"  in the mean: {self._shown(in_mean)}")
        if any(found):
            lines.append(
                "torch.autograd.set_detect_anomaly(True) on such a rank names the operation. If values grow without "
                "bound, use a lower learning rate or ddp.clip_grad_norm_(max_norm); with float16, a "
                "torch.amp.GradScaler"
            )
        else:
            lines.append(self._why_in_mean)
        if self._policy == "raise":
            lines[-1] += '. on_nonfinite="skip" skips such steps on all ranks'
        return "\n".join(lines)

    def _shown(self, found: _Found) -> str:
        shown = [f"{self._names[index]} ({found[index]})" for index in sorted(found)[:_NUM_SHOWN]]
        more = len(found) - len(shown)
        return ", ".join(shown) + (f", and {more} more parameter{'s' if more > 1 else ''}" if more else "")


# ---------------------------------------------------------------------- tensors


def is_finite(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether all elements are finite, in their own dtype or in another one; wait for the device.

    Args:
        values: a tensor of any shape.
        dtype: the dtype to which the values will be converted; None if they will not be.

    Example:
        >>> big = torch.full((2,), 3e38)
        >>> is_finite(big), bool(big.sum().isfinite()), is_finite(big, torch.float16)
        (True, False, False)
    """
    if not values.numel():
        return True
    values = _as_real(values)
    if dtype is None or dtype.to_real() is values.dtype:
        if math.isfinite(values.sum().item()):
            return True
        dtype = values.dtype
    # Rounding keeps the order, so all values fit if the extremes do. aminmax() returns NaN if there is one.
    return bool(torch.stack(values.aminmax()).to(dtype.to_real()).isfinite().all())


def describe(parts: _Parts) -> dict[int, str]:
    """Describe the elements that are not finite, by parameter index; wait for the device.

    Example:
        >>> describe([(7, torch.ones(2)), (8, torch.tensor([1.0, float("nan"), float("-inf")]))])
        {8: 'NaN in 1 and infinity in 1 of 3 elements'}
    """
    found = {}
    for index, values in parts:
        counts = {"NaN": int(values.isnan().sum()), "infinity": int(values.isinf().sum())}
        if any(counts.values()):
            what = " and ".join(f"{kind} in {count}" for kind, count in counts.items() if count)
            found[index] = f"{what} of {values.numel()} element{'s' if values.numel() != 1 else ''}"
    return found


def _present(gradients: Iterable[tuple[int, Tensor | None]]) -> list[tuple[int, Tensor]]:
    """Return the gradients that are not None; for a sparse gradient, its stored rows."""
    return [(i, stored_values(g) if g.is_sparse else g) for i, g in gradients if g is not None]


def _as_real(values: Tensor) -> Tensor:
    """Return a view of the same memory as real numbers; a complex number becomes its real and imaginary parts."""
    if not values.is_complex():
        return values
    return torch.view_as_real(values.conj() if values.is_conj() else values)


def _zero_nonfinite_(values: Tensor) -> None:
    _as_real(values).nan_to_num_(0.0, 0.0, 0.0)


def _nothing_found(outcome: str, *, num_steps: int) -> NonFiniteRecord:
    return NonFiniteRecord(found={}, in_mean=(), outcome=outcome, num_steps=num_steps)
