"""The requests of a wrapper for the next backwards: whether they are reduced, over how many ranks, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Controls"]


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
