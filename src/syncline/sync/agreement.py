"""Do all ranks mean the same? One small record each when they do, a readable difference when they do not.

Every agreement begins with a record of the same size, whatever it is about. So ranks that are at different
places of the program (one averages a metric, another broadcasts a module) are told so, where an engine would
see two sizes that do not fit (Gloo ends the process then).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from syncline.errors import ContractMismatch, SynclineError
from syncline.plan.difference import DEFAULT_REMEDY, describe_difference, describe_ranks
from syncline.transport.base import Transport

__all__ = ["PAYLOAD_BYTES", "agree", "describe_tensors", "exchange"]

PAYLOAD_BYTES = 72
"""What a record has room for besides the fingerprint."""

_DIGEST_BYTES = 32


def agree(transport: Transport, title: str, lines: Sequence[str], *, remedy: str = DEFAULT_REMEDY) -> None:
    """Check that every rank gives the same lines; a collective call that blocks.

    One all_gather of 105 bytes a rank when they do. Only if they do not are the lines themselves exchanged.

    Args:
        transport: between the ranks that have to agree.
        title: what they have to agree on; it is part of what is compared.
        lines: this rank's description, a line an entry (see `describe_difference`).
        remedy: what to do when they do not agree; the last line of the error.

    Raises:
        ContractMismatch: the ranks differ; the same text on every rank.

    Example:
        >>> from syncline.transport.threads import run_ranks
        >>> run_ranks(2, lambda transport: agree(transport, "Net", ["weight  (2, 3)"]))
        [None, None]
    """
    if transport.size > 1:
        exchange(transport, title, lines, remedy=remedy)


def exchange(
    transport: Transport,
    title: str,
    lines: Sequence[str],
    *,
    payload: bytes = b"",
    fault: Exception | None = None,
    remedy: str = DEFAULT_REMEDY,
) -> list[bytes]:
    """Agree, and gather a small payload in the same collective.

    Args:
        transport: between the ranks that have to agree.
        title: what they have to agree on.
        lines: this rank's description.
        payload: up to 72 bytes.
        fault: why this rank cannot go on. Its peers are waiting, so it takes part, and every rank raises.
        remedy: what to do when they do not agree.

    Returns:
        Every rank's payload in rank order, filled up with zeros to 72 bytes.

    Raises:
        ContractMismatch: the ranks differ.
        TypeError, ValueError, SynclineError: some ranks gave a fault: its class, or SynclineError where that is
            neither of the others. In any case the same text on every rank.
    """
    assert len(payload) <= PAYLOAD_BYTES
    digest = hashlib.sha256(json.dumps([title, list(lines)]).encode()).digest()
    records = _gathered(transport, digest + bytes([fault is not None]) + payload.ljust(PAYLOAD_BYTES, b"\0"))
    if any(record[_DIGEST_BYTES] for record in records) or len({r[:_DIGEST_BYTES] for r in records}) > 1:
        _tell(transport, title, lines, fault, remedy)
    return [record[_DIGEST_BYTES + 1 :] for record in records]


def _gathered(transport: Transport, record: bytes) -> list[bytes]:
    if transport.size == 1:
        return [record]
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(transport.control_device)
    everyone = torch.empty(transport.size * len(record), dtype=torch.uint8, device=transport.control_device)
    transport.all_gather(everyone, mine).wait()
    rows = bytes(everyone.tolist())
    return [rows[r * len(record) : (r + 1) * len(record)] for r in range(transport.size)]


def _tell(
    transport: Transport, title: str, lines: Sequence[str], fault: Exception | None, remedy: str
) -> NoReturn:
    """Exchange everything, and raise the same on every rank."""
    reason = None if fault is None else [type(fault).__name__, str(fault)]
    mine = json.dumps([title, list(lines), reason, remedy]).encode()
    told = [json.loads(row) for row in transport.all_gather_bytes(mine)]
    reasons = {rank: tuple(reason) for rank, (_, _, reason, _) in enumerate(told) if reason is not None}
    if reasons:
        raise _refusal(told[min(reasons)][0], reasons) from fault
    descriptions = [lines for _, lines, _, _ in told]
    if len({title for title, _, _, _ in told}) > 1:
        # The ranks are at different places of the program: say so before anything else.
        descriptions = [[f"agreement on  {title}", *lines] for title, lines, _, _ in told]
    title, _, _, remedy = told[0]
    raise ContractMismatch(describe_difference(title, descriptions, remedy=remedy))


def _refusal(title: str, reasons: dict[int, tuple[str, str]]) -> Exception:
    ranks_with: dict[tuple[str, str], list[int]] = {}
    for rank, reason in reasons.items():
        ranks_with.setdefault(reason, []).append(rank)
    text = [f"{title}: refused, nothing was sent"]
    for (name, message), ranks in ranks_with.items():
        cause = message if name in ("TypeError", "ValueError") else f"{name}: {message}"
        text.append(f"{describe_ranks(ranks)}: {cause}")
    names = {name for name, _ in ranks_with}
    error_class: type[Exception] = SynclineError
    if names <= {"TypeError", "ValueError"}:
        error_class = TypeError if names == {"TypeError"} else ValueError
    return error_class("\n".join(text))


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
    named = list(named)
    devices = _device_labels(tensor for _, tensor in named)
    lines = []
    for name, tensor in named:
        line = f"{kind} {name}  {tensor.dtype} {tuple(tensor.shape)} on {devices[tensor.device]}"
        if layout:
            strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
            line += f" strides {strides} requires_grad={tensor.requires_grad}"
        lines.append(line)
    return lines


def _device_labels(tensors: Iterable[Tensor]) -> dict[torch.device, str]:
    """Devices in words that ranks can share: rank 1's cuda:1 is rank 0's cuda:0."""
    labels: dict[torch.device, str] = {}
    num_of_type: dict[str, int] = {}
    for tensor in tensors:
        device = tensor.device
        if device not in labels:
            nth = num_of_type[device.type] = num_of_type.get(device.type, 0) + 1
            labels[device] = device.type if nth == 1 else f"{device.type} (device {nth} of this rank)"
    return labels
