"""The fixed options of gradient synchronization, and the requests of a wrapper for its next backwards."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from syncline.gradients.bucket_plan import BucketCaps

OnNonFinite = Literal["ignore", "warn", "raise", "skip", "zero"]
"""The policies for gradients that are not finite. `riders/nonfinite.py` explains them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOptions:
    """The options of gradient synchronization, which are the same on all ranks."""

    caps: BucketCaps
    """The maximum sizes of buckets."""
    as_bucket_view: bool
    """Whether `.grad` is a view of a bucket after a synchronized backward, instead of a separate tensor."""
    allow_unused: bool
    """Whether a missing gradient counts as zero. If False, a missing gradient is an error."""
    skip_unused: bool = False
    """Whether a bucket is left out if no rank uses its parameters. Ranks exchange which parameters they use."""
    static_graph: bool = False
    """Whether each parameter gets the same number of gradients in every backward."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which floating-point gradients are summed; None to sum each gradient in its parameter's dtype."""
    sparse: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sparse."""
    delayed: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sent after all other gradients."""
    sharded: bool = False
    """Whether each rank reduces only its shard of every bucket, and the optimizer steps only this shard."""
    compares_replicas: bool = False
    """Whether fingerprints of the replicas are sent with the gradients, so that ranks can compare the replicas."""
    looks_at_replicas: bool = False
    """Whether hashes of all parameters are sent with the gradients of a few steps, to warn if replicas differ."""
    on_nonfinite: OnNonFinite = "ignore"
    """The policy that all ranks follow if a gradient on any rank is not finite."""


def _always() -> bool:
    return True


class Announced(enum.Enum):
    """The announcement about the next backward that the forwards since the last reduction made, as in torch's class."""

    NOTHING = "there was no forward"
    LOCAL = "all forwards ran under no_sync"
    REDUCTION = "a forward ran outside of no_sync"


class Controls:
    """The requests of one wrapper for its next backwards.

    The reducer reads these requests when a backward begins or ends.
    """

    def __init__(self) -> None:
        self.enabled = True
        """Whether backwards synchronize gradients; False under `no_sync`."""
        self.announced = Announced.NOTHING
        """The announcement that the forwards since the last reduction made."""
        self.decide: Callable[[], bool] = _always
        """A function that is called when a backward begins. It returns whether the gradients are reduced."""
        self._num_contributing: int | None = None
        """Number of ranks whose gradients count in the next backward (see `join`); None for all ranks."""
        self.on_reduced: Callable[[], None] | None = None
        """A function that is called at the end of each backward, except under `no_sync`; None to call nothing."""
        self._before_reduction: Callable[[], None] | None = None
        self._futures: list[torch.futures.Future[Any]] = []

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable synchronization for the backwards that begin inside a `with` block. `no_sync` calls this method."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def enable(self, enabled: bool) -> None:
        """Enable or disable the synchronization of gradients in backwards."""
        self.enabled = enabled

    def decide_by(self, decide: Callable[[], bool] | None) -> None:
        """Call `decide` whenever a backward begins, to decide whether the gradients are reduced.

        If `decide` is None, the gradients of every backward are reduced.
        """
        self.decide = _always if decide is None else decide

    def count_ranks(self, num_contributing: int) -> None:
        """Divide the gradients of the next backward by `num_contributing`, instead of by the number of all ranks."""
        self._num_contributing = num_contributing

    def do_after_reduction(self, action: Callable[[], None] | None) -> None:
        """Call `action` at the end of each backward, when `.grad` holds the result.

        `action` is not called under `no_sync`. Pass None to call nothing.
        """
        self.on_reduced = action

    def do_before_reduction(self, action: Callable[[], None] | None) -> None:
        """Call `action` once, when the next backward outside of `no_sync` begins. Pass None to call nothing.

        If `action` raises an error, `action` is called again when the following backward begins.
        """
        self._before_reduction = action

    def wait_for(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Let the next backward wait for `futures` at its end, for example for the futures of a buffer hook."""
        self._futures.extend(futures)

    def announce_reduction(self) -> None:
        """Let the next backward be reduced, as after a forward outside of `no_sync`."""
        self.announced = Announced.REDUCTION

    def forget_reduction(self) -> None:
        """Announce no reduction, because the module was wrapped anew. An output may keep the former wrapper alive."""
        if self.announced is Announced.REDUCTION:
            self.announced = Announced.NOTHING

    # ------------------------------------------------------------------ for the reducer

    def forward_ended(self) -> None:
        """Record that a forward with gradients enabled has run. One outside of `no_sync` outweighs those inside."""
        if self.enabled:
            self.announced = Announced.REDUCTION
        elif self.announced is Announced.NOTHING:
            self.announced = Announced.LOCAL

    def backward_begins(self, *, accumulates: bool) -> int | None:
        """Call the action that was given to `do_before_reduction`, if there is one.

        Args:
            accumulates: whether a later backward will reduce the gradients of the backward that begins.

        Returns:
            The number of ranks that was given to `count_ranks`; None if no number was given for this backward. The
            number is then forgotten, because it is valid for one backward only.
        """
        if self._before_reduction is not None and not accumulates:
            self._before_reduction()
            self._before_reduction = None  # only now: if it raised, the next backward calls it again
        num_ranks, self._num_contributing = self._num_contributing, None
        return num_ranks

    def backward_ends(self, *, accumulates: bool) -> None:
        """Wait for the futures, and call the action that was given to `do_after_reduction`.

        Args:
            accumulates: whether a later backward will reduce the gradients of the backward that has ended.
        """
        for future in self._futures:
            future.wait()
        self._futures.clear()
        if not accumulates:
            self.announced = Announced.NOTHING
            if self.on_reduced is not None:
                self.on_reduced()
