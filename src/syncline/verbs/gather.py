"""The verb `gather`, which returns the values of all ranks, such as the predictions of an evaluation.

The opening collective compares the structure of the values, and sends how many rows each rank has. Then the bytes of
all tensors of a device are gathered together. Objects that are not tensors are sent as JSON, never as a pickle: the
reader of a pickle would run code that its writer has chosen.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Complex, Integral, Real
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from syncline.checkpoint.encoding import decode, encode
from syncline.checks import checked_count, checked_flag, suggests_arguments, what_it_is
from syncline.session.world import transport_of
from syncline.tensors.gathering import Row, gather_unequal
from syncline.tensors.targets import as_bytes, check_dense
from syncline.transport.agreement import PAYLOAD_BYTES, DeviceLabels, gather_rows
from syncline.transport.base import Transport
from syncline.trees import leaves, map_leaves
from syncline.verbs.common import Group, Prepared, agree_on_call, verb
from syncline.words import describe_ranks, format_bytes

T = TypeVar("T")

_TITLE = "sl.gather"

_MAX_OBJECT_BYTES = 1 << 30
"""The maximum size of the objects of all ranks together, as JSON."""

_REMEDY = (
    "Pass the same structure, dtypes and sizes on every rank; only the sizes along `dim` may differ. A rank without "
    "rows passes a tensor of 0 rows with the same other sizes, such as torch.empty(0, 10). If the ranks have lists of "
    "different lengths, join the tensors of each list by torch.cat first."
)

_OBJECTS_REMEDY = "Pass the same `objects` on every rank."

_COUNT = struct.Struct("<q")

_NUM_INLINE = PAYLOAD_BYTES // _COUNT.size


@overload
def gather(
    values: Tensor | complex, dim: int = 0, *, objects: Literal[False] = False, group: Group = None
) -> Tensor: ...


@overload
def gather(values: T, dim: int = 0, *, objects: Literal[True], group: Group = None) -> list[T]: ...


@overload
def gather(values: Any, dim: int = 0, *, objects: bool = False, group: Group = None) -> Any: ...


@suggests_arguments
def gather(values: Any, dim: int = 0, *, objects: bool = False, group: Group = None) -> Any:
    """Return the values of all ranks, in rank order, on every rank.

    Tensors are joined along `dim`. The ranks may have different numbers of rows along `dim`, also 0. Everything else
    must agree: the structure, the dtypes, the numbers of dimensions, and the sizes of the other dimensions. The ranks
    compare this before any value is sent. Then the tensors of each device are sent together: there are two collectives
    for up to 16 MiB of values of all ranks (three if there are more than nine tensors with rows), and one more for each
    further 16 MiB.

    Args:
        values: a tensor, a number, or nested dicts, lists, tuples, named tuples and dataclasses of tensors and numbers.
            `gather` does not change `values`. With `objects=True`: see there.
        dim: the dimension along which tensors are joined. Negative numbers count from the last dimension.
        objects: whether to gather objects instead of tensors. Then `values` consists of strings, bytes, numbers and
            None, and of dicts, lists and tuples of them. They may differ between the ranks in every respect. The
            objects are sent as JSON, of up to 1 GiB for all ranks together.
        group: see `broadcast_`.

    Returns:
        The same containers. Of each tensor, a new tensor with the rows of all ranks, on the device of this rank's
        tensor and detached from autograd. Of each number or tensor without dimensions, a tensor of shape (ranks,): a
        float becomes float64, an integer int64, a bool stays bool, and a complex number becomes complex128, on the CPU.
        With `objects=True`: a list of the values of each rank.

    Raises:
        ContractMismatch: the values of the ranks have different structures. The text names the rank and the place, and
            is the same on every rank.
        TypeError: `values` contains something else. Every rank raises the error.
        ValueError: a tensor is sparse, nested or quantized, or does not have the dimension `dim`; an integer has more
            than 64 bits; or the objects are too large. Every rank raises the error.

    Examples:
        >>> import torch, syncline as sl
        >>> sl.gather({"predictions": torch.tensor([2, 0, 1]), "loss": 0.5})
        {'predictions': tensor([2, 0, 1]), 'loss': tensor([0.5000], dtype=torch.float64)}
        >>> sl.gather(["a text", None], objects=True)
        [['a text', None]]
    """
    transport = transport_of(group)
    with verb(transport, "gather"), torch.no_grad():
        if isinstance(objects, bool) and objects:
            return _gather_objects(values, transport)

        def prepare() -> Prepared[list[_Leaf]]:
            checked_flag("objects", objects)
            dimension = checked_count("dim", dim)
            labels = DeviceLabels()
            found = [_Leaf.of(path, leaf, dimension) for path, leaf in leaves(values, "values")]
            lines = [f"dim  {dimension}", *(leaf.line(labels) for leaf in found)]
            return Prepared(found, lines, _packed([leaf.num_rows for leaf in found if not leaf.is_single]))

        found, payloads = agree_on_call(transport, _TITLE, prepare, remedy=_REMEDY)
        results = iter(_gathered(found, _counts(found, payloads, transport), transport))
        return map_leaves(values, lambda path, leaf: next(results))


# ---------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class _Leaf:
    """A tensor or a number of `values` on this rank."""

    path: str
    rows: Tensor
    """The values, with the dimension along which they are joined first: (num_rows, ...). Not necessarily contiguous."""
    dim: int
    """The dimension along which the result is joined, from 0."""
    is_single: bool
    """Whether this is a number or a tensor without dimensions, which is one row on every rank."""
    kind: str
    """The type of a number, or "" for a tensor. It is the same on all ranks."""

    @staticmethod
    def of(path: str, leaf: Any, dim: int) -> _Leaf:
        """Return the description of a leaf.

        Raises:
            TypeError, ValueError: the leaf cannot be gathered.
        """
        if not isinstance(leaf, Tensor):
            number, kind = _as_tensor(path, leaf)
            return _Leaf(path, number, 0, True, kind)
        check_dense(path, leaf)
        plain = leaf.detach().resolve_conj().resolve_neg()
        if plain.dim() == 0:
            return _Leaf(path, plain.view(1), 0, True, "")
        if not -plain.dim() <= dim < plain.dim():
            raise ValueError(
                f"expected dim to be a dimension of {path}, from {-plain.dim()} to {plain.dim() - 1}, got {dim}"
            )
        return _Leaf(path, plain.movedim(dim, 0), dim % plain.dim(), False, "")

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.rows.shape[1:]) * self.rows.element_size()

    def line(self, labels: DeviceLabels) -> str:
        """Return the line that must be the same on all ranks. `*` stands for the size that may differ."""
        if self.kind:
            return f"{self.path}  {self.kind}"
        sizes = [str(size) for size in self.rows.shape[1:]]
        if not self.is_single:
            sizes.insert(self.dim, "*")
        shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
        return f"{self.path}  {self.rows.dtype} {shape} on {labels[self.rows.device]}"


def _as_tensor(path: str, leaf: Any) -> tuple[Tensor, str]:
    """Return a number as a tensor of shape (1,), and the name of its type."""
    if isinstance(leaf, bool):
        return torch.tensor([leaf], device="cpu"), "a bool"
    if isinstance(leaf, Integral):
        if not -(2**63) <= int(leaf) < 2**63:
            raise ValueError(
                f"expected {path} to be an integer of at most 64 bits, got an integer of "
                f"{int(leaf).bit_length()} bits: pass objects=True"
            )
        return torch.tensor([int(leaf)], device="cpu"), "an integer"
    if isinstance(leaf, Real):
        return torch.tensor([float(leaf)], dtype=torch.float64, device="cpu"), "a float"
    if isinstance(leaf, Complex):
        return torch.tensor([complex(leaf)], dtype=torch.complex128, device="cpu"), "a complex number"
    raise TypeError(
        "expected values to be numbers or tensors, or dicts, lists, tuples and dataclasses of numbers and tensors, got "
        f"{what_it_is(leaf)} at {path}: leave it out, convert it to a tensor, or pass objects=True for strings, bytes, "
        "None and data like JSON"
    )


def _packed(counts: Sequence[int]) -> bytes:
    """Return the counts as bytes, if they fit into a payload. Otherwise return nothing."""
    return b"".join(map(_COUNT.pack, counts)) if len(counts) <= _NUM_INLINE else b""


def _counts(found: Sequence[_Leaf], payloads: Sequence[bytes], transport: Transport) -> list[list[int]]:
    """Return the number of rows of each leaf (first index) on each rank (second index)."""
    mine = [leaf.num_rows for leaf in found if not leaf.is_single]
    if len(mine) <= _NUM_INLINE:
        by_rank = [[count for (count,) in _COUNT.iter_unpack(payload)] for payload in payloads]
    else:
        by_rank = [row.tolist() for row in gather_rows(transport, torch.tensor(mine, device="cpu"))]
    columns = iter(zip(*by_rank, strict=True))
    return [[1] * transport.size if leaf.is_single else list(next(columns)) for leaf in found]


def _gathered(
    found: Sequence[_Leaf], counts: Sequence[Sequence[int]], transport: Transport
) -> Iterator[Tensor]:
    """Gather all leaves, and yield their results in order."""
    wholes = [
        torch.empty((sum(rows), *leaf.rows.shape[1:]), dtype=leaf.rows.dtype, device=leaf.rows.device)
        for leaf, rows in zip(found, counts, strict=True)
    ]
    # All ranks have the same devices in the same order; see `DeviceLabels`.
    for device in dict.fromkeys(leaf.rows.device for leaf in found):
        mine = [at for at, leaf in enumerate(found) if leaf.rows.device == device]
        parts = [
            as_bytes(wholes[at]).split([rows * found[at].row_bytes for rows in counts[at]]) for at in mine
        ]
        rows = [Row(of_rank) for of_rank in zip(*parts, strict=True)]
        own = Row([as_bytes(found[at].rows.contiguous()) for at in mine])
        gather_unequal(transport, own, rows, transport.sending_device(device))
    for leaf, whole in zip(found, wholes, strict=True):
        yield whole.movedim(0, leaf.dim).contiguous()


# ---------------------------------------------------------------------- objects


def _gather_objects(values: Any, transport: Transport) -> list[Any]:
    """Return a list of the objects of all ranks."""

    def prepare() -> Prepared[bytearray]:
        content = bytearray(json.dumps(_encoded(values)).encode())
        return Prepared(content, ["objects  True"], _COUNT.pack(len(content)))

    content, payloads = agree_on_call(transport, _TITLE, prepare, remedy=_OBJECTS_REMEDY)
    lengths = [int(_COUNT.unpack_from(payload)[0]) for payload in payloads]
    if sum(lengths) > _MAX_OBJECT_BYTES:
        largest = max(range(len(lengths)), key=lengths.__getitem__)
        raise ValueError(
            f"{_TITLE}: expected objects of up to {format_bytes(_MAX_OBJECT_BYTES)} for all ranks together, got "
            f"{format_bytes(sum(lengths))}, of which {format_bytes(lengths[largest])} are of "
            f"{describe_ranks([largest])}: gather in several calls, or gather tensors"
        )
    contents = [bytearray(length) for length in lengths]
    gather_unequal(
        transport,
        Row([torch.frombuffer(content, dtype=torch.uint8)]),
        [Row([torch.frombuffer(one, dtype=torch.uint8)]) for one in contents],
        transport.control_device,
    )
    return [decode(json.loads(one), {}) for one in contents]


def _encoded(values: Any) -> Any:
    """Return objects in the form in which JSON can hold them; see `checkpoint/encoding.py`."""
    text = "expected values to be strings, bytes, numbers and None, and dicts, lists and tuples of them"
    try:
        encoded, tensors = encode(values, "values")
    except (TypeError, ValueError) as error:
        found = str(error).partition(", which cannot")[0]
        raise type(error)(
            f"{text}, but {found}: convert it (a NumPy value by .tolist()), or leave it out"
        ) from None
    if tensors:
        raise TypeError(
            f"{text}, but {next(iter(tensors))} is a tensor: gather tensors in a call without objects=True, or convert "
            "it by .tolist()"
        )
    return encoded
