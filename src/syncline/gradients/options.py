"""The options of gradient synchronization, which stay, and the requests of a wrapper for its next backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from syncline.gradients.bucket_plan import BucketCaps

OnNonFinite = Literal["ignore", "raise", "skip", "zero"]
"""The policies for gradients that are not finite, see `riders/nonfinite.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOptions:
    """The options of gradient synchronization; equal on all ranks."""

    caps: BucketCaps
    """The maximum sizes of buckets."""
    as_bucket_view: bool
    """Whether `.grad` is a view of the bucket after a backward, not a tensor of its own."""
    allow_unused: bool
    """Whether a parameter without a gradient counts as zero instead of being an error."""
    skip_unused: bool = False
    """Whether buckets of parameters that no rank uses are not sent; ranks exchange their use when a backward begins."""
    static_graph: bool = False
    """Whether every backward gives each parameter as many gradients as the first one did."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which floating-point gradients are summed; None for each parameter's own dtype."""
    sparse: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sparse."""
    delayed: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sent last."""
    sharded: bool = False
    """Whether each rank reduces only its shard of every bucket, and steps the optimizer for that shard."""
    compares_replicas: bool = False
    """Whether fingerprints of replicas are sent with the gradients."""
    on_nonfinite: OnNonFinite = "ignore"
    """The policy of all ranks if a gradient of one of them is not finite."""


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


class Controls:
    """The requests of one wrapper. They are read when a backward begins or ends, and stay if the module changes."""

    def __init__(self) -> None:
        self.enabled = True
        """Whether backwards synchronize; False under `no_sync`."""
        self.decide: Callable[[], bool] = _always
        """Called when a backward begins; returns whether it is reduced."""
        self.num_contributing: int | None = None
        """Number of ranks whose gradients count in the next backward; None for all ranks (see `join`)."""
        self.on_reduced: Callable[[], None] = _nothing
        """Called inside of backward when `.grad` holds the reduced gradients."""
        self._before_reduction: Callable[[], None] | None = None
        self._futures: list[torch.futures.Future[Any]] = []

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Leave gradients on each rank in backwards inside of the block (`no_sync`)."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def enable(self, enabled: bool) -> None:
        """Set whether backwards synchronize."""
        self.enabled = enabled

    def decide_by(self, decide: Callable[[], bool] | None) -> None:
        """Call `decide` when a backward begins, for whether it is reduced. None: each backward is."""
        self.decide = _always if decide is None else decide

    def count_ranks(self, num_contributing: int) -> None:
        """Divide by this number of ranks in the next backward."""
        self.num_contributing = num_contributing

    def do_after_reduction(self, action: Callable[[], None] | None) -> None:
        """Call `action` inside of each backward, when `.grad` holds the reduced gradients."""
        self.on_reduced = _nothing if action is None else action

    def do_before_reduction(self, action: Callable[[], None] | None) -> None:
        """Call `action` when the next backward that may synchronize begins; again in the one after it if it raises."""
        self._before_reduction = action

    def wait_for(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Let the end of the next backward wait for these, too (those of a buffer hook, for example)."""
        self._futures.extend(futures)

    # ------------------------------------------------------------------ for the reducer

    def backward_begins(self) -> None:
        """Run what was requested before the first reduction."""
        if self._before_reduction is not None and self.enabled:
            self._before_reduction()
            self._before_reduction = None  # only now: if it raised, the next backward calls it again

    def backward_ends(self) -> None:
        """Wait for futures, and run what was requested after each backward."""
        for future in self._futures:
            future.wait()
        self._futures.clear()
        if self.enabled:
            self.on_reduced()

    def take_num_contributing(self) -> int:
        """Return the requested number of ranks, which holds for one backward only."""
        num_ranks, self.num_contributing = self.num_contributing, None
        assert num_ranks is not None
        return num_ranks
