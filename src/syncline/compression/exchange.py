"""Averaging of a flat tensor by a compression with error feedback, and the state that is kept between averagings.

An `Averager` requests what it needs of the other ranks. A `MeanExchange` carries out these requests over a transport,
one phase after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from syncline.checks import checked_kind, checked_state, suggests_arguments
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
    encoder_of,
)
from syncline.errors import SynclineError
from syncline.tensors.targets import as_bytes
from syncline.transport.base import Transport
from syncline.transport.work import Work
from syncline.trees import leaves, map_leaves


class Averager:
    """An object that averages one flat tensor over all ranks, again and again, by a compression.

    The residual is the part of the values that an averaging loses. If the compression uses error feedback, the averager
    adds the residual to the values of the next averaging. Then nothing is lost for good: the sum of all results, plus
    the mean over ranks of the last residuals, equals the sum of the exact means. Elements of a residual that are not
    finite are replaced by zeros.

    Args:
        compression: the compression of the values; None to send them without compression.
        layout: the layout of the flat tensor.
    """

    def __init__(self, compression: Compression | None, layout: Layout) -> None:
        self.layout = layout
        self._encoder = encoder_of(compression, layout)
        self._residual: Tensor | None = None
        if compression is not None and compression.feeds_back:
            self._residual = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        self._offsets = list(accumulate(layout.numels, initial=0))
        """The place of each tensor in the flat tensor, where its residual is."""
        self._kept: tuple[Tensor | None, list[dict[str, Tensor]]] | None = None
        """The residual and the encoder's memory at the last call of `keep`; None before the first call."""
        self._spare: Tensor | None = None
        """Memory for the next residual, while the present one is kept."""

    def mean(self, values: Tensor) -> Averaging:
        """Return a generator that averages the tensor `values` over all ranks.

        Args:
            values: this rank's values, of shape (numel,) and of the layout's dtype. They are overwritten, and the mean
                may use their memory.
        """
        residual = lost = self._residual
        if residual is not None and self._kept is not None and self._kept[0] is residual:
            lost = torch.empty_like(residual) if self._spare is None else self._spare
            self._spare = None
        mean = yield from self._encoder.mean(values, residual=residual, lost=lost)
        self._residual = lost
        return mean

    def keep(self) -> None:
        """Remember the present state for `undo`. The residual is not copied."""
        former = None if self._kept is None else self._kept[0]
        if former is not self._residual:
            self._spare = former
        memory = [{name: one.clone() for name, one in tensors.items()} for tensors in self._encoder.memory()]
        self._kept = self._residual, memory

    def undo(self) -> None:
        """Restore the state that `keep` has remembered, because the averagings since then do not count."""
        if self._kept is None:
            return
        self._residual, memory = self._kept
        for tensors, kept in zip(self._encoder.memory(), memory, strict=True):
            for name, tensor in kept.items():
                tensors[name].copy_(tensor)

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the state of each tensor of the layout, as a dict of tensors. Do not modify these tensors.

        If a tensor of the layout has no state, its dict is empty.
        """
        return [self._memory_of(index) for index in range(len(self.layout.shapes))]

    def _memory_of(self, index: int) -> dict[str, Tensor]:
        kept = dict(self._encoder.memory_of(index))
        if self._residual is not None:
            kept["residual"] = self._residual[self._offsets[index] : self._offsets[index + 1]]
        return kept

    def remember(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of one tensor of the layout.

        Args:
            index: the index of the tensor in the layout.
            tensors: the state, as `memory` returned it for the tensor.

        Raises:
            ValueError: the state is of another compression, or of a tensor of another shape.
        """
        self._check(index, tensors)
        for name, tensor in self._memory_of(index).items():
            tensor.copy_(tensors[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state of all tensors, with keys `<index of the tensor>.<name of the state>`."""
        return joined_state({str(index): tensors for index, tensors in enumerate(self.memory())})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: the state is of another compression, or of other tensors. The former state is then unchanged.
        """
        given = parted_state(state)
        num_tensors = len(self.layout.shapes)
        unknown = sorted(set(given).difference(map(str, range(num_tensors))))
        if unknown:
            raise ValueError(
                f"expected the compression state of tensors 0 to {num_tensors - 1}, got a state of tensor "
                f"{', '.join(unknown)}. Load a state that was saved for the same tensors"
            )
        kept = [given.get(str(index), {}) for index in range(num_tensors)]
        for index, tensors in enumerate(kept):
            self._check(index, tensors)
        for index, tensors in enumerate(kept):
            self.remember(index, tensors)

    def _check(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the names or shapes of a saved state do not fit the tensor with this index."""
        own, given = (
            {name: tuple(tensor.shape) for name, tensor in state.items()}
            for state in (self._memory_of(index), tensors)
        )
        if own != given:
            raise ValueError(
                f"the compression state of tensor {index}, which has shape {self.layout.shapes[index]}: expected a "
                f"state with tensors of the shapes {own}, got {given}. This state was saved with another compression, "
                "or for another tensor. Load a state that was saved with this compression and for this tensor"
            )


class MeanExchange:
    """An object that averages one flat tensor over all ranks, again and again, with or without compression.

    One averaging is a call of `start`, any number of calls of `advance` (between other work), and a call of `wait`.
    An averaging has one or more phases of communication. A call of `start` or `advance` starts at most one phase, and
    `wait` starts all remaining phases. So ranks that call these methods in the same order start the same collectives in
    the same order. The constructor is not a collective call. In a group of one rank, nothing is sent, and the mean
    equals the values.

    Args:
        compression: the compression of the values; None to average by one all_reduce without compression.
        shapes: the shapes of the tensors that make up the flat tensor, in order; the same on all ranks.
        dtype: the dtype of the flat tensor. A compression converts float16 and bfloat16 to float32 before it encodes.
        device: the device of the flat tensor.
        transport: connects the ranks.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape has a negative size, or `dtype` is not a floating-point type. Without compression, complex
            types are permitted as well.

    Examples:
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

    @suggests_arguments
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
            checked_kind(
                "compression", compression, Compression, "None or a compression such as sl.compression.Cast()"
            )
        checked_kind("dtype", dtype, torch.dtype, "a torch.dtype")
        if compression is None and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"MeanExchange: expected dtype to be a floating-point or complex dtype, got {dtype}"
            )
        self.dtype = dtype
        self.layout = Layout(
            shapes=_checked_shapes(shapes),
            dtype=dtype if compression is None else computing_dtype(dtype),
            device=device,
            rank=transport.rank,
            num_ranks=transport.size,
        )
        self._transport = transport
        self._averager = Averager(compression, self.layout)
        self._phases: Generator[list[Work], None, Tensor] | None = None
        """A generator that runs the averaging in progress, and yields the collectives of each phase.

        None if no averaging is in progress."""
        self._works: list[Work] = []
        """The collectives of the current phase, which may still be in flight."""
        self._result: Tensor | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether `start` was called, and `wait` has not been called since."""
        return self._phases is not None or self._result is not None

    @property
    def has_arrived(self) -> bool:
        """Whether the mean is already complete, so that `wait` returns at once."""
        return self._result is not None

    def start(self, flat: Tensor) -> None:
        """Start an averaging. When this returns, the messages of the first phase are in flight.

        Args:
            flat: the flat tensor, of shape (numel,). Its memory is reused, also for the mean, so its values are
                undefined until `wait` returns.

        Raises:
            SynclineError: `wait` was not called for the previous averaging.
            ValueError: the number of elements, the dtype or the device of `flat` is wrong.
        """
        if self.is_under_way:
            raise SynclineError(
                f"MeanExchange.start on rank {self._transport.rank}: the previous averaging is still in progress. Call "
                "wait() before the next start()"
            )
        checked_kind("flat", flat, Tensor, "a tensor")
        numel, device = self.layout.numel, self.layout.device
        is_there = flat.device.type == device.type and device.index in (None, flat.device.index)
        if flat.numel() != numel or flat.dtype is not self.dtype or not is_there:
            raise ValueError(
                f"MeanExchange.start: expected the tensor `flat` with {numel} elements of {self.dtype} on {device}, "
                f"got {flat.numel()} elements of {flat.dtype} on {flat.device}"
            )
        flat = flat.detach().view(-1)
        if self._transport.size == 1 or not flat.numel():
            self._result = flat
            return
        self._phases = self._averaged(self._averager.mean(flat.to(self.layout.dtype)))
        self.advance()

    def advance(self) -> None:
        """Wait for the current phase of the averaging, and start the next phase if there is one."""
        if self._phases is None:
            return
        for work in self._works:
            work.wait()  # if this raises, the next call raises again
        try:
            # Independent of the caller's context, because autocast would multiply in half precision.
            with torch.no_grad(), torch.autocast(self.layout.device.type, enabled=False):
                self._works = next(self._phases)
        except StopIteration as ended:
            self._phases, self._works, self._result = None, [], ended.value

    def wait(self) -> Tensor:
        """Wait until the averaging is complete, and return the mean.

        Returns:
            The mean over all ranks, of shape (numel,). It has the flat tensor's dtype, and the same bits on every rank.
            It may use the flat tensor's memory.

        Raises:
            SynclineError: no averaging was started, or a collective failed (as in `Work.wait`).
        """
        if not self.is_under_way:
            raise SynclineError(
                f"MeanExchange.wait on rank {self._transport.rank}: no averaging is in progress. Call start() first"
            )
        while self._phases is not None:
            self.advance()
        result, self._result = self._result, None
        assert result is not None
        return result

    # ------------------------------------------------------------------ state

    def _keep(self) -> None:
        """Remember the compression's present state for `_undo`."""
        self._averager.keep()

    def _undo(self) -> None:
        """Drop the averaging in progress, and restore the state that `_keep` has remembered."""
        self._phases, self._works, self._result = None, [], None
        self._averager.undo()

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the compression's state for each tensor, as a dict of tensors. Do not modify these tensors."""
        return self._averager_at_rest().memory()

    def remember(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the compression's state for one tensor.

        Args:
            index: the index of the tensor in `shapes`.
            tensors: the state, as `memory` returned it for the tensor.

        Raises:
            ValueError: the state is of another compression, or of a tensor of another shape.
        """
        self._averager_at_rest().remember(index, tensors)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the compression's state, with keys `<index of the tensor>.<name of the state>`.

        Residuals differ between ranks, so every rank has to save its own state.

        Raises:
            SynclineError: an averaging is in progress.
        """
        return self._averager_at_rest().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            SynclineError: an averaging is in progress.
            ValueError: the state is of another compression, or of other tensors. The former state is then unchanged.
        """
        self._averager_at_rest().load_state_dict(state)

    def _averager_at_rest(self) -> Averager:
        """Return the averager, to read or load its state. The state is complete only between averagings.

        Raises:
            SynclineError: an averaging is in progress.
        """
        if self._phases is not None:
            raise SynclineError(
                f"MeanExchange on rank {self._transport.rank}: the state cannot be read or loaded while an averaging "
                "is in progress. Call wait() first"
            )
        return self._averager

    # ------------------------------------------------------------------ phases

    def _averaged(self, averaging: Averaging) -> Generator[list[Work], None, Tensor]:
        """Run an averaging by carrying out its requests, and return the mean. Yield the collectives of each phase."""
        reply: Any = None
        while True:
            try:
                request = averaging.send(reply)
            except StopIteration as ended:
                mean: Tensor = ended.value
                return mean.to(self.dtype)
            reply = yield from self._reply_to(request)

    def _reply_to(self, request: Request) -> Generator[list[Work], None, Any]:
        """Start the collectives of one request and yield them. Then return the reply to the request.

        The caller must wait for the collectives before it continues this generator.
        """
        match request:
            case Mean(values, meanwhile):
                wire = self._sendable(values)
                work = self._transport.all_reduce(wire, "mean")
                if meanwhile is not None:
                    meanwhile()
                yield [work]
                return Averaged(wire.to(self.layout.device))
            case Sum(codes):
                wire = self._sendable(codes)
                yield [self._transport.all_reduce(wire, "sum")]
                return wire.to(self.layout.device)
            case Gather():
                return (yield from self._gathered(request))
            case AllToAll(rows):
                return (yield from self._exchanged(rows))

    def _gathered(self, request: Gather) -> Generator[list[Work], None, Gathered]:
        """Gather the tensors of a request from all ranks. A rank sends `values` and `beside` in one message."""
        values, beside = request.values, request.beside
        message = as_bytes(values.contiguous())
        if beside is not None:
            message = torch.cat([as_bytes(beside.contiguous()), message])
        wire = self._sendable(message)
        everyone = torch.empty(self._transport.size * wire.numel(), dtype=torch.uint8, device=wire.device)
        yield [self._transport.all_gather(everyone, wire)]
        rows = everyone.to(self.layout.device).view(self._transport.size, -1)
        if beside is None:
            return Gathered(rows.view(values.dtype), None)
        # Copies, because a view in another type needs aligned memory.
        first, second = (
            part.clone(memory_format=torch.contiguous_format)
            for part in rows.split([beside.nbytes, values.nbytes], dim=1)
        )
        return Gathered(second.view(values.dtype), first.view(beside.dtype))

    def _exchanged(self, rows: Tensor) -> Generator[list[Work], None, Tensor]:
        """Send row r of `rows` to each other rank r. Return a tensor whose row s was received from rank s."""
        transport, rank = self._transport, self._transport.rank
        wire = self._sendable(rows)
        received = torch.empty_like(wire)
        received[rank] = wire[rank]
        works: list[Work] = []
        for step in range(1, transport.size):
            # Of two ranks the lower one sends first. Transports that run the messages of a pair in order need both
            # ranks to start with the same message.
            peer = (rank + step) % transport.size
            directions = [(transport.send, wire), (transport.recv, received)]
            for move, tensor in directions if rank < peer else reversed(directions):
                works.append(move(tensor[peer], peer))
        yield works
        return received.to(self.layout.device)

    def _sendable(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor with the same values, on a device from which the transport can send."""
        return tensor.to(self._transport.sending_device(tensor.device)).contiguous()


def _checked_shapes(shapes: Any) -> tuple[tuple[int, ...], ...]:
    """Return the argument `shapes` as tuples of integers.

    Raises:
        TypeError, ValueError: a shape is invalid.
    """
    try:
        found = tuple(tuple(int(operator.index(size)) for size in shape) for shape in shapes)
    except TypeError:
        raise TypeError(
            f"MeanExchange: expected shapes to be a list of shapes such as [(2, 3), (4,)], got {shapes!r}"
        ) from None
    if any(size < 0 for shape in found for size in shape):
        raise ValueError(f"MeanExchange: expected shapes without negative sizes, got {shapes!r}")
    return found


# ---------------------------------------------------------------------- states of several tensors


def joined_state(kept: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the states of several tensors to one dict of copies, with keys `<name of the tensor>.<name of the state>`.

    Examples:
        >>> joined_state({"fc.weight": {"residual": torch.zeros(1)}})
        {'fc.weight.residual': tensor([0.])}
    """
    return {
        f"{name}.{kind}": tensor.clone() for name, tensors in kept.items() for kind, tensor in tensors.items()
    }


def parted_state(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Divide a dict that `joined_state` returned into one dict per tensor, by the name of the tensor.

    Examples:
        >>> parted_state({"fc.weight.residual": torch.zeros(1)})
        {'fc.weight': {'residual': tensor([0.])}}
    """
    kept: dict[str, dict[str, Tensor]] = {}
    for key, tensor in checked_state(state).items():
        name, _, kind = key.rpartition(".")
        kept.setdefault(name, {})[kind] = tensor
    return kept


def with_own_residuals(state: Any, own: Any) -> Any:
    """Return another rank's state, in which the residuals are those of this rank.

    Ranks have equal states except for their residuals.

    Args:
        state: the state of another rank, made of nested dicts, lists and tuples. It is not changed.
        own: the state of this rank. A residual that it lacks is zero.

    Examples:
        >>> state = {"0.start": torch.ones(1), "0.residual": torch.ones(1)}
        >>> with_own_residuals(state, {})
        {'0.start': tensor([1.]), '0.residual': tensor([0.])}
    """
    residuals = {path: torch.zeros_like(leaf) for path, leaf in _residuals_in(state).items()}
    residuals |= _residuals_in(own)
    return map_leaves(state, lambda path, leaf: residuals.get(path, leaf))


def with_mean_residuals(own: Any, of_all: Sequence[Any]) -> Any:
    """Return a rank's state, with each residual replaced by its mean over all ranks.

    A run with another number of ranks can load the result. Only the mean of the residuals over ranks affects the next
    average. If each rank loads that mean as its residual, the mean is the same for any number of ranks.

    Args:
        own: the state of one rank, made of nested dicts, lists and tuples. It is not changed. A tensor in it is a
            residual if its key ends with `.residual`, as `joined_state` makes it.
        of_all: the states of all ranks, in rank order.

    Examples:
        >>> states = [{"0.residual": torch.tensor([4.0])}, {"0.residual": torch.tensor([2.0])}]
        >>> with_mean_residuals({"step": 3, "of": [states[1]]}, [{"step": 3, "of": [state]} for state in states])
        {'step': 3, 'of': [{'0.residual': tensor([3.])}]}
    """
    totals: dict[str, Tensor] = {}
    for state in of_all:  # in rank order, so that all ranks get the same bits
        for path, residual in _residuals_in(state).items():
            totals[path] = totals[path].add_(residual) if path in totals else residual.clone()
    # A residual that a rank lacks counts as zero.
    means = {path: total.div_(len(of_all)) for path, total in totals.items()}
    return map_leaves(own, lambda path, leaf: means.get(path, leaf))


def _residuals_in(state: Any) -> dict[str, Tensor]:
    """Return the residuals in nested dicts, lists and tuples, by their paths."""
    return {
        path: leaf
        for path, leaf in leaves(state)
        if isinstance(leaf, Tensor) and path.rpartition(".")[2] == "residual"
    }
