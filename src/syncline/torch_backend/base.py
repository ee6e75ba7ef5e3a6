"""The base class of the backend's process groups, which completes their calls, and helpers for tensors and options.

If the options of a call have `asyncOp=False`, the call waits for its operation and returns the shared object `ENDED`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from syncline._torch.process_groups import C10dBackend, set_timeout_of
from syncline.torch_backend import arguments
from syncline.torch_backend.work import ENDED, BackendWork, Finisher
from syncline.transport.base import Transport
from syncline.transport.work import CombinedWork, Work

BACKEND = "syncline"

_NUM_TERMS = 65535
"""How many exchanges have different numbers, so that a message of one never arrives in another."""


class Group:
    """The base class of a process group that uses a transport. It has the group's state and completes its calls.

    Args:
        transport: the transport of the group. The group closes it.
        name: the name of the group.
        global_ranks: the members of the group, as ranks of the default group. The list is empty for the default group.
    """

    def __init__(self, transport: Transport, name: str, global_ranks: list[int]) -> None:
        self.transport = transport
        self._name = name
        self._global_ranks = global_ranks
        self._finisher = Finisher(name)
        self._coalesced: list[BackendWork] | None = None
        self._exchanges = itertools.count(1)
        """The numbers of the collectives that consist of messages. They are equal on all ranks, so a call takes its
        number before anything can fail."""
        self._options = C10dBackend.Options(BACKEND, timedelta(seconds=transport.timeout_seconds))
        self._options.global_ranks_in_group = global_ranks
        self._options.group_name = GroupName(name)

    @property
    def options(self) -> Any:
        return self._options

    def group_for(self, device: torch.device) -> dist.ProcessGroup:
        """Return the process group for tensors on `device`, which is not the CPU.

        Raises:
            ValueError: no backend serves this device. This base class always raises this error.
        """
        if device.type == "meta":
            remedy = "Such a tensor has no data that could be sent. Create it on the CPU, or first give its module "
            remedy += 'memory with module.to_empty(device="cpu")'
        else:
            backend = dist.Backend.default_device_backend_map.get(device.type, "<its backend>")
            remedy = "Create the group with a backend for each device, for instance "
            remedy += f'init_process_group("cpu:{BACKEND},{device.type}:{backend}")'
        raise ValueError(
            f"this process group is for CPU tensors only, got a tensor on the device {device.type}. {remedy}"
        )

    # ------------------------------------------------------------------ lifetime

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    supports_splitting = True
    supports_coalescing = False
    # A Python class that inherits these from torch 2.15 raises RecursionError.
    supports_reconfigure = supports_window = supports_shrinking = _supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        self.transport.timeout_seconds = timeout.total_seconds()
        set_timeout_of(self._options, timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.transport.statistics().total_calls

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing. Torch calls this for a new group, whose ranks have made no calls yet."""

    def _wait_for_pending_works(self) -> None:
        for work in list(self._finisher.pending):
            work.wait()

    def _split(self, ranks: list[int], timeout: timedelta | None) -> Transport | None:
        if sorted(ranks) != list(ranks):
            raise ValueError(f"split_group: expected the ranks of the new group in rising order, got {ranks}")
        transport = self.transport.split(min(ranks) if self.transport.rank in ranks else None)
        if transport is not None and timeout is not None:
            transport.timeout_seconds = timeout.total_seconds()
        return transport

    def _global_ranks_of(self, ranks: list[int]) -> list[int]:
        return [self._global_ranks[rank] if self._global_ranks else rank for rank in ranks]

    def _abort(self) -> None:
        self.transport.abort(f"rank {self.transport.rank} aborted process group {self._name}")

    def _close(self) -> None:
        self._finisher.close()
        self.transport.close()

    # ------------------------------------------------------------------ helpers

    def _under_way(
        self,
        work: Work,
        result: list[Tensor],
        finish: Callable[[], object] | None = None,
        source: int = -1,
    ) -> dist.Work:
        started = BackendWork(work, result, self._finisher, finish, source)
        if self._coalesced is not None:
            self._coalesced.append(started)
        return started

    def _ended_or_under_way(
        self, opts: Any, work: Work, result: list[Tensor], finish: Callable[[], object] | None
    ) -> dist.Work:
        if opts is None or opts.asyncOp:
            return self._under_way(work, result, finish)
        work.wait()
        if finish is not None:
            finish()
        return ENDED

    def _combined(self, opts: Any, works: Sequence[dist.Work], result: list[Tensor]) -> dist.Work:
        started = [_Started(work) for work in works if isinstance(work, BackendWork)]
        return self._ended_or_under_way(opts, CombinedWork.of(started), result, None)

    def _check(
        self, operation: str, tensors: Sequence[Tensor], *lists: Sequence[Tensor], opts: Any = None
    ) -> None:
        """Raise an error if the arguments of a call for this group's own devices are wrong."""
        arguments.check(operation, self.transport, tensors, *lists, opts=opts)

    def _other_group(self, *tensors: Tensor) -> dist.ProcessGroup | None:
        """Return the group that serves the device of the first tensor; None if this group does."""
        if tensors and not tensors[0].is_cpu:
            return self.group_for(tensors[0].device)
        return None

    def _each(
        self,
        name: str,
        operation: Callable[[Tensor, Tensor, Any], dist.Work],
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        options: Any,
    ) -> dist.Work:
        opts = opts or options()
        arguments.check_pairs(name, outputs, inputs)
        for output, input in zip(outputs, inputs, strict=True):
            if self._other_group(output) is None:
                self._check(name, [output, input])
        if len(outputs) == 1:
            return operation(outputs[0], inputs[0], opts)
        later = asynchronous(opts)
        works = [operation(output, input, later) for output, input in zip(outputs, inputs, strict=True)]
        return self._combined(opts, works, outputs)

    def _messages(
        self, exchange: int, opts: Any, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]
    ) -> dist.Work:
        """Send and receive tensors, and complete the call. Skip messages from this rank to itself.

        The two ranks of a message compare its size, so empty tensors are sent, too. They also compare the number of
        this exchange, so a message of a call that has failed never arrives in a later call.

        Args:
            exchange: the number of this exchange, from `_exchanges`.
            opts: the options of the call.
            sends: the tensors to send, each with the receiving rank.
            recvs: the tensors to fill, each with the sending rank.
        """
        transport, copies = self.transport, []
        terms = exchange % _NUM_TERMS or _NUM_TERMS
        works = [
            transport.send(tensor, peer, terms=terms) for tensor, peer in sends if peer != transport.rank
        ]
        for tensor, peer in recvs:
            if peer != transport.rank:
                target = tensor if tensor.is_contiguous() else torch.empty_like(flat(tensor))
                works.append(transport.recv(target.detach(), peer, terms=terms))
                copies.append((tensor, target))
        result = [tensor for tensor, _ in (*recvs, *sends)]
        return self._ended_or_under_way(opts, CombinedWork.of(works), result, copy_back(*copies))


