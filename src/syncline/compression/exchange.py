"""Averaging of a flat tensor over a transport: answers an encoder's requests, one phase after the other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.checks import checked_kind
from syncline.compression.averager import Averager
from syncline.compression.base import (
    AllToAll,
    Averaged,
    Averaging,
    Compression,
    Gather,
    Gathered,
    Layout,
    Mean,
    Request,
    Sum,
    computing_dtype,
    plain_mean,
)
from syncline.errors import SynclineError
from syncline.transport.base import ReduceOp, Transport
from syncline.transport.work import Work


class MeanExchange:
    """Averages one flat tensor over all ranks repeatedly.

    One averaging is a call of `start`, any number of calls of `advance` (between other work), and a call of `wait`.
    `start` and `advance` start the collectives of at most one phase, and `wait` those of all remaining phases. So ranks
    that call them in the same order start the same collectives in the same order. The constructor is not a collective
    call. A group of one rank sends nothing and returns the values unchanged.

    Args:
        compression: how the values are encoded; None for one plain all_reduce.
        shapes: shapes of the tensors that make up the flat tensor, in order; the same on all ranks.
        dtype: type of the flat tensor. fp16 and bf16 are encoded from float32.
        device: device of the flat tensor.
        transport: connects the ranks.

    Raises:
        ValueError: there is a compression, and the type is not real and floating.

    Example:
        >>> from syncline.compression import Quantize
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     exchange = MeanExchange(
        ...         Quantize(8), [(2,)], dtype=torch.float32, device=torch.device("cpu"), transport=transport
        ...     )
        ...     exchange.start(torch.full((2,), 254.0 * transport.rank))
        ...     return exchange.wait().tolist()
        >>> run_ranks(2, program)
        [[127.0, 127.0], [127.0, 127.0]]
    """

    def __init__(
        self,
        compression: Compression | None,
        shapes: Sequence[Sequence[int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        transport: Transport,
    ) -> None:
        checked_kind("transport", transport, Transport, "a Transport")
        checked_kind("device", device, torch.device, "a torch.device")
        if compression is not None:
            checked_kind("compression", compression, Compression, "one of sl.compression, or None")
        checked_kind("dtype", dtype, torch.dtype, "a torch.dtype")
        if compression is None and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"expected dtype to be a floating or complex type, got {dtype}")
        self.dtype = dtype
        self.layout = Layout(
            shapes=_checked_shapes(shapes),
            dtype=dtype if compression is None else computing_dtype(dtype),
            device=device,
            rank=transport.rank,
            num_ranks=transport.size,
        )
        self._transport = transport
        self._averager = None if compression is None else Averager(compression, self.layout)
        self._averaging: Averaging | None = None
        self._reply: Callable[[], Any] | None = None
        self._result: Tensor | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether an averaging was started and not waited for."""
        return self._averaging is not None or self._result is not None

    @property
    def has_arrived(self) -> bool:
        """Whether the mean has arrived, so that `wait` neither sends nor blocks."""
        return self._result is not None

    def start(self, flat: Tensor) -> None:
        """Start an averaging. Its first messages are in flight when this returns.

        Args:
            flat: of shape (numel,). It is consumed: its values are undefined afterwards, and it may be the result.

        Raises:
            SynclineError: the previous averaging was not waited for.
            ValueError: another number of elements, another type, or another device.
        """
        if self.is_under_way:
            raise SynclineError(
                f"rank {self._transport.rank}: an averaging is under way: wait for it before the next is started"
            )
        checked_kind("flat", flat, Tensor, "a tensor")
        numel, device = self.layout.numel, self.layout.device
        is_there = flat.device.type == device.type and device.index in (None, flat.device.index)
        if flat.numel() != numel or flat.dtype is not self.dtype or not is_there:
            raise ValueError(
                f"expected flat to have {numel} elements, {self.dtype} on {device}, got {flat.numel()}, {flat.dtype} "
                f"on {flat.device}"
            )
        flat = flat.detach().view(-1)
        if self._transport.size == 1 or not flat.numel():
            self._result = flat
            return
        if self._averager is None:
            self._averaging = plain_mean(flat)
        else:
            self._averaging = self._averager.mean(flat.to(self.layout.dtype))
        self._step(None)

    def advance(self) -> None:
        """Wait for the current phase, and start the next one if there is one."""
        if self._averaging is not None:
            assert self._reply is not None
            self._step(self._reply())  # if this raises, the next wait raises again

    def wait(self) -> Tensor:
        """Wait for the mean.

        Returns:
            The mean over all ranks, of shape (numel,) and in the flat tensor's type, the same bits on every rank.

        Raises:
            SynclineError: nothing was started, or a rank is gone (as in `Work.wait`).
        """
        if not self.is_under_way:
            raise SynclineError(f"rank {self._transport.rank}: nothing is under way: call start first")
        while self._averaging is not None:
            self.advance()
        result, self._result = self._result, None
        assert result is not None
        return result

    # ------------------------------------------------------------------ state

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the state of each tensor, by name; read-only."""
        self._check_at_rest()
        return [{} for _ in self.layout.shapes] if self._averager is None else self._averager.memory()

    def remember(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of one tensor; a ValueError if it does not fit."""
        self._check_at_rest()
        if self._averager is not None:
            self._averager.remember(index, tensors)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of this rank's state between averagings, with keys `<index of the tensor>.<name>`.

        Residuals differ between ranks, so every rank has to save its own state.
        """
        self._check_at_rest()
        return {} if self._averager is None else self._averager.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: the state is of another compression, or of other tensors. Nothing has changed then.
        """
        self._check_at_rest()
        if self._averager is not None:
            self._averager.load_state_dict(state)
        elif state:
            raise ValueError(f"expected no state, because nothing is compressed; got {', '.join(state)}")

    def _check_at_rest(self) -> None:
        if self._averaging is not None:
            raise SynclineError(
                f"rank {self._transport.rank}: an averaging is under way, and what is kept is in it: wait for it first"
            )

    # ------------------------------------------------------------------ phases

    def _step(self, reply: Any) -> None:
        """Pass a reply to the generator, and start what it requests next."""
        assert self._averaging is not None
        try:
            # Independent of the caller's context, because autocast would multiply in half precision.
            with torch.no_grad(), torch.autocast(self.layout.device.type, enabled=False):
                request = self._averaging.send(reply)
        except StopIteration as ended:
            averaged: Averaged = ended.value
            self._averaging = self._reply = None
            self._result = averaged.mean.to(self.dtype)
            return
        self._reply = self._started(request)

    def _started(self, request: Request) -> Callable[[], Any]:
        """Start what a request needs; return a function that waits for it and returns the reply."""
        if isinstance(request, Mean):
            return _then(Averaged, self._reduced(request.values, "mean"))
        if isinstance(request, Sum):
            return self._reduced(request.codes, "sum")
        if isinstance(request, Gather):
            return self._gathered(request)
        return self._exchanged(request)

    def _reduced(self, tensor: Tensor, op: ReduceOp) -> Callable[[], Tensor]:
        wire = self._sendable(tensor)
        work = self._transport.all_reduce(wire, op)
        return lambda: self._arrived(wire, [work])

    def _gathered(self, request: Gather) -> Callable[[], Gathered]:
        """Gather both tensors of a request in one message per rank."""
        values, beside = request.values, request.beside
        message = _as_bytes(values)
        if beside is not None:
            message = torch.cat([_as_bytes(beside), message])
        wire = self._sendable(message)
        everyone = torch.empty(self._transport.size * wire.numel(), dtype=torch.uint8, device=wire.device)
        work = self._transport.all_gather(everyone, wire)
        num_beside_bytes = message.numel() - values.numel() * values.element_size()

        def reply() -> Gathered:
            rows = self._arrived(everyone, [work], sent=wire).view(self._transport.size, -1)
            if beside is None:
                return Gathered(rows.view(values.dtype), None)
            # Copies, because a view in another type needs aligned memory.
            return Gathered(
                rows[:, num_beside_bytes:].clone(memory_format=torch.contiguous_format).view(values.dtype),
                rows[:, :num_beside_bytes].clone(memory_format=torch.contiguous_format).view(beside.dtype),
            )

        return reply

    def _exchanged(self, request: AllToAll) -> Callable[[], Tensor]:
        rank = self._transport.rank
        wire = self._sendable(request.rows)
        received = torch.empty_like(wire)
        received[rank] = wire[rank]
        works: list[Work] = []
        for step in range(1, self._transport.size):
            # Of two ranks the lower one sends first. Transports that run the messages of a pair in order need both
            # ranks to start with the same message.
            peer = (rank + step) % self._transport.size
            directions = [(self._transport.send, wire), (self._transport.recv, received)]
            for move, rows in directions if rank < peer else reversed(directions):
                works.append(move(rows[peer], peer))
        return lambda: self._arrived(received, works, sent=wire)

    def _sendable(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on a device from which the transport can send."""
        return tensor.to(self._transport.sending_device(tensor.device)).contiguous()

    def _arrived(self, wire: Tensor, works: Sequence[Work], *, sent: Tensor | None = None) -> Tensor:
        """Return what was received, on the layout's device. `sent` is an argument so that it lives until then."""
        for work in works:
            work.wait()
        return wire.to(self.layout.device)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _then(make: Callable[[Tensor], Any], reply: Callable[[], Tensor]) -> Callable[[], Any]:
    return lambda: make(reply())


def _checked_shapes(shapes: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes as tuples of integers.

    Raises:
        TypeError, ValueError: a shape is invalid.
    """
    try:
        found = tuple(tuple(int(operator.index(size)) for size in shape) for shape in shapes)
    except TypeError:
        raise TypeError(f"expected shapes to be a list of shapes, got {shapes!r}") from None
    if any(size < 0 for shape in found for size in shape):
        raise ValueError(f"expected shapes to have sizes of at least 0, got {shapes!r}")
    return found
