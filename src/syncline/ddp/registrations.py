"""The hooks, optimizers and metrics that users register with a wrapped module. The ranks compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline._torch.optimizers import optimizers_in_backward, steps_in_backward
from syncline.buffers.policies import BufferHook
from syncline.checks import checked_flag, checked_kind
from syncline.compression import HookState
from syncline.compression import hook as compression_hook
from syncline.ddp.config import Config
from syncline.errors import SynclineError
from syncline.events import OBSERVERS, OptimizerStepped
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.reducer import GradientSync
from syncline.optimizers.attached import AttachedOptimizer, Outcome, to_replace, weakly
from syncline.optimizers.contents import parameters_of
from syncline.sharded.optimizer import Sharding
from syncline.strategies.execution import Rounds
from syncline.transport.agreement import agree, exchange
from syncline.transport.base import Transport


class Registrations:
    """The hooks, optimizers and metrics of one wrapped module on one rank.

    After each registration, the ranks compare all registrations in the next synchronized backward, before the first
    bucket is sent.

    Args:
        config: the configuration of the wrapper.
        rounds: the execution of a strategy under which replicas drift. Pass None under `EveryStep`.
        compare: a function that calls `agree`. After each registration, it is called at the start of the next
            synchronized backward, and again in later backwards until it returns without an error.
        buffer_hook: a buffer hook that is registered from the start. Pass None if there is none.
    """

    def __init__(
        self,
        config: Config,
        rounds: Rounds | None,
        compare: Callable[[], None],
        buffer_hook: BufferHook | None = None,
    ) -> None:
        self.buffer_hook = buffer_hook
        """The user's hook, which synchronizes buffers instead of the buffer policy; None if there is none."""
        self._are_agreed = False
        self._config = config
        self._rounds = rounds
        self._compare = compare
        self._sharding: Sharding | None = None
        self._step_began_at = 0.0

    def use(
        self, module: nn.Module, gradients: GradientSync, transport: Transport, sharding: Sharding | None
    ) -> None:
        """Let later registrations use these parts. The next synchronized backward compares all registrations.

        Args:
            module: the wrapped module.
            gradients: the synchronization of gradients.
            transport: the transport between the ranks that compare the registrations.
            sharding: the shards of the module. Pass None if the module is not sharded.
        """
        self._module, self._title = module, type(module).__name__
        self._gradients = gradients
        self._transport = transport
        self._sharding = sharding
        self._compare_in_next_backward()

    def _compare_in_next_backward(self) -> None:
        self._are_agreed = False
        self._gradients.controls.do_before_reduction(self._compare)

    # ------------------------------------------------------------------ registration

    def use_comm_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the buckets from now on.

        Raises:
            ValueError: the module is sharded, or has a compression.
        """
        if self._sharding is not None:
            raise ValueError(
                "with sharded=True each rank must receive only its shard of each bucket, but a communication hook "
                "returns whole buckets. Wrap the module without sharded=True, or register no hook"
            )
        if self._config.compression is not None:
            raise ValueError(
                f"a communication hook and compression={self._config.encoding} cannot reduce the same buckets. Use "
                "only one of the two. To use a compression as the communication hook, register sl.compression.hook"
            )
        if hook.hook is compression_hook and isinstance(hook.state, HookState):
            hook = replace(hook, label=hook.state.compression.in_words(), averages=True)
        self._gradients.use_comm_hook(hook)
        self._compare_in_next_backward()

    def use_buffer_hook(self, hook: BufferHook) -> None:
        """Let a buffer hook synchronize the buffers from now on."""
        self.buffer_hook = hook
        self._compare_in_next_backward()

    def report(self, values: Mapping[str, Any], weight: float, *, inside_join: bool) -> None:
        """Send metrics with the next gradients, as `DistributedDataParallel.report` does.

        Args:
            values: the values of this rank, by the names of the metrics.
            weight: the weight of these values in the mean over ranks.
            inside_join: whether the call was made inside of `join`.

        Raises:
            SynclineError: a name is new, and the call was made inside of `join`.
        """
        metrics = self._gradients.riders.metrics
        if not metrics.has_names(values):
            if inside_join:
                raise SynclineError(
                    f"rank {self._transport.rank}: report({', '.join(values)}) was called inside of join() with a name "
                    "that was not reported before. The ranks without inputs cannot report a new name. Report all of "
                    "these names together once before join(), on all ranks"
                )
            self._compare_in_next_backward()
        metrics.add(values, weight)

    def attach(self, optimizer: Optimizer, *, elementwise: bool | None, replaces: bool | None) -> None:
        """Attach an optimizer. `DistributedDataParallel.attach` explains the arguments and errors."""
        checked_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        for name, flag in (("elementwise", elementwise), ("replace", replaces)):
            if flag is not None:
                checked_flag(name, flag)
        settings = self._gradients.riders.settings
        if any(attached.optimizer is optimizer for attached in settings.optimizers):
            return
        own = {id(parameter) for parameter in self._module.parameters()}
        if not any(id(p) in own for p in parameters_of(optimizer)):
            raise ValueError(
                f"expected an optimizer with at least one parameter of {self._title}; got a {type(optimizer).__name__} "
                "without any. Attach the optimizer to the wrapper of the module that it trains"
            )
        if any(steps_in_backward(parameter) for parameter in self._gradients.parameters):
            raise RuntimeError(
                f"parameters of {self._title} have optimizers that step inside backward. The steps of these optimizers "
                f"cannot be compared. Let all optimizers step after backward, or attach none of them"
            )
        replaced = to_replace(optimizer, self._attached(), own, replaces)
        removed = [one for one in settings.optimizers if any(one.optimizer is other for other in replaced)]
        if self._sharding is not None:
            has_begun = bool(self._gradients.state.num_backwards)
            self._sharding.attach(optimizer, elementwise, has_begun=has_begun, replaced=replaced)
        for one in removed:
            one.replace_by(type(optimizer).__name__)
        attached = AttachedOptimizer(
            optimizer,
            weakly(self._before_optimizer_step),
            weakly(self._after_optimizer_step),
            weakly(self._discards_step) if self._config.gradients.on_nonfinite == "skip" else None,
            counts_failed=self._sharding is None,
        )
        settings.optimizers[:] = [*(one for one in settings.optimizers if one not in removed), attached]
        if self._rounds is not None:
            self._rounds.optimizers.watch(attached, removed)
        self._compare_in_next_backward()

    # ------------------------------------------------------------------ registered at present

    def optimizers(self) -> list[Optimizer]:
        """Return the attached optimizers."""
        return [attached.optimizer for attached in self._gradients.riders.settings.optimizers]

    def in_words(self) -> tuple[str, ...]:
        """Return a text for each attached optimizer: its class name and, if it has shards, a description of them."""
        if self._sharding is not None:
            return tuple(attached.describe() for attached in self._sharding.optimizers)
        return tuple(type(optimizer).__name__ for optimizer in self.optimizers())

    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the metrics on which the ranks have agreed."""
        metrics = self._gradients.riders.metrics
        return tuple(name for name in metrics.wanted_names() if metrics.has_names([name]))

    def _attached(self) -> list[tuple[Optimizer, list[Tensor]]]:
        """Return the attached optimizers, each with its parameters."""
        if self._sharding is not None:  # because the attached optimizers hold shards in place of parameters
            return [(one.optimizer, [p for g in one.groups for p in g]) for one in self._sharding.optimizers]
        return [(optimizer, parameters_of(optimizer)) for optimizer in self.optimizers()]

    # ------------------------------------------------------------------ comparison between ranks

    def agree(self) -> None:
        """Check that all ranks have registered the same hooks, optimizers and metrics.

        If this rank has registered something since the last check, this is a collective call. If not, the call does
        nothing.

        Raises:
            ContractMismatch: the ranks have registered different hooks, optimizers or metrics.
            ValueError, SynclineError: the strategy or `on_nonfinite` needs attached optimizers, and a rank lacks one.
                Every rank raises the error.
        """
        if self._are_agreed:
            return
        gradients, metrics = self._gradients, self._gradients.riders.metrics
        step = optimizers_in_backward(gradients.parameters)
        hook = gradients.layout.comm_hook
        self._check_attached()
        self._check_that_steps_can_be_discarded(inside_backward=step is not None)
        agree(
            self._transport,
            f"the hooks, optimizers and metrics of DistributedDataParallel({self._title})",
            [
                f"communication hook: {'none' if hook is None else hook.name}",
                f"buffer hook: {'none' if self.buffer_hook is None else self.buffer_hook.name}",
                f"optimizers step inside backward: {'no' if step is None else 'yes'}",
                *(f"attached optimizer {name}" for name in self.in_words()),
                *(f"reported metric {name}" for name in metrics.wanted_names()),
                *(() if self._sharding is None else self._sharding.describe()),
            ],
            remedy="On every rank, register the same hooks, attach the same optimizers and report the same metrics, "
            "between the same two backwards.",
        )
        if not metrics.has_names(names := metrics.wanted_names()):
            gradients.use_metrics(names)
        self._are_agreed = True  # only here, so that the next backward detects a mismatch again
        gradients.controls.do_before_reduction(None)
        gradients.controls.do_after_reduction(step)

    def _check_attached(self) -> None:
        """If the strategy needs an attached optimizer, check in a collective call that all ranks have one."""
        strategy = self._config.strategy
        if self._rounds is None or not strategy.needs_attach:
            return
        fault = None
        if not self._rounds.optimizers.attached:
            fault = SynclineError(
                f"strategy={strategy} synchronizes parameters after steps of an attached optimizer, but no optimizer "
                f"is attached to {self._title}. The strategy would never run, and the replicas would drift apart. "
                "Write optimizer = ddp.attach(optimizer) on every rank, before the first step"
            )
        exchange(self._transport, f"the first step of {self._title}", [], fault=fault)

    def _check_that_steps_can_be_discarded(self, *, inside_backward: bool) -> None:
        """Under `on_nonfinite="skip"`, check that all optimizer steps can be discarded. The check is a collective call.

        Args:
            inside_backward: whether an optimizer steps inside backward.
        """
        if self._config.gradients.on_nonfinite != "skip":
            return
        fault: Exception | None = None
        if inside_backward:
            fault = ValueError(
                'on_nonfinite="skip" cannot discard the step of an optimizer that steps inside backward. Give '
                'on_nonfinite="zero" or "raise", or use an optimizer that steps after backward'
            )
        elif not self.optimizers():
            fault = SynclineError(
                'on_nonfinite="skip" discards steps of attached optimizers, but no optimizer is attached to '
                f"{self._title}. Its optimizer would step with gradients that are not finite. Write "
                "optimizer = ddp.attach(optimizer) on every rank, before the first step"
            )
        elif left := self._not_attached():
            fault = SynclineError(
                f'on_nonfinite="skip" discards steps of attached optimizers, but {len(left)} of the '
                f"{len(self._gradients.names)} trained parameters of {self._title} are in no attached optimizer. The "
                f"first of them is {left[0]}. Another optimizer would step them with gradients that are not finite. "
                "Write optimizer = ddp.attach(optimizer) for each optimizer, on every rank, before the first step. If "
                "no optimizer trains these parameters, call .requires_grad_(False) on them, or name them in ignore= "
                "when you wrap the module"
            )
        exchange(self._transport, f"the first step of {self._title}", [], fault=fault)

    def _not_attached(self) -> list[str]:
        """Return the names of the parameters that have gradients, but are in no attached optimizer."""
        stepped = {id(p) for _, parameters in self._attached() for p in parameters}
        named = zip(self._gradients.names, self._gradients.parameters, strict=True)
        return [name for name, p in named if id(p) not in stepped]

    # ------------------------------------------------------------------ at an optimizer's step

    def refuse_unreduced(self, what: str) -> None:
        """Raise an error if `.grad` holds the gradients of this rank alone, although they should have been reduced.

        Args:
            what: the name of the call that needs reduced gradients.

        Raises:
            SynclineError: the gradients were not reduced, because the last backward ran under `no_sync`, or because it
                has not ended (see `GradientSync.finish`).
        """
        gradients = self._gradients
        gradients.finish(what, needs_mean=True)
        if gradients.has_unreduced and gradients.controls.decide():
            raise SynclineError(
                f"rank {self._transport.rank}, {what} after step {gradients.step}: expected reduced gradients, but "
                "the last backward, or its forward, ran under no_sync. So .grad holds the gradients of this rank "
                "alone. Run the last micro-batch of each step outside of no_sync, or clear the gradients first"
            )

    def _discards_step(self) -> bool:
        return self._gradients.discards_step()

    def _after_optimizer_step(self, attached: AttachedOptimizer, outcome: Outcome) -> None:
        self._gradients.reduction.clock.optimizer_stepped()
        if OBSERVERS.optimizer_stepped:
            self._emit_step(attached, is_discarded=outcome is Outcome.DISCARDED)
        if self._rounds is not None and outcome is not Outcome.DISCARDED:
            self._rounds.step_ended(attached, has_failed=outcome is Outcome.FAILED)
            gradients = self._gradients
            if gradients.layout.can_be_freed and not gradients.is_in_backward and not self._rounds.reduces():
                gradients.layout.free_unused()

    def _emit_step(self, attached: AttachedOptimizer, *, is_discarded: bool) -> None:
        event = OptimizerStepped(
            source=self._gradients.ledger.source,
            optimizer=type(attached.optimizer).__name__,
            step=attached.num_steps,
            began_at=self._step_began_at,
            ended_at=perf_counter(),
            is_discarded=is_discarded,
        )
        for receive in OBSERVERS.optimizer_stepped:
            receive(event)

    def _before_optimizer_step(self, attached: AttachedOptimizer) -> None:
        self._step_began_at = perf_counter()
        if self._rounds is not None:
            self._rounds.step_begins()
        if self._transport.size == 1:
            return
        self.refuse_unreduced("optimizer.step()")
        if self._rounds is not None:
            return  # because settings are compared at parameter syncs
        if attached.compared_settings in (None, attached.settings()):
            return
        # If the settings changed on some ranks only, the other ranks do not take part here.
        agree(
            self._transport,
            f"the changed settings of an attached {type(attached.optimizer).__name__} at its step",
            attached.describe(0),
            remedy="Change settings in the same way on all ranks, preferably between a step and the next backward.",
        )
        attached.compared_settings = attached.settings()
