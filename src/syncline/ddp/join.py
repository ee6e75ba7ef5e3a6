"""Uneven inputs: a rank without inputs takes part in the other ranks' collectives with zeros (torch's `Join`).

Before each forward, one small collective decides whether this iteration synchronizes and whose buffers count: those
of the highest rank that still has inputs, or the mean over all that have. When all ranks are done, they get the model
of the rank that finished last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from syncline._torch.modules import leave_join, set_join_configs
from syncline.buffers.policies import BufferSync
from syncline.gradients.reducer import GradientSync
from syncline.transport.base import Transport
from syncline.transport.c10d_work import CallOfTorch

__all__ = [
    "NOT_WITH_JOIN",
    "Iteration",
    "JoinBlock",
    "ShadowHook",
    "agree_on_iteration",
    "joined_forward_begins",
]


NOT_WITH_JOIN = "a rank without inputs would have to step its share, so join() is not possible"
"""The reason why sharded replicas cannot join."""

_COUNT = "all_reduce of Join, which counts the ranks that have inputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """The work of one iteration on the ranks that still have inputs."""

    synchronizes: bool
    """Whether its backward reduces gradients on some rank."""
    buffers_from: int
    """The rank whose buffers count, if one rank's do; -1 if no rank has inputs."""
    num_with_inputs: int
    """Number of ranks that still have inputs."""
    has_inputs: bool
    """Whether this rank has inputs."""


class JoinBlock(Join):
    """torch's `Join` that resets its joinables at the end; torch's leaves them in the state of the block.

    Args:
        transport: the transport over the same ranks.
        joinables: as in `Join`.
        options: as in `Join`.
    """

    def __init__(self, transport: Transport, joinables: list[Joinable], **options: bool) -> None:
        super().__init__(joinables, **options)
        self._transport: Any = transport
        self._ours = joinables

    def __enter__(self) -> None:
        set_join_configs(self)  # because a block may be entered more than once
        super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        except RuntimeError as error:
            named = CallOfTorch(self._transport, self._ours[0].join_process_group, _COUNT).named(error)
            if named is error:
                raise
            raise named from None
        finally:
            for joinable in self._ours:
                leave_join(joinable)


def agree_on_iteration(transport: Transport, *, has_inputs: bool, synchronizes: bool) -> Iteration:
    """Agree on the next iteration with one all_reduce of `size + 1` numbers; collective, also without inputs."""
    mine = torch.zeros(transport.size + 1, dtype=torch.int32, device=transport.control_device)
    mine[transport.rank], mine[-1] = has_inputs, synchronizes
    transport.all_reduce(mine, "sum").wait()
    *with_inputs, any_synchronizes = mine.tolist()
    return Iteration(
        synchronizes=bool(any_synchronizes),
        buffers_from=max((rank for rank, has in enumerate(with_inputs) if has), default=-1),
        num_with_inputs=sum(with_inputs),
        has_inputs=has_inputs,
    )


def joined_forward_begins(
    joinable: Joinable,
    transport: Transport,
    gradients: GradientSync,
    buffers: BufferSync,
    *,
    synchronizes: bool,
    counts_all_ranks: bool,
) -> None:
    """Prepare a forward inside `join`, on a rank with inputs.

    Args:
        joinable: the wrapper; the other ranks are notified that it still has inputs.
        transport: the wrapper's transport.
        gradients: its gradient synchronization.
        buffers: its buffers, which are synchronized if that is due.
        synchronizes: whether this iteration reduces gradients on this rank.
        counts_all_ranks: whether to divide gradients by the number of all ranks, not only of those with inputs.
    """
    work = Join.notify_join_context(joinable)
    if work is not None:
        watched: Any = transport
        CallOfTorch(watched, joinable.join_process_group, _COUNT, work).wait()
        if not counts_all_ranks:
            gradients.controls.count_ranks(int(work.result()[0].item()))
    _sync_buffers(buffers, agree_on_iteration(transport, has_inputs=True, synchronizes=synchronizes))


def _sync_buffers(buffers: BufferSync, iteration: Iteration) -> None:
    """Synchronize buffers as a forward does."""
    buffers.before_forward(
        next_is_due=iteration.synchronizes,
        src=iteration.buffers_from,
        counts=iteration.has_inputs,
        num_counting=iteration.num_with_inputs,
    )


class ShadowHook(JoinHook):
    """The hook that runs on a rank while it has no inputs left.

    Args:
        transport: the transport of the wrapped module.
        gradients: its gradient synchronization.
        buffers: its buffers.
        sync_module: copies parameters and buffers from the given rank to all.
    """

    def __init__(
        self,
        transport: Transport,
        gradients: GradientSync,
        buffers: BufferSync,
        sync_module: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._transport = transport
        self._gradients = gradients
        self._buffers = buffers
        self._sync_module = sync_module

    def main_hook(self) -> None:
        """Match the collectives of the other ranks in one iteration."""
        iteration = agree_on_iteration(self._transport, has_inputs=False, synchronizes=False)
        _sync_buffers(self._buffers, iteration)
        if iteration.synchronizes:
            with torch.no_grad():
                self._gradients.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the model of the rank that finished last."""
        last = torch.tensor(
            [self._transport.rank if is_last_joiner else -1], device=self._transport.control_device
        )
        self._transport.all_reduce(last, "max").wait()
        self._sync_module(int(last.item()))
