"""Buffers (BatchNorm's running statistics, say) are made rank 0's before a forward."""

from __future__ import annotations

from torch import Tensor, nn

from syncline.events import BufferRecord
from syncline.sync.tensors import TensorBroadcaster
from syncline.transport.base import Transport

__all__ = ["BufferSync"]


class BufferSync:
    """Broadcasts a module's buffers from rank 0 before a forward.

    As in torch, a forward whose predecessor ran under `no_sync` or `torch.no_grad()` sends nothing, and without
    buffers nothing is ever sent. Autograd's version counters stay as they are, so that two forwards before one
    backward (a GAN's discriminator with BatchNorm) keep working.

    Args:
        module: whose buffers; a buffer may be replaced by assignment at any time.
        transport: what they travel by.
        enabled: False where the user asked for no broadcasts.
    """

    def __init__(self, module: nn.Module, transport: Transport, *, enabled: bool) -> None:
        self.enabled = enabled
        self.due = True
        """Whether the next forward broadcasts: the previous one was neither under no_sync nor under no_grad."""
        self._transport = transport
        self._slots = [
            (owner._buffers, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._tensors: list[Tensor] = []
        self._broadcaster: TensorBroadcaster | None = None
        self._num_tensors, self._payload_bytes = self.size()
        self._last: tuple[bool, str] | None = None

    def size(self) -> tuple[int, int]:
        """Tensors and bytes, a buffer that occurs twice counted once."""
        tensors = {id(buffer): buffer for buffer in self._current()}.values()
        return len(tensors), sum(t.numel() * t.element_size() for t in tensors)

    def before_forward(self, *, next_is_due: bool) -> None:
        """Broadcast if it is due.

        Args:
            next_is_due: whether this forward counts as one after which buffers are to be synchronized.
        """
        due, self.due = self.due, next_is_due
        if not self._slots:
            self._last = (False, "the module has no buffers")
        elif not self.enabled:
            self._last = (False, "broadcasting buffers is switched off")
        elif self._transport.size == 1:
            self._last = (False, "there is only one rank")
        elif not due:
            self._last = (False, "the previous forward ran under no_sync or no_grad")
        else:
            self._broadcast()
            self._last = (True, "")

    def _broadcast(self) -> None:
        tensors = self._current()
        if self._broadcaster is None or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._tensors = tensors
            self._broadcaster = TensorBroadcaster(tensors, self._transport, preserve_version=True)
            self._num_tensors, self._payload_bytes = self.size()
        self._broadcaster.start(0).wait()

    def _current(self) -> list[Tensor]:
        tensors = (owner.get(name) for owner, name in self._slots)
        return [tensor for tensor in tensors if tensor is not None]

    def last_forward(self) -> BufferRecord | None:
        """What the most recent forward did about buffers; None before the first."""
        if self._last is None:
            return None
        sent, reason = self._last
        return BufferRecord(
            num_tensors=self._num_tensors, payload_bytes=self._payload_bytes, sent=sent, reason=reason
        )
