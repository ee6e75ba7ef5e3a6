"""The state of synchronization between two steps: that of a strategy and that of a compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from syncline.checks import checked_kind
from syncline.compression import HookState
from syncline.ddp.config import Config
from syncline.ddp.drift import Drift

__all__ = ["SyncState"]


class SyncState:
    """The state that `DistributedDataParallel.sync_state_dict` returns.

    Args:
        config: the configuration of the wrapper.
        drift: has the strategy's state.
        compression: the encoding of gradients and its state; None if gradients are sent unchanged.
        idle: a loaded compression state that is not used while there is one rank. It is saved again for a larger world.
    """

    def __init__(
        self,
        config: Config,
        drift: Drift,
        compression: HookState | None,
        idle: Mapping[str, Any],
    ) -> None:
        self.compression = compression
        self.idle = idle
        self._drift = drift
        self._strategy = config.strategy
        self._encoding = None if config.compression is None else config.compression.in_words()

    def _parts(self) -> dict[str, Any]:
        """Return the parts that have a state of their own, by name."""
        parts = {"rounds": self._drift.rounds, "compression": self.compression}
        return {name: part for name, part in parts.items() if part is not None}

    def _is_idle(self) -> bool:
        """Return whether there is a compression that encodes nothing, because there is one rank."""
        return self._encoding is not None and self.compression is None

    def __bool__(self) -> bool:
        """Return whether there is state to save."""
        return self._is_idle() or bool(self._parts())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part."""
        states = {name: part.state_dict() for name, part in self._parts().items()}
        rounds = self._drift.rounds
        if rounds is not None:
            states["rounds"]["are_equal"] = self._drift.is_round_equal(rounds)
        return states | {"compression": dict(self.idle)} if self._is_idle() else states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: the state was saved under another strategy or compression.
        """
        parts = self._parts()
        checked_kind("state", state, Mapping, "a dict, as sync_state_dict() gives it")
        if parts.keys() != state.keys() - ({"compression"} if self._is_idle() else set()):
            raise ValueError(
                f"expected what sync_state_dict() gave under strategy={self._strategy} and compression="
                f"{self._encoding}: the state of {', '.join(parts) or 'nothing'}; got that of "
                f"{', '.join(state) or 'nothing'}"
            )
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self._drift.was_loaded()
        if self._is_idle():
            self.idle = state.get("compression", {})
