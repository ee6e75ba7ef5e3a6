"""The options of gradient synchronization, which do not change, and a wrapper's requests for its next backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from syncline.gradients.bucket_plan import BucketCaps

OnNonFinite = Literal["ignore", "raise", "skip", "zero"]
"""The policies for gradients that are not finite, which `riders/nonfinite.py` explains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOptions:
    """The options of gradient synchronization; equal on all ranks."""

    caps: BucketCaps
    """The maximum sizes of buckets."""
    as_bucket_view: bool
    """Whether `.grad` is a view of a bucket after a synchronized backward, instead of a separate tensor."""
    allow_unused: bool
    """Whether a missing gradient counts as zero. If not, it is an error."""
    skip_unused: bool = False
    """Whether a bucket is left out if no rank uses its parameters. Ranks exchange their use when a backward begins."""
    static_graph: bool = False
    """Whether each parameter gets the same number of gradients in every backward."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which floating-point gradients are summed; None for each parameter's own dtype."""
    sparse: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sparse."""
    delayed: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sent last."""
    sharded: bool = False
    """Whether each rank reduces only its shard of every bucket, and the optimizer steps only this shard."""
    compares_replicas: bool = False
    """Whether fingerprints of replicas are sent with the gradients."""
    on_nonfinite: OnNonFinite = "ignore"
    """The policy of all ranks if a gradient on any rank is not finite."""


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


class Controls:
    """The requests of one wrapper for its next backwards.

    They are read when a backward begins or ends. They stay in force if the module changes.
    """

    def __init__(self) -> None:
        self.enabled = True
        """Whether backwards synchronize; False under `no_sync`."""
        self.decide: Callable[[], bool] = _always
        """A function that is called when a backward begins. It returns whether the backward is reduced."""
        self._num_contributing: int | None = None
        """Number of ranks whose gradients count in the next backward (see `join`); None for all ranks."""
        self.on_reduced: Callable[[], None] = _nothing
        """A function that is called at the end of each backward that may synchronize."""
        self._before_reduction: Callable[[], None] | None = None
        self._futures: list[torch.futures.Future[Any]] = []

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Do not synchronize the backwards that begin inside of the block (`no_sync`)."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def enable(self, enabled: bool) -> None:
        """Set whether backwards synchronize."""
        self.enabled = enabled

    def decide_by(self, decide: Callable[[], bool] | None) -> None:
        """Let `decide` return whether a backward is reduced, each time a backward begins.

        If `decide` is None, each backward is reduced.
        """
        self.decide = _always if decide is None else decide

    def count_ranks(self, num_contributing: int) -> None:
        """Divide the gradients of the next backward by this number of ranks."""
        self._num_contributing = num_contributing

    def do_after_reduction(self, action: Callable[[], None] | None) -> None:
        """Call `action` at the end of each backward, when `.grad` holds the reduced gradients. None: call nothing."""
        self.on_reduced = _nothing if action is None else action

    def do_before_reduction(self, action: Callable[[], None] | None) -> None:
        """Call `action` when the next backward that may synchronize begins. None: call nothing.

        If `action` raises, it is called again in the following backward.
        """
        self._before_reduction = action

    def wait_for(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Wait for these futures at the end of the next backward. They may come from a buffer hook, for example."""
        self._futures.extend(futures)

    # ------------------------------------------------------------------ for the reducer

    def backward_begins(self) -> None:
        """Call the action that was requested before the next reduction, if there is one."""
        if self._before_reduction is not None and self.enabled:
            self._before_reduction()
            self._before_reduction = None  # only now: if it raised, the next backward calls it again

    def backward_ends(self) -> None:
        """Wait for the futures, and call the action that was requested after each reduction."""
        for future in self._futures:
            future.wait()
        self._futures.clear()
        if self.enabled:
            self.on_reduced()

    def take_num_contributing(self) -> int | None:
        """Return the requested number of ranks, and forget it, because it holds for one backward only."""
        num_ranks, self._num_contributing = self._num_contributing, None
        return num_ranks