class _Started(Work):
    """An adapter that gives a `BackendWork` the methods of a transport's `Work`."""

    __slots__ = ("_work",)

    def __init__(self, work: BackendWork) -> None:
        self._work = work

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._work.wait(None if timeout_seconds is None else timedelta(seconds=timeout_seconds))

    def is_completed(self) -> bool:
        return self._work.is_completed()


# ---------------------------------------------------------------------- tensors


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor that a transport can read: `tensor` itself if possible, or else a contiguous copy of it."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def fillable(tensor: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
    """Return a contiguous tensor in which a transport can store a result that belongs in `tensor`.

    Returns:
        The tensor, and a function that copies its contents to `tensor`. If `tensor` is contiguous, the returned tensor
        is `tensor` itself, and the function is None.
    """
    if tensor.is_contiguous():
        return tensor, None
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return buffer, copy_back((tensor, buffer))


def copy_back(*pairs: tuple[Tensor, Tensor]) -> Callable[[], object] | None:
    """Return a function that copies results to their targets. Return None if there is nothing to copy.

    Args:
        pairs: pairs of a target and its result. A pair whose target and result are the same tensor is not copied.
    """
    copies = [(target, result) for target, result in pairs if target is not result]
    if not copies:
        return None

    def finish() -> None:
        for target, result in copies:
            target.detach().copy_(result.view(target.shape))

    return finish


# ---------------------------------------------------------------------- options


def with_option(options: Any, given: Any, attribute: str) -> Any:
    """Return the options object of a call.

    Args:
        options: the class of the options.
        given: the argument of the call: an options object, the plain value of `attribute`, or None.
        attribute: the name of the attribute to set if `given` is a plain value.
    """
    if given is not None and hasattr(given, attribute):
        return given
    made = options()
    if given is not None:
        setattr(made, attribute, given)
    return made


def asynchronous(opts: Any) -> Any:
    """Return a copy of `opts` with `asyncOp=True`. A call with the copy starts its operation without a wait."""
    made = type(opts)()
    for attribute in ("reduceOp", "rootRank", "rootTensor"):
        if hasattr(opts, attribute):
            setattr(made, attribute, getattr(opts, attribute))
    made.asyncOp = True
    return made
