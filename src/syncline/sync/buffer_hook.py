"""A user's hook that synchronizes buffers in place of their policy, as torch's `_register_buffer_comm_hook` has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from syncline.sync.comm_hook import qualified_name

__all__ = ["BufferHook"]


class BufferHook:
    """One hook.

    Args:
        state: handed to the hook in each call.
        hook: called with the state and the buffers by name; it may return futures, or None.
        after_forward: whether it runs after a forward; otherwise before.
    """

    def __init__(
        self, state: object, hook: Callable[[Any, dict[str, Tensor]], Any], *, after_forward: bool
    ) -> None:
        self.after_forward = after_forward
        self.is_due = False
        """Whether the forward under way synchronizes."""
        self._state = state
        self._hook = hook

    @property
    def name(self) -> str:
        """What all ranks must have registered alike."""
        return qualified_name(self._hook)

    def run(self, named_buffers: dict[str, Tensor]) -> Iterable[torch.futures.Future[Any]]:
        """Call the hook; returns what has to be waited for."""
        with torch.no_grad():
            return self._hook(self._state, named_buffers) or ()
