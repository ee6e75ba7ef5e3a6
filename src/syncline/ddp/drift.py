"""The control of the drift of replicas, and the comparison of replicas that must be equal.

`Drift` decides whether replicas are allowed to differ now. `ReplicaChecks` compares them. `SyncState` saves and loads
the state that a strategy and a compression keep from one step to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from syncline.buffers.policies import BufferSync
from syncline.checks import checked_kind
from syncline.compression import HookState
from syncline.compression import hook as compression_hook
from syncline.ddp.config import Config
from syncline.ddp.lanes import Lanes
from syncline.ddp.registrations import Registrations
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.reducer import GradientSync
from syncline.gradients.riders.replica_watch import ReplicaWatch
from syncline.optimizers.attached import weakly
from syncline.strategies import Spec
from syncline.strategies.execution import Rounds
from syncline.transport.base import Transport
from syncline.verbs.diverge import Divergence


class SyncState:
    """The owner of the state that `DistributedDataParallel.sync_state_dict` saves.

    Args:
        config: the configuration of the wrapper.
        drift: the control of drift, which holds the state of the strategy.
        compression: the compression with its state, if it is known already.
        idle: the loaded state of the compression, in a world of one rank. Nothing is encoded there, so this state is
            kept unchanged, and is saved again later.
    """

    def __init__(
        self, config: Config, drift: Drift, compression: HookState | None, idle: Mapping[str, Any]
    ) -> None:
        self.compression = compression
        self.idle = idle
        self._drift = drift
        self._config = config

    def comm_hook(self, lane: Transport, module: nn.Module, *, num_ranks: int) -> CommHook | None:
        """Return the communication hook by which the compression encodes gradients from now on.

        The result is None if no compression is configured, or if there has only been one rank so far.

        Args:
            lane: the transport that carries the gradients.
            module: the wrapped module.
            num_ranks: the number of ranks that synchronize.
        """
        if self.compression is None:
            if self._config.compression is None or num_ranks == 1:
                return None
            self.compression = HookState(self._config.compression, lane, module=module)
            self.compression.load_state_dict(self.idle)
        self.compression.use(lane, module)
        label = self.compression.compression.in_words()
        return CommHook(state=self.compression, hook=compression_hook, label=label, averages=True)

    def _parts(self) -> dict[str, Any]:
        """Return the objects whose state is saved, by name: the rounds of the strategy, and the compression."""
        parts = {"rounds": self._drift.rounds, "compression": self.compression}
        return {name: part for name, part in parts.items() if part is not None}

    def _is_idle(self) -> bool:
        """Return whether a compression is configured, but encodes nothing because there is only one rank."""
        return self._config.compression is not None and self.compression is None

    def __bool__(self) -> bool:
        """Return True if there is state to save."""
        return self._is_idle() or bool(self._parts())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy and of the compression."""
        states = {name: part.state_dict() for name, part in self._parts().items()}
        if self._drift.rounds is not None:
            states["rounds"]["are_equal"] = self._drift.is_last_sync_valid()
        return states | {"compression": dict(self.idle)} if self._is_idle() else states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            TypeError: `state` is not a mapping.
            ValueError: the state was saved under another strategy or compression.
        """
        parts = self._parts()
        checked_kind("state", state, Mapping, "a dict, as returned by sync_state_dict()")
        if parts.keys() != state.keys() - ({"compression"} if self._is_idle() else set()):
            raise ValueError(
                f"under strategy={self._config.strategy} and compression={self._config.encoding}, expected a state of "
                f"sync_state_dict() with the entries {', '.join(parts) or '(none)'}; got the entries "
                f"{', '.join(state) or '(none)'}. Load a state that was saved under the same strategy and compression"
            )
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self._drift.was_loaded()
        if self._is_idle():
            self.idle = state.get("compression", {})


class ReplicaChecks:
    """The comparisons of one replica with the replicas of other ranks."""

    def __init__(self) -> None:
        self.in_backwards: ReplicaWatch | None = None
        """The watch that compares replicas in each synchronized backward, among the ranks that average their gradients
        together. None if nothing is compared."""
        self.after_syncs: ReplicaWatch | None = None
        """The watch that compares the replicas of all ranks after each parameter sync. None if these syncs do not make
        parameters equal, or if nothing is compared."""
        self._compared_at = 0

    def compare_after_sync(self, transport: Transport, step: int) -> None:
        """Compare the parameters of all ranks after a parameter sync that made them equal. A collective call.

        Args:
            transport: the transport between all ranks.
            step: the number of optimizer steps so far.

        Raises:
            ReplicaDivergence: the parameters differ, and `on_divergence` is "raise"; or it is "repair", but there is no
                majority. Every rank raises the error.
        """
        watch = self.after_syncs
        if watch is None:
            return
        watch.begin(range(min(self._compared_at, step - 1) + 1, step + 1))
        self._compared_at = step
        fingerprints = transport.all_gather_bytes(watch.fingerprint().to_bytes(8, "little"))
        watch.compare([int.from_bytes(row, "little") for row in fingerprints], step)

    @property
    def last_compared(self) -> tuple[int, bool] | None:
        """The step of the last comparison, and whether all replicas were equal; None before the first comparison."""
        watches = (self.in_backwards, self.after_syncs)
        compared = [watch.last_compared for watch in watches if watch is not None]
        return max((one for one in compared if one is not None), default=None)

    @property
    def num_repairs(self) -> int:
        """The number of comparisons that found different replicas and made them equal."""
        return sum(watch.num_repairs for watch in (self.in_backwards, self.after_syncs) if watch is not None)


class Drift:
    """The control of drift for one module, which decides whether replicas are allowed to differ now.

    A strategy or `sl.diverge` allows replicas to differ. This object then turns the synchronization of gradients and
    buffers off and on. The constructor is a collective call if `spec` is given.

    Args:
        module: the wrapped module.
        named: the trained parameters of the module, with their names.
        config: the configuration of the wrapper.
        transport: the transport between the ranks.
        spec: the facts on which the strategy depends: ranks, hosts and sizes of parameters. Pass None if replicas do
            not drift under the strategy.
        checks: the comparisons of this replica with the replicas of other ranks.
        title: the name of the module in events.
    """

    def __init__(
        self,
        module: nn.Module,
        named: Sequence[tuple[str, Tensor]],
        config: Config,
        transport: Transport,
        spec: Spec | None,
        checks: ReplicaChecks,
        *,
        title: str,
    ) -> None:
        self._module = module
        self.rounds: Rounds | None = None
        """The execution of a strategy under which replicas drift; None under `EveryStep`."""
        self._lanes = Lanes(self)
        self._strategy = config.strategy
        self._syncs_buffers = config.buffers != "none"
        self._checks = checks
        self._equal_after_backward = 0
        """The number of backwards that this rank had run when all parameters were last known to be equal."""
        self._act_on(transport)
        if spec is not None:
            self.rounds = Rounds(
                config.strategy,
                type(module).__name__,
                named,
                transport,
                spec,
                are_equal=config.init_sync,
                when_equal=weakly(self._are_equal_after),
                equalize_buffers=weakly(self._equalize_buffers),
                present_buffers=weakly(self._present_buffers),
                title_in_events=title,
            )
            self._lanes.keep(self.rounds.lanes, of=transport)

    def follow(self, transport: Transport, spec: Spec | None) -> None:
        """Act on the ranks of another transport from now on. A collective call if the strategy lets replicas drift.

        Args:
            transport: the transport.
            spec: the ranks, for a strategy under which replicas drift.
        """
        self._act_on(transport)
        if self.rounds is not None:
            assert spec is not None
            with self._lanes.replaced():
                self.rounds.follow(transport, spec)
                self._lanes.keep(self.rounds.lanes, of=transport)

    def use_module(self, module: nn.Module) -> None:
        """Control the drift of another module from now on: the program has replaced the wrapped module by it."""
        self._module = module
        self._act_on(self._transport)

    def _act_on(self, transport: Transport) -> None:
        self._transport = transport
        self.divergence = Divergence(self._module, transport, weakly(self._switch), weakly(self._was_written))
        """The record that says whether `sl.diverge` lets the replicas drift apart now, or has let them drift before."""

    def use(self, gradients: GradientSync, buffers: BufferSync, registered: Registrations) -> None:
        """Control from now on whether these parts synchronize.

        Args:
            gradients: the synchronization of gradients.
            buffers: the synchronization of buffers.
            registered: the registered hooks, optimizers and metrics.
        """
        self._gradients = gradients
        self._buffers = buffers
        self._registered = registered
        self._let_decide()

    def _let_decide(self) -> None:
        """Let each backward call `reduces` when it begins, if a strategy or `sl.diverge` can prevent its reduction."""
        is_open = self.rounds is not None or self.divergence.is_open
        self._gradients.controls.decide_by(weakly(self.reduces) if is_open else None)

    def reduces(self) -> bool:
        """Return whether a backward that begins now outside of `no_sync` reduces its gradients."""
        if self.divergence.is_open:
            return False
        return self.rounds is None or self.rounds.reduces()

    # ------------------------------------------------------------------ may replicas differ?

    @property
    def is_possible(self) -> bool:
        """True if replicas drift under the strategy, or have drifted by `sl.diverge` and are not equal again yet."""
        return self.rounds is not None or self.divergence.is_open or self.divergence.has_diverged

    @property
    def reason(self) -> str:
        """The reason why replicas are allowed to differ now; "" if all parameters must be equal."""
        if self.divergence.has_diverged:
            return "sl.diverge has let the replicas drift apart"
        if self.rounds is not None:
            return (
                f"under strategy={self._strategy} replicas are allowed to differ between two parameter syncs"
            )
        return ""

    def are_parameters_equal(self) -> bool:
        """Return whether all parameters are known to be equal now."""
        return not (self.divergence.is_open or self.divergence.has_diverged) and self.is_last_sync_valid()

    def is_last_sync_valid(self) -> bool:
        """Return whether all parameters were made equal, and no backward has run since then.

        After a backward it is unknown whether they are equal, because an optimizer that is not attached can change
        them.
        Under `EveryStep` the answer is always True.
        """
        rounds, num_backwards = self.rounds, self._gradients.state.num_backwards
        return rounds is None or (rounds.are_equal and self._equal_after_backward == num_backwards)

    def refuse(self, what: str) -> None:
        """Raise an error if replicas drift under the strategy.

        Args:
            what: a clause that says what is not possible under this strategy. The error shows it after the strategy.

        Raises:
            ValueError: replicas drift under the strategy.
        """
        if self.rounds is not None:
            raise ValueError(
                f"under strategy={self._strategy} {what}. Use strategy=sl.EveryStep(), or take the "
                "module out of the wrapper (ddp.module) and wrap it again"
            )

    # ------------------------------------------------------------------ called by the strategy and by sl.diverge

    def _equalize_buffers(self) -> None:
        if self._syncs_buffers:
            self._buffers.sync()

    def _present_buffers(self) -> list[Tensor]:
        return self._buffers.present() if self._syncs_buffers else []

    def _mark_equal(self) -> None:
        """Record that all parameters are equal now, after the backwards that have run so far."""
        self._equal_after_backward = self._gradients.state.num_backwards

    def was_loaded(self) -> None:
        """Record that a saved state was loaded, probably together with parameters.

        The step at which the replicas were last equal is therefore unknown.
        """
        self._mark_equal()
        if self._checks.after_syncs is not None:
            self._checks.after_syncs.agreed_at(None)

    def _are_equal_after(self, step: int) -> None:
        """Record that a parameter sync has made all parameters equal. Compare them if a replica check is configured.

        This is a collective call if the parameters are compared. `step` is the number of optimizer steps so far.
        """
        self._mark_equal()
        self._checks.compare_after_sync(self._transport, step)

    def _was_written(self) -> None:
        """Record that a function such as `sl.broadcast_` has made all parameters equal."""
        self._mark_equal()
        if self.rounds is not None:
            self.rounds.restart()

    def _switch(self, is_open: bool) -> None:
        """Turn synchronization off when a block of `sl.diverge` begins, and on again when the block ends.

        At the beginning of the block this is a collective call.
        """
        if is_open:
            self._registered.agree()  # because nothing is sent inside the block
        self._let_decide()
        for attached in self._gradients.riders.settings.optimizers:
            attached.counts = not is_open
        self._buffers.pause("sl.diverge lets the replicas drift apart" if is_open else "")
