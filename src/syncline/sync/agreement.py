"""Do all ranks mean the same? One small record each when they do, a readable difference when they do not.

What is agreed on is put into lines here; how the ranks compare them is `transport/opening.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from syncline.plan.difference import DEFAULT_REMEDY
from syncline.transport.base import Transport
from syncline.transport.opening import PAYLOAD_BYTES, exchange, fingerprint

__all__ = ["PAYLOAD_BYTES", "agree", "describe_tensors", "exchange", "fingerprint", "gather_rows"]


def agree(transport: Transport, title: str, lines: Sequence[str], *, remedy: str = DEFAULT_REMEDY) -> None:
    """Check that every rank gives the same lines; a collective call that blocks.

    One all_gather of 105 bytes a rank when they do. Only if they do not are the lines themselves exchanged.

    Args:
        transport: between the ranks that have to agree.
        title: what they have to agree on; it is part of what is compared.
        lines: this rank's description, a line an entry (see `describe_difference`).
        remedy: what to do when they do not agree; the last line of the error.

    Raises:
        ContractMismatch: the lines differ; the same text on every rank.
        CollectiveMismatch: the titles differ: the ranks are at different places of the program.

    Example:
        >>> from syncline.transport.threads import run_ranks
        >>> run_ranks(2, lambda transport: agree(transport, "Net", ["weight  (2, 3)"]))
        [None, None]
    """
    if transport.size > 1:
        exchange(transport, title, lines, remedy=remedy)


def gather_rows(transport: Transport, row: Tensor) -> list[Tensor]:
    """Every rank's `row` in rank order, on the CPU; a collective call that blocks.

    Args:
        row: (numel,), on the CPU, with as many elements of one dtype on all ranks.
    """
    if transport.size == 1 or not row.numel():
        return [row] * transport.size
    mine = row.to(transport.control_device)
    everyone = torch.empty(transport.size * row.numel(), dtype=row.dtype, device=mine.device)
    transport.all_gather(everyone, mine).wait()
    return list(everyone.cpu().view(transport.size, -1).unbind())


def describe_tensors(
    named: Iterable[tuple[str, Tensor]], kind: str = "parameter", *, layout: bool = True
) -> list[str]:
    """One line a tensor, for `agree`.

    Args:
        named: names and tensors.
        kind: what they are, the first word of each line.
        layout: whether strides and requires_grad are part of the description. (They need not be equal where
            only values are sent.)

    Example:
        >>> describe_tensors([("weight", torch.zeros(2, 3))], kind="buffer")
        ['buffer weight  torch.float32 (2, 3) on cpu strides (3, 1) requires_grad=False']
    """
    labels = _DeviceLabels()
    lines = []
    for name, tensor in named:
        line = f"{kind} {name}  {tensor.dtype} {tuple(tensor.shape)} on {labels[tensor.device]}"
        if layout:
            strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
            line += f" strides {strides} requires_grad={tensor.requires_grad}"
        lines.append(line)
    return lines


class _DeviceLabels(dict[torch.device, str]):
    """Devices in words that ranks can share: rank 1's cuda:1 is rank 0's cuda:0. In the order in which they are met."""

    def __missing__(self, device: torch.device) -> str:
        nth = 1 + sum(known.type == device.type for known in self)
        self[device] = device.type if nth == 1 else f"{device.type} (device {nth} of this rank)"
        return self[device]
