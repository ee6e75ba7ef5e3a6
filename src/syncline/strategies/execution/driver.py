"""Run a strategy: count optimizer steps, ask the strategy for actions, carry them out, and record them."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from syncline.equality.fingerprint import digest_of, fingerprints
from syncline.errors import ReplicaDivergence, SynclineError
from syncline.optimizers.attached import AttachedOptimizer, settings_of
from syncline.optimizers.contents import floating_state
from syncline.records import RoundRecord
from syncline.strategies.actions import (
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
from syncline.strategies.base import OuterCopies, Progress, PushSumWeight, ServerShard, Spec, Strategy
from syncline.strategies.execution.outer_step import OuterLoop
from syncline.strategies.execution.push_sum import PushSum
from syncline.strategies.execution.server import ShardedServer
from syncline.tensors.reduction import TensorReducer
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport
from syncline.user_code import calling

__all__ = ["Rounds"]


_WEIGHT = struct.Struct("<d")

_REMEDY = "Give all ranks the same settings, and step their optimizers equally often."


class Rounds:
    """Runs a strategy for one module on one rank. The constructor is a collective call.

    Args:
        strategy: the strategy to run.
        title: the module's title, for messages.
        named: the module's trained parameters with their names, the same on all ranks.
        transport: connects the ranks.
        spec: the situation, which is passed to the strategy.
        equalize_buffers: makes the buffers equal; all ranks must call it.
        present_buffers: returns the buffers that take part in syncs.

    Raises:
        ValueError, TypeError: the strategy does not fit the module or the ranks. All ranks raise if one does.
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
        """Number of optimizer steps completed."""
        self.last: RoundRecord | None = None
        """The most recent round that sent or received something."""
        self.when_equal: Callable[[int], object] | None = None
        """Callback. It is called with the step after each sync that made all parameters equal, on all ranks."""
        self.are_equal = False
        """Whether all parameters are known to be equal, because no rank has stepped since they were made equal."""
        self._title = title
        self._spec = spec
        self._parameters = [parameter for _, parameter in named]
        self._equalize_buffers = equalize_buffers
        self._present_buffers = present_buffers
        self._attached: list[AttachedOptimizer] = []
        self._num_steps: list[int] = []
        self._has_started = False
        self._met_out_of_turn_at = 0
        lane = transport.lane(f"parameters of {title}")
        self._lane = lane
        self.outer: OuterLoop | None = None
        self._push_sum: PushSum | None = None
        self._server: ShardedServer | None = None
        self.synced_at: dict[str, int] = {}
        """For parameters, buffers and optimizer: the step after which each was last synced."""
        fault = None
        weight = 1.0
        try:
            # Syncline's own strategies raise Syncline's errors. Errors of a user's strategy are marked as user code.
            is_ours = type(strategy).__module__.startswith("syncline.")
            with nullcontext() if is_ours else calling(f"init() or mechanism() of {type(strategy).__name__}"):
                self._state = strategy.init(spec)
                kept = strategy.mechanism(spec)
            if isinstance(kept, OuterCopies):
                self.outer = OuterLoop(
                    named, kept.fragments, kept.outer, kept.compression, lane, keeps_sent=kept.keeps_sent
                )
            elif isinstance(kept, PushSumWeight):
                weight = kept.weight
        except Exception as error:
            fault = error
        rows = exchange(
            transport,
            f"{title} by {type(strategy).__name__}",
            self._outer_settings(),
            payload=_WEIGHT.pack(weight),
            fault=fault,
            remedy=_REMEDY,
        )
        if isinstance(kept, PushSumWeight):
            weights = [_WEIGHT.unpack_from(row)[0] for row in rows]
            self._push_sum = PushSum(weights, lane)
        elif isinstance(kept, ServerShard) and transport.size > 1:
            self._server = ShardedServer(self._parameters, lane)

    @property
    def lanes(self) -> list[Transport]:
        """The lanes to close once this object is no longer needed."""
        return [self._lane, *(() if self._server is None else self._server.lanes)]

    # ------------------------------------------------------------------ called by the wrapper

    def reduces(self) -> str | None:
        """Return which ranks average gradients in a backward that begins now: "all", "worker", or None for no ranks."""
        for action in self.strategy.at_backward(self._state, Progress(step=self.step)):
            if isinstance(action, ReduceGradients):
                return action.among
        return None

    def watch(self, attached: AttachedOptimizer, replaced: Collection[AttachedOptimizer] = ()) -> None:
        """Count an optimizer's steps. A step is complete when every attached optimizer has taken it.

        Args:
            attached: the new optimizer.
            replaced: the attached optimizers that it replaces.
        """
        kept = [
            (known, num_steps)
            for known, num_steps in zip(self._attached, self._num_steps, strict=True)
            if known not in replaced
        ]
        self._attached = [*(known for known, _ in kept), attached]
        self._num_steps = [*(num_steps for _, num_steps in kept), self.step]

    @property
    def is_watching(self) -> bool:
        """Whether an optimizer is attached."""
        return bool(self._attached)

    def step_begins(self) -> None:
        """Prepare for an optimizer step. The first call is collective if the strategy keeps copies of parameters."""
        if self._has_started:
            return
        self._has_started = True  # not in __init__: values may be loaded into the module after it was wrapped
        if self.outer is None and self._server is None:
            return
        digest = digest_of(fingerprints([parameter.detach() for parameter in self._parameters]))
        title = f"the first step of {self._title}"
        if len(set(exchange(self.transport, title, [], payload=digest))) > 1:
            raise ReplicaDivergence(
                f"{title}: expected equal parameters on all ranks, because {self.strategy} continues from them, but "
                "they differ: sl.broadcast_(ddp) makes them rank 0's, sl.check_replicas(ddp) says which ones differ",
                tensor="",
                num_differing=0,
                minority_ranks=(),
            )
        self.restart()
        if self._server is not None:
            self._server.restart()

    def restart(self) -> None:
        """Take the current parameters, which are equal on all ranks, as the new start of the outer optimizer."""
        self.are_equal = True
        if self.outer is not None and not self.outer.is_under_way:
            self.outer.restart()

    def step_ended(self, attached: AttachedOptimizer) -> None:
        """Record that an attached optimizer has stepped, and run the due actions once all of them have."""
        self._num_steps[self._attached.index(attached)] += 1
        self.are_equal = False
        if min(self._num_steps) == self.step:
            return
        self.step += 1
        inbox = self._server.poll() if self._server is not None else ()
        state, actions = self.strategy.at_step(self._state, Progress(step=self.step), inbox)
        if self._is_blocking(actions):
            title = f"the parameter sync of {self._title} after step {self.step}"
            exchange(self.transport, title, self._lines(actions), remedy=_REMEDY)
        self._carry_out(state, actions)

    def sync_parameters(self) -> None:
        """Run a sync now, outside of the schedule. Afterwards all ranks are equal. A collective call."""
        state, actions = self.strategy.at_meeting(self._state, Progress(step=self.step))
        # Ranks with different actions would mix up their messages, so the actions are compared first.
        wanted = [] if self._server is not None else [str(action) for action in actions]
        exchange(
            self.transport,
            f"ddp.sync_parameters_() of {self._title}",
            [f"steps done: {self.step}", *wanted, *self._lines(actions)],
            remedy="Call it after as many steps on every rank, with the same settings.",
        )
        self.step_begins()
        self._carry_out(state, actions)
        if self._server is not None:
            self._server.finish()
        self._met_out_of_turn_at = self.step

    def check_may_wait(self, what: str) -> None:
        """Raise, on all ranks alike, if waiting for the other ranks now could deadlock with a parameter server."""
        if self._server is not None and self._met_out_of_turn_at != self.step:
            raise SynclineError(
                f"{what} after step {self.step}: under strategy={self.strategy} updates are under way after each step, "
                "and a rank that waits serves none: call ddp.sync_parameters_() right before it, on all ranks, every "
                "so many steps"
            )

    def next_step(self, limit: int = 10_000) -> int | None:
        """Return the step after which something is sent next.

        Returns None if nothing is sent within `limit` steps, or if it depends on the other ranks.
        """
        state = self._state
        if self._server is not None:
            return self.step + 1
        for step in range(self.step + 1, self.step + limit):
            state, actions = self.strategy.at_step(state, Progress(step=step))
            if any(self._sends(action) for action in actions):
                return step
        return None

    # ------------------------------------------------------------------ carrying out actions

    def _carry_out(self, state: Any, actions: Sequence[Action]) -> None:
        if not actions:
            self._state = state
            return
        board, before, start = self.transport.board, self.transport.statistics(), time.perf_counter()
        former_phase, board.phase = board.phase, f"the meeting after step {self.step}"
        done = list(actions)
        try:
            self._do_all(actions)
            while any(isinstance(action, Await) for action in actions):
                assert self._server is not None
                inbox: list[Message] = self._server.wait(self.transport.timeout_seconds)
                state, actions = self.strategy.at_step(state, Progress(step=self.step), inbox)
                self._do_all(actions)
                done += actions
            if self._server is not None:
                self._server.write()
        finally:
            board.phase = former_phase
        self._state = state
        sent = self.transport.statistics() - before
        words = tuple(dict.fromkeys(self._in_words(done)))
        for what in self._that_met(done):
            self.synced_at[what] = self.step
        if words:
            self.last = RoundRecord(
                step=self.step,
                what=words,
                num_calls=sent.total_calls,
                payload_bytes=sent.total_bytes,
                waited_seconds=sent.waited_seconds,
                duration_seconds=time.perf_counter() - start,
            )
        self.are_equal = self._makes_equal(done)
        if self.when_equal is not None and self.are_equal:
            self.when_equal(self.step)

    def _makes_equal(self, actions: Sequence[Action]) -> bool:
        """Return whether the actions make all parameters equal."""
        if any(isinstance(action, Average) for action in actions):
            return True
        taken = {
            action.fragment for action in actions if isinstance(action, ReceiveOuter) and action.mixing == 0
        }
        return self.outer is not None and len(taken) == self.outer.num_fragments

    def _is_blocking(self, actions: Sequence[Action]) -> bool:
        """Return whether all ranks wait for each other in these actions; False if they compute while data travels."""
        sent = {action.fragment for action in actions if isinstance(action, SendOuter)}
        received = {action.fragment for action in actions if isinstance(action, ReceiveOuter)}
        return bool(sent & received) or any(isinstance(action, Average) for action in actions)

    def _lines(self, actions: Sequence[Action]) -> list[str]:
        """Return descriptions of the settings that must be equal on all ranks at a sync."""
        lines = [
            line
            for number, attached in enumerate(self._attached)
            for line in attached.describe_settings(number)
        ]
        lines += self._outer_settings()
        if any(isinstance(action, Average) and action.optimizer_state for action in actions):
            lines += describe_tensors(self._optimizer_state(), kind="state", layout=False)
        return lines

    def _outer_settings(self) -> list[str]:
        if self.outer is None:
            return []
        return [
            f"outer optimizer, param_groups[{index}].{key}  {value}"
            for index, group in enumerate(settings_of(self.outer.optimizer))
            for key, value in group
        ]

    def _sends(self, action: Action) -> bool:
        """Return whether an action sends something."""
        if isinstance(action, AverageBuffers):
            return bool(self._present_buffers())
        return not isinstance(action, RestartOuter)

    def _that_met(self, actions: Sequence[Action]) -> set[str]:
        """Return what the actions synchronize: any of "parameters", "buffers" and "optimizer"."""
        met = set()
        for action in actions:
            if isinstance(action, Average | ReceiveOuter | Push | Close | Adopt):
                met.add("parameters")
            if isinstance(action, Average | AverageBuffers | Push) and self._present_buffers():
                met.add("buffers")
            if isinstance(action, Average) and action.optimizer_state:
                met.add("optimizer")
        return met

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
            self._push_sum.average([*self._parameters, *self._floating_buffers()])
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

    def _in_words(self, actions: Sequence[Action]) -> Iterator[str]:
        buffers = bool(self._present_buffers())
        for action in actions:
            match action:
                case Average(optimizer_state=with_state):
                    what = [
                        "parameters",
                        *(["buffers"] if buffers else []),
                        *(["optimizer state"] if with_state else []),
                    ]
                    yield f"averaged {', '.join(what)}"
                case AverageBuffers() if buffers:
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

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy and of its execution; see `DistributedDataParallel.sync_state_dict`."""
        self._check_settled()
        parts = {name: part.state_dict() for name, part in self._parts()}
        return {
            "strategy": str(self.strategy),
            "step": self.step,
            "has_started": self._has_started,
            "are_equal": self.are_equal,
            "state": self._state._asdict(),
            **parts,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: the state was saved under another strategy or for another module.
        """
        if saved["strategy"] != str(self.strategy):
            raise ValueError(
                f"this was saved under strategy={saved['strategy']}; the module is wrapped with "
                f"strategy={self.strategy}: wrap it with the same strategy"
            )
        self._check_settled()
        for name, part in self._parts():
            if isinstance(part, ShardedServer) and name not in saved:
                part.restart()  # it was saved by a run with one rank, which has no servers
            else:
                part.load_state_dict(saved[name])
        self._state = self.strategy.state_from(saved["state"], self._spec)
        self.step, self._has_started = saved["step"], saved["has_started"]
        self.are_equal = saved.get(
            "are_equal", False
        )  # absent in states saved by versions without replica checks
        self._met_out_of_turn_at = self.step
        self._num_steps = [self.step] * len(self._num_steps)

    def _check_settled(self) -> None:
        if self._server is not None and not self._server.is_settled:
            raise SynclineError(
                "updates of a ParameterServer are under way, so that nothing can be saved or loaded: call "
                "ddp.sync_parameters_() on all ranks first"
            )

    def _parts(self) -> Iterator[tuple[str, Any]]:
        parts = {"outer": self.outer, "push_sum": self._push_sum, "server": self._server}
        return ((name, part) for name, part in parts.items() if part is not None)

    @property
    def outer_optimizer(self) -> Optimizer | None:
        """The outer optimizer, or None."""
        return None if self.outer is None else self.outer.optimizer


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks)) or 'none'}"
