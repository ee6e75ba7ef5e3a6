"""Agreement: a check that all ranks are about to make the same call, before any data is sent.

Each rank describes its call in lines of text. The ranks exchange one small record each, which contains a fingerprint of
these lines and has the same size for every call. If the fingerprints differ, the ranks exchange the lines and raise an
error that shows the difference.

This detects ranks that are at different places of the program: one averages a metric, another broadcasts a module, for
instance. Without it, an engine would only see two sizes that do not match, and Gloo would end the process.
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
from syncline.transport.base import Transport
from syncline.transport.work import Disagreement
from syncline.user_code import called_in, user_code
from syncline.words import DEFAULT_REMEDY, describe_difference, refusal_of

PAYLOAD_BYTES = 72
"""Size of the payload in a record."""

_DIGEST_BYTES = 32

_ONE_THREAD = (
    "Threads of one rank that call at once need a group each (torch.distributed.new_group), or must come in an order "
    "that is the same on all ranks, where threads are recognized by their names."
)

_TERMS = 1
"""The terms of a record's collective. They are constant, because the ranks compare the records themselves."""


def fingerprint(title: str, lines: Sequence[str]) -> bytes:
    """Return the hash of a title and lines that ranks compare."""
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
        title: the subject of the agreement, or the name of the call.
        lines: this rank's description.
        payload: up to 72 bytes.
        fault: the error that stops this rank. Its peers are waiting, so it takes part, and every rank raises.
        remedy: what to do if the ranks do not agree.
        digest: the `fingerprint` of title and lines, if the caller has kept it.
        refusal: the meaning of a fault, shown after the title. None stands for "refused, nothing was sent", or for
            "failed" if the fault is not ours but comes from a function that was called (see `calling`).

    Returns:
        Every rank's payload in rank order, padded with zeros to 72 bytes.

    Raises:
        CollectiveMismatch: the ranks gave different titles, so they are at different places of the program.
        ContractMismatch: the lines differ.
        TypeError, ValueError, SynclineError: some ranks gave a fault. The class is the fault's, or SynclineError if it
            is neither of the other two. The text is the same on every rank.
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
        except Disagreement:  # a rank made another call with terms, and repeats it as a record now
            records = _gathered(transport, record)
    finally:
        transport.board.opening = before
    if any(record[_DIGEST_BYTES] for record in records) or len({r[:_DIGEST_BYTES] for r in records}) > 1:
        _raise_difference(transport, title, lines, fault, remedy, refusal)
    return [record[_DIGEST_BYTES + 1 :] for record in records]


def _gathered(transport: Transport, record: bytes) -> list[bytes]:
    if transport.size == 1:
        return [record]
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(transport.control_device)
    everyone = torch.empty(transport.size * len(record), dtype=torch.uint8, device=transport.control_device)
    transport.all_gather(everyone, mine, terms=_TERMS).wait()
    rows = bytes(everyone.tolist())
    return [rows[r * len(record) : (r + 1) * len(record)] for r in range(transport.size)]


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
    reasons = {
        rank: tuple(reason) for rank, (_, _, reason, *_) in enumerate(descriptions) if reason is not None
    }
    if reasons:
        first = descriptions[min(reasons)]
        raise refusal_of(first[0], reasons, first[4]) from fault
    if len({title for title, *_ in descriptions}) > 1:
        places = [f"  rank {rank}: {title}, {place}" for rank, (title, *_, place) in enumerate(descriptions)]
        raise CollectiveMismatch("\n".join(["the ranks called different things:", *places, SAME_CALLS]))
    raise ContractMismatch(
        describe_difference(
            title,
            [lines for _, lines, *_ in descriptions],
            remedy=max((remedy for _, _, _, remedy, *_ in descriptions), key=len),
        )
    )


def agree(transport: Transport, title: str, lines: Sequence[str], *, remedy: str = DEFAULT_REMEDY) -> None:
    """Check that every rank gives the same lines; a collective call that blocks.

    This takes one all_gather of 105 bytes per rank if the lines are equal. The lines are exchanged only if they differ.

    Args:
        transport: a transport between the ranks that have to agree.
        title: the subject of the agreement; it is compared as well.
        lines: this rank's description, one line per entry (see `describe_difference`).
        remedy: what to do if the ranks do not agree; the last line of the error.

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
    mine = row.to(transport.control_device)
    everyone = torch.empty(transport.size * row.numel(), dtype=row.dtype, device=mine.device)
    transport.all_gather(everyone, mine).wait()
    return list(everyone.cpu().view(transport.size, -1).unbind())


def describe_tensors(
    named: Iterable[tuple[str, Tensor]], kind: str = "parameter", *, layout: bool = True
) -> list[str]:
    """Return one line per tensor, for `agree`.

    Args:
        named: names and tensors.
        kind: the kind of tensor, the first word of each line.
        layout: whether strides and requires_grad are part of the description. (They need not be equal if only values
            are sent.)

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
    """Names of devices that are comparable between ranks: rank 1's cuda:1 is rank 0's cuda:0.

    Devices of one type are numbered in the order of their first use.
    """

    def __missing__(self, device: torch.device) -> str:
        nth = 1 + sum(known.type == device.type for known in self)
        self[device] = device.type if nth == 1 else f"{device.type} (device {nth} of this rank)"
        return self[device]
