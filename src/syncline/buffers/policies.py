"""Buffers (BatchNorm's running statistics, say) are made equal on all ranks before a forward, by a policy.

A user's hook that synchronizes buffers in place of their policy, as torch's `_register_buffer_comm_hook` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from syncline.buffers.pooling import average_buffers, running_statistics
from syncline.gradients.comm_hook import qualified_name
from syncline.records import BufferRecord
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import agree, describe_tensors
from syncline.transport.base import Transport

__all__ = ["BufferHook", "BufferPolicy", "BufferSync"]


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


BufferPolicy = Literal["broadcast", "average", "none"]


class BufferSync:
    """Makes a module's buffers equal on all ranks before a forward.

    As in torch, a forward whose predecessor ran under `no_sync` or `torch.no_grad()` sends nothing, and without
    buffers nothing is ever sent. Autograd's version counters stay as they are, so that two forwards before one
    backward (a GAN's discriminator with BatchNorm) keep working.

    Args:
        module: whose buffers; a buffer may be replaced by assignment at any time.
        transport: what they travel by.
        agreeing: what ranks agree by where a buffer's shape or type has changed; `transport` itself if None.
        policy: "broadcast": rank 0's. "average": floating buffers become the mean over ranks, each rank with the
            same weight; a `running_mean` and `running_var` of one submodule are pooled (see [Note: pooling] in
            `pooling.py`); integers, such as `num_batches_tracked`, become the maximum; a bool is true where it is
            true on any rank. "none": every rank keeps its own.
        enabled: False means that forwards do not synchronize, as with the policy "none"; it may be switched later
            ("none" switched on is "broadcast").
        ignored: names of buffers that are left alone.

    Raises:
        ValueError: an unknown policy.
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
        if policy not in get_args(BufferPolicy):
            raise ValueError(
                f"expected one of {', '.join(get_args(BufferPolicy))} for buffers; got {policy!r}"
            )
        self.policy: BufferPolicy = policy
        self.enabled = enabled and policy != "none"
        """Whether forwards synchronize."""
        self.why_disabled = "broadcasting buffers is switched off"
        self.due = True
        """Whether the next forward synchronizes: the previous one was neither under no_sync nor under no_grad,
        and `equalize` has not been called since."""
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
        self._was_equalized = False
        self._last: tuple[bool, str] | None = None

    def size(self) -> tuple[int, int]:
        """Tensors and bytes, a buffer that occurs twice counted once."""
        tensors = self.present()
        return len(tensors), sum(t.numel() * t.element_size() for t in tensors)

    def leave_to_hook(self, *, next_is_due: bool) -> bool:
        """A user's hook synchronizes in place of this forward's policy; whether that is due."""
        due, self.due = self.due, next_is_due
        self._was_equalized = False
        self._last = (False, "a buffer hook is registered")
        return due and self.enabled and bool(self._slots)

    def before_forward(
        self, *, next_is_due: bool, src: int = 0, counts: bool = True, num_counting: int | None = None
    ) -> None:
        """Synchronize if it is due.

        Args:
            next_is_due: whether this forward counts as one after which buffers are to be synchronized.
            src: the rank whose buffers the policy "broadcast" takes; the same on all ranks.
            counts: whether this rank's take part in the policy "average".
            num_counting: on how many ranks they do; None stands for all.
        """
        due, self.due = self.due, next_is_due
        was_equalized, self._was_equalized = self._was_equalized, False
        if not self._slots:
            self._last = (False, "the module has no buffers")
        elif not self.enabled:
            self._last = (False, self.why_disabled)
        elif self._transport.size == 1:
            self._last = (False, "there is only one rank")
        elif not due and was_equalized:
            self._last = (False, "they were made equal after the previous forward")
        elif not due:
            self._last = (False, "the previous forward ran under no_sync or no_grad")
        else:
            self._synchronize(src, counts=counts, num_counting=num_counting)
            self._last = (True, "")

    def equalize(self) -> int:
        """Make the buffers equal now, by the policy ("none": rank 0's): before a checkpoint or an evaluation.

        A collective call. After the last step the buffers are those of each rank's own last batch; after this
        they are equal, and the next forward has nothing to send, so that one rank may evaluate alone.

        Returns:
            The number of collectives made; 0 without buffers and on one rank.
        """
        if not self._slots or self._transport.size == 1:
            return 0
        self.due, self._was_equalized = False, True
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
        """A replaced buffer may have another shape or type; then it must have so on all ranks. A collective call."""
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
        """Take the place of another, of the same module before it was changed."""
        self.enabled, self.due, self.why_disabled = former.enabled, former.due, former.why_disabled

    def _named_current(self) -> list[tuple[str, Tensor]]:
        named = ((name, owner.get(name)) for owner, name in self._slots)
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def present(self) -> list[Tensor]:
        """The buffers as they are now, one that occurs twice once."""
        return list({id(buffer): buffer for buffer in self._current()}.values())

    def _current(self) -> list[Tensor]:
        return [tensor for _, tensor in self._named_current()]

    @property
    def were_sent(self) -> bool:
        """Whether the most recent forward synchronized them."""
        return self._last is not None and self._last[0]

    @property
    def are_equal(self) -> bool:
        """Whether they were made equal and no forward has run since."""
        return self._was_equalized

    def places(self) -> list[tuple[str, dict[str, Tensor | None], str]]:
        """Of each buffer its name in the module, and where it is: a module's dictionary, and the key in it."""
        return [(path, owner, name) for path, (owner, name) in zip(self._paths, self._slots, strict=True)]

    def named_present(self) -> list[tuple[str, Tensor]]:
        """As `present`, with their names in the module."""
        found: dict[int, tuple[str, Tensor]] = {}
        for path, owner, name in self.places():
            buffer = owner.get(name)
            if buffer is not None:
                found.setdefault(id(buffer), (path, buffer))
        return list(found.values())

    def last_forward(self) -> BufferRecord | None:
        """What the most recent forward did about buffers; None before the first."""
        if self._last is None:
            return None
        sent, reason = self._last
        return BufferRecord(
            num_tensors=self._num_tensors, payload_bytes=self._payload_bytes, sent=sent, reason=reason
        )


def _kinds(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
