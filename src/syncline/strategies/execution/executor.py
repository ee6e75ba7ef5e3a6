"""Carry out the actions of a strategy: move the tensors of one rank, and the state of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from syncline.optimizers.attached import AttachedOptimizer, settings_of
from syncline.optimizers.contents import floating_state
from syncline.strategies.base import (
    Action,
    Adopt,
    AdvanceOuter,
    Average,
    AverageBuffers,
    Await,
    Close,
    Mechanism,
    OuterCopies,
    Push,
    PushSumWeight,
    ReceiveOuter,
    RestartOuter,
    SendOuter,
    ServerShard,
    Update,
)
from syncline.strategies.execution.outer_step import OuterLoop
from syncline.strategies.execution.push_sum import PushSum
from syncline.strategies.execution.server import ShardedServer
from syncline.tensors.reduction import TensorReducer
from syncline.transport.base import Transport


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


class Executor:
    """The tensors of one module on one rank, and the data that the strategy's actions need beside them.

    Args:
        kept: the data that the strategy asks for.
        named: the module's trained parameters with their names, the same on all ranks.
        lane: carries parameters and what is averaged with them, and nothing else.
        optimizers: the attached optimizers, whose state a strategy may average as well.
        equalize_buffers: makes the buffers equal; all ranks must call it.
        present_buffers: returns the buffers that take part in syncs.

    Raises:
        TypeError, ValueError: the outer optimizer is not one, or is one of other parameters.
    """

    def __init__(
        self,
        kept: Mechanism,
        named: Sequence[tuple[str, Tensor]],
        lane: Transport,
        optimizers: Optimizers,
        *,
        equalize_buffers: Callable[[], object],
        present_buffers: Callable[[], list[Tensor]],
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        self._kept = kept
        self._lane = lane
        self._optimizers = optimizers
        self._equalize_buffers = equalize_buffers
        self._present_buffers = present_buffers
        self.outer: OuterLoop | None = None
        self.server: ShardedServer | None = None
        self._push_sum: PushSum | None = None
        if isinstance(kept, OuterCopies):
            self.outer = OuterLoop(
                named, kept.fragments, kept.outer, kept.compression, lane, keeps_sent=kept.keeps_sent
            )

    @property
    def weight(self) -> float:
        """This rank's push-sum weight; 1.0 without one."""
        return self._kept.weight if isinstance(self._kept, PushSumWeight) else 1.0

    def connect(self, weights: Sequence[float]) -> None:
        """Prepare what needs the other ranks. `weights` are the weights of all ranks, in rank order."""
        if isinstance(self._kept, PushSumWeight):
            self._push_sum = PushSum(weights, self._lane)
        elif isinstance(self._kept, ServerShard) and self._lane.size > 1:
            self.server = ShardedServer(self.parameters, self._lane)

    @property
    def lanes(self) -> list[Transport]:
        """The lanes to close once this object is no longer needed."""
        return [self._lane, *(() if self.server is None else self.server.lanes)]

    @property
    def has_copies(self) -> bool:
        """Whether there is a second copy of the parameters, which has to start from equal parameters."""
        return self.outer is not None or self.server is not None

    @property
    def has_buffers(self) -> bool:
        """Whether there are buffers that take part in syncs."""
        return bool(self._present_buffers())

    @property
    def num_fragments(self) -> int:
        """The number of fragments of the outer optimizer; 0 without one."""
        return 0 if self.outer is None else self.outer.num_fragments

    @property
    def outer_settings(self) -> list[str]:
        """The settings of the outer optimizer, which must be equal on all ranks."""
        if self.outer is None:
            return []
        return [
            f"outer optimizer, param_groups[{index}].{key}  {value}"
            for index, group in enumerate(settings_of(self.outer.optimizer))
            for key, value in group
        ]

    @property
    def parts(self) -> Iterator[tuple[str, Any]]:
        """The parts with a state of their own, by the names under which they are saved."""
        parts = {"outer": self.outer, "push_sum": self._push_sum, "server": self.server}
        return ((name, part) for name, part in parts.items() if part is not None)

    def run(self, actions: Sequence[Action]) -> None:
        """Carry out actions in their order; `Await` is left to the caller."""
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Average():
                self._average(action)
            case AverageBuffers():
                self._equalize_buffers()
            case RestartOuter():
                assert self.outer is not None
                self.outer.restart()
            case SendOuter(fragment):
                assert self.outer is not None
                self.outer.send(fragment)
            case AdvanceOuter(fragment):
                assert self.outer is not None
                self.outer.advance(fragment)
            case ReceiveOuter(fragment, mixing):
                assert self.outer is not None
                self.outer.receive(fragment, mixing)
            case Push(to, sources):
                assert self._push_sum is not None
                self._push_sum.push([*self.parameters, *self._floating_buffers()], to, sources)
            case Update(clock):
                assert self.server is not None
                self.server.begin(clock)
            case Close(clock):
                assert self.server is not None
                self.server.close(clock)
            case Adopt(shard, clock):
                assert self.server is not None
                self.server.adopt(shard, clock)
            case _:
                assert isinstance(action, Await), action

    def _average(self, action: Average) -> None:
        if action.by_weight:
            assert self._push_sum is not None
            self._push_sum.average([*self.parameters, *self._floating_buffers()])
        else:
            tensors = list(self.parameters)
            if action.optimizer_state:
                tensors += [tensor for _, tensor in self._optimizers.floating_state()]
            TensorReducer(tensors, self._lane, "mean", rounds_once=True).run()
        self._equalize_buffers()

    def _floating_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self._present_buffers() if buffer.is_floating_point()]
