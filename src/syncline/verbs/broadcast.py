"""The verb `broadcast_`, which copies tensors from one rank to all others, in place."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from torch import Tensor
from torch.optim import Optimizer

from syncline.checks import checked_flag
from syncline.optimizers.contents import OptimizerNumbers
from syncline.session.world import transport_of
from syncline.suggestions import suggests_arguments
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.tensors.targets import named_tensors
from syncline.transport.agreement import describe_tensors
from syncline.transport.base import Transport
from syncline.transport.work import CombinedWork, Work
from syncline.verbs.common import Group, Prepared, agree_on_call, rank_of_source, refuse_sharded, verb
from syncline.verbs.diverge import record_equal

T = TypeVar("T")

_REMEDY = (
    "Pass the same tensors in the same containers, and the same src, on every rank. "
    "(Of tied tensors, only the first is named.)"
)


@overload
def broadcast_(target: T, src: int = 0, *, group: Group = None, async_op: Literal[False] = False) -> T: ...


@overload
def broadcast_(target: Any, src: int = 0, *, group: Group = None, async_op: Literal[True]) -> Work: ...


@overload
def broadcast_(target: T, src: int = 0, *, group: Group = None, async_op: bool) -> T | Work: ...


@suggests_arguments
def broadcast_(target: Any, src: int = 0, *, group: Group = None, async_op: bool = False) -> Any:
    """Copy the values of `target` from rank `src` to all other ranks, in place.

    Tensors of all dtypes are sent together, in few collectives. Tied weights stay tied. If `target` is an optimizer,
    the tensors and the numbers (learning rate, step counts) of its state and its parameter groups are sent, but not the
    parameters. The ranks compare names, shapes and dtypes before any tensor is sent. Strides may differ between ranks.
    Autograd treats the write as an in-place change: a backward through a graph that was recorded before raises an error
    instead of computing wrong gradients. On rank `src` nothing is written.

    Args:
        target: a Module (its parameters and buffers), an Optimizer, a Tensor, or nested dicts, lists and tuples of
            tensors.
        src: the rank to copy from. As in torch, this is a global rank. If `group` is a Syncline transport, it is a rank
            of that transport.
        group: the ranks that take part: a `torch.distributed` process group or a Syncline transport. None means the
            default group, or a world of one rank if torch.distributed is not initialised.
        async_op: whether to return at once, with a handle. Do not use `target` before you have waited for the handle.

    Returns:
        `target`. If `async_op` is True, a handle with a method `wait()`.

    Raises:
        ContractMismatch: the ranks passed different targets or sources. The text is the same on every rank.
        TypeError: `target` has an unsupported type, or contains something other than tensors; or `src` is not an
            integer. Every rank raises the error, even if only one rank has the cause.
        ValueError: a tensor cannot be written in place, `src` is not a rank of the group, or the optimizer is sharded.
            Every rank raises the error, even if only one rank has the cause.

    Examples:
        >>> import torch, syncline as sl
        >>> model = sl.broadcast_(torch.nn.Linear(2, 1))
        >>> work = sl.broadcast_(model, async_op=True)
        >>> work.wait()
    """
    transport = transport_of(group)
    with verb(transport, "broadcast_"):

        def prepare() -> Prepared[tuple[Replaced, int]]:
            checked_flag("async_op", async_op)
            src_rank = rank_of_source(src, group, transport)
            replaced = Replaced(target)
            return Prepared((replaced, src_rank), [f"source  rank {src}", *replaced.lines])

        (replaced, src_rank), _ = agree_on_call(transport, "sl.broadcast_", prepare, remedy=_REMEDY)
        if async_op:
            return replaced.start(transport, src_rank)
        replaced.run(transport, src_rank)
        return target


class Replaced:
    """The values of a target that a broadcast replaces: its tensors and, if it is an optimizer, its numbers.

    Args:
        target: see `broadcast_`.

    Raises:
        TypeError, ValueError: the target cannot be broadcast.
    """

    def __init__(self, target: Any) -> None:
        named = named_tensors(target)
        self._tensors: list[Tensor] = [tensor for _, tensor in named]
        self._numbers: OptimizerNumbers | None = None
        self.lines = describe_tensors(named, kind="tensor", layout=False)
        """The lines that describe the target. They must be equal on all ranks."""
        refuse_sharded(
            target,
            "so the state of one rank must not be copied to the others. To make the state consistent, call "
            "optimizer.load_state_dict(optimizer.state_dict()) on all ranks",
        )
        if isinstance(target, Optimizer):
            self._numbers = OptimizerNumbers(target)
            self._tensors += self._numbers.tensors
            self.lines += self._numbers.lines

    def start(self, transport: Transport, src_rank: int) -> Work:
        """Start to broadcast all values at once, and return the handle for which to wait."""
        work = TensorBroadcaster(self._tensors, transport).start(src_rank)
        return CombinedWork([(work, lambda: self._finish(is_source=transport.rank == src_rank))])

    def run(self, transport: Transport, src_rank: int) -> None:
        """Broadcast the values, and wait for them. Unlike `start`, `run` bounds the memory for packed copies."""
        TensorBroadcaster(self._tensors, transport).run(src_rank)
        self._finish(is_source=transport.rank == src_rank)

    def _finish(self, *, is_source: bool) -> None:
        if self._numbers is not None and not is_source:
            self._numbers.write_back()
        record_equal(self._tensors)
