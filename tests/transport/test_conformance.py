"""What the collectives do with each operation, dtype and layout: right, or which error; the same on every engine.

The table in docs/reference/collectives.md is what `table_over` returns. Each engine is compared with it. To rewrite it:

    python tests/transport/test_conformance.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import syncline as sl
from syncline import SynclineError
from syncline.transport import C10dTransport, HierarchicalTransport, Transport, run_ranks
from syncline.transport.shared_memory import SharedMemoryTransport

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*quantize"
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "collectives.md"
BEGIN, END = "<!-- begin: generated -->\n", "<!-- end: generated -->\n"

OPERATIONS: dict[str, Callable[[Tensor, Transport], Any]] = {
    "`all_reduce_` sum": lambda x, t: sl.all_reduce_(x, "sum", group=t),
    "mean": lambda x, t: sl.all_reduce_(x, "mean", group=t),
    "max": lambda x, t: sl.all_reduce_(x, "max", group=t),
    "min": lambda x, t: sl.all_reduce_(x, "min", group=t),
    "product": lambda x, t: sl.all_reduce_(x, "product", group=t),
    "`broadcast_`": lambda x, t: sl.broadcast_(x, t.size - 1, group=t),
    "`average_`": lambda x, t: sl.average_(x, 1 + t.rank, group=t),
    "`sl.mean`": lambda x, t: sl.mean(x, 1 + t.rank, group=t),
    "`sl.gather`": lambda x, t: sl.gather(x, group=t),
}
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn),
)
FEW_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.uint16,
)
"""One of each kind, for layouts beside contiguous ones."""
DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "other strides": lambda x: x.t().contiguous().t(),
    "made in inference mode": lambda x: x,
    "rank 0 calls in inference mode": lambda x: x,
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse COO": lambda x: x.to_sparse(),
    "sparse CSR": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
    "nested, jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint8),
}
NAMED_ERRORS = {"is not defined for": "not defined", "to be a dense tensor": "not dense"}
"""How a cell calls a ValueError, by its words."""


def values(rank: int, dtype: torch.dtype) -> Tensor:
    """Small and exact in every dtype."""
    x = (torch.arange(6.0).view(2, 3) + rank) % 3
    return torch.complex(x, 1 - x).to(dtype) if dtype.is_complex else x.to(dtype)


def expected(operation: str, size: int, dtype: torch.dtype) -> Tensor:
    """The result, in the widest type there is."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    all_values = torch.stack([values(rank, dtype).to(wide) for rank in range(size)])
    weights = torch.arange(1, size + 1, dtype=torch.float64).view(-1, 1, 1)
    results: dict[str, Callable[[], Tensor]] = {
        "`all_reduce_` sum": lambda: all_values.sum(0),
        "mean": lambda: all_values.mean(0),
        "max": lambda: all_values.amax(0),
        "min": lambda: all_values.amin(0),
        "product": lambda: all_values.prod(0),
        "`broadcast_`": lambda: all_values[-1],
        "`sl.gather`": lambda: all_values.flatten(0, 1),
    }
    return results.get(operation, lambda: (all_values * weights).sum(0) / weights.sum())()


def outcome(operation: str, tensor: Tensor, dtype: torch.dtype, t: Transport) -> str:
    """A cell of the table."""
    try:
        result = OPERATIONS[operation](tensor, t)
    except (TypeError, ValueError, SynclineError) as error:
        for words, cell in NAMED_ERRORS.items():
            if type(error) is ValueError and words in str(error):
                return cell
        return f"{type(error).__name__}: {error}"
    wanted = expected(operation, t.size, dtype)
    is_rounded = result.dtype.is_floating_point or result.dtype.is_complex
    rtol = t.size * torch.finfo(result.dtype).eps if is_rounded else 0
    got = result.to(wanted.dtype)
    return "right" if torch.allclose(got, wanted, rtol=rtol, atol=0) else f"got {got}, expected {wanted}"


def table_over(t: Transport) -> str:
    """The table, in Markdown."""
    rows: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for layout, lay_out in {**DENSE, **OTHERS}.items():
        rows[layout] = {}
        dtypes = DTYPES if layout == "contiguous" else FEW_DTYPES if layout in DENSE else (torch.float32,)
        for dtype in dtypes:
            cells = []
            for operation in OPERATIONS:
                with torch.inference_mode(layout == "made in inference mode"):
                    tensor = lay_out(values(t.rank, dtype))
                with torch.inference_mode(layout == "rank 0 calls in inference mode" and t.rank == 0):
                    cells.append(outcome(operation, tensor, dtype, t))
            rows[layout].setdefault(tuple(cells), []).append(str(dtype).removeprefix("torch."))
    layouts: dict[tuple[str, str], list[str]] = {}
    for layout, of_layout in rows.items():
        for cells, alike in of_layout.items():
            layouts.setdefault((", ".join(alike), " | ".join(cells)), []).append(layout)
    lines = [f"| layout | dtype | {' | '.join(OPERATIONS)} |", "|---" * (2 + len(OPERATIONS)) + "|"]
    lines += [f"| {'; '.join(names)} | {dtypes} | {cells} |" for (dtypes, cells), names in layouts.items()]
    return "\n".join(lines) + "\n"


def published() -> str:
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def test_threads() -> None:
    assert run_ranks(2, table_over) == [published()] * 2


@pytest.mark.ranks(2)
def test_gloo() -> None:
    assert table_over(C10dTransport(timeout_seconds=30)) == published()


@pytest.mark.ranks(2)
def test_shared_memory() -> None:
    transport = SharedMemoryTransport.over(C10dTransport(timeout_seconds=30))
    assert transport.name == "shared memory"
    assert table_over(transport) == published()


@pytest.mark.ranks(2)
def test_backend_syncline() -> None:
    sl.register_backend()
    assert table_over(C10dTransport(dist.new_group(backend="syncline"), timeout_seconds=30)) == published()


@pytest.mark.ranks(3)
def test_hierarchy() -> None:
    beneath = C10dTransport(timeout_seconds=30)
    assert table_over(HierarchicalTransport.over(beneath, host="aab"[beneath.rank])) == published()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + run_ranks(2, table_over)[0] + END + rest.partition(END)[2])
