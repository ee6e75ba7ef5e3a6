"""Synchronization of buffers (such as BatchNorm's running statistics) before a forward, by a policy or a user's hook.

The hook has the interface of torch's `_register_buffer_comm_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from syncline.buffers.pooling import average_buffers, running_statistics
from syncline.gradients.comm_hook import qualified_name
from syncline.records import BufferRecord
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import agree, describe_tensors
from syncline.transport.base import Transport


class BufferHook:
    """A user's hook that synchronizes buffers in place of the policy.

    Args:
        state: passed to the hook in each call.
        hook: called with the state and the buffers by name; it may return futures, or None.
        after_forward: whether it runs after a forward; otherwise before.
    """

    def __init__(
        self, state: object, hook: Callable[[Any, dict[str, Tensor]], Any], *, after_forward: bool
    ) -> None:
        self.after_forward = after_forward
        self.is_due = False
        """Whether the current forward synchronizes."""
        self._state = state
        self._hook = hook

    @property
    def name(self) -> str:
        """The hook's qualified name, which must be the same on all ranks."""
        return qualified_name(self._hook)

    def run(self, named_buffers: dict[str, Tensor]) -> Iterable[torch.futures.Future[Any]]:
        """Call the hook, and return the futures to wait for."""
        with torch.no_grad():
            return self._hook(self._state, named_buffers) or ()


BufferPolicy = Literal["broadcast", "average", "none"]


