"""Hooks, optimizers and metrics that users register with a wrapped module, and the comparison of them between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.reducer import GradientSync
from syncline.optimizers.attached import AttachedOptimizer, to_replace, weakly
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
        module: the wrapped module.
        config: the configuration of the wrapper.
        rounds: the execution of a strategy under which replicas drift; None under `EveryStep`.
        compare: called at the start of each synchronized backward, until `agree` has returned.
        buffer_hook: a buffer hook that is already registered.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        rounds: Rounds | None,
        compare: Callable[[], None],
        buffer_hook: BufferHook | None = None,
    ) -> None:
        self.buffer_hook = buffer_hook
        """The hook that synchronizes buffers in place of the policy; None if there is none."""
        self._are_agreed = False
        self._module = module
        self._title = type(module).__name__
        self._config = config
        self._rounds = rounds
        self._compare = compare
        self._sharding: Sharding | None = None

    def use(self, gradients: GradientSync, transport: Transport, sharding: Sharding | None) -> None:
        """Use these parts from now on, and compare the registrations in the next synchronized backward."""
        self._gradients = gradients
        self._transport = transport
        self._sharding = sharding
        self._compare_in_next_backward()

    def _compare_in_next_backward(self) -> None:
        self._are_agreed = False
        self._gradients.controls.do_before_reduction(self._compare)

    # ------------------------------------------------------------------ registration

    def use_comm_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the buckets.

        Raises:
            ValueError: the module is sharded, or there is a compression.
        """
        if self._sharding is not None:
            raise ValueError(
                "with sharded=True each rank reduces its shards of the buckets, which a communication hook cannot do: "
                "wrap the module without sharded=True"
            )
        if self._config.compression is not None:
            raise ValueError(
                f"a communication hook and compression={self._config.encoding} cannot reduce the same buckets: use "
                "one of the two (sl.compression.hook is the compression as a communication hook)"
            )
        if hook.hook is compression_hook and isinstance(hook.state, HookState):
            hook = replace(hook, label=hook.state.compression.in_words(), averages=True)
        self._gradients.use_comm_hook(hook)
        self._compare_in_next_backward()

    def use_buffer_hook(self, hook: BufferHook) -> None:
        """Let a buffer hook synchronize the buffers."""
        self.buffer_hook = hook
        self._compare_in_next_backward()

    def report(self, values: Mapping[str, Any], weight: float, *, inside_join: bool) -> None:
        """Send metrics with the next gradients. This is `DistributedDataParallel.report`."""
        metrics = self._gradients.riders.metrics
        if not metrics.has_names(values):
            if inside_join:
                raise SynclineError(
                    f"rank {self._transport.rank}: report({', '.join(values)}) was called with a new name inside of "
                    "join(), where the ranks without inputs cannot report it. Report these names once before join(), "
                    "on all ranks"
                )
            self._compare_in_next_backward()
        metrics.add(values, weight)

    def attach(self, optimizer: Optimizer, *, elementwise: bool | None, replaces: bool | None) -> None:
        """Attach an optimizer. This is `DistributedDataParallel.attach`."""
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
                f"expected an optimizer of parameters of {self._title}, got a {type(optimizer).__name__} that has none "
                "of them. Attach the optimizer to the wrapper of the module that it trains"
            )
        if any(steps_in_backward(parameter) for parameter in self._gradients.parameters):
            raise RuntimeError(
                f"the parameters of {self._title} have optimizers that step inside backward, whose steps cannot be "
                f"checked. Do not attach an optimizer, or let the optimizers step after backward"
            )
        replaced = to_replace(optimizer, self._attached(), own, replaces)
        removed = [one for one in settings.optimizers if any(one.optimizer is other for other in replaced)]
        if self._sharding is not None:
            has_begun = bool(self._gradients.num_backwards)
            self._sharding.attach(optimizer, elementwise, has_begun=has_begun, replaced=replaced)
        for one in removed:
            one.replace_by(type(optimizer).__name__)
        attached = AttachedOptimizer(
            optimizer,
            weakly(self._before_optimizer_step),
            weakly(self._after_optimizer_step),
            weakly(self._discards_step) if self._config.gradients.on_nonfinite == "skip" else None,
        )
        settings.optimizers[:] = [*(one for one in settings.optimizers if one not in removed), attached]
        if self._rounds is not None:
            self._rounds.watch(attached, removed)
        self._compare_in_next_backward()

    # ------------------------------------------------------------------ registered at present

    def optimizers(self) -> list[Optimizer]:
        """Return the attached optimizers."""
        return [attached.optimizer for attached in self._gradients.riders.settings.optimizers]

    def in_words(self) -> tuple[str, ...]:
        """Return the class name of each attached optimizer, with a description of its shards if it is sharded."""
        if self._sharding is not None:
            return tuple(attached.describe() for attached in self._sharding.optimizers)
        return tuple(type(optimizer).__name__ for optimizer in self.optimizers())

    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the reported metrics that the ranks have compared."""
        metrics = self._gradients.riders.metrics
        return tuple(name for name in metrics.wanted_names() if metrics.has_names([name]))

    def _attached(self) -> list[tuple[Optimizer, list[Tensor]]]:
        """Return the attached optimizers, each with its parameters."""
        if self._sharding is not None:  # because the attached optimizers hold shards in place of parameters
            return [(one.optimizer, [p for g in one.groups for p in g]) for one in self._sharding.optimizers]
        return [(optimizer, parameters_of(optimizer)) for optimizer in self.optimizers()]

    # ------------------------------------------------------------------ comparison between ranks

    def agree(self) -> None:
        """Check that all ranks have registered the same hooks, optimizers and metrics, if there are new ones.

        This is a collective call if a rank has registered something since the last call.
        """
        if self._are_agreed:
            return
        self._transport.board.phase = (
            f"the comparison of what was registered with and attached to {self._title}"
        )
        gradients, metrics = self._gradients, self._gradients.riders.metrics
        step = optimizers_in_backward(gradients.parameters)
        hook = gradients.layout.comm_hook
        self._check_attached()
        self._check_that_steps_can_be_discarded(inside_backward=step is not None)
        agree(
            self._transport,
            f"what was registered with and attached to DistributedDataParallel({self._title})",
            [
                f"communication hook: {'none' if hook is None else hook.name}",
                f"buffer hook: {'none' if self.buffer_hook is None else self.buffer_hook.name}",
                f"optimizers step inside backward: {'no' if step is None else 'yes'}",
                *(f"attached optimizer {name}" for name in self.in_words()),
                *(f"reported metric {name}" for name in metrics.wanted_names()),
                *(() if self._sharding is None else self._sharding.describe()),
            ],
            remedy="Register, attach and report the same on every rank, between the same two backwards.",
        )
        if not metrics.has_names(names := metrics.wanted_names()):
            gradients.use_metrics(names)
        self._are_agreed = True  # only here, so that the next backward detects a mismatch again
        gradients.controls.do_before_reduction(None)
        gradients.controls.do_after_reduction(step)

    def _check_attached(self) -> None:
        """Check that an optimizer is attached, if the strategy needs one. A collective call."""
        strategy = self._config.strategy
        if self._rounds is None or not strategy.needs_attach:
            return
        fault = None
        if not self._rounds.is_watching:
            fault = SynclineError(
                f"strategy={strategy} synchronizes parameters at the optimizer's step, but no optimizer is attached to "
                f"{self._title}, so the strategy would never run, and the replicas would drift apart. Write "
                "optimizer = ddp.attach(optimizer) on every rank, before the first step"
            )
        exchange(self._transport, f"the first step of {self._title}", [], fault=fault)

    def _check_that_steps_can_be_discarded(self, *, inside_backward: bool) -> None:
        """Under `on_nonfinite="skip"`, check that every optimizer step can be discarded. A collective call."""
        if self._config.gradients.on_nonfinite != "skip":
            return
        fault: Exception | None = None
        if inside_backward:
            fault = ValueError(
                'on_nonfinite="skip" cannot discard the step of an optimizer that steps inside backward: give '
                'on_nonfinite="zero" or "raise", or use an optimizer that steps after backward'
            )
        elif not self.optimizers():
            fault = SynclineError(
                'on_nonfinite="skip" discards steps of attached optimizers, but no optimizer is attached to '
                f"{self._title}, so its optimizer would step with gradients that are not finite. Write "
                "optimizer = ddp.attach(optimizer) on every rank, before the first step"
            )
        elif left := self._not_attached():
            fault = SynclineError(
                'on_nonfinite="skip" discards steps of attached optimizers, but no attached optimizer has '
                f"{left[0]} of {self._title} (in all {len(left)} of {len(self._gradients.names)} parameters are in "
                "none), so another optimizer would step them with gradients that are not finite. Write "
                "optimizer = ddp.attach(optimizer) "
                "for each optimizer, on every rank, before the first step. If no optimizer trains these parameters, "
                "call .requires_grad_(False) on them, or name them in ignore= when you wrap the module"
            )
        exchange(self._transport, f"the first step of {self._title}", [], fault=fault)

    def _not_attached(self) -> list[str]:
        """Return the names of parameters with gradients that no attached optimizer steps."""
        stepped = {id(p) for _, parameters in self._attached() for p in parameters}
        named = zip(self._gradients.names, self._gradients.parameters, strict=True)
        return [name for name, p in named if id(p) not in stepped]

    # ------------------------------------------------------------------ at an optimizer's step

    def refuse_unreduced(self, what: str) -> None:
        """Raise if `.grad` holds only this rank's gradients.

        Args:
            what: the name of the refused call.

        Raises:
            SynclineError: the gradients were not reduced, because the last backward ran under `no_sync`.
        """
        gradients = self._gradients
        if gradients.has_unreduced and gradients.controls.decide():
            raise SynclineError(
                f"rank {self._transport.rank}, {what} after step {gradients.step}: expected reduced gradients, but "
                "the last backward ran under no_sync, so .grad holds the gradients of this rank alone. Run the last "
                "micro-batch outside of no_sync, or clear the gradients first"
            )

    def _discards_step(self) -> bool:
        return self._gradients.discards_step()

    def _after_optimizer_step(self, attached: AttachedOptimizer) -> None:
        if self._rounds is not None:
            self._rounds.step_ended(attached)

    def _before_optimizer_step(self, attached: AttachedOptimizer) -> None:
        if self._rounds is not None:
            self._rounds.step_begins()
        if self._transport.size == 1:
            return
        self.refuse_unreduced("optimizer.step()")
        if self._rounds is not None:
            return  # because settings are compared at parameter syncs
        if attached.compared_settings in (None, attached.settings()):
            return
        # The settings changed after the backward that compared them. If they changed on some ranks only, the other
        # ranks do not take part here, and the error reads from the board where each rank is.
        self._transport.board.phase = "optimizer.step(), where settings have changed since the backward"
        agree(
            self._transport,
            f"the settings of an attached {type(attached.optimizer).__name__}, at its step",
            attached.describe(0),
            remedy="Change settings in the same way on all ranks, preferably between a step and the next backward.",
        )
        attached.compared_settings = attached.settings()
