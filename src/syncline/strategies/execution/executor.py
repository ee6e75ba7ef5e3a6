"""Carry out the actions of a strategy on the tensors and optimizers of one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_
from syncline.optimizers.attached import AttachedOptimizer, settings_of
from syncline.optimizers.contents import floating_state
from syncline.strategies.actions import (
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
from syncline.strategies.execution.standing import Standing
from syncline.tensors.reduction import TensorReducer
from syncline.tensors.targets import mark_written
from syncline.transport.base import Transport


class Optimizers:
    """The attached optimizers of one module, and a count of the steps of each optimizer.

    A step of the module is complete as soon as each attached optimizer has taken it.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        """The number of steps that every attached optimizer has taken."""
        self._taken: dict[AttachedOptimizer, int] = {}

    @property
    def attached(self) -> list[AttachedOptimizer]:
        """The attached optimizers, in the order in which they were attached."""
        return list(self._taken)

    def watch(self, attached: AttachedOptimizer, replaced: Collection[AttachedOptimizer]) -> None:
        """Count the steps of an attached optimizer from now on.

        The steps of the optimizers in `replaced` are no longer counted.
        """
        self._taken = {known: taken for known, taken in self._taken.items() if known not in replaced}
        self._taken[attached] = self.num_steps

    def add_step(self, attached: AttachedOptimizer) -> bool:
        """Count one step of an optimizer. Return whether every attached optimizer has now taken this step."""
        self._taken[attached] += 1
        if min(self._taken.values()) == self.num_steps:
            return False
        self.num_steps += 1
        return True

    def continue_at(self, step: int, taken: Sequence[int] | None = None) -> None:
        """Set the number of steps that every attached optimizer has taken, for example after a state was loaded.

        Args:
            step: the number of steps that all optimizers have taken.
            taken: the number of steps of each optimizer, if some have taken one more.
        """
        self.num_steps = step
        self._taken = dict(zip(self._taken, taken or [step] * len(self._taken), strict=True))

    @property
    def taken(self) -> list[int]:
        """The number of steps of each optimizer, in the order in which they were attached."""
        return list(self._taken.values())

    def floating_state(self) -> list[tuple[str, Tensor]]:
        """Return the floating-point tensors of the optimizers' states, with names that are the same on all ranks."""
        return [
            (f"optimizer {number}, {name}", tensor)
            for number, attached in enumerate(self._taken)
            for name, tensor in floating_state(attached.optimizer)
        ]


class Executor:
    """The executor of a strategy's actions on one module and one rank.

    Args:
        mechanism: a description of the data that the strategy's actions need beside the module; None if there is none.
        named: the module's trained parameters with their names. The names are the same on all ranks.
        lane: the lane for the parameters and the tensors averaged with them. It carries no other data.
        optimizers: the attached optimizers. A strategy can also average their state.
        standing: the confirmation of syncs.
        equalize_buffers: a function that makes the buffers equal on all ranks; a collective call.
        present_buffers: a function that returns the buffers that are synchronized.

    Raises:
        TypeError: the function for the outer optimizer does not return an optimizer.
        ValueError: the outer optimizer has other parameters than the copies that it should step.
    """

    def __init__(
        self,
        mechanism: Mechanism | None,
        named: Sequence[tuple[str, Tensor]],
        lane: Transport,
        optimizers: Optimizers,
        standing: Standing,
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
        self._standing = standing
        self.kept = (
            OuterLoop(named, mechanism, lane, standing) if isinstance(mechanism, OuterCopies) else Kept()
        )
        """The data that the actions need beside the module. For gossip and parameter servers `connect` creates it."""

    @property
    def weight(self) -> float:
        """This rank's push-sum weight, or 1.0 if the strategy has no push-sum weights."""
        return self._mechanism.weight if isinstance(self._mechanism, PushSumWeight) else 1.0

    def connect(self, weights: Sequence[float]) -> None:
        """Create the data of gossip or of a parameter server, if the strategy needs it.

        Args:
            weights: the push-sum weights of all ranks, in rank order.
        """
        if isinstance(self._mechanism, PushSumWeight):
            self.kept = PushSum(weights, self._lane, self._mixed_tensors)
        elif isinstance(self._mechanism, ServerShard) and self._lane.size > 1:
            self.kept = ShardedServer(self.parameters, self._lane)

    def follow(self, lane: Transport) -> None:
        """Carry out actions over another lane from now on, and discard what is in flight. Call `connect` afterwards."""
        self._lane = lane
        if isinstance(self.kept, OuterLoop):
            self.kept.follow(lane)
        else:
            self.kept = Kept()

    @property
    def is_apart(self) -> bool:
        """Whether ranks send to single other ranks, so that they never meet all at once."""
        return isinstance(self._mechanism, PushSumWeight | ServerShard)

    @property
    def lanes(self) -> list[Transport]:
        """The lanes that carry the strategy's data."""
        return [self._lane, *self.kept.lanes]

    @property
    def has_buffers(self) -> bool:
        """Whether the module has buffers that are synchronized."""
        return bool(self._present_buffers())

    @property
    def outer_settings(self) -> list[str]:
        """The settings of the outer optimizer as one line of text each. They must be equal on all ranks."""
        groups = [] if self.kept.optimizer is None else settings_of(self.kept.optimizer)
        return [
            f"outer optimizer, param_groups[{index}].{key}  {value}"
            for index, group in enumerate(groups)
            for key, value in group
        ]

    def run(self, action: Action) -> None:
        """Carry out an action. Skip `Await`, because the caller waits for messages."""
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

    def averaged_by(self, actions: Sequence[Action]) -> list[Tensor]:
        """Return the tensors that actions replace by their plain mean, without the buffers. There may be none."""
        plain = [action for action in actions if isinstance(action, Average) and not action.by_weight]
        if not plain or self._lane.size == 1:
            return []
        with_state = any(action.optimizer_state for action in plain)
        state = self._optimizers.floating_state() if with_state else []
        return [*self.parameters, *(tensor for _, tensor in state)]

    def _average(self, action: Average) -> None:
        if action.by_weight:
            self.kept.run(action)
            return
        tensors = self.averaged_by([action])
        if not self._standing.confirms:
            TensorReducer(tensors, self._lane, "mean", rounds_once=True).run()
            return
        means = [tensor.detach().clone() for tensor in tensors]
        TensorReducer(means, self._lane, "mean", rounds_once=True).run()

        def write() -> None:
            with torch.no_grad():
                foreach_copy_([tensor.data for tensor in tensors], means)
            mark_written(tensors)

        self._standing.write(write)

    def _mixed_tensors(self) -> list[Tensor]:
        """Return the tensors that gossip mixes: the parameters, and the floating-point buffers."""
        buffers = self._present_buffers()
        return [*self.parameters, *(buffer for buffer in buffers if buffer.is_floating_point())]
