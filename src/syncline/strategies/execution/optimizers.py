"""The attached optimizers of one module: how many steps they have completed, and their state."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from syncline.optimizers.attached import AttachedOptimizer
from syncline.optimizers.contents import floating_state

__all__ = ["Optimizers"]


class Optimizers:
    """The attached optimizers of one module. A step is complete when each of them has taken it."""

    def __init__(self) -> None:
        self.num_steps = 0
        """The number of complete steps."""
        self._taken: dict[AttachedOptimizer, int] = {}

    @property
    def attached(self) -> list[AttachedOptimizer]:
        """The optimizers, in the order in which they were attached."""
        return list(self._taken)

    def watch(self, attached: AttachedOptimizer, replaced: Collection[AttachedOptimizer]) -> None:
        """Count the steps of `attached` from now on, and no longer those of `replaced`."""
        self._taken = {known: taken for known, taken in self._taken.items() if known not in replaced}
        self._taken[attached] = self.num_steps

    def add_step(self, attached: AttachedOptimizer) -> bool:
        """Count one step of an optimizer, and return whether that completes a step of all optimizers."""
        self._taken[attached] += 1
        if min(self._taken.values()) == self.num_steps:
            return False
        self.num_steps += 1
        return True

    def continue_at(self, step: int) -> None:
        """Continue after `step` complete steps, of which each optimizer has taken all."""
        self.num_steps = step
        self._taken = dict.fromkeys(self._taken, step)

    def floating_state(self) -> list[tuple[str, Tensor]]:
        """Return the floating-point tensors of the optimizers' states, with names that are the same on all ranks."""
        return [
            (f"optimizer {number}, {name}", tensor)
            for number, attached in enumerate(self._taken)
            for name, tensor in floating_state(attached.optimizer)
        ]
