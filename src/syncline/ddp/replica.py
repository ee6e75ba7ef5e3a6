"""The replica of one rank: the parts that keep a wrapped module equal on all ranks.

The parts are replaced by new ones when the module changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from syncline._torch.modules import is_in_functional_call
from syncline.buffers.policies import BufferSync
from syncline.ddp.config import Config
from syncline.ddp.drift import Drift, ReplicaChecks, SyncState
from syncline.ddp.lanes import Lanes
from syncline.ddp.plan import Evidence, Plan, sizes_of
from syncline.ddp.registrations import Registrations
from syncline.ddp.selection import Inventory, Selection, select
from syncline.ddp.wrapping import (
    Hosts,
    agree_on_module,
    broadcast_values,
    check_one_copy,
    describe_new_values,
    first_plan,
    gather_hosts,
    warn_if_wrapped_twice,
)
from syncline.errors import SynclineError
from syncline.gradients.backward import refuse_graph_capture
from syncline.gradients.reducer import GradientSync
from syncline.gradients.riders.replica_look import Looks
from syncline.gradients.riders.replica_search import Peers
from syncline.gradients.riders.replica_watch import ReplicaCheck, ReplicaWatch
from syncline.gradients.riders.requests import StopVote
from syncline.gradients.state import StepState
from syncline.gradients.user_hooks import HookTable, table_of
from syncline.liveness.board import BUFFERS_LANE, StepPhase
from syncline.optimizers.attached import weakly
from syncline.session.world import transport_of
from syncline.sharded.optimizer import Sharding
from syncline.transport.base import Transport

UNCHANGED = "the module and its group cannot be changed"


class Replica:
    """The parts that keep one wrapped module equal on all ranks.

    The constructor is a collective call. The ranks compare the module and the configuration. With `init_sync`, rank 0
    then broadcasts its values. Hooks on parameters hold no strong reference to the replica. They are removed when the
    replica is freed.

    Args:
        module: the wrapped module.
        chosen: the tensors of the module that are synchronized.
        transport: the transport between the ranks.
        config: the configuration of the wrapper.
        hosts: the hosts on which the ranks run.

    Raises:
        ContractMismatch: the module or the configuration differs between ranks. The text is the same on every rank.
    """

    def __init__(
        self, module: nn.Module, chosen: Selection, transport: Transport, config: Config, hosts: Hosts
    ) -> None:
        self.module = module
        self.transport = transport
        self.config = config
        self.checks = ReplicaChecks()
        """The comparisons of this replica with the replicas of other ranks."""
        self._numbered_title = transport.numbered(self._title)
        self.was_changed = False
        """Whether the last forward with gradients enabled has detected that the module changed."""
        self._new_module: nn.Module | None = None
        """The module that has taken the place of `module` in the wrapper, until the ranks have compared it."""
        self._triggers: list[tuple[HookTable, int]] = []
        """The hooks, by table and key, on parameters that a changed module has and the reducer does not know yet."""
        self.sharding: Sharding | None = None
        self._has_local_buffers = not chosen.buffers
        """Whether no buffer is ever synchronized, because the module had none when it was wrapped."""
        self._first_plan, spec = first_plan(config, self._title, chosen, transport, hosts)
        agree_on_module(self._first_plan, chosen, transport)
        check_one_copy(module, transport)
        if config.init_sync:
            broadcast_values(chosen, transport, src=0, buffers=config.init_buffers)
        self._lanes = Lanes(self)
        self._gradient_lane, self._buffer_lane = self._open_lanes()
        drifting = spec if config.strategy.drifts else None
        self.drift = Drift(
            module, chosen.reduced, config, transport, drifting, self.checks, title=self._numbered_title
        )
        self.registered = Registrations(config, self.drift.rounds, weakly(self._before_reduction))
        self.state = SyncState(config, self.drift, None, {})
        """The owner of the state that the strategy and the compression keep between steps."""
        self._wire(chosen)

    @property
    def _title(self) -> str:
        return type(self.module).__name__

    def _open_lanes(self) -> tuple[Transport, Transport]:
        """Open one lane for gradients and one for buffers, so that their messages cannot mix. A collective call."""
        gradients = self._open_lane("gradients")
        workers = self._first_plan.workers
        if workers is not None:
            within = self.transport.split(workers[self.transport.rank])
            assert within is not None
            gradients = within
            self._lanes.keep([within], of=self.transport)
        sends_buffers = self.config.sends_buffers and not self._has_local_buffers
        return gradients, self._open_lane(BUFFERS_LANE) if sends_buffers else self.transport

    def _open_lane(self, purpose: str, lanes: Lanes | None = None) -> Transport:
        """Open a lane for a purpose, and add it to `lanes`, or else to those of this replica."""
        return (lanes or self._lanes).open(f"{purpose} of {self._title}", of=self.transport)

    def _wire(self, chosen: Selection, former: GradientSync | None = None) -> None:
        """Build the parts that synchronize these tensors, and install their hooks.

        With `sharded=True`, or in another group than that of `former`, this is a collective call.

        Args:
            chosen: the tensors to synchronize.
            former: the reducer that the new one replaces. Pass None if there is none.
        """
        self.selection = chosen
        # Not part of the configuration, because a group of one rank may be replaced by a larger one.
        check = self.config.replica_check if self.transport.size > 1 else None
        looks = isinstance(check, Looks) and not self.config.strategy.drifts
        self.gradients = GradientSync(
            chosen.reduced,
            self._gradient_lane,
            replace(
                self.config.gradients,
                compares_replicas=isinstance(check, ReplicaCheck),
                looks_at_replicas=looks,
            ),
            main_lane=self.transport,
            state=StepState(self.config.gradients.on_nonfinite) if former is None else former.state,
            title=self._numbered_title,
            # Passed before the buckets are laid out, because encoded gradients need no memory of the transport.
            comm_hook=self.state.comm_hook(self._gradient_lane, self.module, num_ranks=self.transport.size),
            carry=None if former is None else former.retire(self._gradient_lane),
        )
        rules, ignored = self._first_plan.rules, [*chosen.ignored, *self.config.ignore]
        if former is None:
            self.buffers: BufferSync = BufferSync(
                self.config.buffers,
                are_local=self._has_local_buffers,
                are_compared=self.config.sends_buffers,
            )
            if rules is not None:
                when = rules.buffers_when if self.config.buffers != "none" else "never (buffers='none')"
                self.buffers.leave_to_strategy(f"under {self.config.strategy} they are synchronized {when}")
        self.buffers.use(self.module, self._buffer_lane, self.transport, ignored)
        if self.config.gradients.sharded:
            self.sharding = Sharding(
                self.module,
                list(zip(self.gradients.names, self.gradients.parameters, strict=True)),
                self.gradients.layout.shards(),
                self._open_lane("shards", Lanes(self.module)),  # shared memory outlives the wrapper
                by_parameter=self.config.gradients.allow_unused,
                former=self.sharding,
            )
        self._watch_gradients()
        if rules is not None and rules.equal_after_sync:
            self.checks.after_syncs = self._watch(self.transport, range(self.transport.size))
        self.registered.use(self.module, self.gradients, self.transport, self.sharding)
        self.drift.use(self.gradients, self.buffers, self.registered)
        self._remove_triggers()
        self._inventory = Inventory(self.module)
        # The finalizer must hold no reference that keeps the wrapper alive.
        self._hooks_finalizer = weakref.finalize(self, self.gradients.remove_hooks)

    def _wire_again(self) -> None:
        """Replace the parts by new ones for the module as it is now, which take over the state of the former parts.

        Raises:
            ValueError: the module is sharded.
        """
        self.refuse_sharded(f"the bounds of the shards are fixed, so {UNCHANGED}")
        self._replace_parts(self._chosen_again())

    def _replace_parts(self, chosen: Selection, compared: Inventory | None = None) -> None:
        """Replace the parts by new ones.

        Args:
            chosen: the tensors to synchronize.
            compared: the record of the module when the ranks compared it. Pass None if they have compared it now.
        """
        self._hooks_finalizer.detach()
        self._wire(chosen, self.gradients)
        self._inventory = compared or self._inventory

    def _chosen_again(self) -> Selection:
        """Repeat the selection of the tensors to synchronize, in the module as it is now."""
        delayed = [(n, p) for n, p in self.module.named_parameters() if n in self.config.gradients.delayed]
        return select(self.module, ignore=self.config.ignore, delayed=delayed, must_match=False)

    def _watch(self, transport: Transport, ranks: Sequence[int]) -> ReplicaWatch | None:
        """Return a watch that compares the replicas of these ranks; None if no comparison is configured or possible."""
        check = self.config.replica_check
        if not isinstance(check, ReplicaCheck) or transport.size == 1:
            return None
        steps_alike = self.drift.rounds is None and not self.config.gradients.sharded
        return ReplicaWatch(
            check,
            Peers(self._title, transport, ranks),
            self._own_parameters(),
            buffers=[] if self.config.buffers == "none" or self._has_local_buffers else self.buffers.places,
            optimizers=weakly(self.registered.optimizers) if steps_alike else list,
            agreed_at=0 if self.config.init_sync else None,
        )

    def _own_parameters(self) -> Sequence[tuple[str, Tensor]]:
        """Return the parameters of which each rank has its own copy: none, if all ranks share one copy."""
        has_one_copy = self.sharding is not None and self.sharding.num_copies == 1
        return [] if has_one_copy else self.selection.parameters

    def _watch_gradients(self) -> None:
        """Let the ranks that average their gradients together compare their replicas in synchronized backwards."""
        look, hook = self.gradients.riders.look, self.gradients.layout.comm_hook
        look.use(self._title, self._own_parameters() if self.gradients.options.looks_at_replicas else [])
        if hook is not None and hook.lets_replicas_drift:
            look.stop()
        ranks = self._plan_of(self.selection).reducing_ranks
        self.checks.in_backwards = self._watch(self._gradient_lane, ranks)
        self.gradients.riders.replicas.use(self.checks.in_backwards)

    def before_forward_of_equal_buffers(self) -> None:
        """Record that the buffers are equal on all ranks now, because the forward that begins has synchronized them."""
        watch = self.gradients.riders.replicas.watch
        if watch is not None and self.drift.rounds is None:
            watch.buffers_are_equal(self.gradients.state.num_backwards + 1)

    def equal_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that must be equal on all ranks now, each with its name."""
        named: list[tuple[str, Tensor]] = []
        if self.drift.are_parameters_equal():
            named += self.selection.parameters
        if self.config.buffers != "none" and self.buffers.are_equal:
            named += self.buffers.named_present()
        return named

    # ------------------------------------------------------------------ a module that changes

    def before_forward(self, module: nn.Module, *, synchronizes: bool, inside_join: bool) -> None:
        """Detect a change of the module, and check that `sl.diverge` has not left the replicas different.

        This sends nothing, because one rank may run a forward alone. A change is also detected under `no_sync`, because
        the backward may run outside of `no_sync`.

        Args:
            module: the module of the wrapper, which the program may have replaced.
            synchronizes: whether the backward of this forward would be synchronized.
            inside_join: whether the forward runs inside of `join`.

        Raises:
            SynclineError: the replicas have drifted apart, the module has changed inside of `join`, or the forward is
                being captured into a CUDA graph.
        """
        if self.gradients.parameters[0].is_cuda:
            refuse_graph_capture(rank=self.transport.rank, step=self.gradients.step + 1, phase="forward")
        if not self.gradients.step:  # checked only before the first step, so that later steps are faster
            warn_if_wrapped_twice(self.module, self.gradients.parameters)
        divergence = self.drift.divergence
        if divergence.is_open:
            return
        needs_attach = self.config.strategy.needs_attach
        if synchronizes and divergence.has_diverged and (self.drift.reduces() or needs_attach):
            divergence.check_not_diverged()
        has_changed = (
            module is not self.module or self._inventory.has_changed() or not self.gradients.layout.fits()
        )
        self.was_changed = has_changed and not is_in_functional_call()
        if self.was_changed:
            self._await_changes(module, inside_join=inside_join)
        elif self._new_module is not None and not has_changed:
            self._forget_changes()

    def _await_changes(self, module: nn.Module, *, inside_join: bool) -> None:
        """Follow a change of the module in the next synchronized backward, unless the change needs nothing.

        The first gradient of that backward may be one of a parameter that the reducer does not know.
        """
        if self._needs_nothing(module):
            self._forget_changes()
            self._use_module(module)
            self._inventory = Inventory(module)
            self.buffers.use_module(module)
            return
        if inside_join:
            raise SynclineError(
                f"rank {self.transport.rank}: {self._title} was changed inside of join(), but the ranks without "
                "inputs cannot make the same change. Change the module before or after join()"
            )
        self._new_module = module
        self._remove_triggers()
        known = {id(parameter) for parameter in self.gradients.parameters}
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in known:
                table, key = table_of(parameter), self.gradients.ownership.hook_key
                table.add_first(key, weakly(self._gradient_is_ready))
                self._triggers.append((table, key))
        self.gradients.controls.do_before_reduction(weakly(self._before_reduction))

    def _needs_nothing(self, module: nn.Module) -> bool:
        """Return whether a changed module has the same parameters as before, in the same form."""
        same = [(name, id(p)) for name, p in self.selection.parameters]
        now = [(name, id(p)) for name, p in module.named_parameters() if name not in self.selection.ignored]
        trained = {id(p) for _, p in self.selection.reduced}
        return (
            now == same
            and self.gradients.layout.fits()
            and all(p.requires_grad <= (id(p) in trained) for _, p in self.selection.parameters)
        )

    def _use_module(self, module: nn.Module) -> None:
        if module is not self.module:
            self.module = module
            self.drift.use_module(module)

    def _forget_changes(self) -> None:
        """Forget a change that the program has undone before a backward followed it."""
        self._new_module = None
        self._remove_triggers()

    def _remove_triggers(self) -> None:
        for table, key in self._triggers:
            table.drop(key)
        self._triggers = []

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        """Follow the changes of the module, because a parameter has got a gradient that the reducer does not know."""
        if self.gradients.is_local_now():
            return
        self._follow_changes()
        self.gradients.take_first(parameter)

    def _before_reduction(self) -> None:
        """Compare the module and the registrations of the ranks if they have changed. A collective call.

        This runs at the start of a synchronized backward, because all ranks run the backward, but one rank may run a
        forward alone.
        """
        self._follow_changes()
        self.registered.agree()

    def _follow_changes(self) -> None:
        """Compare a changed module between the ranks, then synchronize it in its new form. A collective call.

        It is too late to broadcast the values of new tensors, so the ranks compare these values.
        """
        if self.drift.divergence.is_open:
            return
        self._remove_triggers()
        module = self._new_module or self.module
        if self._needs_nothing(module):  # it was changed for one forward only
            self._new_module = None
            return
        self.drift.refuse(UNCHANGED)
        self.transport.board.phase = StepPhase.AFTER_CHANGE
        former = self.module
        self._use_module(module)
        try:
            chosen = replace(self._chosen_again(), buffers=())
            delayed = frozenset(name for name, _ in chosen.delayed)
            self.config = self.config.with_gradients(sparse=chosen.sparse, delayed=delayed)
            agree_on_module(
                self._plan_of(chosen),
                chosen,
                self.transport,
                new_values=describe_new_values(chosen, self.selection) if self.config.init_sync else (),
                remedy="Change a wrapped module in the same way on every rank, between the same two steps. If new "
                "parameters have different values, call sl.broadcast_(ddp.module) on every rank after the change.",
            )
        except BaseException:
            self._use_module(former)
            raise
        self._new_module = None
        self._wire_again()

    def agree_before_join(self, module: nn.Module) -> None:
        """Run the comparisons of a backward before `join`. A collective call.

        A rank without inputs runs no backward, so it could not compare later.

        Args:
            module: the module of the wrapper.
        """
        self._new_module = module
        self._before_reduction()

    def use_static_graph(self) -> None:
        """Behave from now on as if `static_graph=True` had been given. Call this method before the first backward."""
        self.drift.refuse(UNCHANGED)
        self.config = self.config.with_gradients(static_graph=True, allow_unused=True, skip_unused=False)
        self._wire_again()

    def use_transport(self, transport: Transport) -> None:
        """Synchronize over another group from now on. A collective call of that group.

        The replicas of the ranks in the group must already be equal, or drift under the strategy.

        Raises:
            ValueError: `sl.diverge` is active.
        """
        self.drift.divergence.refuse_inside("the change of the process group")
        self.transport = transport
        hosts = gather_hosts(transport)
        # A rank that has joined has caps for a group of one rank. Shards keep their buckets.
        if self.config.gradients.caps.is_default and self.sharding is None:
            caps = hosts.caps_for(self.selection, transport, self.config.compression)
            self.config = self.config.with_gradients(caps=caps)
        self._first_plan, spec = first_plan(self.config, self._title, self.selection, transport, hosts)
        self.drift.follow(transport, spec)
        if self.sharding is not None and transport.size == 1:
            self.sharding.dissolve(transport)
            self.sharding, self.config = None, self.config.with_gradients(sharded=False)
        with self._lanes.replaced():
            self._gradient_lane, self._buffer_lane = self._open_lanes()
            # Perhaps only some ranks have changed the module since then, so the next backward compares the change.
            self._replace_parts(self.selection, self._inventory)
        self.gradients.riders.look.restart()
        # The ranks may have stopped in different forwards, and one that has joined has run none.
        self.buffers.due = True

    def abort_groups(self, reason: str) -> None:
        """Make the ranks of this rank's gradient group raise an error, because this rank stops."""
        if self._first_plan.workers is not None:
            self._gradient_lane.abort(reason)

    @property
    def is_drifting(self) -> bool:
        """True if replicas drift under the strategy, or have drifted by `sl.diverge` and are not equal again yet."""
        return self.drift.is_possible

    @property
    def drift_reason(self) -> str:
        """The reason why replicas are allowed to differ now; "" if all parameters must be equal."""
        return self.drift.reason

    def send_stop_vote(self, vote: StopVote, transport: Transport) -> bool:
        """Send this rank's vote on stopping with the next gradients. Return whether that is possible.

        Args:
            vote: the vote of this rank.
            transport: the transport between the ranks that vote.
        """
        if self.drift.rounds is not None:
            self.drift.rounds.check_may_wait("stop_if_asked")
        elif self.transport is transport:
            self.gradients.riders.stop.carry(vote)
            return True
        return False

    def refuse_sharded(self, why: str) -> None:
        """Raise an error if the module is sharded.

        Args:
            why: a clause that says what is not possible. The error shows it after "with sharded=True".

        Raises:
            ValueError: the module is sharded.
        """
        if self.sharding is not None:
            raise ValueError(f"with sharded=True {why}. Wrap the module without sharded=True")

    # ------------------------------------------------------------------ plan, records and state

    def _plan_of(self, chosen: Selection) -> Plan:
        """Return the plan for a module with these tensors. It lacks the registered hooks, optimizers and metrics."""
        transport = self.transport
        return replace(
            self._first_plan,
            config=self.config,
            transport=transport.name,
            rank=transport.rank,
            num_ranks=transport.size,
            sizes=sizes_of(chosen),
        )

    @property
    def plan(self) -> Plan:
        """The plan of this replica, which the contract and the timeline describe."""
        hook = self.gradients.layout.comm_hook
        form = replace(self.gradients.layout.form, widths=tuple(self.gradients.riders.widths))
        return replace(
            self._plan_of(replace(self.selection, buffers=tuple(self.buffers.named_present()))),
            num_copies=0 if self.sharding is None else self.sharding.num_copies,
            comm_hook=None if hook is None or self.state.compression is not None else hook.name,
            has_buffer_hook=self.registered.buffer_hook is not None,
            has_local_buffers=self._has_local_buffers,
            optimizers=self.registered.in_words(),
            metrics=self.registered.metric_names(),
            reports=(*self.gradients.riders.subjects, "times of the step"),
            num_report_bytes=form.num_digits + form.num_noted,
        )

    def evidence(self, *, looks_ahead: bool = False) -> Evidence:
        """Return the last records of this rank.

        Args:
            looks_ahead: whether to find the step of the next parameter sync. This can call the strategy thousands of
                times.
        """
        rounds = self.drift.rounds
        return Evidence(
            backward=self.gradients.ledger.last(),
            buffers=self.buffers.last_forward(),
            round=None if rounds is None else rounds.last,
            next_round=rounds.next_step() if rounds is not None and looks_ahead else None,
            synced_at={} if rounds is None else dict(rounds.synced_at),
            replicas_compared=self.checks.last_compared,
            num_repairs=self.checks.num_repairs,
            device=self.gradients.parameters[0].device.type,
        )

    @property
    def has_sync_state(self) -> bool:
        """True if `sync_state_dict` of the wrapper returns a state that has to be saved."""
        return bool(self.state)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the part of the replica that can be pickled. Hooks and connections cannot be pickled."""
        state = self.state
        kept = (state.compression, state.idle, self.registered.buffer_hook, self._has_local_buffers)
        return (self.module, self.config, self._first_plan, *kept)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restore a pickled replica, over the default group. Hooks and optimizers must be registered again.

        The restored replica has no separate lanes, because opening a lane is a collective call, and one rank may
        unpickle alone.
        """
        self.module, self.config, self._first_plan, compression, idle, buffer_hook, are_local = state
        self._has_local_buffers = are_local
        self.was_changed, self.sharding = False, None
        self._new_module, self._triggers = None, []
        self.checks = ReplicaChecks()
        self.transport = transport_of(None)
        title = self._numbered_title = self._title  # not numbered, because one rank may unpickle alone
        self._gradient_lane = self._buffer_lane = self.transport
        self._lanes = Lanes(self)
        self.drift = Drift(self.module, (), self.config, self.transport, None, self.checks, title=title)
        compare = weakly(self._before_reduction)
        self.registered = Registrations(self.config, None, compare, buffer_hook)
        self.state = SyncState(self.config, self.drift, compression, idle)
        self._wire(self._chosen_again())
        # One rank may run the forward of a copy alone, such as that of `AveragedModel`.
        self.buffers.due = False
