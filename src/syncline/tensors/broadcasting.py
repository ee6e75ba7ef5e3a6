"""A broadcast of many tensors in few collectives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_
from syncline.tensors.in_flight import run_pieces
from syncline.tensors.packing import plan_pieces
from syncline.tensors.targets import as_bytes, as_flat, is_plain, mark_written
from syncline.transport.base import Transport
from syncline.transport.work import CombinedWork, Work


class TensorBroadcaster:
    """A broadcast that can be repeated for the same tensors. Its plan is made once, and its memory is reused.

    A tensor of 1 MiB or more is sent from its own memory. Smaller tensors are packed, as raw bytes, into pieces of up
    to 32 MiB. A tensor that is not contiguous is sent as a contiguous copy. If the transport cannot send from the CPU
    (NCCL, for example), CPU tensors are copied to its control device and sent from there.

    Args:
        tensors: the tensors to broadcast, of the same shapes and dtypes on all ranks, in the same order. Strides may
            differ. If a module's buffer is replaced by another tensor, a new broadcaster is needed.
        transport: the transport between the ranks.
        preserve_version: whether to hide the writes from autograd. Otherwise autograd detects them: a backward raises
            torch's usual error if its graph saved one of the tensors before the tensor was overwritten.

    Examples:
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
        self._pieces: list[_BytesPiece] = []
        self._addresses: list[int] = []
        self._in_flight: Work | None = None
        self._plan()

    @property
    def num_collectives(self) -> int:
        """The number of collectives that one call of `start` or `run` makes."""
        return len(self._pieces)

    def start(self, src: int = 0) -> Work:
        """Start to broadcast the tensors from rank `src`. All collectives are in flight at once.

        The memory of the packed copies is kept for the next call. If an earlier broadcast is still in flight, the call
        waits for it first.
        """
        self._prepare()
        is_source = self._transport.rank == src
        self._in_flight = CombinedWork(
            [
                (piece.launch(self._transport, src), None if is_source else piece.land)
                for piece in self._pieces
            ],
            at_end=None if is_source else partial(mark_written, self._written),
        )
        return self._in_flight

    def run(self, src: int = 0) -> None:
        """Broadcast the tensors from rank `src`, and wait. At most two packed copies of 32 MiB exist at a time."""
        self._prepare()
        is_source = self._transport.rank == src

        def land(piece: _BytesPiece) -> None:
            if not is_source:
                piece.land()
            piece.drop_copies()

        try:
            run_pieces(self._pieces, lambda piece: piece.launch(self._transport, src), land)
        finally:
            if not is_source:
                mark_written(self._written)

    def _prepare(self) -> None:
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
        # `tensor.data = other` and `set_` keep the object but change its memory.
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            self._plan()

    def _plan(self) -> None:
        sending_device = cache(self._transport.sending_device)
        devices = [sending_device(tensor.device) for tensor in self._tensors]
        sizes_bytes = [tensor.nbytes for tensor in self._tensors]
        # `.data` shares the memory but neither graph nor version counter, so writing to it is always allowed.
        self._pieces = [
            _BytesPiece([self._tensors[i].data for i in piece], devices[piece[0]])
            for piece in plan_pieces(sizes_bytes, devices)
        ]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]


class _BytesPiece:
    """The tensors of one collective. A single contiguous tensor is sent in place, other tensors as a copy of bytes."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._num_bytes = [tensor.nbytes for tensor in tensors]
        # Bytes of contiguous tensors can be copied as they are, at any offset. Other tensors (strided, or with a
        # pending conjugation) are first copied to a contiguous twin.
        self._strided = [tensor for tensor in tensors if not is_plain(tensor)]
        self._tensors = tensors
        self.is_copied = len(tensors) > 1 or bool(self._strided) or tensors[0].device != device
        self._twins: list[Tensor] = []
        self._parts: list[Tensor] = []
        """Flat views of the tensors or of their twins."""
        self._wire: Tensor | None = None
        self._slots: list[Tensor] = []
        """The places of the parts in the memory that is sent, of the same dtypes."""

    def launch(self, transport: Transport, src: int) -> Work:
        if self._wire is None:
            self._allocate()
        assert self._wire is not None
        if transport.rank == src:
            with torch.inference_mode():  # it allows writing to any tensor, including inference tensors
                for twin, tensor in zip(self._twins, self._strided, strict=True):
                    twin.copy_(tensor)
                if self._slots:
                    foreach_copy_(self._slots, self._parts)
        return transport.broadcast(self._wire, src)

    @torch.inference_mode()  # see `launch`
    def land(self) -> None:
        """Write the values that this rank has received into the tensors."""
        if self._slots:
            foreach_copy_(self._parts, self._slots)
        # One at a time, because the batched call cannot write to a tensor with a pending conjugation.
        for twin, tensor in zip(self._twins, self._strided, strict=True):
            tensor.copy_(twin)

    def drop_copies(self) -> None:
        self._twins, self._parts, self._slots, self._wire = [], [], [], None

    def _allocate(self) -> None:
        self._twins = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in self._strided]
        plain: Sequence[Tensor] = self._tensors
        if self._strided:
            twins = iter(self._twins)
            plain = [tensor if is_plain(tensor) else next(twins) for tensor in plain]
        if len(plain) == 1 and plain[0].device == self._device:
            self._wire = as_bytes(plain[0])
            return
        self._wire = torch.empty(sum(self._num_bytes), dtype=torch.uint8, device=self._device)
        dtypes = {tensor.dtype for tensor in plain}
        if len(dtypes) == 1:  # no view as bytes for each tensor
            self._parts = [as_flat(tensor) for tensor in plain]
            self._slots = list(self._wire.view(*dtypes).split([part.numel() for part in self._parts]))
        else:
            self._parts = [as_bytes(tensor) for tensor in plain]
            self._slots = list(self._wire.split(self._num_bytes))
