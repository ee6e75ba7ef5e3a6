"""all_reduce of fp32 by each engine, and the copy that it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.transport.backend import register_backend
from syncline.transport.base import ReduceOp, Transport
from syncline.verbs import all_reduce_

__all__ = ["COPY", "GLOO", "IN_PLACE", "OURS", "OURS_SUM", "backend_group", "checked", "engines"]

OURS = "syncline"
OURS_SUM = "syncline, sum only"
IN_PLACE = "syncline, in place"
VERB = "sl.all_reduce_"
BACKEND = "backend syncline"
GLOO = "gloo"
COPY = "copy"


def backend_group(notes: list[str]) -> dist.ProcessGroup | None:
    """A group of all ranks on the backend "syncline"; None where there is none, and why in `notes`."""
    try:
        register_backend()
        group: dist.ProcessGroup = dist.new_group(backend="syncline")
    except Exception as error:
        notes.append(f'no torch.distributed group on the backend "syncline": {_first_line(error)}')
        return None
    return group


def engines(
    numel: int, *, transport: Transport, backend: dist.ProcessGroup | None, with_sum: bool = False
) -> dict[str, tuple[Callable[[], object], Tensor]]:
    """What makes one all_reduce of `numel` elements, and the tensor that it reduces, by engine.

    Args:
        numel: elements of fp32.
        transport: ours; its ranks are those of torch's default group, which is Gloo.
        backend: a group on our torch.distributed backend.
        with_sum: also ours without the division.
    """
    plain = torch.ones(numel)
    size = transport.size

    def ours(tensor: Tensor, op: ReduceOp = "mean") -> Callable[[], object]:
        return lambda: transport.all_reduce(tensor, op).wait()

    def by_torch(group: dist.ProcessGroup | None, divide: bool) -> Callable[[], object]:
        def reduce() -> None:
            dist.all_reduce(plain, dist.ReduceOp.SUM if divide else dist.ReduceOp.AVG, group=group)
            if divide:
                plain.div_(size)

        return reduce

    found: dict[str, tuple[Callable[[], object], Tensor]] = {OURS: (ours(plain), plain)}
    if transport.reduces_in_place:
        allocated = transport.allocate(numel, torch.float32, torch.device("cpu"))
        found[IN_PLACE] = (ours(allocated), allocated)
    if with_sum:
        found[OURS_SUM] = (ours(plain, "sum"), plain)
    found[VERB] = (lambda: all_reduce_(plain, op="mean"), plain)
    if backend is not None:
        found[BACKEND] = (by_torch(backend, divide=False), plain)
    found[GLOO] = (by_torch(None, divide=True), plain)
    target = torch.empty(numel)
    found[COPY] = (lambda: target.copy_(plain), plain)
    return found


def checked(
    found: Mapping[str, tuple[Callable[[], object], Tensor]], *, rank: int, size: int
) -> dict[str, Callable[[], object]]:
    """The calls alone, each shown to reduce right, and its tensor left at 0.

    Raises:
        RuntimeError: an engine's result is wrong.
    """
    for name, (call, tensor) in found.items():
        tensor.fill_(rank + 1)
        call()
        expected = size * (size + 1) / 2
        if name == COPY:
            continue
        if name != OURS_SUM:
            expected /= size
        if not torch.allclose(tensor, torch.tensor(expected)):
            raise RuntimeError(f"{name}: expected {expected:g} from all_reduce, got {tensor[:3].tolist()}")
    for _, tensor in found.values():
        tensor.zero_()
    return {name: call for name, (call, _) in found.items()}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