class BufferSync:
    """Makes a module's buffers equal on all ranks before a forward.

    As in torch, a forward sends nothing if the previous one ran under `no_sync` or `torch.no_grad()`. A module without
    buffers never sends anything. Autograd's version counters do not change, so that two forwards before one backward
    (a GAN's discriminator with BatchNorm) keep working.

    Args:
        module: has the buffers; a buffer may be replaced by assignment at any time.
        transport: carries the buffers.
        agreeing: the transport by which ranks agree after a buffer's shape or type has changed; None for `transport`.
        policy: "broadcast": rank 0's buffers. "average": floating buffers become the mean over ranks, with equal
            weights; a `running_mean` and `running_var` of one submodule are pooled (see [Note: pooling] in
            `pooling.py`); integers, such as `num_batches_tracked`, become the maximum; a bool becomes true if it is
            true on any rank. "none": every rank keeps its own.
        enabled: False means that forwards do not synchronize, as with the policy "none". It may be changed later
            ("none" then acts as "broadcast").
        ignored: names of buffers that are never synchronized.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        *,
        agreeing: Transport | None = None,
        policy: BufferPolicy = "broadcast",
        enabled: bool = True,
        ignored: Collection[str] = (),
    ) -> None:
        self.policy: BufferPolicy = policy
        self.enabled = enabled and policy != "none"
        """Whether forwards synchronize."""
        self.why_disabled = "broadcasting buffers is switched off"
        self.due = True
        """Whether the next forward synchronizes. It does unless the previous forward ran under no_sync or no_grad, or
        `sync` was called since."""
        self._transport = transport
        self._agreeing = agreeing or transport
        self._module_name = type(module).__name__
        slots = [
            (f"{path}.{name}" if path else name, owner._buffers, name)
            for path, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and (f"{path}.{name}" if path else name) not in ignored
        ]
        self._slots = [(owner, name) for _, owner, name in slots]
        self._paths = [path for path, _, _ in slots]
        self._tensors: list[Tensor] = []
        self._agreed_kinds = _kinds(self._current())
        self._broadcaster: TensorBroadcaster | None = None
        self._num_tensors, self._payload_bytes = self.size()
        self._was_synced = False
        self._last: tuple[bool, str] | None = None

    def size(self) -> tuple[int, int]:
        """Return the number of tensors and of bytes; a buffer that occurs twice counts once."""
        tensors = self.present()
        return len(tensors), sum(t.numel() * t.element_size() for t in tensors)

    def leave_to_hook(self, *, next_is_due: bool) -> bool:
        """Leave this forward to a user's hook; return whether the hook has to synchronize."""
        due, self.due = self.due, next_is_due
        self._was_synced = False
        self._last = (False, "a buffer hook is registered")
        return due and self.enabled and bool(self._slots)

    def before_forward(
        self, *, next_is_due: bool, src: int = 0, counts: bool = True, num_counting: int | None = None
    ) -> None:
        """Synchronize if it is due.

        Args:
            next_is_due: whether the forward after this one synchronizes.
            src: the rank whose buffers the policy "broadcast" sends; the same on all ranks.
            counts: whether this rank's buffers count in the policy "average".
            num_counting: number of ranks whose buffers count; None for all.
        """
        due, self.due = self.due, next_is_due
        was_synced, self._was_synced = self._was_synced, False
        if not self._slots:
            self._last = (False, "the module has no buffers")
        elif not self.enabled:
            self._last = (False, self.why_disabled)
        elif self._transport.size == 1:
            self._last = (False, "there is only one rank")
        elif not due and was_synced:
            self._last = (False, "they were made equal after the previous forward")
        elif not due:
            self._last = (False, "the previous forward ran under no_sync or no_grad")
        else:
            self._synchronize(src, counts=counts, num_counting=num_counting)
            self._last = (True, "")

    def sync(self) -> int:
        """Make the buffers equal now, by the policy ("none": rank 0's), before a checkpoint or an evaluation.

        A collective call. After the last step each rank has the buffers of its own last batch. After this call they
        are equal, and the next forward sends nothing, so that one rank may evaluate alone.

        Returns:
            The number of collectives; 0 without buffers or with one rank.
        """
        if not self._slots or self._transport.size == 1:
            return 0
        self.due, self._was_synced = False, True
        return self._synchronize(0)

    def _synchronize(self, src: int, *, counts: bool = True, num_counting: int | None = None) -> int:
        tensors = self._current()
        if len(tensors) != len(self._tensors) or any(
            a is not b for a, b in zip(tensors, self._tensors, strict=True)
        ):
            self._tensors, self._broadcaster = tensors, None
            self._num_tensors, self._payload_bytes = self.size()
            self._agree_on_changes()
        if self.policy == "average":
            distinct = self.present()
            taking_part = {id(tensor) for tensor in distinct}
            return average_buffers(
                distinct,
                running_statistics((owner for owner, _ in self._slots), taking_part),
                self._transport,
                counts=counts,
                num_counting=num_counting,
            )
        if self._broadcaster is None:
            self._broadcaster = TensorBroadcaster(tensors, self._transport, preserve_version=True)
        self._broadcaster.start(src).wait()
        return self._broadcaster.num_collectives

    def _agree_on_changes(self) -> None:
        """Check that a replaced buffer has the same shape and type on all ranks. Collective if one has changed."""
        kinds = _kinds(self._tensors)
        if kinds == self._agreed_kinds:
            return
        self._agreed_kinds = kinds
        self._agreeing.board.phase = f"forward, where buffers of {self._module_name} were replaced"
        named = [(f"{name} ({at})", tensor) for at, (name, tensor) in enumerate(self._named_current())]
        agree(
            self._agreeing,
            f"the buffers of {self._module_name}, some of which were replaced",
            describe_tensors(named, kind="buffer", layout=False),
            remedy="Replace a buffer by one of another shape or type on all ranks, before the same forward.",
        )

    def continues(self, former: BufferSync) -> None:
        """Take over the settings of the synchronizer for the same module before the module was changed."""
        self.enabled, self.due, self.why_disabled = former.enabled, former.due, former.why_disabled

    def _named_current(self) -> list[tuple[str, Tensor]]:
        named = ((name, owner.get(name)) for owner, name in self._slots)
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def present(self) -> list[Tensor]:
        """Return the present buffers; one that occurs twice is listed once."""
        return list({id(buffer): buffer for buffer in self._current()}.values())

    def _current(self) -> list[Tensor]:
        return [tensor for _, tensor in self._named_current()]

    @property
    def were_sent(self) -> bool:
        """Whether the most recent forward synchronized the buffers."""
        return self._last is not None and self._last[0]

    @property
    def are_equal(self) -> bool:
        """Whether the buffers were made equal and no forward has run since."""
        return self._was_synced

    def places(self) -> list[tuple[str, dict[str, Tensor | None], str]]:
        """Return, for each buffer, its name in the module, the dictionary that contains it, and its key there."""
        return [(path, owner, name) for path, (owner, name) in zip(self._paths, self._slots, strict=True)]

    def named_present(self) -> list[tuple[str, Tensor]]:
        """Return the present buffers with their names in the module; one that occurs twice is listed once."""
        found: dict[int, tuple[str, Tensor]] = {}
        for path, owner, name in self.places():
            buffer = owner.get(name)
            if buffer is not None:
                found.setdefault(id(buffer), (path, buffer))
        return list(found.values())

    def last_forward(self) -> BufferRecord | None:
        """Return what the most recent forward did with the buffers; None before the first."""
        if self._last is None:
            return None
        sent, reason = self._last
        return BufferRecord(
            num_tensors=self._num_tensors, payload_bytes=self._payload_bytes, sent=sent, reason=reason
        )


def _kinds(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
