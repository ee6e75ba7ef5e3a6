"""Uneven inputs: a rank that has run out of inputs sends zeros in the collectives of the other ranks.

This uses torch's `Join`. Before each forward, the ranks agree in one small collective whether the backward of this
iteration reduces gradients, and which ranks still have inputs. Under the buffer policy "broadcast", the buffers come
from the highest rank that still has inputs. Under "average", they are the mean over the ranks that still have inputs.
When all ranks are done, the rank that finished last broadcasts its model to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from syncline._torch.modules import leave_join, set_join_configs
from syncline.checks import checked_truth, suggests_arguments
from syncline.ddp.config import checked_truths
from syncline.ddp.replica import Replica
from syncline.ddp.torch_names import TorchNames
from syncline.ddp.wrapping import broadcast_values
from syncline.transport.base import Transport
from syncline.transport.c10d_work import CallOfTorch

_NOT_WITH_SHARDS = "a rank without inputs would still have to step its shard, so join() is not possible"

_COUNT = "all_reduce of Join, which counts the ranks that have inputs"
"""The name of a collective of torch's `Join`. Errors about a rank that does not take part in it show this name."""


class _JoinBlock(Join):
    """torch's `Join` context. When it ends, it also resets its joinables, so that later forwards do not join.

    Args:
        transport: the transport between the ranks that enter the context.
        joinables: see `Join`.
        options: see `Join`.
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


def _begin_iteration(replica: Replica, *, has_inputs: bool, synchronizes: bool) -> bool:
    """Agree on the next iteration, and synchronize the buffers before its forward if this is due. A collective call.

    Ranks without inputs take part, too. The ranks agree by one all_reduce of a tensor of shape (number of ranks + 2,).

    Args:
        replica: the replica of the wrapped module.
        has_inputs: whether this rank has inputs.
        synchronizes: whether the backward of this iteration reduces gradients on this rank.

    Returns:
        Whether the backward of this iteration reduces gradients on any rank.
    """
    transport, buffers = replica.transport, replica.buffers
    mine = torch.zeros(transport.size + 2, dtype=torch.int32, device=transport.control_device)
    mine[transport.rank], mine[-2] = has_inputs, synchronizes
    mine[-1] = buffers.are_sent and buffers.were_replaced()
    transport.all_reduce(mine, "sum").wait()
    *with_inputs, any_synchronizes, any_replaced = mine.tolist()
    if any_replaced:
        buffers.compare()
    buffers.before_forward(
        next_is_due=bool(any_synchronizes),
        src=max((rank for rank, has in enumerate(with_inputs) if has), default=-1),
        counts=has_inputs,
        num_counting=sum(with_inputs),
    )
    return bool(any_synchronizes)


class _ShadowHook(JoinHook):
    """The hook that runs on a rank after this rank has run out of inputs.

    Args:
        replica: the replica of the wrapped module.
        sync_module: a function that broadcasts parameters and buffers. Its argument is the source rank.
    """

    def __init__(self, replica: Replica, sync_module: Callable[[int], None]) -> None:
        super().__init__()
        self._replica = replica
        self._sync_module = sync_module

    def main_hook(self) -> None:
        """Take part in the collectives that the other ranks run in one iteration."""
        if _begin_iteration(self._replica, has_inputs=False, synchronizes=False):
            with torch.no_grad():
                self._replica.gradients.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the model of the rank that finished last to all ranks. A collective call."""
        transport = self._replica.transport
        last = torch.tensor([transport.rank if is_last_joiner else -1], device=transport.control_device)
        transport.all_reduce(last, "max").wait()
        self._sync_module(int(last.item()))


@suggests_arguments
class JoinMethods(TorchNames, Joinable):
    """The methods of the wrapper for uneven inputs. Only `DistributedDataParallel` inherits from this class."""

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of inputs at different times, as in torch.

        A rank that leaves its loop early sends zeros in the collectives of the other ranks, until all ranks are done.
        Then the rank that finished last broadcasts its model to all ranks.

        Args:
            divide_by_initial_world_size: divide the sum of the gradients by the number of all ranks. With False, divide
                it by the number of ranks that still have inputs.
            enable: whether the context does anything.
            throw_on_early_termination: raise an error on every rank as soon as one rank has no inputs left.

        Raises:
            ValueError: the module is not synchronized over a torch.distributed group, is sharded, or has a strategy
                under which replicas drift.
        """
        replica = self._replica
        options = checked_truths(
            {
                "divide_by_initial_world_size": divide_by_initial_world_size,
                "throw_on_early_termination": throw_on_early_termination,
            }
        )
        if not checked_truth("enable", enable) or replica.transport.size == 1:
            return nullcontext()
        replica.refuse_sharded(_NOT_WITH_SHARDS)
        replica.drift.refuse(
            "ranks without inputs cannot take part in parameter syncs, so join() is not possible"
        )
        if self.process_group is None:
            raise ValueError(
                "expected a wrapper over a torch.distributed process group, which join() needs; got a wrapper over "
                f"{replica.transport.name}. Give process_group= when you wrap the module"
            )
        return _JoinBlock(replica.transport, [self], **options)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that torch's `Join` runs on a rank without inputs. A collective call."""
        replica = self._replica
        replica.refuse_sharded(_NOT_WITH_SHARDS)
        self._has_joined = True
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        replica.agree_before_join(self.module)
        return _ShadowHook(replica, self._make_all_equal_to)

    @property
    def join_device(self) -> torch.device:
        """The device on which torch's `Join` creates its tensors."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group over which torch's `Join` counts the ranks that have inputs."""
        assert self.process_group is not None
        return self.process_group

    def _make_all_equal_to(self, src: int) -> None:
        self._authoritative_rank = src
        replica = self._replica
        chosen = replace(replica.selection, buffers=tuple(replica.buffers.named_present()))
        if replica.buffers.are_sent:
            replica.buffers.compare()  # a rank without inputs lacks buffers that the forwards of the others have added
        broadcast_values(chosen, replica.transport, src=src, buffers=replica.buffers.are_sent)

    def _joined_forward_begins(self, *, synchronizes: bool) -> None:
        """Prepare a forward inside of `join`, on a rank that has inputs. A collective call.

        Args:
            synchronizes: whether the backward of this iteration reduces gradients on this rank.
        """
        replica = self._replica
        work = Join.notify_join_context(self)
        if work is not None:
            watched: Any = replica.transport
            CallOfTorch(watched, self.join_process_group, _COUNT, work).wait()
            if not self._divide_by_initial_world_size:
                replica.gradients.controls.count_ranks(int(work.result()[0].item()))
        _begin_iteration(replica, has_inputs=True, synchronizes=synchronizes)
