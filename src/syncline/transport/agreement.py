"""A check that all ranks are about to make the same call, before any data is sent.

Each rank describes its call in a title and lines of text. Each rank sends a small record to all ranks. The record
contains a fingerprint (a hash) of the description, and has the same size for every call. If the fingerprints differ,
the ranks exchange the full descriptions, and all ranks raise an error that shows the difference.

Suppose that one rank averages a metric while another rank broadcasts a module. With this check, the error names the two
ranks and their calls. Without it, an engine would only see two sizes that do not match, and Gloo would end the process.
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
"""The number of payload bytes in each record."""

_DIGEST_BYTES = 32

_ONE_THREAD = (
    "If several threads of a rank make such calls at the same time, create a separate group for each thread "
    "(torch.distributed.new_group), or let the threads call in the same order on all ranks. Threads are recognized by "
    "their names."
)

_TERMS = 1
"""The `terms` (see `Transport.all_reduce`) of the collective that gathers the records.

The value is the same for every call, because `exchange` itself compares the records.
"""


def fingerprint(title: str, lines: Sequence[str]) -> bytes:
    """Return the hash of a title and lines. Ranks compare this hash instead of the texts."""
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
    """Check that all ranks pass the same title and lines, and gather a small payload in the same collective.

    Args:
        transport: a transport between the ranks that have to agree.
        title: the name of the call, or of the thing that must be equal on all ranks.
        lines: this rank's description of the call. It must be the same on all ranks.
        payload: up to 72 bytes that this rank sends to the other ranks.
        fault: an error that prevents the call on this rank. The other ranks wait for this rank, so it has to take part
            in the exchange nevertheless. Then all ranks raise an error. Pass None if there is no such error.
        remedy: the sentence of the error that says what to do if the descriptions differ.
        digest: the `fingerprint` of title and lines. Pass None to compute it here.
        refusal: the words after the title in the error about a fault. Pass None for the default: "failed" if the fault
            was raised by a function that Syncline called for the user (see `calling`), else "refused, nothing was
            sent".

    Returns:
        The payloads of all ranks in rank order, each padded with zeros to 72 bytes.

    Raises:
        CollectiveMismatch: the titles differ, so the ranks are at different places of the program.
        ContractMismatch: the titles are equal, but the lines differ.
        TypeError, ValueError, RuntimeError: at least one rank passed a fault. All ranks raise the same class and text:
            a TypeError if all faults are TypeErrors, a ValueError if all are TypeErrors or ValueErrors, a RuntimeError
            if all are RuntimeErrors of Syncline, else a SynclineError, which is a RuntimeError. A fault that a function
            of the user raised is its cause.
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
    """Exchange the full descriptions of the calls, and raise an error about them, with the same text on every rank."""
    reason = None if fault is None else [type(fault).__name__, str(fault), called_in(fault)]
    place = Place.of(transport.board, code=user_code(sys._getframe()))
    mine = json.dumps([title, list(lines), reason, remedy, refusal, str(place)]).encode()
    descriptions = [json.loads(row) for row in transport.all_gather_bytes(mine)]
    titles, all_lines, faults, remedies, refusals, places = zip(*descriptions, strict=True)
    reasons = {rank: tuple(reason) for rank, reason in enumerate(faults) if reason is not None}
    if reasons:
        first = min(reasons)
        # The cause adds nothing, unless a function of the user has raised it.
        raise refusal_of(titles[first], reasons, refusals[first], size=transport.size) from (
            fault if called_in(fault) else None
        )
    if len(set(titles)) > 1:
        calls = [
            f"  rank {r}: {title}, {place}"
            for r, (title, place) in enumerate(zip(titles, places, strict=True))
        ]
        raise CollectiveMismatch("\n".join(["the ranks made different calls:", *calls, SAME_CALLS]))
    raise ContractMismatch(describe_difference(title, list(all_lines), remedy=max(remedies, key=len)))


def agree(transport: Transport, title: str, lines: Sequence[str], *, remedy: str = DEFAULT_REMEDY) -> None:
    """Check that all ranks pass the same title and lines; a collective call that blocks.

    The ranks exchange only a hash, in one all_gather of 105 bytes per rank. If the hashes differ, they also exchange
    the lines.

    Args:
        transport: a transport between the ranks that have to agree.
        title: the name of the thing that must be equal on all ranks.
        lines: this rank's description of that thing (for the format, see `describe_difference`).
        remedy: the last line of the error, which says what to do if the lines differ.

    Raises:
        ContractMismatch: the lines differ. The error has the same text on every rank.
        CollectiveMismatch: the titles differ, so the ranks are at different places of the program.

    Examples:
        >>> from syncline.transport.threads import run_ranks
        >>> run_ranks(2, lambda transport: agree(transport, "Net", ["weight  (2, 3)"]))
        [None, None]
    """
    if transport.size > 1:
        exchange(transport, title, lines, remedy=remedy)


def gather_rows(transport: Transport, row: Tensor) -> list[Tensor]:
    """Return the rows of all ranks in rank order, on the CPU; a collective call that blocks.

    Args:
        row: a tensor of shape (numel,) on the CPU, with the same numel and dtype on all ranks.
    """
    if transport.size == 1 or not row.numel():
        return [row] * transport.size
    return list(gather_tensor(transport, row).unbind())


def describe_tensors(
    named: Iterable[tuple[str, Tensor]], kind: str = "parameter", *, layout: bool = True
) -> list[str]:
    """Return one line of text per tensor. The lines can be passed to `agree`.

    Args:
        named: pairs of a name and a tensor.
        kind: the first word of each line.
        layout: whether the lines contain strides and requires_grad. Pass False for calls that only send values, because
            these properties can then differ between ranks.

    Examples:
        >>> describe_tensors([("weight", torch.zeros(2, 3))], kind="buffer")
        ['buffer weight  torch.float32 (2, 3) on cpu strides (3, 1) requires_grad=False']
    """
    labels = DeviceLabels()
    lines = []
    for name, tensor in named:
        line = f"{kind} {name}  {tensor.dtype} {tuple(tensor.shape)} on {labels[tensor.device]}"
        if layout:
            strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
            line += f" strides {strides} requires_grad={tensor.requires_grad}"
        lines.append(line)
    return lines


class DeviceLabels(dict[torch.device, str]):
    """A map from devices to labels that ranks can compare, although each rank uses a different device.

    The first device of each type that is looked up gets the type as its label. So the label is "cuda" both for cuda:0
    on rank 0 and for cuda:1 on rank 1. Other devices of that type get a label with a number.
    """

    def __missing__(self, device: torch.device) -> str:
        nth = 1 + sum(known.type == device.type for known in self)
        self[device] = device.type if nth == 1 else f"{device.type} (device {nth} of this rank)"
        return self[device]
