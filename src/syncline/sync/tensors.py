"""Naming the tensors of a target, and broadcasting many tensors in few collectives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from syncline.plan.packing import plan_pieces
from syncline.plan.trees import leaves
from syncline.sync.optimizers import optimizer_leaves
from syncline.transport.base import Transport, Work

__all__ = [
    "TensorBroadcaster",
    "as_bytes",
    "as_flat",
    "broadcast_tensors",
    "is_plain",
    "named_tensors",
    "parts_of",
]


_OWN_MEMORY = (Tensor, nn.Parameter)
"""Types that are neither lazy nor made of other tensors, as other subclasses may be."""


# ---------------------------------------------------------------------- which tensors


def named_tensors(target: Any, *, for_writing: bool = True) -> list[tuple[str, Tensor]]:
    """The tensors of a target with their names, in an order that is the same on every rank.

    A tensor that occurs twice (tied weights, or another view of exactly the same memory) is listed once, by
    its first name.

    Args:
        target: a Module (parameters, then buffers, non-persistent ones too), an Optimizer (tensors of its
            state and of its parameter groups; not the parameters), a Tensor, or dicts, lists and tuples of
            tensors (dicts in the order of their keys' text).
        for_writing: whether they have to be such that they can be written in place.

    Raises:
        TypeError: something else, or a leaf that is no tensor; its path is named.
        ValueError: a tensor that cannot be written in place: lazy, meta, sparse, expanded, or a subclass that
            wraps others (DTensor).

    Example:
        >>> [name for name, _ in named_tensors(nn.BatchNorm1d(4))]
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    seen: dict[int, list[Tensor]] = {}
    named: list[tuple[str, Tensor]] = []
    for name, tensor in _walk(target):
        _check_readable(name, tensor)
        if for_writing:
            _check_writable(name, tensor)
        others = seen.setdefault(tensor.data_ptr() or id(tensor), [])
        if not others or not any(_identity(tensor) == _identity(other) for other in others):
            others.append(tensor)
            named.append((name, tensor))
    return named


def _walk(target: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(target, nn.Module):
        kind = type(target)
        if kind.named_parameters is nn.Module.named_parameters and (
            kind.named_buffers is nn.Module.named_buffers
        ):
            yield from _walk_module(target)
        else:
            yield from target.named_parameters()
            yield from target.named_buffers()
    elif isinstance(target, Optimizer):
        yield from _walk_optimizer(target)
    else:
        yield from _walk_tree(target)


def _walk_module(module: nn.Module) -> list[tuple[str, Tensor]]:
    """As named_parameters() and named_buffers() would, in one walk; what is tied more than once."""
    parameters: list[tuple[str, Tensor]] = []
    buffers: list[tuple[str, Tensor]] = []
    _collect(module, "", set(), parameters, buffers)
    return parameters + buffers


def _collect(
    module: nn.Module,
    prefix: str,
    seen: set[nn.Module],
    parameters: list[tuple[str, Tensor]],
    buffers: list[tuple[str, Tensor]],
) -> None:
    seen.add(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            parameters.append((prefix + name, parameter))
    for name, buffer in module._buffers.items():
        if buffer is not None:
            buffers.append((prefix + name, buffer))
    for name, inner in module._modules.items():
        if inner is not None and inner not in seen:
            _collect(inner, f"{prefix}{name}.", seen, parameters, buffers)


def _walk_optimizer(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in optimizer_leaves(optimizer):
        if isinstance(leaf, Tensor):
            yield path, leaf


def _walk_tree(tree: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in leaves(tree):
        if not isinstance(leaf, Tensor):
            where = f" at {path}" if path else ""
            raise TypeError(
                f"expected a Module, an Optimizer, a Tensor, or dicts, lists and tuples of tensors; "
                f"got {type(leaf).__name__}{where}: take it out, or make it a tensor"
            )
        yield path or "tensor", leaf


def _check_readable(name: str, tensor: Tensor) -> None:
    if type(tensor) not in _OWN_MEMORY:
        if is_lazy(tensor):
            raise ValueError(f"{name} is lazy, it has no shape yet: run one forward with a real batch first")
        if hasattr(tensor, "__tensor_flatten__"):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}, which wraps other tensors: pass those (to_local())"
            )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{name} is {tensor.layout}, {tensor.dtype}: expected a dense tensor that is not quantized"
        )
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device, it has no values: materialize it first (to_empty)")


def _check_writable(name: str, tensor: Tensor) -> None:
    if tensor.is_contiguous():
        return  # so are empty ones
    repeats = any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if repeats:
        raise ValueError(
            f"{name} is expanded (shape {tuple(tensor.shape)}, strides {tensor.stride()}): several elements "
            "share one place in memory and cannot be written; clone() it first"
        )


def _identity(tensor: Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    # The address includes the storage offset.
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())


# ---------------------------------------------------------------------- broadcasting them


def broadcast_tensors(
    tensors: Sequence[Tensor], transport: Transport, src: int, *, preserve_version: bool = False
) -> Work:
    """Copy rank `src`'s tensors into every other rank's, all dtypes together in few collectives.

    Everything is under way at once; `TensorBroadcaster.run` blocks, and bounds the memory for copies.

    Args:
        tensors: the same shapes and dtypes on all ranks, in the same order; strides may differ.
        transport: between the ranks.
        src: whose values, a rank of the transport. Nothing is written there.
        preserve_version: see `TensorBroadcaster`.

    Returns:
        What to wait for; the tensors are not to be touched before.
    """
    return TensorBroadcaster(tensors, transport, preserve_version=preserve_version).start(src)


class TensorBroadcaster:
    """Broadcasts the same tensors again and again; planned once, its buffers reused.

    Tensors from 1 MiB on travel from where they are; smaller ones are packed, as raw bytes, into pieces of up
    to 32 MiB. Tensors that are not contiguous travel by a contiguous copy. A tensor on the CPU travels by the
    transport's control device where the engine cannot send from the CPU (NCCL).

    Args:
        tensors: what to broadcast: the same shapes and dtypes on all ranks, in the same order; strides may
            differ. Held by identity: when a module's buffer is replaced, make a new broadcaster.
        transport: between the ranks.
        preserve_version: hide the writing from autograd. Otherwise a backward through a graph that saved one
            of the tensors before they were overwritten is torch's usual error.

    Example:
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     x, n = torch.full((2,), float(transport.rank)), torch.tensor(transport.rank)
        ...     TensorBroadcaster([x, n], transport).start(1).wait()
        ...     return x.tolist(), n.item(), transport.statistics().num_calls
        >>> run_ranks(2, program)[0]
        ([1.0, 1.0], 1, {'broadcast': 1})
    """

    def __init__(
        self, tensors: Sequence[Tensor], transport: Transport, *, preserve_version: bool = False
    ) -> None:
        self._transport = transport
        self._tensors = list(tensors) if transport.size > 1 else []
        self._written = [] if preserve_version else [t for t in self._tensors if t.numel()]
        self._pieces: list[_Piece] = []
        self._addresses: list[int] = []
        self._under_way: _Broadcast | None = None
        self._plan()

    @property
    def num_collectives(self) -> int:
        """Broadcasts that one `start` or `run` makes."""
        return len(self._pieces)

    def start(self, src: int = 0) -> Work:
        """Broadcast from rank `src`, everything under way at once.

        The packed copies are kept for the next call. A previous broadcast that was not waited for is waited
        for first.
        """
        self._prepare()
        is_source = self._transport.rank == src
        works = [(piece, piece.launch(self._transport, src)) for piece in self._pieces]
        self._under_way = _Broadcast(works, [] if is_source else self._written, is_source=is_source)
        return self._under_way

    def run(self, src: int = 0) -> None:
        """Broadcast from rank `src` and wait, with at most two packed copies of up to 32 MiB at a time."""
        self._prepare()
        is_source = self._transport.rank == src
        under_way: deque[_Broadcast] = deque()
        for piece in self._pieces:
            if len(under_way) == 2:
                under_way.popleft().wait()
            work = piece.launch(self._transport, src)
            under_way.append(_Broadcast([(piece, work)], [], is_source=is_source, keep_copies=False))
        for broadcast in under_way:
            broadcast.wait()
        if not is_source:
            torch.autograd.graph.increment_version(self._written)

    def _prepare(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
        # `tensor.data = other` and `set_` leave the identity and move the memory.
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            self._plan()

    def _plan(self) -> None:
        devices = [self._transport.sending_device(tensor.device) for tensor in self._tensors]
        sizes_bytes = [tensor.numel() * tensor.element_size() for tensor in self._tensors]
        # `.data` shares the memory, but neither graph nor version counter: writing to it is always allowed.
        self._pieces = [
            _Piece([self._tensors[i].data for i in piece], devices[piece[0]])
            for piece in plan_pieces(sizes_bytes, devices)
        ]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]


class _Piece:
    """Tensors of one collective, sent as bytes: in place if it is one contiguous tensor, else by a copy."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._num_bytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        # Bytes of contiguous tensors can be copied as they are, at any offset. Others (strided, or with a
        # pending conjugation) are first copied to a contiguous twin.
        self._strided = [tensor for tensor in tensors if not is_plain(tensor)]
        self._tensors = tensors
        self._twins: list[Tensor] = []
        self._bytes: list[Tensor] = []
        self._wire: Tensor | None = None
        self._slots: list[Tensor] = []

    def launch(self, transport: Transport, src: int) -> Work:
        if self._wire is None:
            self._allocate()
        assert self._wire is not None
        if transport.rank == src:
            for twin, tensor in zip(self._twins, self._strided, strict=True):
                twin.copy_(tensor)
            if self._slots:
                torch._foreach_copy_(self._slots, self._bytes)
        return transport.broadcast(self._wire, src)

    def land(self) -> None:
        """Write what has arrived into the tensors."""
        if self._slots:
            torch._foreach_copy_(self._bytes, self._slots)
        # One by one: the batched call cannot write to a tensor with a pending conjugation.
        for twin, tensor in zip(self._twins, self._strided, strict=True):
            tensor.copy_(twin)

    def drop_copies(self) -> None:
        self._twins, self._bytes, self._slots, self._wire = [], [], [], None

    def _allocate(self) -> None:
        self._twins = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in self._strided]
        twins = iter(self._twins)
        self._bytes = [as_bytes(t if is_plain(t) else next(twins)) for t in self._tensors]
        if len(self._bytes) == 1 and self._bytes[0].device == self._device:
            self._wire = self._bytes[0]
            return
        self._wire = torch.empty(sum(self._num_bytes), dtype=torch.uint8, device=self._device)
        self._slots = list(torch.split(self._wire, self._num_bytes))


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory holds the values one after the other: no strides, no pending conjugation or sign."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def parts_of(tensor: Tensor, cap_bytes: int) -> list[Tensor]:
    """Views of at most `cap_bytes` each that make up a tensor, row by row: cut by its shape alone.

    Example:
        >>> [part.shape[0] for part in parts_of(torch.zeros(5, 2), 17)]
        [2, 2, 1]
    """
    if tensor.nbytes <= cap_bytes or tensor.numel() == 1:
        return [tensor]
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    row_bytes = tensor.nbytes // tensor.shape[dim]
    rows = tensor.split(max(1, cap_bytes // row_bytes), dim)
    return [part for row in rows for part in parts_of(row, cap_bytes)]


def as_flat(tensor: Tensor) -> Tensor:
    """The memory of a plain tensor, (numel,). (`view(-1)` leaves a single element whatever stride it has.)"""
    return tensor.as_strided((1,), (1,)) if tensor.numel() == 1 else tensor.view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a plain tensor as bytes, (numel * element_size,)."""
    return as_flat(tensor).view(torch.uint8)


class _Broadcast(Work):
    """Pieces under way; `wait` writes what arrives, piece by piece."""

    __slots__ = ("_is_source", "_keep_copies", "_works", "_written")

    def __init__(
        self,
        works: Sequence[tuple[_Piece, Work]],
        written: Sequence[Tensor],
        *,
        is_source: bool,
        keep_copies: bool = True,
    ) -> None:
        self._works = deque(works)
        self._written = written
        self._is_source = is_source
        self._keep_copies = keep_copies

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self._works:
            return
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            while self._works:
                piece, work = self._works[0]
                work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if not self._is_source:
                    piece.land()
                if not self._keep_copies:
                    piece.drop_copies()
                self._works.popleft()
        finally:
            if self._written:
                torch.autograd.graph.increment_version(self._written)

    def is_completed(self) -> bool:
        return all(work.is_completed() for _, work in self._works)
