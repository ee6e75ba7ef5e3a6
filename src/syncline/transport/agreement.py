"""Agreement: a check that all ranks are about to make the same call, before any data is sent.

Each rank describes its call in lines of text. The ranks exchange one small record each, which contains a fingerprint of
these lines and has the same size for every call. If the fingerprints differ, the ranks exchange the lines, and all
ranks raise an error that shows the difference.

So an error names the ranks that are at different places of the program: for instance, one rank averages a metric, and
another rank broadcasts a module. Without this check, an engine would only see two sizes that do not match, and Gloo
would end the process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from syncline.errors import CollectiveMismatch, ContractMismatch
from syncline.liveness.board import Place
from syncline.liveness.calls import SAME_CALLS
from syncline.transport.base import Transport, gather_tensor
from syncline.transport.work import Disagreement
from syncline.user_code import called_in, user_code
from syncline.words import DEFAULT_REMEDY, describe_difference, refusal_of

PAYLOAD_BYTES = 72
"""Size of the payload in a record."""

_DIGEST_BYTES = 32

_ONE_THREAD = (
    "If several threads of a rank make such calls at the same time, create a separate group for each thread "
    "(torch.distributed.new_group), or let the threads call in the same order on all ranks. Threads are recognized by "
    "their names."
)

_TERMS = 1
"""The terms of the collective that gathers the records. They are constant, because the records are compared."""


def fingerprint(title: str, lines: Sequence[str]) -> bytes:
    """Return the hash by which ranks compare a title and lines."""
    return hashlib.sha256(json.dumps([title, list(lines)]).encode()).digest()


def exchange(
    transport: Transport,
    title: str,
    lines: Sequence[str],
    *,
    payload: bytes = b"",
    fault: Exception | None = None,
    remedy: str = DEFAULT_REMEDY,
    digest: bytes | None = None,
    refusal: str | None = None,
) -> list[bytes]:
    """Check that all ranks agree, and gather a small payload in the same collective.

    Args:
        transport: a transport between the ranks that have to agree.
        title: the name of the call, or the subject of the agreement.
        lines: the description of the call on this rank.
        payload: up to 72 bytes for the other ranks.
        fault: an error on this rank. This rank takes part nevertheless, because its peers wait. Then all ranks raise.
        remedy: what users should do if the ranks do not agree.
        digest: the `fingerprint` of title and lines, if the caller knows it already.
        refusal: words that explain a fault, shown after the title. None means "refused, nothing was sent", or "failed"
            if the fault was raised by a function that Syncline called for the user (see `calling`).

    Returns:
        The payloads of all ranks in rank order, each padded with zeros to 72 bytes.

    Raises:
        CollectiveMismatch: the ranks gave different titles, so they are at different places of the program.
        ContractMismatch: the lines differ.
        TypeError, ValueError, SynclineError: some ranks gave a fault. The error has the class of the fault if that is
            TypeError or ValueError, else SynclineError. The text is the same on every rank.
    """
    assert len(payload) <= PAYLOAD_BYTES
    if transport.turn.caller:
        lines, digest = [*lines, f"thread  {transport.turn.caller}"], None
        remedy = f"{remedy} {_ONE_THREAD}"
    record = (
        (digest or fingerprint(title, lines))
        + bytes([fault is not None])
        + payload.ljust(PAYLOAD_BYTES, b"\0")
    )
    before, transport.board.opening = transport.board.opening, title
    try:
        try:
            records = _gathered(transport, record)
        except Disagreement:  # a rank made another call, and now gathers records, too
            records = _gathered(transport, record)
    finally:
        transport.board.opening = before
    if any(record[_DIGEST_BYTES] for record in records) or len({r[:_DIGEST_BYTES] for r in records}) > 1:
        _raise_difference(transport, title, lines, fault, remedy, refusal)
    return [record[_DIGEST_BYTES + 1 :] for record in records]


def _gathered(transport: Transport, record: bytes) -> list[bytes]:
    if transport.size == 1:
        return [record]
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    return [bytes(row) for row in gather_tensor(transport, mine, terms=_TERMS).tolist()]


def _raise_difference(
    transport: Transport,
    title: str,
    lines: Sequence[str],
    fault: Exception | None,
    remedy: str,
    refusal: str | None,
) -> NoReturn:
    """Exchange the full descriptions, and raise the same error on every rank."""
    reason = None if fault is None else [type(fault).__name__, str(fault), called_in(fault)]
    place = Place.of(transport.board, code=user_code(sys._getframe()))
    mine = json.dumps([title, list(lines), reason, remedy, refusal, str(place)]).encode()
    descriptions = [json.loads(row) for row in transport.all_gather_bytes(mine)]
    titles, all_lines, faults, remedies, refusals, places = zip(*descriptions, strict=True)
    reasons = {rank: tuple(reason) for rank, reason in enumerate(faults) if reason is not None}
    if reasons:
        first = min(reasons)
        raise refusal_of(titles[first], reasons, refusals[first]) from fault
    if len(set(titles)) > 1:
        calls = [
            f"  rank {r}: {title}, {place}"
            for r, (title, place) in enumerate(zip(titles, places, strict=True))
        ]
        raise CollectiveMismatch("\n".join(["the ranks made different calls:", *calls, SAME_CALLS]))
    raise ContractMismatch(describe_difference(title, list(all_lines), remedy=max(remedies, key=len)))


def agree(transport: Transport, title: str, lines: Sequence[str], *, remedy: str = DEFAULT_REMEDY) -> None:
    """Check that all ranks give the same lines; a collective call that blocks.

    If the lines are equal, this takes one all_gather of 105 bytes per rank. Only different lines are exchanged.

    Args:
        transport: a transport between the ranks that have to agree.
        title: the subject of the agreement. The ranks compare the title as well.
        lines: the lines of this rank (see `describe_difference`).
        remedy: what users should do if the ranks do not agree. It is the last line of the error.

    Raises:
        ContractMismatch: the lines differ. The text is the same on every rank.
        CollectiveMismatch: the titles differ, so the ranks are at different places of the program.

    Example:
        >>> from syncline.transport.threads import run_ranks
        >>> run_ranks(2, lambda transport: agree(transport, "Net", ["weight  (2, 3)"]))
        [None, None]
    """
    if transport.size > 1:
        exchange(transport, title, lines, remedy=remedy)


def gather_rows(transport: Transport, row: Tensor) -> list[Tensor]:
    """Return every rank's `row` in rank order, on the CPU; a collective call that blocks.

    Args:
        row: (numel,), on the CPU, with the same number of elements and the same dtype on all ranks.
    """
    if transport.size == 1 or not row.numel():
        return [row] * transport.size
    return list(gather_tensor(transport, row).unbind())


def describe_tensors(
    named: Iterable[tuple[str, Tensor]], kind: str = "parameter", *, layout: bool = True
) -> list[str]:
    """Return a line of text that describes each tensor, to pass to `agree`.

    Args:
        named: names and tensors.
        kind: the kind of tensor, which is the first word of each line.
        layout: whether the lines contain strides and requires_grad, which may differ if only values are sent.

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
    """Names of devices that are equal on ranks with different devices: cuda:0 on rank 0, cuda:1 on rank 1.

    The devices of one type are numbered in the order of their first use.
    """

    def __missing__(self, device: torch.device) -> str:
        nth = 1 + sum(known.type == device.type for known in self)
        self[device] = device.type if nth == 1 else f"{device.type} (device {nth} of this rank)"
        return self[device]
