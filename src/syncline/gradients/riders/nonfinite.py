"""Gradients that hold NaN or infinity: found on the rank that has them, answered by all ranks alike.

A mean tells that some rank's gradient was not finite, not whose. So each rank looks at its own, bucket by bucket,
between filling and sending. Whether there was anything is one bit behind the last bucket (`control.py`); only then do
the ranks tell each other which parameters. All decide by the same facts, before any optimizer steps.

On the CPU a sum is the sieve: it is not finite if an element is not, at the cost of reading the bucket once. The rest
is done only if it is not: a sum of finite numbers may overflow, extremes do not. On an accelerator nothing may wait for
a bucket. There the largest magnitude of each parameter is computed, by kernels that are waited for together when the
last bucket is about to leave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from syncline._torch.grad_scaler import ScalerFinder
from syncline._torch.tensors import foreach_norm, stored_values
from syncline.errors import NonFiniteGradient
from syncline.gradients.options import OnNonFinite
from syncline.gradients.riders.base import Holder, Reduced, Rider, Words
from syncline.gradients.riders.discarded import DiscardedGradients
from syncline.records import NonFiniteRecord
from syncline.transport.base import Transport
from syncline.user_code import warn_user

__all__ = [
    "NonFinite",
    "NonFiniteWatch",
    "describe",
    "is_finite",
]


_Parts = Sequence[tuple[int, Tensor]]
"""Gradients by parameter index; several of one parameter are parts of it."""

_Found = Mapping[int, str]
"""By parameter index, what is not finite, in words."""

_OUTCOMES = {"raise": "raised", "skip": "discarded", "zero": "zeroed"}

_LEFT = "left to the GradScaler"

_NUM_SHOWN = 4

_OVERFLOWED = (
    "Each rank's own gradients are finite: their sum, or what a compression or a communication hook makes of them, "
    "does not fit in its type. The largest float16 is 65,504: use bfloat16, reduce_dtype=torch.float32 or a smaller "
    "loss"
)

_REDUCED_OUTSIDE = (
    "They were reduced by sl.sync_gradients_, where nobody looks at each rank's own: a backward outside of no_sync "
    "names the rank"
)


class NonFinite(Rider):
    """Gradients that are not finite are ignored: `on_nonfinite="ignore"`. Nothing is looked at or reported."""

    num_bits = 1

    last: NonFiniteRecord | None = None
    """Of the last reduction; None where nothing is looked for."""
    was_reported = False
    """Whether some rank reported in the last step that its own gradients are not finite."""

    def continues(self, former: NonFinite) -> None:
        """Take the place of another, for the module has changed."""

    def backward_begins(self, *, has_hook: bool) -> None:
        """Prepare for a backward, reduced or not."""

    def conclude_alone(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Judge all of `.grad`: there is one rank."""

    def conclude_outside(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """Judge gradients that were reduced after a backward."""

    def act(self) -> None:
        """Raise or warn, if there is anything to say."""

    def failed(self) -> None:
        """The backward has ended by an error."""

    def discards_step(self) -> bool:
        """Return whether an optimizer is to leave its step undone."""
        return False


class NonFiniteWatch(NonFinite):
    """Looks at the gradients of one module, and applies a policy to those that are not finite.

    One backward is `backward_begins`, `look_at` for each bucket, `word` when the last bucket leaves, `conclude` when
    `.grad` holds the mean, and `act`, which raises or warns when all else is done; or `failed`.

    Args:
        policy: "raise", "skip" or "zero".
        names: of all parameters, by index.
        gradients: asked for the tensors that are in `.grad`, or stand for them.
        transport: between the ranks.
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
        """Whether what the backward under way leaves in `.grad` must not be stepped; None before that is decided."""
        self._transport = transport
        self._scalers = ScalerFinder()
        self._replaces = False
        """Whether what is not finite travels as zero."""
        self._own: dict[int, str] = {}
        self._sizes: list[tuple[int, Tensor]] = []
        """On accelerators: the largest magnitude of each parameter's gradient, not yet waited for."""
        self._step = 0
        self._text: str | None = None
        """What `act` has to say."""
        self._why_in_mean = _OVERFLOWED
        self._told: set[tuple[int, str]] = set()
        """Of which rank (-1: of the mean) and parameter there was a warning."""
        self._warns_from = 1
        """The number of steps from which on there is a warning again, even if it names nothing new."""

    def continues(self, former: NonFinite) -> None:
        """Take the place of another, for the module has changed."""
        assert isinstance(former, NonFiniteWatch)
        self._discarded, self.last = former._discarded, former.last
        self._told, self._warns_from = former._told, former._warns_from

    # ------------------------------------------------------------------ this rank's own

    def backward_begins(self, *, has_hook: bool) -> None:
        """A backward begins.

        Args:
            has_hook: whether a communication hook or a compression gets the gradients, which may remember what it
                could not send: nothing that is not finite may come to it.
        """
        self._replaces = self._policy == "zero" or has_hook
        self._own = {}
        self._sizes = []
        self._text = None
        self._is_bad = None
        self.last = _nothing_found("not reduced", num_steps=self.last.num_steps)

    def look_at(self, bucket: Holder) -> None:
        """Look at what this rank is about to send; where it must not travel, it is zero afterwards."""
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
        """Measure, without waiting."""
        parts = [(index, values) for index, values in parts if values.numel()]
        if parts:
            sizes = foreach_norm([_as_real(values) for _, values in parts], math.inf)
            self._sizes += zip((index for index, _ in parts), sizes, strict=True)

    def word(self) -> int:
        """Return 1 if this rank's own gradients are not finite."""
        return int(self.has_found())

    def hear(self, words: Words) -> None:
        """Keep whether any rank found something."""
        self.was_reported = words.any_set

    def hear_silence(self, step: int) -> None:
        """No rank found anything."""
        self.was_reported = False

    def has_found(self) -> bool:
        """Whether this rank has something that is not finite. Waits for an accelerator, once for all buckets."""
        for device in {size.device for _, size in self._sizes}:
            here = [(index, size) for index, size in self._sizes if size.device == device]
            for (index, _), size in zip(here, torch.stack([size for _, size in here]).tolist(), strict=True):
                if not math.isfinite(size):
                    self._own[index] = "NaN" if math.isnan(size) else "infinity"
        self._sizes = []
        return bool(self._own)

    # ------------------------------------------------------------------ what all ranks make of it

    def conclude(self, reduced: Reduced) -> None:
        """Decide what becomes of this step. A collective call where anything was found, or can overflow."""
        found: list[_Found] = []
        in_mean: _Found = {}
        self._why_in_mean = _OVERFLOWED
        has_scaler = False
        if self.was_reported:
            found, has_scaler = self._exchange(self._own)
        # Of a step that is not taken, nobody asks what else is wrong with it.
        if reduced.can_overflow and not has_scaler and (not found or self._policy == "zero"):
            in_mean, has_scaler = self._in_mean(reduced.buckets)
        parts = (part for bucket in reduced.buckets for part in bucket.handed_out()[1])
        self._decide(found, in_mean, parts, step=reduced.step, has_scaler=has_scaler)

    def conclude_alone(self, gradients: Iterable[tuple[int, Tensor | None]], *, step: int) -> None:
        """The same where there is one rank, whose gradients are in no bucket."""
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
        """The same of gradients that were reduced after a backward, so that nobody has looked at each rank's own.

        A collective call where the mean, the same on every rank, is not finite.
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
        """What is not finite in the mean; and whether a scaler is in use. A collective call."""
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
        """What each rank has found; and whether any has a scaler in use. A collective call."""
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
        """By facts that are the same on every rank.

        Args:
            found: by rank, its own; empty where nobody has anything.
            in_mean: what is not finite though each rank's own is.
            parts: of `.grad` on this rank.
            step: this one.
            has_scaler: whether somebody else takes care.
        """
        num_steps, outcome = self.last.num_steps, "finite"
        is_any = bool(in_mean) or any(found)
        if is_any and has_scaler:
            outcome = _LEFT
            if self._replaces:  # it has to find what has not travelled
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
        """The backward has ended by an error: what was not judged is not to be stepped either."""
        if self._policy == "skip":
            self._settle(is_bad=self._is_bad is not False)

    def _settle(self, *, is_bad: bool) -> None:
        """When nobody puts anything else into `.grad` any more."""
        self._is_bad = None
        self._discarded.are(self._gradients() if is_bad else ())

    def discards_step(self) -> bool:
        """Whether an optimizer is to leave its step undone: `.grad` is what was found to be not finite."""
        return self._discarded.has_any_of(self._gradients())

    def _named(self, found: _Found) -> tuple[str, ...]:
        return tuple(self._names[index] for index in sorted(found))

    # ------------------------------------------------------------------ what it comes to

    def act(self) -> None:
        """Raise, or warn on rank 0, if there is anything to say.

        A warning names what no warning has named before, or says that the number of such steps has doubled.

        Raises:
            NonFiniteGradient: something was found, under "raise".
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
            "raise": "gradients are not finite, and nothing may be stepped with them",
            "skip": f"gradients are not finite, so no rank steps ({so_far})",
            "zero": f"elements of gradients that are not finite count as zero ({so_far})",
        }[self._policy]
        lines = [f"step {self._step}, backward: {text}:"]
        lines += [f"  rank {rank}: {self._shown(row)}" for rank, row in enumerate(found) if row]
        if in_mean:
            lines.append(f"  in the mean: {self._shown(in_mean)}")
        if any(found):
            lines.append(
                "torch.autograd.set_detect_anomaly(True) on such a rank names the operation. What grows beyond bounds "
                "wants a lower learning rate or ddp.clip_grad_norm_(max_norm), float16 a torch.amp.GradScaler"
            )
        else:
            lines.append(self._why_in_mean)
        if self._policy == "raise":
            lines[-1] += '. on_nonfinite="skip" leaves such steps out on all ranks'
        return "\n".join(lines)

    def _shown(self, found: _Found) -> str:
        shown = [f"{self._names[index]} ({found[index]})" for index in sorted(found)[:_NUM_SHOWN]]
        more = len(found) - len(shown)
        return ", ".join(shown) + (f", and {more} more parameter{'s' if more > 1 else ''}" if more else "")


# ---------------------------------------------------------------------- tensors


def is_finite(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether all elements are finite, as they are or as another type; waits.

    Args:
        values: of any shape.
        dtype: to which they will be converted; None: they stay as they are.

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
    # Rounding keeps the order, so if the extremes fit, all do. NaN is an extreme.
    return bool(torch.stack(values.aminmax()).to(dtype.to_real()).isfinite().all())


def describe(parts: _Parts) -> dict[int, str]:
    """What is not finite, by index, in words; waits.

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
    """The memory of those that are there; of a sparse one, its rows."""
    return [(i, stored_values(g) if g.is_sparse else g) for i, g in gradients if g is not None]


def _as_real(values: Tensor) -> Tensor:
    """The same memory; of complex numbers, real and imaginary parts."""
    if not values.is_complex():
        return values
    return torch.view_as_real(values.conj() if values.is_conj() else values)


def _zero_nonfinite_(values: Tensor) -> None:
    _as_real(values).nan_to_num_(0.0, 0.0, 0.0)


def _nothing_found(outcome: str, *, num_steps: int) -> NonFiniteRecord:
    return NonFiniteRecord(found={}, in_mean=(), outcome=outcome, num_steps=num_steps)
