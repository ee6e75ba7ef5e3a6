"""One backward: its state, and what is known of it.

A backward is in one of these states. The hooks of parameters act only in FILLING.

| state    | meaning                                                                              | next states      |
|----------|--------------------------------------------------------------------------------------|------------------|
| LOCAL    | it is not reduced: under `no_sync`, in a world of one rank, or by a strategy         | ENDED, FAILED    |
| DEFERRED | it will be reduced, but its gradients may not be copied before it has ended          | FILLING, FAILED  |
| FILLING  | ready gradients are copied into their buckets, and complete buckets are sent         | SENT, FAILED     |
| SENT     | all buckets are sent, and are waited for                                             | ENDED, FAILED    |
| ENDED    | it is over; if it was reduced, `.grad` holds the result                              |                  |
| FAILED   | it ended with an error, or another backward began before its end                     |                  |
"""

from __future__ import annotations

import enum
import time
from collections.abc import Set

from syncline.gradients.bucket import Bucket
from syncline.gradients.sparse import SparseBucket

__all__ = ["NO_INDICES", "Backward", "BackwardState"]


NO_INDICES: frozenset[int] = frozenset()


class BackwardState(enum.Enum):
    """The state of a backward; the table of this module states what each means."""

    LOCAL = "local"
    DEFERRED = "deferred"
    FILLING = "filling"
    SENT = "sent"
    ENDED = "ended"
    FAILED = "failed"


ALLOWED_MOVES: dict[BackwardState, frozenset[BackwardState]] = {
    BackwardState.LOCAL: frozenset({BackwardState.ENDED, BackwardState.FAILED}),
    BackwardState.DEFERRED: frozenset({BackwardState.FILLING, BackwardState.FAILED}),
    BackwardState.FILLING: frozenset({BackwardState.SENT, BackwardState.FAILED}),
    BackwardState.SENT: frozenset({BackwardState.ENDED, BackwardState.FAILED}),
    BackwardState.ENDED: frozenset(),
    BackwardState.FAILED: frozenset(),
}


class Backward:
    """One backward of a module's parameters, from its first gradient to its end.

    Args:
        step: the step that this backward ends.
        state: the state in which it begins.
        num_items: the items behind this rank's gradients, under `normalize_by`; None if they are not counted.
        num_ranks: the number of ranks whose gradients count.
        scale: the factor by which gradients are multiplied when they are copied into buckets.
        unreduced: indices of parameters that hold gradients of earlier backwards, which were not reduced.
        context_id: the context of torch's distributed autograd; None for an ordinary backward.
        has_graph: whether it runs under create_graph=True, so that `.grad` has a graph and must stay the same tensor.

    Example:
        >>> backward = Backward(step=1, state=BackwardState.LOCAL)
        >>> backward.move(BackwardState.ENDED)
        >>> backward.move(BackwardState.SENT)
        Traceback (most recent call last):
        AssertionError: the backward of step 1: ended -> sent
    """

    __slots__ = (
        "absent",
        "began_at",
        "context_id",
        "has_graph",
        "is_synchronized",
        "missing",
        "num_items",
        "num_launched",
        "num_ranks",
        "ready",
        "scale",
        "sent",
        "state",
        "step",
        "unreduced",
    )

    def __init__(
        self,
        *,
        step: int,
        state: BackwardState,
        num_items: int | None = None,
        num_ranks: int = 1,
        scale: float = 1.0,
        unreduced: Set[int] = NO_INDICES,
        context_id: int | None = None,
        has_graph: bool = False,
    ) -> None:
        self.step = step
        self.state = state
        self.num_items = num_items
        self.num_ranks = num_ranks
        self.scale = scale
        self.unreduced = unreduced
        self.context_id = context_id
        self.has_graph = has_graph
        self.is_synchronized = state in (BackwardState.DEFERRED, BackwardState.FILLING)
        """Whether it is, or was to be, reduced."""
        self.began_at = time.perf_counter()
        self.ready: list[int] = []
        """Indices of the parameters in the order in which their gradients were ready."""
        self.absent = NO_INDICES
        """Indices of the parameters that it will not reach, as the autograd engine reported when it began."""
        self.missing = NO_INDICES
        """Indices of the parameters that have got no gradient; known once all buckets are filled."""
        self.num_launched = 0
        """Number of buckets, in index order, that were sent or left out because no rank uses their parameters."""
        self.sent: list[Bucket | SparseBucket] = []

    def move(self, to: BackwardState) -> None:
        """Enter another state."""
        assert to in ALLOWED_MOVES[self.state], (
            f"the backward of step {self.step}: {self.state.value} -> {to.value}"
        )
        self.state = to
