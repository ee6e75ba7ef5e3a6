"""Flat tensors: tensors of one dtype on one device are joined to one vector, which can be sent and added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_, split_like
from syncline.tensors.in_flight import run_pieces
from syncline.tensors.packing import plan_pieces
from syncline.tensors.targets import as_real, parts_of
from syncline.transport.base import Transport
from syncline.transport.work import Work


class FlatGroup:
    """A group of tensors of one dtype on one device, which are read and written as one flat tensor.

    The flat tensor has at least 32 bits per value.

    Args:
        tensors: the tensors. Complex tensors count as pairs of real numbers.
        indices: the indices of these tensors in the list that `flat_groups` divides into groups.

    Examples:
        >>> x, y = torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)
        >>> group = FlatGroup([x, y], (0, 1))
        >>> flat = group.read()
        >>> group.write(flat * 2)
        >>> flat.tolist(), x.tolist(), y.item()
        ([1.0, 2.0, 3.0], [[2.0, 4.0]], 6.0)
    """

    def __init__(self, tensors: Sequence[Tensor], indices: tuple[int, ...]) -> None:
        self.indices = indices
        self._tensors = list(tensors)
        real = [as_real(tensor) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in real]
        self.numels = [tensor.numel() for tensor in real]
        self.numel = sum(self.numels)
        self.device = tensors[0].device
        self.dtype = torch.promote_types(real[0].dtype, torch.float32)
        """The dtype of the flat tensor: float32, or a wider dtype if the tensors have one."""
        self.wire_dtype = real[0].dtype
        """The dtype of the tensors of the group, or of their real parts if they are complex."""

    def read(self) -> Tensor:
        """Return the values of all tensors as a new flat tensor of shape (numel,)."""
        return torch.cat([as_real(tensor).reshape(-1).to(self.dtype) for tensor in self._tensors])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split the tensor `flat` into one view per tensor of the group, in the shape of that tensor.

        The view for a complex tensor has one more dimension, for the real and the imaginary part.
        """
        parts = flat.split(self.numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def write(self, flat: Tensor) -> None:
        """Write the values of the tensor `flat` into the tensors of the group. Autograd detects the in-place change."""
        foreach_copy_([as_real(tensor) for tensor in self._tensors], self.views(flat))
        torch.autograd.graph.increment_version(self._tensors)


def flat_groups(tensors: Sequence[Tensor]) -> list[FlatGroup]:
    """Divide tensors into one group per combination of dtype and device.

    The groups are in the order of their first tensors.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return [FlatGroup([tensors[i] for i in indices], tuple(indices)) for indices in kinds.values()]


_PIECE_BYTES = 4 * 1024 * 1024
"""The most bytes of outer gradients that one collective averages."""

_Kind = tuple[torch.dtype, torch.device]


class Wires:
    """The buffers in which outer gradients are averaged: for each kind of tensor, two that are used in turn.

    The transport allocates the buffers, because it reduces its own memory fastest. They are kept from round to round.

    Args:
        transport: the lane for the outer gradients.
        tensors: all parameters that may be averaged.
    """

    def __init__(self, transport: Transport, tensors: Iterable[Tensor]) -> None:
        self.transport = transport
        self._numels: dict[_Kind, int] = {}
        for tensor in tensors:
            most = _PIECE_BYTES // tensor.element_size()
            kind = tensor.dtype, tensor.device
            self._numels[kind] = min(most, self._numels.get(kind, 0) + tensor.numel())
        self._made: dict[_Kind, list[Tensor]] = {}

    def prepare(self, kinds: Iterable[_Kind]) -> None:
        """Allocate the buffers for these kinds of tensors, unless they exist already. A collective call."""
        for kind in kinds:
            if kind not in self._made:
                numel = self._numels[kind]
                self._made[kind] = [self.transport.allocate(numel, *kind) for _ in range(2)]

    def take(self, kind: _Kind, numel: int, turn: int) -> Tensor:
        """Return a buffer for `numel` elements. Two buffers alternate: finish with the one of `turn` - 2 first."""
        wire = self._made[kind][turn % 2]
        return wire if wire.numel() == numel else self.transport.narrow(wire, numel)


class InPlaceMean:
    """The mean outer gradient of some parameters, which temporarily replaces the values of these parameters.

    The caller then writes the result of the outer step into the parameters. The outer gradient is computed and averaged
    piece by piece in separate buffers. So if a collective fails, no parameter is left half-averaged.

    Args:
        local: the parameters.
        common: the copies of the outer optimizer, of the same dtypes and on the same devices.
    """

    def __init__(self, local: Sequence[Tensor], common: Sequence[Tensor]) -> None:
        here = [part for one in local for part in parts_of(one.data, _PIECE_BYTES)]
        start = [part for one in common for part in parts_of(one.data, _PIECE_BYTES)]
        kinds = [(part.dtype, part.device) for part in here]
        pieces = plan_pieces(
            [part.nbytes for part in here], kinds, cap_bytes=_PIECE_BYTES, alone_bytes=_PIECE_BYTES
        )
        self._kinds = dict.fromkeys(kinds)
        self._pieces = [
            _Piece([here[i] for i in members], [start[i] for i in members], turn)
            for turn, members in enumerate(pieces)
        ]

    def run(self, wires: Wires) -> None:
        """Replace the parameters by the mean over all ranks of (copy - parameter). A collective call."""
        wires.prepare(self._kinds)
        try:
            run_pieces(self._pieces, lambda piece: piece.launch(wires), _Piece.land)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Replace each mean that was written by (copy - mean), which is the mean of the parameters over all ranks.

        Parameters that were not replaced keep this rank's values.
        """
        for piece in self._pieces:
            piece.undo()


class _Piece:
    """Parts of parameters whose outer gradients are averaged by one collective."""

    is_copied = True

    def __init__(self, local: Sequence[Tensor], common: Sequence[Tensor], turn: int) -> None:
        self._local, self._common, self._turn = local, common, turn
        self._views: Sequence[Tensor] = ()
        self._is_written = False

    def launch(self, wires: Wires) -> Work:
        kind = self._local[0].dtype, self._local[0].device
        wire = wires.take(kind, sum(part.numel() for part in self._local), self._turn)
        self._views = split_like(wire, list(self._local))
        for view, common, local in zip(self._views, self._common, self._local, strict=True):
            torch.sub(common, local, out=view)
        return wires.transport.all_reduce(wire, "mean")

    def land(self) -> None:
        foreach_copy_(self._local, self._views)
        self._views, self._is_written = (), True

    def undo(self) -> None:
        if self._is_written:
            for common, local in zip(self._common, self._local, strict=True):
                torch.sub(common, local, out=local)
        self._is_written = False
