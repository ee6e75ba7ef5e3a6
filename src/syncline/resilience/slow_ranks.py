"""Handling of ranks that are slow over many steps in `sl.steps`: none, a warning, or eviction.

The step times of all ranks travel with the gradients, so all ranks detect the same stragglers after the same step
(`gradients/stragglers.py`) and need no vote. Before the next step, the slow rank leaves, and the others agree on a new
membership without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.checks import checked_choice, checked_count, checked_number
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.gradients.stragglers import NUM_PARTS, StragglerRule
from syncline.records import StragglerRecord
from syncline.session.world import world


class SlowRanks:
    """The stragglers of one loop.

    Args:
        on_straggler, straggler_factor, straggler_steps: the arguments of `sl.steps`.
        min_ranks: the smallest number of ranks that train on.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self, on_straggler: str | None, straggler_factor: float, straggler_steps: int, min_ranks: int
    ) -> None:
        if on_straggler is not None:
            checked_choice("on_straggler", on_straggler, ("warn", "evict"))
        self._evicts = on_straggler == "evict"
        self._min_ranks = min_ranks
        self._rule = StragglerRule(
            factor=checked_number("straggler_factor", straggler_factor, above=1),
            num_steps=checked_count("straggler_steps", straggler_steps, at_least=NUM_PARTS),
            warns=on_straggler is not None,
        )
        self._wrappers: Sequence[DistributedDataParallel] = ()

    def watch(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        """Apply the rule of this loop to the wrapped modules. All ranks make this call before the same step."""
        self._wrappers = wrappers
        for wrapper in wrappers:
            wrapper._replica.gradients.state.stragglers.use(self._rule)

    def end(self) -> None:
        """Apply the default rule again, because the loop has ended."""
        for wrapper in self._wrappers:
            wrapper._replica.gradients.state.stragglers.use(StragglerRule())

    def to_leave_behind(self) -> StragglerRecord | None:
        """Return the straggler to evict, or None if there is none. The result is the same on all ranks."""
        if not self._evicts:
            return None
        here = world()
        if here.size - 1 < self._min_ranks:
            return None
        found = []
        for wrapper in self._wrappers:
            gradients = wrapper._replica.gradients
            if gradients.reduction.transport.size == here.size:  # ranks of other groups see other times
                found += gradients.state.stragglers.present
        return max(found, key=lambda one: one.late_seconds, default=None)
