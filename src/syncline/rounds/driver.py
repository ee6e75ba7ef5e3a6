"""Drives a strategy: counts optimizer steps, asks what is due, does it, and records it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from syncline.events import RoundRecord
from syncline.rounds.average import average_weighted, floating_state
from syncline.rounds.gossip import PushSum
from syncline.rounds.outer import OuterLoop
from syncline.rounds.server import ShardedServer
from syncline.strategy.actions import (
    Action,
    Adopt,
    AdvanceOuter,
    Average,
    AverageBuffers,
    Await,
    Close,
    Message,
    Push,
    ReceiveOuter,
    ReduceGradients,
    RestartOuter,
    SendOuter,
    Update,
)
from syncline.strategy.base import Progress, Spec, Strategy
from syncline.strategy.mechanism import OuterCopies, PushSumWeight, ServerShard
from syncline.sync.agreement import describe_tensors, exchange
from syncline.sync.attached import AttachedOptimizer
from syncline.sync.reduction import TensorReducer
from syncline.transport.base import Transport

__all__ = ["Rounds"]

_REMEDY = "Give all ranks the same settings, and step their optimizers as often."


class Rounds:
    """Carries out a strategy for one module on one rank. Making one is a collective call.

    Args:
        strategy: which.
        title: of the module, for messages.
        named: its trained parameters, the same on all ranks.
        transport: between the ranks.
        spec: what the strategy is told.
        equalize_buffers: makes buffers equal, when called on all ranks.
        present_buffers: those that take part.

    Raises:
        ValueError, TypeError: the strategy does not fit the module or the ranks; on every rank, if only one says so.
    """

    def __init__(
        self,
        strategy: Strategy[Any],
        title: str,
        named: Sequence[tuple[str, Tensor]],
        transport: Transport,
        spec: Spec,
        *,
        equalize_buffers: Callable[[], object],
        present_buffers: Callable[[], list[Tensor]],
    ) -> None:
        self.strategy = strategy
        self.transport = transport
        self.step = 0
        """Optimizer steps that are done."""
        self.last: RoundRecord | None = None
        """The most recent one that moved something."""
        self._title = title
        self._named = list(named)
        self._parameters = [parameter for _, parameter in named]
        self._equalize_buffers = equalize_buffers
        self._present_buffers = present_buffers
        self._attached: list[AttachedOptimizer] = []
        self._num_steps: list[int] = []
        self._has_started = False
        lane = transport.lane(f"parameters of {title}")
        self._lane = lane
        self.outer: OuterLoop | None = None
        self._push_sum: PushSum | None = None
        self._server: ShardedServer | None = None
        fault = None
        try:
            self._state = strategy.init(spec)
            kept = strategy.mechanism(spec)
            if isinstance(kept, OuterCopies):
                self.outer = OuterLoop(
                    named, kept.fragments, kept.outer, kept.compression, lane, keeps_sent=kept.keeps_sent
                )
            elif isinstance(kept, PushSumWeight):
                self._push_sum = PushSum(kept.weight, lane)
        except Exception as error:
            fault = error
        exchange(transport, f"{title} by {type(strategy).__name__}", [], fault=fault)
        if fault is None and isinstance(kept, ServerShard) and transport.size > 1:
            self._server = ShardedServer(self._parameters, lane)

    # ------------------------------------------------------------------ what is asked of it

    def reduces(self) -> str | None:
        """Among whom a backward that begins now averages gradients: "all", "worker"; None: they stay local."""
        for action in self.strategy.at_backward(self._state, Progress(step=self.step)):
            if isinstance(action, ReduceGradients):
                return action.among
        return None

    def watch(self, attached: AttachedOptimizer) -> None:
        """Count its steps: a step is done when every attached optimizer has done one."""
        self._attached.append(attached)
        self._num_steps.append(self.step)

    @property
    def is_watching(self) -> bool:
        """Whether an optimizer is attached."""
        return bool(self._attached)

    def step_begins(self) -> None:
        """An attached optimizer is about to step."""
        if self._has_started:
            return
        self._has_started = True  # what was loaded into the module since it was wrapped counts
        if self.outer is not None:
            self.outer.restart()
        if self._server is not None:
            self._server.restart()

    def step_ended(self, attached: AttachedOptimizer) -> None:
        """An attached optimizer has stepped; do what is due when all have."""
        at = next(i for i, known in enumerate(self._attached) if known is attached)
        self._num_steps[at] += 1
        if min(self._num_steps) == self.step:
            return
        self.step += 1
        inbox = self._server.poll() if self._server is not None else ()
        self._carry_out(
            *self.strategy.at_step(self._state, Progress(step=self.step), inbox), is_asked_for=False
        )

    def meet(self) -> None:
        """A meeting out of turn, after which all ranks are equal. A collective call."""
        lines = [f"steps done: {self.step}"] if self._server is not None else []
        exchange(
            self.transport,
            f"ddp.meet() of {self._title}",
            lines,
            remedy="Call it after as many steps on every rank.",
        )
        self.step_begins()
        self._carry_out(*self.strategy.at_meeting(self._state, Progress(step=self.step)), is_asked_for=True)
        if self._server is not None:
            self._server.finish()

    def next_step(self, limit: int = 10_000) -> int | None:
        """After which step something is sent next; None: not within so many steps, or it depends on the others."""
        state = self._state
        if self._server is not None:
            return self.step + 1
        for step in range(self.step + 1, self.step + limit):
            state, actions = self.strategy.at_step(state, Progress(step=step))
            if any(not isinstance(action, RestartOuter) for action in actions):
                return step
        return None

    # ------------------------------------------------------------------ doing it

    def _carry_out(self, state: Any, actions: Sequence[Action], *, is_asked_for: bool) -> None:
        if not actions:
            self._state = state
            return
        board, before, start = self.transport.board, self.transport.statistics(), time.perf_counter()
        former_phase, board.phase = board.phase, f"the meeting after step {self.step}"
        done = list(actions)
        if not is_asked_for:
            self._open(actions)
        self._do_all(actions)
        while any(isinstance(action, Await) for action in actions):
            assert self._server is not None
            inbox: list[Message] = self._server.wait(self.transport.timeout_seconds)
            state, actions = self.strategy.at_step(state, Progress(step=self.step), inbox)
            self._do_all(actions)
            done += actions
        if self._server is not None:
            self._server.write()
        self._state = state
        board.phase = former_phase
        sent = self.transport.statistics() - before
        words = tuple(dict.fromkeys(_in_words(done)))
        if words:
            self.last = RoundRecord(
                step=self.step,
                what=words,
                num_calls=sent.total_calls,
                payload_bytes=sent.total_bytes,
                waited_seconds=sent.waited_seconds,
                duration_seconds=time.perf_counter() - start,
            )

    def _open(self, actions: Sequence[Action]) -> None:
        """Agree that this is where all ranks are; but not where they go on computing while something travels."""
        average = next((action for action in actions if isinstance(action, Average)), None)
        sent = {action.fragment for action in actions if isinstance(action, SendOuter)}
        received = {action.fragment for action in actions if isinstance(action, ReceiveOuter)}
        if average is None and not sent & received:
            return
        lines = [
            line
            for number, attached in enumerate(self._attached)
            for line in attached.describe(number)
            if not line.startswith("steps of")
        ]
        if average is not None and average.optimizer_state:
            lines += describe_tensors(self._optimizer_state(), kind="state", layout=False)
        exchange(
            self.transport,
            f"the meeting of {self._title} after step {self.step}",
            lines,
            remedy=_REMEDY,
        )

    def _do_all(self, actions: Sequence[Action]) -> None:
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
                self._push_sum.push([*self._parameters, *self._floating_buffers()], to, sources)
            case Update(clock):
                assert self._server is not None
                self._server.begin(clock)
            case Close(clock):
                assert self._server is not None
                self._server.close(clock)
            case Adopt(shard, clock):
                assert self._server is not None
                self._server.adopt(shard, clock)
            case _:
                assert isinstance(action, Await), action

    def _average(self, action: Average) -> None:
        if action.by_weight:
            assert self._push_sum is not None
            average_weighted(
                [*self._parameters, *self._floating_buffers()], self._push_sum.weight, self._lane
            )
            self._push_sum.restart()
        else:
            tensors = list(self._parameters)
            if action.optimizer_state:
                tensors += [tensor for _, tensor in self._optimizer_state()]
            TensorReducer(tensors, self._lane, "mean", rounds_once=True).run()
        self._equalize_buffers()

    def _floating_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self._present_buffers() if buffer.is_floating_point()]

    def _optimizer_state(self) -> list[tuple[str, Tensor]]:
        return [
            (f"optimizer {number}, {name}", tensor)
            for number, attached in enumerate(self._attached)
            for name, tensor in floating_state(attached.optimizer)
        ]

    # ------------------------------------------------------------------ saved and loaded

    def state_dict(self) -> dict[str, Any]:
        """What it remembers; see `DistributedDataParallel.sync_state_dict`."""
        parts = {name: part.state_dict() for name, part in self._parts()}
        return {
            "strategy": str(self.strategy),
            "step": self.step,
            "has_started": self._has_started,
            "state": self._state._asdict(),
            **parts,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The inverse.

        Raises:
            ValueError: it is of another strategy or module.
        """
        if saved["strategy"] != str(self.strategy):
            raise ValueError(
                f"this was saved under strategy={saved['strategy']}; the module is wrapped with "
                f"strategy={self.strategy}: wrap it with the same strategy"
            )
        for name, part in self._parts():
            part.load_state_dict(saved[name])
        self._state = self.strategy.state_from(saved["state"])
        self.step, self._has_started = saved["step"], saved["has_started"]
        self._num_steps = [self.step] * len(self._num_steps)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        parts = {"outer": self.outer, "push_sum": self._push_sum, "server": self._server}
        return ((name, part) for name, part in parts.items() if part is not None)

    @property
    def outer_optimizer(self) -> Optimizer | None:
        """The outer optimizer, where there is one."""
        return None if self.outer is None else self.outer.optimizer


def _in_words(actions: Sequence[Action]) -> Iterator[str]:
    for action in actions:
        match action:
            case Average(optimizer_state=with_state):
                yield "averaged parameters, buffers" + (" and optimizer state" if with_state else "")
            case AverageBuffers():
                yield "made buffers equal"
            case SendOuter(fragment):
                yield f"sent the outer gradient of fragment {fragment}"
            case ReceiveOuter(fragment):
                yield f"took the outer step of fragment {fragment}"
            case Push(to, sources):
                yield f"sent to {_ranks(to)}, received from {_ranks(sources)}"
            case Update():
                yield "sent its update to all servers"
            case Close(clock):
                yield f"closed its shard at step {clock}"
            case Adopt(shard, clock):
                yield f"took over shard {shard} of step {clock}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks)) or 'none'}"
