"""A step of this rank's shards, which all ranks make or none does, also if another rank is lost in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from syncline._torch.tensors import version_of


class OpenStep:
    """A step that this rank is about to make, or has made without the shards of all other ranks."""

    def __init__(self) -> None:
        self.is_made = False
        """Whether this rank has stepped its shards, but has not received the shards of all other ranks."""
        self._prepared: Callable[[], Any] | None = None
        self._shards: Sequence[Tensor] = ()

    def prepare(self, step: Callable[[], Any], shards: Sequence[Tensor]) -> None:
        """Announce a step, before the ranks confirm that all of them are about to make it.

        Args:
            step: a function that steps this rank's shards.
            shards: the shards.
        """
        self._prepared, self._shards = step, shards

    def make(self) -> Any:
        """Make the step that was announced."""
        assert self._prepared is not None
        before = [version_of(shard) for shard in self._shards]
        try:
            result = self._prepared()
        finally:
            # A hook of the optimizer may have raised an error before the shards were written, or afterwards.
            if [version_of(shard) for shard in self._shards] != before:
                self._prepared, self.is_made = None, True
        self._prepared, self.is_made = None, True
        return result

    def close(self) -> None:
        """Record that this rank has received the shards of all other ranks."""
        self.is_made = False

    def conclude(self, *, is_made: bool) -> bool:
        """Make the step that was announced, or drop it. Return whether this rank has made a step without the others.

        Args:
            is_made: whether another rank has made it.
        """
        if is_made and self._prepared is not None:
            self.make()
        found, self.is_made, self._prepared = self.is_made, False, None
        return found
