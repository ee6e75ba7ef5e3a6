"""Run a strategy: count optimizer steps, ask the strategy for actions, carry them out, and record them."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline._torch.autograd import profiled
from syncline._torch.tensors import foreach_copy_
from syncline.equality.fingerprint import hash_of, hash_of_sample
from syncline.equality.locate import emit_divergence
from syncline.errors import ReplicaDivergence, SynclineError
from syncline.events import OBSERVERS, ParametersSynced, Source, emit
from syncline.liveness.board import StepPhase
from syncline.optimizers.attached import AttachedOptimizer, Optimizers, settings_of
from syncline.records import RoundRecord
from syncline.strategies.actions import (
    Action,
    Average,
    AverageBuffers,
    Await,
    Mechanism,
    OuterCopies,
    Push,
    PushSumWeight,
    ReceiveOuter,
    ReduceGradients,
    SendOuter,
    ServerShard,
    are_blocking,
    descriptions,
    make_equal,
    synchronized_by,
)
from syncline.strategies.base import Progress, Spec, Strategy
from syncline.strategies.execution.kept import Kept
from syncline.strategies.execution.outer_step import OuterLoop
from syncline.strategies.execution.push_sum import PushSum
from syncline.strategies.execution.server import ShardedServer
from syncline.strategies.execution.standing import Standing
from syncline.tensors.reduction import TensorReducer
from syncline.tensors.targets import mark_written
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport
from syncline.user_code import calling

_WEIGHT = struct.Struct("<d")

_REMEDY = "Use the same settings on all ranks, and step the optimizers equally often on all ranks."


class Rounds:
    """The execution of one module's strategy on one rank. The constructor is a collective call.

    Args:
        strategy: the strategy to run.
        title: the title of the module in messages.
        named: the module's trained parameters with their names. The names are the same on all ranks.
        transport: connects the ranks.
        spec: describes the ranks and the parameters to the strategy.
        are_equal: whether the parameters are known to be equal on all ranks.
        when_equal: a function that is called on all ranks after each sync that has made all parameters equal. Its
            argument is the number of the step.
        equalize_buffers: a function that makes the buffers equal on all ranks; a collective call.
        present_buffers: a function that returns the buffers that are synchronized.
        title_in_events: the name of the module in events, which can differ between ranks.

    Raises:
        TypeError, ValueError: the strategy does not fit the module or the ranks. If it does not fit on one rank, all
            ranks raise the error.
    """

    def __init__(
        self,
        strategy: Strategy[Any],
        title: str,
        named: Sequence[tuple[str, Tensor]],
        transport: Transport,
        spec: Spec,
        *,
        are_equal: bool,
        when_equal: Callable[[int], object],
        equalize_buffers: Callable[[], object],
        present_buffers: Callable[[], list[Tensor]],
        title_in_events: str,
    ) -> None:
        self.strategy = strategy
        self.transport = transport
        self.optimizers = Optimizers()
        self.last: RoundRecord | None = None
        """The record of the most recent round that sent or received data; None before the first such round."""
        self.are_equal = are_equal
        """Whether the parameters are known to be equal on all ranks.

        True if a call has made them equal, and no rank has stepped after that call."""
        self.synced_at: dict[str, int] = {}
        """For each kind of data ("parameters", "buffers" or "optimizer"), the step after which it was last synced."""
        self._settled_at: int | None = None
        """The step of the start, or of the last sync that the user requested. No data was in flight then.

        It is None until the first step begins, because values may be loaded into the module before that."""
        self._when_equal = when_equal
        self._title, self._title_in_events = title, title_in_events
        self._spec = spec
        self._sent_at: dict[int, int] = {}
        """For each fragment, the step after which its outer gradient was last sent."""
        self.standing = Standing(transport)
        """The two-phase commit of parameter syncs."""
        self._parameters = [parameter for _, parameter in named]
        self._lane = transport.lane(f"parameters of {title}")
        """The lane for the parameters and the tensors averaged with them. It carries no other data."""
        self._equalize_buffers = equalize_buffers
        self._present_buffers = present_buffers
        self._mechanism: Mechanism | None = None
        self._kept = Kept()
        """The data that actions need in addition to the module. `_connect` creates it for gossip and servers."""
        fault = None
        try:
            # Syncline's own strategies raise Syncline's errors. Errors of a user's strategy are marked as user code.
            is_ours = type(strategy).__module__.startswith("syncline.")
            with nullcontext() if is_ours else calling(f"init() or mechanism() of {type(strategy).__name__}"):
                self._plan = strategy.init(spec)
                self._mechanism = strategy.mechanism(spec)
            if isinstance(self._mechanism, OuterCopies):
                self._kept = OuterLoop(named, self._mechanism, self._lane, self.standing)
        except Exception as error:
            fault = error
        self._connect(fault)

    def _connect(self, fault: Exception | None) -> None:
        """Compare the outer optimizers, exchange the push-sum weights, and create the data of gossip or of a server.

        A collective call.
        """
        mechanism = self._mechanism
        rows = exchange(
            self.transport,
            f"{self._title} by {type(self.strategy).__name__}",
            self._outer_settings(),
            payload=_WEIGHT.pack(mechanism.weight if isinstance(mechanism, PushSumWeight) else 1.0),
            fault=fault,
            remedy=_REMEDY,
        )
        if isinstance(mechanism, PushSumWeight):
            weights = [_WEIGHT.unpack_from(row)[0] for row in rows]
            self._kept = PushSum(weights, self._lane, self._mixed_tensors)
        elif isinstance(mechanism, ServerShard) and self._lane.size > 1:
            self._kept = ShardedServer(self._parameters, self._lane)

    def _mixed_tensors(self) -> list[Tensor]:
        """Return the tensors that gossip mixes: the parameters, and the floating-point buffers."""
        buffers = self._present_buffers()
        return [*self._parameters, *(buffer for buffer in buffers if buffer.is_floating_point())]

    @property
    def step(self) -> int:
        """The number of completed optimizer steps."""
        return self.optimizers.num_steps

    @property
    def lanes(self) -> list[Transport]:
        """The lanes that carry the strategy's data. They have to be closed together with the wrapper."""
        return [self._lane, *self._kept.lanes]

    @property
    def outer_optimizer(self) -> Optimizer | None:
        """The outer optimizer of the strategy, or None if the strategy has none."""
        return self._kept.optimizer

    # ------------------------------------------------------------------ called by the wrapper

    def reduces(self) -> bool:
        """Return whether a backward that begins now averages gradients, over all ranks or within groups of ranks."""
        actions = self.strategy.at_backward(self._plan, Progress(step=self.step))
        return any(isinstance(action, ReduceGradients) for action in actions)

    @property
    def is_synchronous(self) -> bool:
        """Whether the next step is made with the mean gradients of all ranks, as in a warm-up."""
        return ReduceGradients("all") in self.strategy.at_backward(self._plan, Progress(step=self.step))

    def step_begins(self) -> None:
        """Check before the first optimizer step that the parameters are equal, if the strategy copies the parameters.

        The check is a collective call. Only the first call of this method checks. Later calls do nothing.

        Raises:
            ReplicaDivergence: the parameters differ between ranks.
        """
        if self._settled_at is not None:
            return
        if self._kept.has_copies:
            title = f"before the first step of {self._title}"
            if not self._are_found_equal(title, self._parameters):
                error = ReplicaDivergence(
                    f"{title}: expected equal parameters on all ranks, but they differ. {self.strategy} needs an equal "
                    "start on all ranks. Call sl.broadcast_(ddp) to copy rank 0's parameters to all ranks, or "
                    "sl.check_replicas(ddp) for the names of the parameters that differ",
                    tensor="",
                    num_differing=0,
                    minority_ranks=(),
                )
                emit_divergence(error, check=title, rank=self.transport.rank)
                raise error
            self.are_equal = True
        self._start()

    def _start(self) -> None:
        """Copy the parameters as the starting point. Only the first call does this."""
        # Not in __init__, because values may be loaded into the module after it was wrapped.
        if self._settled_at is None:
            self._settled_at = self.step
            self._kept.start()

    def restart(self) -> None:
        """Continue from the current parameters, after a call such as `sl.broadcast_` has made them equal."""
        self.are_equal = True
        self._kept.restart()

    def step_ended(self, attached: AttachedOptimizer, *, has_failed: bool = False) -> None:
        """Record that an attached optimizer has stepped.

        As soon as all attached optimizers have stepped, ask the strategy for actions, and carry them out.

        Args:
            attached: the optimizer.
            has_failed: whether an error was raised after the step. Then the strategy's actions are not carried out, as
                if they had failed, and `settle` makes the parameters equal if training continues.
        """
        self.are_equal = False
        was_synchronous = self.is_synchronous
        if not self.optimizers.add_step(attached):
            return
        if was_synchronous or not self.strategy.needs_attach:
            self.standing.contain(self.step)
        inbox = self._kept.poll()
        plan, actions = self.strategy.at_step(self._plan, Progress(step=self.step), inbox)
        if has_failed:
            self._plan = self._plan if actions else plan
            return
        if are_blocking(actions):
            title = f"the parameter sync of {self._title} after step {self.step}"
            exchange(self.transport, title, self._settings(actions), remedy=_REMEDY)
        self._carry_out(plan, actions)

    def sync_parameters(self) -> None:
        """Run a parameter sync now, because the user requests it. A collective call.

        Afterwards the parameters are equal on all ranks.
        """
        plan, actions = self.strategy.at_sync(self._plan, Progress(step=self.step))
        # Ranks with different actions would mix up their messages, so the actions are compared first.
        compared = [] if self._kept.serves else [str(action) for action in actions]
        averaged = self._averaged_by(actions)
        title = f"ddp.sync_parameters_() of {self._title}"
        samples = exchange(
            self.transport,
            title,
            [f"steps done: {self.step}", *compared, *self._settings(actions)],
            payload=hash_of_sample(averaged),
            remedy="Call it after the same number of steps on every rank, with the same settings.",
        )
        self.step_begins()
        # If the hashes of samples differ, the parameters differ. Only if they are equal, all values are hashed.
        if averaged and len(set(samples)) == 1 and self._are_found_equal(title, averaged):
            self.standing.contain(self.step)
            self.synced_at |= dict.fromkeys(synchronized_by(actions, has_buffers=False), self.step)
            # Of each average of parameters, only the sync of buffers remains.
            remaining = [AverageBuffers() if isinstance(action, Average) else action for action in actions]
            self._carry_out(plan, remaining, are_equal=True)
        else:
            self._carry_out(plan, actions)
        self._kept.finish()
        self._settled_at = self.step

    def _are_found_equal(self, title: str, tensors: Sequence[Tensor]) -> bool:
        """Return whether hashes of tensors are equal on all ranks. A collective call, called `title` in errors."""
        return len(set(exchange(self.transport, title, [], payload=hash_of(tensors)))) == 1

    def check_may_wait(self, what: str) -> None:
        """Raise an error on all ranks if a call that waits for all ranks could deadlock now.

        A deadlock is possible if updates are in flight to a parameter server, because a rank processes no updates while
        it waits.

        Args:
            what: the name of the call, for the message.

        Raises:
            SynclineError: the call could deadlock.
        """
        if self._kept.serves and self._settled_at not in (None, self.step):
            raise SynclineError(
                f"{what} after step {self.step} could deadlock under strategy={self.strategy}. Updates of parameters "
                "may still be in flight, and a rank cannot process them while it waits for the other ranks in this "
                "call. Call ddp.sync_parameters_() right before it, on all ranks after the same step"
            )

    def next_step(self) -> int | None:
        """Return the next step after which the strategy sends data, or None if it is not among the next 10,000."""
        if self._kept.serves:
            return self.step + 1
        plan, has_buffers = self._plan, bool(self._present_buffers())
        for step in range(self.step + 1, self.step + 10_000):
            plan, actions = self.strategy.at_step(plan, Progress(step=step))
            if any(descriptions(actions, has_buffers=has_buffers)):
                return step
        return None

    # ------------------------------------------------------------------ a round

    def _carry_out(self, plan: Any, actions: Sequence[Action], *, are_equal: bool = False) -> None:
        """Carry out the strategy's actions, record them, and store `plan`, which is the strategy's new state.

        Args:
            plan: the new state.
            actions: the actions.
            are_equal: whether the parameters were found equal on all ranks.
        """
        if not actions:
            self._plan = plan
            return
        board, has_buffers = self.transport.board, bool(self._present_buffers())
        before, start = self.transport.statistics(), time.perf_counter()
        former_phase, board.phase = board.phase, StepPhase.PARAMETER_SYNC
        done = list(actions)
        with profiled("round {}", type(self.strategy).__name__):
            self._run(actions)
            while any(isinstance(action, Await) for action in actions):
                plan, actions = self.strategy.at_step(plan, Progress(step=self.step), self._kept.wait())
                self._run(actions)
                done += actions
            self._kept.write()
        board.phase = former_phase
        self._plan = plan
        if any(isinstance(action, Push) for action in done):
            self.standing.contain(self.step)
        sent = self.transport.statistics() - before
        self.synced_at |= dict.fromkeys(synchronized_by(done, has_buffers=has_buffers), self.step)
        if what := tuple(dict.fromkeys(descriptions(done, has_buffers=has_buffers))):
            self.last = RoundRecord(
                step=self.step,
                what=what,
                num_calls=sent.total_calls,
                payload_bytes=sent.total_bytes,
                waited_seconds=sent.waited_seconds,
                duration_seconds=time.perf_counter() - start,
            )
            if OBSERVERS.parameters_synced:
                source = Source(self.transport.rank, self._title_in_events)
                event = ParametersSynced(source, start, time.perf_counter(), self.last)
                emit(OBSERVERS.parameters_synced, event)
        self.are_equal = are_equal or make_equal(done, num_fragments=self._kept.num_fragments)
        if self.are_equal:
            self._when_equal(self.step)

    def _run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Average():
                    self.standing.announce(self.step)
                    if action.by_weight:
                        self._kept.run(action)
                    else:
                        self._average(action)
                    self._equalize_buffers()
                case AverageBuffers():
                    self._equalize_buffers()
                case Await():
                    pass  # `_carry_out` waits
                case _:
                    if isinstance(action, SendOuter):
                        self._sent_at[action.fragment] = self.step
                    elif isinstance(action, ReceiveOuter):
                        self.standing.announce(self._sent_at.get(action.fragment, self.step))
                    self._kept.run(action)

    def _averaged_by(self, actions: Sequence[Action]) -> list[Tensor]:
        """Return the tensors that actions replace by their plain mean, without the buffers. There may be none."""
        plain = [action for action in actions if isinstance(action, Average) and not action.by_weight]
        if not plain or self._lane.size == 1:
            return []
        with_state = any(action.optimizer_state for action in plain)
        state = self.optimizers.floating_state() if with_state else []
        return [*self._parameters, *(tensor for _, tensor in state)]

    def _average(self, action: Average) -> None:
        tensors = self._averaged_by([action])
        confirms = self.standing.confirms
        means = [tensor.detach().clone() for tensor in tensors] if confirms else tensors
        TensorReducer(means, self._lane, "mean", rounds_once=True).run()

        def write() -> None:
            with torch.no_grad():
                foreach_copy_([tensor.data for tensor in tensors], means)
            mark_written(tensors)

        if confirms:
            self.standing.write(write)

    def _settings(self, actions: Sequence[Action]) -> list[str]:
        """Return the settings that must be equal on all ranks at a parameter sync, as one line of text each."""
        lines = [
            line
            for number, attached in enumerate(self.optimizers.attached)
            for line in attached.describe_settings(number)
        ]
        lines += self._outer_settings()
        if any(isinstance(action, Average) and action.optimizer_state for action in actions):
            lines += describe_tensors(self.optimizers.floating_state(), kind="state", layout=False)
        return lines

    def _outer_settings(self) -> list[str]:
        """Return the settings of the outer optimizer as one line of text each. They must be equal on all ranks."""
        groups = [] if self._kept.optimizer is None else settings_of(self._kept.optimizer)
        return [
            f"outer optimizer, param_groups[{index}].{key}  {value}"
            for index, group in enumerate(groups)
            for key, value in group
        ]

    # ------------------------------------------------------------------ ranks are lost, or join

    @property
    def contained(self) -> int:
        """The last step of which the parameters of this rank contain the changes by all ranks."""
        return max(self.standing.contained, self._kept.closed_up_to)

    @property
    def meets_at_syncs(self) -> bool:
        """Whether syncs, which are confirmed, are the only calls in which all ranks take part."""
        sends_to_single_ranks = isinstance(self._mechanism, PushSumWeight | ServerShard)
        return self.strategy.needs_attach and not sends_to_single_ranks and not self.is_synchronous

    def follow(self, transport: Transport, spec: Spec) -> None:
        """Synchronize over another group from now on, and discard data in flight. A collective call.

        The ranks may be at different steps. `place`, `go_to` and `settle` bring them to the same step.
        """
        self.transport, self._spec = transport, spec
        self.standing.follow(transport)
        self._lane = transport.lane(f"parameters of {self._title}")
        if isinstance(self._kept, OuterLoop):
            self._kept.follow(self._lane)
        else:
            self._kept = Kept()
        # Some ranks may have begun the first step, and all compare the parameters before it.
        if self.step == 0:
            self._settled_at = None
        self._connect(None)

    def place(self) -> dict[str, Any]:
        """Return this rank's step counts and the strategy's state, for `go_to` on ranks that are behind."""
        return {
            "state": self._plan._asdict(),
            "step": self.step,
            "taken": self.optimizers.taken,
            "has_started": self._settled_at is not None,
            "num_written": self.standing.num_written,
            "contained": self.contained,
        }

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Take over another rank's step counts and strategy state, but not its parameters. Nothing is sent."""
        self.optimizers.continue_at(place["step"], place["taken"])
        self.standing.continue_at(place["num_written"], place["contained"])
        self._plan = self.strategy.state_from(place["state"], self._spec)
        if place["has_started"]:
            self._start()

    def settle(self) -> None:
        """Make the parameters equal on all ranks. All ranks have to be at the same step. A collective call."""
        plan, actions = self.strategy.at_change(self._plan, Progress(step=self.step), self._spec)
        if self._settled_at is None:
            actions = ()  # no rank has made a step
        self._carry_out(plan, actions)
        self.standing.contain(self.step)
        self._kept.finish()
        if self._settled_at is not None:
            self._settled_at = self.step

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy and of its execution; see `DistributedDataParallel.sync_state_dict`."""
        self._check_settled()
        return {
            "strategy": str(self.strategy),
            "step": self.step,
            "has_started": self._settled_at is not None,
            "are_equal": self.are_equal,
            "state": self._plan._asdict(),
            **({self._kept.name: self._kept.state_dict()} if self._kept.name else {}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: the state was saved under another strategy, or with another module.
            SynclineError: updates are in flight.
        """
        if saved["strategy"] != str(self.strategy):
            raise ValueError(
                f"this state was saved under strategy={saved['strategy']}, but the module is wrapped with "
                f"strategy={self.strategy}. Wrap the module with the strategy under which the state was saved"
            )
        self._check_settled()
        if self._kept.name in saved:
            self._kept.load_state_dict(saved[self._kept.name])
        else:
            self._kept.start()  # the state was saved by a run with one rank, which has no servers
        self._plan = self.strategy.state_from(saved["state"], self._spec)
        self.optimizers.continue_at(saved["step"])
        self._settled_at = saved["step"] if saved["has_started"] else None
        # absent in states saved by versions without replica checks
        self.are_equal = saved.get("are_equal", False)

    def _check_settled(self) -> None:
        if not self._kept.is_settled:
            raise SynclineError(
                f"step {self.step}: the state of {self.strategy} cannot be saved or loaded now, because updates of the "
                "parameters are in flight between ranks: call ddp.sync_parameters_() on all ranks first"
            )
