"""One rank's replica: the parts that keep a module equal on all ranks. They are rebuilt when the module changes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from syncline.buffers.policies import BufferSync
from syncline.compression import HookState
from syncline.compression import hook as compression_hook
from syncline.contract import Rules
from syncline.ddp.config import Config
from syncline.ddp.drift import Drift, ReplicaChecks, SyncState
from syncline.ddp.plan import Evidence, Plan, sizes_of
from syncline.ddp.registrations import Registrations
from syncline.ddp.selection import Inventory, Selection, select
from syncline.ddp.wrapping import (
    Hosts,
    agree_on_module,
    broadcast_values,
    describe_new_values,
    spec_of,
)
from syncline.errors import SynclineError
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.reducer import GradientSync
from syncline.gradients.riders.replica_watch import ReplicaWatch
from syncline.gradients.riders.stop import StopVote, VoteRoute
from syncline.gradients.usage import when_backward_reaches_any
from syncline.optimizers.attached import weakly
from syncline.session.world import transport_of
from syncline.sharded.optimizer import Sharding
from syncline.sharded.sharing import one_copy_of, written_elsewhere
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport

NOT_COPIED = (
    "a wrapper cannot be copied or pickled, because the copy would not have what the ranks agreed on last"
)


_UNCHANGED = "the module and its group cannot be changed"


class _Situation(NamedTuple):
    """The facts about the ranks that do not change."""

    num_hosts: int
    rules: Rules | None
    """The rules of a strategy under which replicas drift."""
    workers: tuple[int, ...] | None
    """For each rank, the number of its group that averages gradients; None if all ranks do."""


class _Lanes(NamedTuple):
    """Transports that are used for one purpose each, so that no rank mistakes a message for one of another purpose."""

    gradients: Transport
    buffers: Transport


class Replica:
    """The parts that keep one wrapped module equal on all ranks.

    The constructor is a collective call. The ranks agree on the module and the configuration, and start from the same
    values. The hooks are removed when the replica is freed. They hold no strong reference to it.

    Args:
        module: the module to keep equal.
        chosen: the tensors of the module that take part.
        transport: connects the ranks.
        config: the configuration of the wrapper.
        hosts: the hosts of the ranks.

    Raises:
        ContractMismatch: the ranks differ. The text is the same on every rank.
    """

    def __init__(
        self, module: nn.Module, chosen: Selection, transport: Transport, config: Config, hosts: Hosts
    ) -> None:
        self.module = module
        self.transport = transport
        self.config = config
        self.checks = ReplicaChecks()
        """The comparisons of this replica with those of the other ranks."""
        self.was_changed = False
        """Whether the last forward with gradients enabled found the module changed."""
        self.sharding: Sharding | None = None
        spec = spec_of(chosen, transport, hosts)
        strategy = config.strategy
        workers = strategy.workers(spec)
        rules = strategy.rules(spec) if strategy.drifts else None
        self._situation = _Situation(len(hosts.loads), rules, workers)
        agree_on_module(self._plan_of(chosen), chosen, transport)
        former = one_copy_of(module)
        if former is not None:
            names = former.written_here()
            fault = written_elsewhere(f": {names}") if names else None
            exchange(transport, f"DistributedDataParallel({self._title})", [], fault=fault)
        if config.init_sync:
            broadcast_values(chosen, transport, src=0, buffers=config.init_buffers)
        self._lanes = self._open_lanes(chosen)
        trained = [*chosen.trained, *chosen.delayed]
        self.drift = Drift(module, trained, config, transport, spec if strategy.drifts else None, self.checks)
        self.registered = Registrations(module, config, self.drift.rounds, weakly(self._before_reduction))
        self._wire(chosen)
        compression = None
        if config.compression is not None and transport.size > 1:
            compression = HookState(config.compression, self._lanes.gradients)
        self.state = SyncState(config, self.drift, compression, {})
        """The state of the strategy and of the compression between steps."""
        self._compress()
        if config.gradients.sharded:
            self._shard()

    @property
    def _title(self) -> str:
        return type(self.module).__name__

    # ------------------------------------------------------------------ lanes and hooks

    def _open_lanes(self, chosen: Selection) -> _Lanes:
        """Open separate lanes for gradients and for buffers. A collective call."""
        gradients = self._open_lane("gradients")
        workers = self._situation.workers
        if workers is not None:
            within = self.transport.split(workers[self.transport.rank])
            assert within is not None
            gradients = within
            weakref.finalize(self, within.close)
        return _Lanes(gradients, self._open_lane("buffers") if chosen.buffers else self.transport)

    def _open_lane(self, purpose: str, *, of: object = None) -> Transport:
        """Return a new lane, which is closed when `of` (None: this replica) is freed."""
        lane = self.transport.lane(f"{purpose} of {self._title}")
        if lane is not self.transport:
            weakref.finalize(self if of is None else of, lane.close)
        return lane

    def _wire(self, chosen: Selection, former: GradientSync | None = None) -> None:
        """Install the hooks on the chosen tensors. A collective call only with `sharded=True`.

        Args:
            chosen: the tensors.
            former: the reducer whose state the new one takes over.
        """
        self.selection = chosen
        lane = self._lanes.gradients
        # Computed here, because a group of one rank may have been replaced by a larger one.
        compares = self.config.replica_check is not None and self.transport.size > 1
        self.gradients = GradientSync(
            [*chosen.trained, *chosen.delayed],
            lane,
            replace(self.config.gradients, compares_replicas=compares),
            main_lane=self.transport,
            former=former,
        )
        self.buffers = BufferSync(
            self.module,
            self._lanes.buffers,
            agreeing=self.transport,
            policy=self.config.buffers,
            ignored=set(chosen.ignored),
        )
        self._watch_gradients()
        rules = self._situation.rules
        if rules is not None and rules.equal_after_sync:
            self.checks.after_syncs = self._watch(self.transport, range(self.transport.size))
        self.registered.use(self.gradients, self.transport, self.sharding)
        self.drift.use(self.gradients, self.buffers, self.registered, rules)
        self._inventory = Inventory(self.module)
        # The finalizer must hold no reference that keeps the wrapper alive.
        self._hooks_finalizer = weakref.finalize(self, self.gradients.remove_hooks)
        if former is not None and self.state.compression is not None:
            self.state.compression.use(lane, self.module)

    def _wire_again(self, chosen: Selection | None = None) -> None:
        """Replace the hooks by new ones, with the same lanes and configuration."""
        self.refuse_sharded("shards stay as they were cut, so the module and its group cannot be changed")
        former, former_buffers = self.gradients, self.buffers
        self._hooks_finalizer.detach()
        self._wire(chosen or self._chosen_again(), former)
        self.buffers.continues(former_buffers)

    def _chosen_again(self) -> Selection:
        delayed = [(n, p) for n, p in self.module.named_parameters() if n in self.config.gradients.delayed]
        return select(self.module, ignore=self.config.ignore, delayed=delayed, must_match=False)

    def _compress(self) -> None:
        """Encode the buckets, if there is a compression."""
        state = self.state.compression
        if state is not None:
            state.use(self._lanes.gradients, self.module)
            label = state.compression.in_words()
            hook = CommHook(state=state, hook=compression_hook, label=label, averages=True)
            self.gradients.use_comm_hook(hook)

    def _shard(self) -> None:
        """Move the parameters to memory in which each rank steps its shard of them. A collective call."""
        self.sharding = Sharding(
            self.module,
            list(zip(self.gradients.names, self.gradients.parameters, strict=True)),
            self.gradients.layout.shards(),
            self._open_lane("shards", of=self.module),  # because sharing outlives the wrapper
            by_parameter=self.config.gradients.allow_unused,
        )
        self._watch_gradients()
        self.registered.use(self.gradients, self.transport, self.sharding)

    # ------------------------------------------------------------------ comparisons of replicas

    def _watch(self, transport: Transport, ranks: Sequence[int]) -> ReplicaWatch | None:
        """Return the watch that compares replicas between the ranks of `transport`, or None."""
        check = self.config.replica_check
        if check is None or transport.size == 1:
            return None
        has_one_copy = self.sharding is not None and self.sharding.num_copies == 1
        steps_alike = self.drift.rounds is None and not self.config.gradients.sharded
        return ReplicaWatch(
            check,
            self._title,
            [] if has_one_copy else self.selection.parameters,
            transport,
            ranks=ranks,
            buffers=[] if self.config.buffers == "none" else self.buffers.places(),
            optimizers=weakly(self.registered.optimizers) if steps_alike else list,
            agreed_at=0 if self.config.init_sync else None,
        )

    def _watch_gradients(self) -> None:
        """Let the ranks that average their gradients compare their replicas during backward."""
        workers = self._situation.workers or (0,) * self.transport.size
        own = workers[self.transport.rank]
        ranks = [rank for rank, worker in enumerate(workers) if worker == own]
        self.checks.in_backwards = self._watch(self._lanes.gradients, ranks)
        self.gradients.compare_replicas_by(self.checks.in_backwards)

    def before_forward_of_equal_buffers(self) -> None:
        """Record that buffers were synchronized for a forward that will change them."""
        watch = self.gradients.riders.replicas.watch
        if watch is not None and self.drift.rounds is None and self.buffers.were_sent:
            watch.buffers_are_equal(self.gradients.num_backwards + 1)

    def equal_tensors(self) -> list[tuple[str, Tensor]]:
        """See `ReplicaProtocol.equal_tensors`."""
        named: list[tuple[str, Tensor]] = []
        if self.drift.are_parameters_equal:
            named += self.selection.parameters
        if self.config.buffers != "none" and self.buffers.are_equal:
            named += self.buffers.named_present()
        return named

    # ------------------------------------------------------------------ a module that changes

    def before_forward(self, *, synchronizes: bool, inside_join: bool) -> None:
        """Run the checks that need no other rank. Nothing is sent, because a rank may run a forward alone.

        The checks also run under `no_sync`, because the backward may run outside of it.
        """
        divergence = self.drift.divergence
        if divergence.is_open:
            return
        needs_attach = self.config.strategy.needs_attach
        if synchronizes and divergence.has_diverged and (self.drift.reduces() or needs_attach):
            divergence.check_not_diverged()
        self.was_changed = self._has_changed()
        if self.was_changed:
            if inside_join:
                raise SynclineError(
                    f"rank {self.transport.rank}: {self._title} was changed inside of join(), where ranks without "
                    "inputs cannot follow: change it before or after"
                )
            self.gradients.controls.do_before_reduction(weakly(self._before_reduction))

    def follow_in_backward(self, output: object) -> None:
        """Let the backward of this forward begin by agreeing on the changed module."""
        when_backward_reaches_any(output, weakly(self._follow_changes))

    def _has_changed(self) -> bool:
        """Return whether the module has changed since the ranks agreed on it."""
        return self._inventory.has_changed() or not self.gradients.layout.fits()

    def _before_reduction(self) -> None:
        """Compare registrations at the start of a synchronized backward. A collective call."""
        if not self.drift.divergence.is_open and self._has_changed():
            raise SynclineError(
                f"rank {self.transport.rank}, step {self.gradients.step + 1}, backward: {self._title} has changed "
                "since it was wrapped, and this backward did not begin at an output of the wrapper, so the ranks "
                "could not compare the change. Call the wrapper, not the module, and return tensors (also in lists, "
                "tuples, dictionaries or dataclasses); or wrap the changed module again"
            )
        if not self.registered.are_agreed:
            self.registered.agree()

    def _follow_changes(self, _: object = None) -> None:
        """Agree on a module that has changed since it was wrapped, and synchronize it. A collective call.

        This runs at the start of a backward, which all ranks reach, and not in forward, which one rank may run alone.
        At that point it is too late to broadcast the values of new tensors, so they are compared instead.
        """
        if not self.gradients.controls.enabled or self.drift.divergence.is_open or not self._has_changed():
            return
        self.drift.refuse(_UNCHANGED)
        self.transport.board.phase = f"backward, where {self._title} has changed since it was wrapped"
        before, chosen = self.selection, self._chosen_again()
        delayed = frozenset(name for name, _ in chosen.delayed)
        self.config = self.config.with_gradients(sparse=chosen.sparse, delayed=delayed)
        agree_on_module(
            self._plan_of(chosen),
            chosen,
            self.transport,
            new_values=describe_new_values(chosen, before) if self.config.init_sync else (),
            remedy="Change a wrapped module in the same way on every rank, between the same two steps. Where new "
            "parameters have different values, call sl.broadcast_(ddp.module) after the change, on every rank.",
        )
        if chosen.buffers and not before.buffers:
            self._lanes = self._lanes._replace(buffers=self._open_lane("buffers"))
        self._wire_again(chosen)

    def agree_before_join(self) -> None:
        """Compare now, because a rank without inputs runs no backward that would compare. A collective call."""
        self._follow_changes()
        if not self.registered.are_agreed:
            self.registered.agree()

    def use_static_graph(self) -> None:
        """Assume from now on that the same parameters get gradients. Allowed only before the first backward."""
        self.drift.refuse(_UNCHANGED)
        self.config = self.config.with_gradients(static_graph=True, allow_unused=True, skip_unused=False)
        self._wire_again()

    def use_transport(self, transport: Transport) -> None:
        """Synchronize over another group from now on. A collective call of its ranks, which must already be equal."""
        self.drift.refuse(_UNCHANGED)
        self.transport = transport
        self.drift.use_transport(transport)
        self._lanes = self._open_lanes(self.selection)
        self._wire_again()

    def use_comm_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the buckets."""
        self.refuse_sharded("buckets are reduced by spans, which no communication hook does")
        self.registered.use_comm_hook(hook)

    # ------------------------------------------------------------------ called by the library

    @property
    def is_drifting(self) -> bool:
        """See `ReplicaProtocol.is_drifting`."""
        return self.drift.is_possible

    @property
    def drift_reason(self) -> str:
        """See `ReplicaProtocol.drift_reason`."""
        return self.drift.reason

    def send_stop_vote(self, vote: StopVote, transport: Transport, *, inside_join: bool) -> VoteRoute:
        """See `ReplicaProtocol.send_stop_vote`."""
        if self.drift.rounds is not None:
            self.drift.rounds.check_may_wait("stop_if_asked")
            return VoteRoute.COLLECTIVE
        if self.transport is not transport:
            return VoteRoute.COLLECTIVE
        self.gradients.riders.stop.carry(vote)
        return VoteRoute.GRADIENTS_ONLY if inside_join else VoteRoute.GRADIENTS

    def refuse_sharded(self, why: str) -> None:
        """Raise if each rank steps only its shard. `why` states the reason."""
        if self.sharding is not None:
            raise ValueError(f"with sharded=True {why}: wrap the module without sharded=True")

    # ------------------------------------------------------------------ plan, records and state

    def _plan_of(self, chosen: Selection) -> Plan:
        """Return the facts about a module with these tensors, without what was registered."""
        num_hosts, rules, workers = self._situation
        return Plan(
            config=self.config,
            module=self._title,
            transport=self.transport.name,
            num_ranks=self.transport.size,
            num_hosts=num_hosts,
            sizes=sizes_of(chosen),
            rules=rules,
            num_reducing=None if workers is None else workers.count(workers[self.transport.rank]),
        )

    @property
    def plan(self) -> Plan:
        """The facts about this replica that are printed."""
        hook = self.gradients.layout.comm_hook
        return replace(
            self._plan_of(self.selection),
            num_copies=0 if self.sharding is None else self.sharding.num_copies,
            comm_hook=None if hook is None or self.state.compression is not None else hook.name,
            has_buffer_hook=self.registered.buffer_hook is not None,
            optimizers=self.registered.in_words(),
            metrics=self.registered.metric_names(),
        )

    def evidence(self, *, looks_ahead: bool = False) -> Evidence:
        """Return the records of this rank.

        Args:
            looks_ahead: also find the step of the next parameter sync. This may ask the strategy thousands of times.
        """
        rounds = self.drift.rounds
        return Evidence(
            rank=self.transport.rank,
            backward=self.gradients.ledger.last(),
            buffers=self.buffers.last_forward(),
            round=None if rounds is None else rounds.last,
            next_round=rounds.next_step() if rounds is not None and looks_ahead else None,
            synced_at={} if rounds is None else dict(rounds.synced_at),
            replicas_compared=self.checks.last_compared,
            num_repairs=self.checks.num_repairs,
        )

    @property
    def has_sync_state(self) -> bool:
        """See `ReplicaProtocol.has_sync_state`."""
        return bool(self.state)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the state without the parts that hold hooks and connections."""
        state = self.state
        return (
            *(self.module, self.config, self._situation),
            *(state.compression, state.idle, self.registered.buffer_hook),
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restore the replica over the default group, without lanes of its own.

        Opening a lane is a collective call, but a rank may unpickle a replica alone. Hooks and optimizers must be
        registered again.
        """
        self.module, self.config, self._situation, compression, idle, buffer_hook = state
        self.was_changed, self.sharding = False, None
        self.checks = ReplicaChecks()
        self.transport = transport_of(None)
        self._lanes = _Lanes(self.transport, self.transport)
        self.drift = Drift(self.module, (), self.config, self.transport, None, self.checks)
        compare = weakly(self._before_reduction)
        self.registered = Registrations(self.module, self.config, None, compare, buffer_hook)
        self._wire(self._chosen_again())
        self.state = SyncState(self.config, self.drift, compression, idle)
        self._compress()
