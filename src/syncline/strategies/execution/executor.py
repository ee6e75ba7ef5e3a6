"""Carry out the actions of a strategy on the tensors and optimizers of one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from syncline.optimizers.attached import AttachedOptimizer, settings_of
from syncline.optimizers.contents import floating_state
from syncline.strategies.base import (
    Action,
    Average,
    AverageBuffers,
    Await,
    Mechanism,
    OuterCopies,
    PushSumWeight,
    ServerShard,
)
from syncline.strategies.execution.kept import Kept
from syncline.strategies.execution.outer_step import OuterLoop
from syncline.strategies.execution.push_sum import PushSum
from syncline.strategies.execution.server import ShardedServer
from syncline.tensors.reduction import TensorReducer
from syncline.transport.base import Transport


class Optimizers:
    """The attached optimizers of one module. A step is complete as soon as each of them has taken it."""

    def __init__(self) -> None:
        self.num_steps = 0
        """The number of complete steps."""
        self._taken: dict[AttachedOptimizer, int] = {}

    @property
    def attached(self) -> list[AttachedOptimizer]:
        """The attached optimizers, in the order in which they were attached."""
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
        """Set the number of complete steps, all of which each optimizer has taken."""
        self.num_steps = step
        self._taken = dict.fromkeys(self._taken, step)

    def floating_state(self) -> list[tuple[str, Tensor]]:
        """Return the floating-point tensors of the optimizers' states, with names that are the same on all ranks."""
        return [
            (f"optimizer {number}, {name}", tensor)
            for number, attached in enumerate(self._taken)
            for name, tensor in floating_state(attached.optimizer)
        ]


class Executor:
    """The tensors of one module on one rank, and the data that a strategy's actions need beside them.

    Args:
        mechanism: the data that the strategy needs.
        named: the module's trained parameters with their names, the same on all ranks.
        lane: carries parameters and what is averaged with them, and nothing else.
        optimizers: the attached optimizers, whose state a strategy may average as well.
        equalize_buffers: makes the buffers equal; all ranks must call it.
        present_buffers: returns the buffers that take part in syncs.

    Raises:
        TypeError: the outer optimizer is not an optimizer.
        ValueError: the outer optimizer has parameters other than those that it was given.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        named: Sequence[tuple[str, Tensor]],
        lane: Transport,
        optimizers: Optimizers,
        *,
        equalize_buffers: Callable[[], object],
        present_buffers: Callable[[], list[Tensor]],
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        self._mechanism = mechanism
        self._lane = lane
        self._optimizers = optimizers
        self._equalize_buffers = equalize_buffers
        self._present_buffers = present_buffers
        self.kept = OuterLoop(named, mechanism, lane) if isinstance(mechanism, OuterCopies) else Kept()
        """The data beside the module, complete after `connect`."""

    @property
    def weight(self) -> float:
        """This rank's push-sum weight; 1.0 without one."""
        return self._mechanism.weight if isinstance(self._mechanism, PushSumWeight) else 1.0

    def connect(self, weights: Sequence[float]) -> None:
        """Create the data of gossip or of a parameter server. `weights` are the push-sum weights in rank order."""
        if isinstance(self._mechanism, PushSumWeight):
            self.kept = PushSum(weights, self._lane, self._mixed_tensors)
        elif isinstance(self._mechanism, ServerShard) and self._lane.size > 1:
            self.kept = ShardedServer(self.parameters, self._lane)

    @property
    def lanes(self) -> list[Transport]:
        """The lanes that the strategy's data travels on."""
        return [self._lane, *self.kept.lanes]

    @property
    def has_buffers(self) -> bool:
        """Whether there are buffers that take part in syncs."""
        return bool(self._present_buffers())

    @property
    def outer_settings(self) -> list[str]:
        """The settings of the outer optimizer, which must be equal on all ranks."""
        groups = [] if self.kept.optimizer is None else settings_of(self.kept.optimizer)
        return [
            f"outer optimizer, param_groups[{index}].{key}  {value}"
            for index, group in enumerate(groups)
            for key, value in group
        ]

    def run(self, actions: Sequence[Action]) -> None:
        """Carry out actions in their order, except `Await`, which is left to the caller."""
        for action in actions:
            match action:
                case Average():
                    self._average(action)
                    self._equalize_buffers()
                case AverageBuffers():
                    self._equalize_buffers()
                case Await():
                    pass
                case _:
                    self.kept.run(action)

    def _average(self, action: Average) -> None:
        if action.by_weight:
            self.kept.run(action)
            return
        tensors = list(self.parameters)
        if action.optimizer_state:
            tensors += [tensor for _, tensor in self._optimizers.floating_state()]
        TensorReducer(tensors, self._lane, "mean", rounds_once=True).run()

    def _mixed_tensors(self) -> list[Tensor]:
        """Return the tensors that gossip mixes: the parameters, and the floating-point buffers."""
        buffers = self._present_buffers()
        return [*self.parameters, *(buffer for buffer in buffers if buffer.is_floating_point())]
