"""Synchronization of buffers (such as BatchNorm's running statistics) before a forward, by a policy or a user's hook.

The hook has the interface of torch's `_register_buffer_comm_hook`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from syncline._torch.autograd import profiled
from syncline._torch.modules import as_mapping
from syncline._torch.tensors import belongs_to_transform
from syncline.buffers.pooling import BufferAverage, running_statistics
from syncline.errors import SynclineError
from syncline.gradients.comm_hook import qualified_name
from syncline.records import BufferRecord
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.tensors.targets import check_writable, is_expanded
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport


class BufferHook:
    """A user's hook that synchronizes buffers. It replaces the policy.

    Args:
        state: the first argument of `hook`.
        hook: a function that is called with `state` and the buffers by name. It may return futures, or None.
        after_forward: whether the hook runs after each forward. Otherwise it runs before each forward.
    """

    def __init__(
        self, state: object, hook: Callable[[Any, dict[str, Tensor]], Any], *, after_forward: bool
    ) -> None:
        self.after_forward = after_forward
        self.is_due = False
        """Whether the hook has to run in the current forward."""
        self._state = state
        self._hook = hook

    @property
    def name(self) -> str:
        """The qualified name of the hook, which must be the same on all ranks."""
        return qualified_name(self._hook)

    def run(self, named_buffers: dict[str, Tensor]) -> Iterable[torch.futures.Future[Any]]:
        """Call the hook, and return the futures for which the caller must wait."""
        with torch.no_grad():
            return self._hook(self._state, named_buffers) or ()


BufferPolicy = Literal["broadcast", "average", "none"]

Place = tuple[str, Mapping[str, Tensor | None], str]
"""The name of a buffer in a module, the table of a submodule that contains the buffer, and its key there."""


class BufferSync:
    """The synchronization of a module's buffers before a forward.

    As in torch, a forward sends nothing if the previous forward ran under `no_sync` or `torch.no_grad()`. A module that
    had no buffers when it was wrapped never sends any. Autograd's version counters do not change, so that two forwards
    can precede one backward (as for the discriminator of a GAN).

    Args:
        policy: with "broadcast", all ranks get rank 0's buffers. With "average", floating-point buffers become the mean
            over ranks, with equal weights. The `running_mean` and `running_var` of a submodule are pooled (see [Note:
            pooling] in `pooling.py`). Integers, such as `num_batches_tracked`, become the maximum. A bool becomes true
            if it is true on any rank. With "none", every rank keeps its own buffers. If the attribute `enabled` is set
            later, the policy "none" acts as "broadcast".
        are_local: whether no buffer is ever synchronized, because the module had none when it was wrapped.
        are_compared: whether the ranks have compared the buffers to which `use` is applied first.
    """

    def __init__(
        self, policy: BufferPolicy = "broadcast", *, are_local: bool = False, are_compared: bool = True
    ) -> None:
        self.policy: BufferPolicy = policy
        self.enabled = policy != "none"
        """Whether forwards synchronize buffers."""
        self.why_disabled = "broadcasting buffers is switched off"
        self.due = True
        """Whether the next forward synchronizes buffers. It does not if the previous forward ran under no_sync or
        no_grad, or if `sync` was called after the previous forward."""
        self.are_local = are_local
        """Whether no buffer is ever synchronized."""
        self._are_compared = are_compared
        self._paused = ""
        """The reason why nothing is synchronized for a while; "" if there is none."""
        self._places: list[Place] = []
        self._last: tuple[bool, str] | None = None
        """Whether the last forward synchronized buffers, and the reason if not. It is None before any forward."""
        self._comparing: Any = None

    def use(
        self, module: nn.Module, transport: Transport, comparing: Transport, ignored: Collection[str] = ()
    ) -> None:
        """Synchronize the buffers of this module from now on.

        Args:
            module: the module that has the buffers. Buffers may be added, removed and replaced at any time.
            transport: the transport that sends the buffers.
            comparing: the transport over which ranks compare the shapes and types of the buffers after one has changed.
            ignored: names of buffers that are never synchronized, and shell patterns for such names.
        """
        self._ignored, self._transport, self._module_name = ignored, transport, type(module).__name__
        self.use_module(module)
        self._tensors: list[Tensor] = []
        """The tensors that the last synchronization used."""
        self._broadcaster: TensorBroadcaster | None = None
        self.are_equal = False
        """Whether `sync` has made the buffers equal, and no forward has run after it."""
        if comparing is not self._comparing:
            self._comparing = comparing
            # An expanded buffer cannot be written, so the first synchronization has to detect it.
            kinds = [(*kind, False) for *kind, _ in _kinds(self._current())]
            self._agreed_kinds, self._are_compared = kinds if self._are_compared else None, False
            """The shapes and types of the buffers on which the ranks have agreed; None if they have not."""

    def use_module(self, module: nn.Module) -> None:
        """Synchronize the buffers of this module from now on, which has the same parameters as the former one."""
        self._tables = [(prefix, as_mapping(owner._buffers)) for prefix, owner in module.named_modules()]
        self._keys: list[str] | None = None
        """The keys of all tables when `_places` was made."""

    @property
    def are_sent(self) -> bool:
        """Whether forwards synchronize buffers when this is due."""
        return self.enabled and not self.are_local and not self._paused

    def leave_to_strategy(self, why: str) -> None:
        """Synchronize nothing before forwards, for the reason `why`, unless `enabled` is set later."""
        self.enabled, self.why_disabled = False, why

    def pause(self, why: str) -> None:
        """Synchronize nothing before forwards, for the reason `why`, until this method is called with ""."""
        self._paused = why

    @property
    def places(self) -> list[Place]:
        """The name of each buffer in the module, the dictionary that contains the buffer, and its key there."""
        keys = [*chain.from_iterable(table for _, table in self._tables)]
        if keys != self._keys:
            self._keys = keys
            self._places = [
                (path, table, key)
                for prefix, table in self._tables
                for key in table
                if not self._is_ignored(path := f"{prefix}.{key}" if prefix else key)
            ]
        return self._places

    def _is_ignored(self, path: str) -> bool:
        return path in self._ignored or any(fnmatchcase(path, pattern) for pattern in self._ignored)

    def leave_to_hook(self, *, next_is_due: bool) -> bool:
        """Leave the synchronization in this forward to a user's hook. Return whether the hook has to run.

        Args:
            next_is_due: whether the next forward synchronizes buffers.
        """
        due, self.due = self.due, next_is_due
        self.are_equal = False
        self._last = (False, "a buffer hook is registered")
        return due and self.are_sent

    def before_forward(
        self, *, next_is_due: bool, src: int = 0, counts: bool = True, num_counting: int | None = None
    ) -> bool:
        """Synchronize the buffers if this is due. Record and return whether it was done.

        Args:
            next_is_due: whether the next forward synchronizes buffers.
            src: the rank whose buffers the policy "broadcast" sends. All ranks pass the same rank.
            counts: whether this rank's buffers count in the policy "average".
            num_counting: the number of ranks whose buffers count. Pass None if all ranks count.
        """
        due, self.due = self.due, next_is_due
        were_equal, self.are_equal = self.are_equal, False
        if self.are_local:
            self._last = (False, "the module had no buffers when it was wrapped")
        elif self._paused or not self.enabled:
            self._last = (False, self._paused or self.why_disabled)
        elif self._transport.size == 1:
            self._last = (False, "there is only one rank")
        elif not due and were_equal:
            self._last = (False, "the buffers were made equal after the previous forward")
        elif not due:
            self._last = (False, "the previous forward ran under no_sync or no_grad")
        else:
            with profiled("buffers"):
                self._synchronize(src, counts=counts, num_counting=num_counting)
            self._last = (True, "")
        return self._last[0]

    def sync(self) -> int:
        """Synchronize the buffers now, for a checkpoint or an evaluation. This is a collective call.

        The buffers are synchronized by the policy. With "none", all ranks get rank 0's buffers. After a training step
        each rank has the buffers of its own last batch. After this call the buffers are equal on all ranks, and the
        next forward sends nothing, so that one rank can evaluate alone.

        Returns:
            The number of collectives. It is 0 if there are no buffers, or only one rank.
        """
        if self.are_local or self._transport.size == 1:
            return 0
        self.due, self.are_equal = False, True
        with profiled("buffers"):
            return self._synchronize(0)

    def _synchronize(self, src: int, *, counts: bool = True, num_counting: int | None = None) -> int:
        """Synchronize the buffers now. Return the number of collectives. See `before_forward` for the arguments."""
        tensors = self._current()
        if len(tensors) != len(self._tensors) or any(map(operator.is_not, tensors, self._tensors)):
            self._refuse_tensors_of_transforms()
            self._tensors, self._broadcaster = tensors, None
            if self.were_replaced():
                self.compare()
        if self.policy == "average":
            distinct = self.present()
            taking_part = {id(tensor) for tensor in distinct}
            pairs = running_statistics((table for _, table in self._tables), taking_part)
            divisor = float(num_counting or self._transport.size)
            averaging = BufferAverage(
                distinct, pairs, self._transport, fraction=float(counts), divisor=divisor
            )
            averaging.wait()
            return averaging.num_collectives
        if self._broadcaster is None:
            self._broadcaster = TensorBroadcaster(tensors, self._transport, preserve_version=True)
        self._broadcaster.start(src).wait()
        return self._broadcaster.num_collectives

    def _refuse_tensors_of_transforms(self) -> None:
        """Raise an error if a transform of torch.func has replaced a buffer, because it has no values to send.

        Raises:
            SynclineError: a buffer belongs to a transform.
        """
        for name, buffer in self._named_current():
            if belongs_to_transform(buffer):
                raise SynclineError(
                    f"rank {self._transport.rank}, forward of {self._module_name}: buffers are synchronized before a "
                    f"forward, but torch.func has replaced the buffer {name} by one of its own, which has no values "
                    'that could be sent. Wrap the module with buffers="none", or transform ddp.module instead'
                )

    def were_replaced(self) -> bool:
        """Whether the buffers of this rank have other shapes or types than when the ranks compared them last."""
        return _kinds(self._current()) != self._agreed_kinds

    def compare(self) -> None:
        """Check that the buffers have the same shapes and types on all ranks, and can be written. A collective call.

        Raises:
            ContractMismatch: the buffers differ between ranks.
            SynclineError: a buffer cannot be written.
        """
        self._agreed_kinds = _kinds(self._current())
        fault = None
        try:
            for name, buffer in self._named_current():
                check_writable(name, buffer)
        except ValueError as error:
            fault = SynclineError(str(error))
        exchange(
            self._comparing,
            f"the buffers of {self._module_name}, some of which were added or replaced",
            describe_tensors(self._named_current(), kind="buffer", layout=False),
            fault=fault,
            remedy="All ranks must add a buffer, or replace it by one of another shape or type, before the same "
            "forward. A buffer that each rank may have for itself is named in ignore= when the module is wrapped.",
        )

    def _named_current(self) -> list[tuple[str, Tensor]]:
        """Return the present buffers with their names. If a buffer has several names, it occurs with each name."""
        named = ((path, table[key]) for path, table, key in self.places if key in table)
        return [(path, tensor) for path, tensor in named if tensor is not None]

    def _current(self) -> list[Tensor]:
        return [tensor for _, tensor in self._named_current()]

    def named_present(self) -> list[tuple[str, Tensor]]:
        """Return the present buffers with their names. If a buffer has several names, it occurs only with the first."""
        found: dict[int, tuple[str, Tensor]] = {}
        for path, buffer in self._named_current():
            found.setdefault(id(buffer), (path, buffer))
        return list(found.values())

    def present(self) -> list[Tensor]:
        """Return the present buffers. A buffer with several names occurs only once."""
        return [buffer for _, buffer in self.named_present()]

    @property
    def were_sent(self) -> bool:
        """Whether the most recent forward synchronized the buffers."""
        return self._last is not None and self._last[0]

    def last_forward(self) -> BufferRecord | None:
        """Return a record of the buffers in the most recent forward. Return None before the first forward."""
        if self._last is None:
            return None
        sent, reason = self._last
        tensors = self.present()
        if self.are_local and not tensors:
            reason = "the module has no buffers"
        payload_bytes = sum(tensor.nbytes for tensor in tensors)
        return BufferRecord(num_tensors=len(tensors), payload_bytes=payload_bytes, sent=sent, reason=reason)


def _kinds(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device.type, is_expanded(tensor)) for tensor in tensors]
