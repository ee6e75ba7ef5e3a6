"""One rank's replica: the parts that keep a module equal on all ranks. They are rebuilt when the module changes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline._torch.optimizers import optimizers_in_backward, steps_in_backward
from syncline.buffers.policies import BufferHook, BufferPolicy, BufferSync
from syncline.checks import checked_flag, checked_kind
from syncline.compression import Compression, HookState
from syncline.compression import hook as compression_hook
from syncline.ddp.replica_checks import ReplicaChecks
from syncline.ddp.selection import Inventory, Selection, select
from syncline.ddp.wrapping import (
    Hosts,
    agree_on_module,
    broadcast_values,
    describe_new_values,
    plan_after_change,
    plan_of,
    spec_of,
)
from syncline.errors import SynclineError
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.options import GradientOptions
from syncline.gradients.outputs import when_backward_reaches_any
from syncline.gradients.reducer import GradientSync
from syncline.gradients.riders.replica_watch import ReplicaCheck, ReplicaWatch
from syncline.gradients.riders.stop import StopVote, VoteRoute
from syncline.optimizers.attached import AttachedOptimizer, to_replace
from syncline.optimizers.contents import parameters_of
from syncline.optimizers.weak_methods import weakly as _weakly
from syncline.report.explain import Evidence, contract_of
from syncline.session.world import transport_of
from syncline.sharded.one_copy import one_copy_of, written_elsewhere
from syncline.sharded.optimizer import Sharding
from syncline.strategies import Spec, Strategy
from syncline.strategies.execution import Rounds
from syncline.transport.agreement import agree, exchange
from syncline.transport.base import Transport
from syncline.verbs.diverge import Divergence

__all__ = ["NOT_COPIED", "Replica"]


NOT_COPIED = (
    "a wrapper cannot be copied or pickled, for what the ranks agreed on last would not be the copy's"
)


class Replica:
    """The parts that keep one wrapped module equal on all ranks.

    The constructor is a collective call. The ranks agree on the module and the options, and start from the same values.
    The hooks are removed when the replica is freed. They hold no strong reference to it.

    Args:
        module: the module to keep equal.
        chosen: the tensors of the module that take part.
        transport: connects the ranks.
        options: how gradients are reduced.
        hosts: the hosts of the ranks.
        strategy: when and how parameters are synchronized.
        init_sync: broadcast parameters from rank 0 now.
        init_buffers: with `init_sync`, broadcast buffers from rank 0 now, too.
        buffer_policy: how buffers are synchronized before a forward.
        ignore: names or patterns of tensors that do not take part, including tensors that are added later.
        compression: how gradients are encoded.
        replica_check: how replicas are compared.

    Raises:
        ContractMismatch: the ranks differ. The text is the same on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        chosen: Selection,
        transport: Transport,
        options: GradientOptions,
        *,
        hosts: Hosts,
        strategy: Strategy[Any],
        init_sync: bool,
        init_buffers: bool,
        buffer_policy: BufferPolicy,
        ignore: Sequence[str],
        compression: Compression | None = None,
        replica_check: ReplicaCheck | None = None,
    ) -> None:
        self.module = module
        self.transport = transport
        self.options = options
        self.strategy = strategy
        spec = spec_of(chosen, transport, hosts)
        self._workers = strategy.workers(spec)
        self.plan = plan_of(
            module,
            chosen,
            options,
            transport,
            num_hosts=len(hosts.loads),
            init_sync=init_sync,
            init_buffers=init_buffers,
            buffer_policy=buffer_policy,
            rules=strategy.rules(spec) if strategy.drifts else None,
            compression=None if compression is None else compression.in_words(),
            replica_check=replica_check,
        )
        """The facts about this replica that the ranks agree on and that are printed."""
        self.buffer_hook: BufferHook | None = None
        self._buffer_policy: BufferPolicy = buffer_policy
        self._ignore = tuple(ignore)
        self.checks = ReplicaChecks(replica_check)
        """The comparisons of this replica with those of the other ranks."""
        self.was_changed = False
        """Whether the last forward with gradients enabled found the module changed."""
        self._equal_after_backward = 0
        """The number of backwards that had run when all parameters were last known to be equal."""
        agree_on_module(chosen, contract_of(self.plan), options, transport)
        former = one_copy_of(module)
        if former is not None:
            names = former.written_here()
            fault = written_elsewhere(f": {names}") if names else None
            exchange(transport, f"DistributedDataParallel({type(module).__name__})", [], fault=fault)
        if init_sync:
            broadcast_values(chosen, transport, src=0, buffers=init_buffers)
        self._open_lanes(chosen)
        self.divergence = self._divergence()
        """The record of whether replicas drift apart on purpose (`sl.diverge`)."""
        self.rounds = self._rounds(chosen, spec) if strategy.drifts else None
        """Runs a strategy under which replicas drift; None under `EveryStep`."""
        self._wire(chosen)
        self.compression: HookState | None = None
        """The encoding of gradients and its state between steps; None if gradients are sent unchanged."""
        self._owed: Mapping[str, Any] = {}
        """A loaded compression state that is not used while there is one rank. It is saved again for a larger world."""
        if compression is not None and transport.size > 1:
            self.compression = HookState(compression, self._gradient_lane)
            self._compress(self.compression)
        self.sharding = self._shard() if options.sharded else None

    # ------------------------------------------------------------------ lanes and hooks

    def _open_lanes(self, chosen: Selection) -> None:
        """Open separate lanes for gradients and for buffers. A collective call.

        With separate lanes, no rank mistakes their messages for another operation that runs at the same time.
        """
        self._gradient_lane = self._open_lane("gradients")
        if self._workers is not None:
            within = self.transport.split(self._workers[self.transport.rank])
            assert within is not None
            self._gradient_lane = within
            self.plan = replace(self.plan, num_reducing=within.size)
            weakref.finalize(self, within.close)
        self._buffer_lane = self._open_lane("buffers") if chosen.buffers else self.transport

    def _open_lane(self, purpose: str, *, of: object = None) -> Transport:
        """Return a new lane, which is closed when `of` (None: this replica) is freed."""
        lane = self.transport.lane(f"{purpose} of {type(self.module).__name__}")
        if lane is not self.transport:
            weakref.finalize(self if of is None else of, lane.close)
        return lane

    def _let_decide(self) -> None:
        """Ask in each backward whether to reduce it, if a strategy or `sl.diverge` can prevent that."""
        is_open = self.rounds is not None or self.divergence.is_open
        self.gradients.decide = _weakly(self.reduces) if is_open else None

    def _divergence(self) -> Divergence:
        """Return the record through which `sl.diverge` reaches this replica."""
        return Divergence(self.module, self.transport, _weakly(self._drift), _weakly(self._was_written))

    def _was_written(self) -> None:
        """Record that a verb has made all parameters equal."""
        self._equal_after_backward = self.gradients.num_backwards
        if self.rounds is not None:
            self.rounds.restart()

    def _drift(self, is_open: bool) -> None:
        """Begin or end a deliberate drift of the replicas. The beginning is a collective call."""
        if is_open and not self.is_agreed:
            self.agree_before_the_first_step()  # because nothing is sent inside the block
        self._let_decide()
        for attached in self.gradients.settings.optimizers:
            attached.counts = not is_open
        buffers = self.buffers
        if is_open:
            self._before_drifting = (buffers.enabled, buffers.why_disabled)
            buffers.enabled, buffers.why_disabled = False, "the replicas drift apart on purpose (sl.diverge)"
        else:
            buffers.enabled, buffers.why_disabled = self._before_drifting

    def _rounds(self, chosen: Selection, spec: Spec) -> Rounds:
        """Return the object that runs the strategy. A collective call."""
        rounds = Rounds(
            self.strategy,
            type(self.module).__name__,
            [*chosen.trained, *chosen.delayed],
            self.transport,
            spec,
            equalize_buffers=_weakly(self._equalize_buffers_at_meeting),
            present_buffers=_weakly(self._present_buffers),
        )
        rounds.are_equal = self.plan.init_sync
        for lane in rounds.lanes:
            if lane is not self.transport:
                weakref.finalize(self, lane.close)
        return rounds

    def _equalize_buffers_at_meeting(self) -> None:
        if self._buffer_policy != "none":
            self.buffers.sync()

    def _present_buffers(self) -> list[Tensor]:
        return [] if self._buffer_policy == "none" else self.buffers.present()

    def _wire(self, chosen: Selection) -> None:
        """Install the hooks on the chosen tensors. A collective call only with `sharded=True`."""
        self.selection = chosen
        self.ignored = set(chosen.ignored)
        # Computed here, because a group of one rank may have been replaced by a larger one.
        self.options = replace(self.options, compares_replicas=self.checks.are_needed(self.transport))
        self.gradients = GradientSync(
            [*chosen.trained, *chosen.delayed],
            self._gradient_lane,
            self.options,
            has_own_connection=self._gradient_lane is not self.transport,
        )
        self.gradients.main_lane = self.transport
        self._let_decide()
        self.buffers = BufferSync(
            self.module,
            self._buffer_lane,
            agreeing=self.transport,
            policy=self._buffer_policy,
            ignored=self.ignored,
        )
        self._watch_gradients()
        if self.rounds is not None:
            if self.plan.rules is not None and self.plan.rules.meets_equal:
                self.checks.after_meetings = self._watch(self.transport, range(self.transport.size))
            self.rounds.when_equal = _weakly(self._are_equal_after)
            self.buffers.enabled = False
            why = "buffers='none'"
            if self._buffer_policy != "none" and self.plan.rules is not None:
                why = f"they meet {self.plan.rules.buffers_when}"
            self.buffers.why_disabled = f"under {self.strategy}: {why}"
        self._inventory = Inventory(self.module)
        self._compare_in_next_backward()
        # The finalizer must hold no reference that keeps the wrapper alive.
        self._hooks_finalizer = weakref.finalize(self, self.gradients.remove_hooks)

    def _watch(self, transport: Transport, ranks: Sequence[int]) -> ReplicaWatch | None:
        """Return the watch that compares replicas between the ranks of `transport`, or None."""
        return self.checks.watch(
            type(self.module).__name__,
            [] if self.plan.sharded and self.plan.num_copies == 1 else self.selection.parameters,
            transport,
            ranks=ranks,
            buffers=[] if self._buffer_policy == "none" else self.buffers.places(),
            optimizers=_weakly(self._compared_optimizers),
            are_equal=self.plan.init_sync,
        )

    def _watch_gradients(self) -> None:
        """Let the ranks that average their gradients compare their replicas during backward."""
        ranks = range(self.transport.size)
        if self._workers is not None:
            own = self._workers[self.transport.rank]
            ranks = [rank for rank, worker in enumerate(self._workers) if worker == own]  # type: ignore[assignment]
        self.gradients.replicas.watch = self.checks.in_backwards = self._watch(self._gradient_lane, ranks)

    def _compared_optimizers(self) -> list[Optimizer]:
        """Return the attached optimizers whose state is compared, because they must step alike on all ranks."""
        if self.plan.sharded or self.rounds is not None:
            return []
        return [attached.optimizer for attached in self.gradients.settings.optimizers]

    def _are_equal_after(self, step: int) -> None:
        """Record that a parameter sync has made all parameters equal, and compare them if that is due."""
        self._equal_after_backward = self.gradients.num_backwards
        self.checks.compare_after_meeting(self.transport, step)

    def before_forward_of_equal_buffers(self) -> None:
        """Record that buffers were synchronized for a forward that will change them."""
        watch = self.gradients.replicas.watch
        if watch is not None and self.rounds is None and self.buffers.were_sent:
            watch.buffers_are_equal(self.gradients.num_backwards + 1)

    def _are_equal(self, rounds: Rounds) -> bool:
        """Return whether all parameters are still known to be equal.

        If a backward ran since they were made equal, an optimizer that is not attached may have changed them.
        """
        return rounds.are_equal and self._equal_after_backward == self.gradients.num_backwards

    @property
    def is_drifting(self) -> bool:
        """See `ReplicaProtocol.is_drifting`."""
        return self.rounds is not None or self.divergence.is_open or self.divergence.has_diverged

    @property
    def drift_reason(self) -> str:
        """See `ReplicaProtocol.drift_reason`."""
        if self.divergence.has_diverged:
            return "replicas drift apart on purpose (sl.diverge)"
        if self.rounds is not None:
            return f"between two meetings replicas may differ (strategy={self.strategy})"
        return ""

    def equal_tensors(self) -> list[tuple[str, Tensor]]:
        """See `ReplicaProtocol.equal_tensors`."""
        named: list[tuple[str, Tensor]] = []
        drifts = self.rounds is not None and not self._are_equal(self.rounds)
        if not drifts and not self.divergence.is_open and not self.divergence.has_diverged:
            named += self.selection.parameters
        if self._buffer_policy != "none" and self.buffers.are_equal:
            named += self.buffers.named_present()
        return named

    def _compress(self, state: HookState) -> None:
        """Encode the buckets with a compression."""
        state.use(self._gradient_lane, self.module)
        label = state.compression.in_words()
        self.gradients.use_comm_hook(CommHook(state=state, hook=compression_hook, label=label, averages=True))

    def _wire_again(self, chosen: Selection | None = None) -> None:
        """Replace the present hooks, using the present lanes and `options`."""
        self.refuse_sharded("shards stay as they were cut, so the module and its group cannot be changed")
        self.refuse_drifting("the module and its group cannot be changed")
        former, former_buffers = self.gradients, self.buffers
        self._hooks_finalizer.detach()
        self._wire(chosen or self._chosen_again())
        if self.compression is not None:
            self.compression.use(self._gradient_lane, self.module)
        self.gradients.continues(former)
        self.buffers.continues(former_buffers)

    def _chosen_again(self) -> Selection:
        delayed = [(n, p) for n, p in self.module.named_parameters() if n in self.options.delayed]
        return select(self.module, ignore=self._ignore, delayed=delayed, must_match=False)

    def _shard(self) -> Sharding:
        """Move the parameters to memory in which each rank steps its shard of them. A collective call."""
        sharding = Sharding(
            self.module,
            list(zip(self.gradients.names, self.gradients.parameters, strict=True)),
            self.gradients.layout.shares(),
            self._open_lane("shards", of=self.module),  # because sharing outlives the wrapper
            by_parameter=self.options.allow_unused,
        )
        self.plan = replace(self.plan, num_copies=sharding.num_copies)
        self._watch_gradients()
        return sharding

    # ------------------------------------------------------------------ before a step

    def before_forward(self, *, synchronizes: bool, inside_join: bool) -> None:
        """Run the checks that need no other rank. Nothing is sent, because a rank may run a forward alone.

        The checks also run under `no_sync`, because the backward may run outside of it.
        """
        if self.divergence.is_open:
            return
        if synchronizes and self.divergence.has_diverged and (self.reduces() or self.strategy.needs_attach):
            self.divergence.check_not_diverged()
        self.was_changed = self._has_changed()
        if self.was_changed:
            if inside_join:
                raise SynclineError(
                    f"rank {self.transport.rank}: {type(self.module).__name__} was changed inside of join(), where "
                    "ranks without inputs cannot follow: change it before or after"
                )
            self.gradients.before_reduction = _weakly(self._before_reduction)

    def follow_in_backward(self, output: object) -> None:
        """Let the backward of this forward begin by agreeing on the changed module."""
        when_backward_reaches_any(output, _weakly(self._follow_changes))

    def _has_changed(self) -> bool:
        """Return whether the module has changed since the ranks agreed on it."""
        return self._inventory.has_changed() or not self.gradients.layout.fits()

    def _compare_in_next_backward(self) -> None:
        """Let the next synchronized backward compare what the ranks registered, before its first bucket."""
        self.is_agreed = False
        """Whether the ranks have compared their registered hooks, optimizers and metrics."""
        self.gradients.before_reduction = _weakly(self._before_reduction)

    def _before_reduction(self) -> None:
        """Compare registrations at the start of a synchronized backward. A collective call."""
        if not self.divergence.is_open and self._has_changed():
            raise SynclineError(
                f"rank {self.transport.rank}, step {self.gradients.step + 1}, backward: {type(self.module).__name__} "
                "has changed since it was wrapped, and this backward did not begin at an output of the wrapper, so "
                "the ranks could not compare the change. Call the wrapper, not the module, and return tensors (also "
                "in lists, tuples, dictionaries or dataclasses); or wrap the changed module anew"
            )
        if not self.is_agreed:
            self.agree_before_the_first_step()

    def _follow_changes(self, _: object = None) -> None:
        """Agree on a module that has changed since it was wrapped, and synchronize it. A collective call.

        This runs at the start of a backward, which all ranks reach, and not in forward, which one rank may run alone.
        At that point it is too late to broadcast the values of new tensors, so they are compared instead.
        """
        if not self.gradients.enabled or self.divergence.is_open or not self._has_changed():
            return
        self.refuse_drifting("the module and its group cannot be changed")
        self.transport.board.phase = (
            f"backward, where {type(self.module).__name__} has changed since it was wrapped"
        )
        before, chosen = self.selection, self._chosen_again()
        self.plan = plan_after_change(self.plan, chosen)
        self.options = replace(
            self.options, sparse=chosen.sparse, delayed=frozenset(name for name, _ in chosen.delayed)
        )
        agree_on_module(
            chosen,
            contract_of(self.plan),
            self.options,
            self.transport,
            new_values=describe_new_values(chosen, before) if self.plan.init_sync else (),
            remedy="Change a wrapped module in the same way on every rank, between the same two steps. Where new "
            "parameters have different values, call sl.broadcast_(ddp.module) after the change, on every rank.",
        )
        if chosen.buffers and not before.buffers:
            self._buffer_lane = self._open_lane("buffers")
        self._wire_again(chosen)

    def agree_before_join(self) -> None:
        """Compare now, because a rank without inputs runs no backward that would compare. A collective call."""
        self._follow_changes()
        if not self.is_agreed:
            self.agree_before_the_first_step()

    def agree_before_the_first_step(self) -> None:
        """Check that all ranks have registered the same since construction. A collective call."""
        self.transport.board.phase = (
            f"where what was registered with and attached to {type(self.module).__name__} is compared"
        )
        step = optimizers_in_backward(self.gradients.parameters)
        hook = self.gradients.comm_hook
        self._check_attached()
        self._check_that_steps_can_be_discarded(inside_backward=step is not None)
        agree(
            self.transport,
            f"what was registered with and attached to DistributedDataParallel({type(self.module).__name__})",
            [
                f"communication hook: {'none' if hook is None else hook.name}",
                f"buffer hook: {'none' if self.buffer_hook is None else self.buffer_hook.name}",
                f"optimizers step inside backward: {'no' if step is None else 'yes'}",
                *(f"attached optimizer {name}" for name in self.plan.optimizers),
                *(f"reported metric {name}" for name in self.gradients.metrics.wanted_names()),
                *(() if self.sharding is None else self.sharding.describe()),
            ],
            remedy="Register, attach and report the same on every rank, between the same two backwards.",
        )
        if not self.gradients.metrics.has_names(names := self.gradients.metrics.wanted_names()):
            self.gradients.use_metrics(names)
            self.plan = replace(self.plan, metrics=tuple(names))
        self.is_agreed = True  # only here, so that a mismatch is found again in the next backward
        self.gradients.before_reduction = None
        self.gradients.on_reduced = step

    def _check_attached(self) -> None:
        """Check that an optimizer is attached, if the strategy needs one. A collective call.

        Without an attached optimizer, the strategy would never act, and the replicas would drift apart.
        """
        if self.rounds is None or not self.strategy.needs_attach:
            return
        fault = None
        if not self.rounds.is_watching:
            fault = SynclineError(
                f"strategy={self.strategy} acts at the optimizer's step, but no optimizer is attached to "
                f"{type(self.module).__name__}, so it would never act, and the replicas would drift apart: write "
                "optimizer = ddp.attach(optimizer), on every rank, before the first step"
            )
        exchange(self.transport, f"the first step of {type(self.module).__name__}", [], fault=fault)

    def _check_that_steps_can_be_discarded(self, *, inside_backward: bool) -> None:
        """Check that every optimizer step can be discarded, under `on_nonfinite="skip"`. A collective call."""
        if self.options.on_nonfinite != "skip":
            return
        fault: Exception | None = None
        if inside_backward:
            fault = ValueError(
                'on_nonfinite="skip" cannot discard the step of an optimizer that steps inside backward: use "zero" or '
                '"raise", or an optimizer that steps after backward'
            )
        elif not self.gradients.settings.optimizers:
            fault = SynclineError(
                'on_nonfinite="skip" leaves the optimizer\'s step undone, but no optimizer is attached to '
                f"{type(self.module).__name__}, so it would step all the same: write optimizer = "
                "ddp.attach(optimizer), on every rank, before the first step"
            )
        elif left := self._not_attached():
            fault = SynclineError(
                f'on_nonfinite="skip" leaves the steps of attached optimizers undone, but {left[0]} of '
                f"{type(self.module).__name__} is in none of them (in all {len(left)} of "
                f"{len(self.gradients.names)} parameters), so that another optimizer would step it all the same: write "
                "optimizer = ddp.attach(optimizer) for each one, on every rank, before the first step. If no optimizer "
                "is to step it: .requires_grad_(False), or ignore= it when wrapping"
            )
        exchange(self.transport, f"the first step of {type(self.module).__name__}", [], fault=fault)

    def _not_attached(self) -> list[str]:
        """Return the names of parameters with gradients that no attached optimizer steps."""
        stepped = {id(p) for _, parameters in self._attached() for p in parameters}
        named = zip(self.gradients.names, self.gradients.parameters, strict=True)
        return [name for name, p in named if id(p) not in stepped]

    def use_static_graph(self) -> None:
        """Assume from now on that the same parameters get gradients. Allowed only before the first backward."""
        self.options = replace(self.options, static_graph=True, allow_unused=True, skip_unused=False)
        self.plan = replace(self.plan, allow_unused=True)
        self._wire_again()

    def use_transport(self, transport: Transport) -> None:
        """Synchronize over another group from now on. A collective call of its ranks, which must already be equal."""
        self.transport = transport
        self.divergence = self._divergence()
        self.plan = replace(self.plan, transport=transport.name, num_ranks=transport.size)
        self._open_lanes(self.selection)
        self._wire_again()

    # ------------------------------------------------------------------ registration

    def use_comm_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the buckets."""
        if self.plan.compression is not None:
            raise ValueError(
                f"a communication hook cannot reduce what compression={self.plan.compression} encodes: use one or the "
                "other (sl.compression.hook is the same as a hook)"
            )
        self.refuse_sharded("buckets are reduced by spans, which no communication hook does")
        if hook.hook is compression_hook and isinstance(hook.state, HookState):
            hook = replace(hook, label=hook.state.compression.in_words(), averages=True)
        self.gradients.use_comm_hook(hook)
        self.plan = replace(self.plan, comm_hook=hook.name)
        self._compare_in_next_backward()

    def report(self, values: Mapping[str, Any], weight: float, *, inside_join: bool) -> None:
        """See `DistributedDataParallel.report`."""
        metrics = self.gradients.metrics
        if inside_join and not metrics.has_names(values):
            raise SynclineError(
                f"rank {self.transport.rank}: report({', '.join(values)}) inside of join(), where ranks without inputs "
                "cannot follow: report these names once before, on all ranks"
            )
        if not metrics.has_names(values):
            self._compare_in_next_backward()
        metrics.add(values, weight)

    def use_buffer_hook(self, hook: BufferHook) -> None:
        """Let a buffer hook synchronize the buffers."""
        self.refuse_drifting("buffers meet when parameters do, so that a buffer hook would never be called")
        self.buffer_hook = hook
        self.plan = replace(self.plan, has_buffer_hook=True)
        self._compare_in_next_backward()

    def _attached(self) -> list[tuple[Optimizer, list[Tensor]]]:
        """Return the attached optimizers, each with its parameters."""
        if self.sharding is not None:  # because its optimizers hold shards instead
            return [(one.optimizer, [p for g in one.groups for p in g]) for one in self.sharding.optimizers]
        return [(one.optimizer, parameters_of(one.optimizer)) for one in self.gradients.settings.optimizers]

    def attach(self, optimizer: Optimizer, *, elementwise: bool | None, replaces: bool | None) -> None:
        """See `DistributedDataParallel.attach`."""
        checked_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        if elementwise is not None:
            checked_flag("elementwise", elementwise)
        if replaces is not None:
            checked_flag("replace", replaces)
        settings = self.gradients.settings
        if any(attached.optimizer is optimizer for attached in settings.optimizers):
            return
        own = {id(parameter) for parameter in self.module.parameters()}
        if not any(id(p) in own for p in parameters_of(optimizer)):
            raise ValueError(
                f"this {type(optimizer).__name__} has no parameter of {type(self.module).__name__}: attach it to the "
                "module that it trains"
            )
        if any(steps_in_backward(parameter) for parameter in self.gradients.parameters):
            raise RuntimeError(
                "the optimizers of this module step inside backward, where there is no step to check: attach nothing"
            )
        name = type(optimizer).__name__
        replaced = to_replace(optimizer, self._attached(), own, replaces)
        gone = [one for one in settings.optimizers if any(one.optimizer is other for other in replaced)]
        if self.sharding is not None:
            has_begun = bool(self.gradients.num_backwards)
            name = self.sharding.attach(
                optimizer, elementwise, has_begun=has_begun, replaced=replaced
            ).describe()
        for one in gone:
            one.replace_by(type(optimizer).__name__)
        staying = [
            (one, name)
            for one, name in zip(settings.optimizers, self.plan.optimizers, strict=True)
            if one not in gone
        ]
        attached = AttachedOptimizer(
            optimizer,
            _weakly(self._before_optimizer_step),
            _weakly(self._after_optimizer_step),
            _weakly(self._discards_step) if self.options.on_nonfinite == "skip" else None,
        )
        settings.optimizers[:] = [*(one for one, _ in staying), attached]
        if self.rounds is not None:
            self.rounds.watch(attached, gone)
        self.plan = replace(self.plan, optimizers=(*(name for _, name in staying), name))
        self._compare_in_next_backward()

    def reduces(self) -> bool:
        """Return whether a backward that begins now is reduced, unless it runs under `no_sync`."""
        if self.divergence.is_open:
            return False
        return self.rounds is None or self.rounds.reduces() is not None

    def _discards_step(self) -> bool:
        return self.gradients.discards_step()

    def _after_optimizer_step(self, attached: AttachedOptimizer) -> None:
        if self.rounds is not None:
            self.rounds.step_ended(attached)

    def _before_optimizer_step(self, attached: AttachedOptimizer) -> None:
        if self.rounds is not None:
            self.rounds.step_begins()
        if self.transport.size == 1:
            return
        self.refuse_unreduced("optimizer.step()")
        if self.rounds is not None:
            return  # because settings are compared at parameter syncs
        if attached.told_settings in (None, attached.settings()):
            return
        # The settings changed after the backward that compared them. If they did not change on all ranks, the board
        # reports where each rank is.
        self.transport.board.phase = "optimizer.step(), where settings have changed since the backward"
        agree(
            self.transport,
            f"the settings of an attached {type(attached.optimizer).__name__}, at its step",
            attached.describe(0),
            remedy="Change settings on all ranks alike, best between a step and the next backward.",
        )
        attached.told_settings = attached.settings()

    def send_stop_vote(self, vote: StopVote, transport: Transport, *, inside_join: bool) -> VoteRoute:
        """See `ReplicaProtocol.send_stop_vote`."""
        if self.rounds is not None:
            self.rounds.check_may_wait("stop_if_asked")
            return VoteRoute.COLLECTIVE
        if self.transport is not transport:
            return VoteRoute.COLLECTIVE
        self.gradients.stop.vote = vote
        return VoteRoute.GRADIENTS_ONLY if inside_join else VoteRoute.GRADIENTS

    # ------------------------------------------------------------------ refused combinations

    def refuse_unreduced(self, what: str) -> None:
        """Raise if `.grad` holds only this rank's gradients. `what` names the refused call."""
        if self.gradients.has_unreduced and self.reduces():
            raise SynclineError(
                f"rank {self.transport.rank}, {what} after step {self.gradients.step}: expected reduced gradients, "
                "but the last backward ran under no_sync, so .grad holds this rank's alone. Run the last micro-batch "
                "outside of no_sync, or clear the gradients first"
            )

    def refuse_sharded(self, why: str) -> None:
        """Raise if each rank steps only its shard. `why` states the reason."""
        if self.sharding is not None:
            raise ValueError(f"with sharded=True {why}: wrap the module without sharded=True")

    def refuse_drifting(self, what: str) -> None:
        """Raise if replicas may differ between two parameter syncs. `what` states what is not possible."""
        if self.rounds is not None:
            raise ValueError(
                f"under strategy={self.strategy} {what}: wrap the module anew, or with EveryStep()"
            )

    # ------------------------------------------------------------------ records and state

    def evidence(self, *, looks_ahead: bool = False) -> Evidence:
        """Return the records of this rank.

        Args:
            looks_ahead: also find the step of the next parameter sync. This may ask the strategy thousands of times.
        """
        return Evidence(
            rank=self.transport.rank,
            backward=self.gradients.ledger.last(),
            buffers=self.buffers.last_forward(),
            round=None if self.rounds is None else self.rounds.last,
            next_round=self.rounds.next_step() if self.rounds is not None and looks_ahead else None,
            met_at={} if self.rounds is None else dict(self.rounds.met_at),
            replicas_compared=self.checks.last_compared,
            num_repairs=self.checks.num_repairs,
        )

    def _stateful_parts(self) -> dict[str, Any]:
        """Return the parts that have a state of their own, by name."""
        parts = {"rounds": self.rounds, "compression": self.compression}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def has_sync_state(self) -> bool:
        """See `ReplicaProtocol.has_sync_state`."""
        return self._is_compression_idle() or bool(self._stateful_parts())

    def sync_state_dict(self) -> dict[str, Any]:
        """See `DistributedDataParallel.sync_state_dict`."""
        if self.rounds is not None:
            self.rounds.are_equal = self._are_equal(self.rounds)
        states = {name: part.state_dict() for name, part in self._stateful_parts().items()}
        return states | {"compression": dict(self._owed)} if self._is_compression_idle() else states

    def load_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `sync_state_dict` returned, as `DistributedDataParallel.load_sync_state_dict` does."""
        parts = self._stateful_parts()
        checked_kind("state", state, Mapping, "a dict, as sync_state_dict() gives it")
        if parts.keys() != state.keys() - ({"compression"} if self._is_compression_idle() else set()):
            raise ValueError(
                f"expected what sync_state_dict() gave under strategy={self.strategy} and compression="
                f"{self.plan.compression}: the state of {', '.join(parts) or 'nothing'}; got that of "
                f"{', '.join(state) or 'nothing'}"
            )
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self._equal_after_backward = self.gradients.num_backwards
        if self.checks.after_meetings is not None:
            self.checks.after_meetings.agreed_at(None)
        if self._is_compression_idle():
            self._owed = state.get("compression", {})

    def _is_compression_idle(self) -> bool:
        """Return whether there is a compression that encodes nothing, because there is one rank."""
        return self.plan.compression is not None and self.compression is None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the parts that hold hooks and connections."""
        return {name: value for name, value in vars(self).items() if name in _KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the replica over the default group, without lanes of its own.

        Opening a lane is a collective call, but a rank may unpickle a replica alone. Hooks and optimizers must be
        registered again.
        """
        vars(self).update(state)
        self.transport = self._gradient_lane = self._buffer_lane = transport_of(None)
        self.divergence = self._divergence()
        self.plan = replace(self.plan, comm_hook=None, optimizers=(), metrics=())
        self._wire(self._chosen_again())
        if self.compression is not None:
            self._compress(self.compression)


_KEPT = frozenset(
    {
        "module",
        "options",
        "plan",
        "strategy",
        "rounds",
        "sharding",
        "buffer_hook",
        "_owed",
        "_buffer_policy",
        "_ignore",
        "_workers",
        "compression",
        "checks",
        "_equal_after_backward",
    }
)
