"""How a transaction on the main lane is opened: by one small record of the same size, whatever it is about.

So ranks that are at different places of the program (one averages a metric, another broadcasts a module) are told
so, where an engine would see two sizes that do not fit (Gloo ends the process then).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from syncline.board import Place
from syncline.errors import CollectiveMismatch, ContractMismatch
from syncline.plan.difference import DEFAULT_REMEDY, describe_difference, refusal_of
from syncline.transport.base import Disagreement
from syncline.transport.calls import SAME_CALLS
from syncline.transport.user_code import called_in, user_code

if TYPE_CHECKING:
    from syncline.transport.base import Transport

__all__ = ["PAYLOAD_BYTES", "exchange", "fingerprint"]

PAYLOAD_BYTES = 72
"""What a record has room for besides the fingerprint."""

_DIGEST_BYTES = 32
_ONE_THREAD = (
    "Threads of one rank that call at once need a group each (torch.distributed.new_group), or must come in an order "
    "that is the same on all ranks, where threads are recognized by their names."
)
_TERMS = 1
"""Of a record: what it is about is compared by the ranks, not by the engine."""


def fingerprint(title: str, lines: Sequence[str]) -> bytes:
    """What ranks compare of a title and lines."""
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
    """Agree, and gather a small payload in the same collective.

    Args:
        transport: between the ranks that have to agree.
        title: what they have to agree on, or what they called.
        lines: this rank's description.
        payload: up to 72 bytes.
        fault: why this rank cannot go on. Its peers are waiting, so it takes part, and every rank raises.
        remedy: what to do when they do not agree.
        digest: the `fingerprint` of title and lines, where that was kept.
        refusal: what a fault means, after the title. None: "refused, nothing was sent"; or "failed", where it is not
            ours but comes from what was called (see `calling`).

    Returns:
        Every rank's payload in rank order, filled up with zeros to 72 bytes.

    Raises:
        CollectiveMismatch: the ranks gave different titles: they are at different places of the program.
        ContractMismatch: the lines differ.
        TypeError, ValueError, SynclineError: some ranks gave a fault: its class, or SynclineError where that is
            neither of the others. In any case the same text on every rank.
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
        except Disagreement:  # a rank called something else, which it repeats in this form now
            records = _gathered(transport, record)
    finally:
        transport.board.opening = before
    if any(record[_DIGEST_BYTES] for record in records) or len({r[:_DIGEST_BYTES] for r in records}) > 1:
        _tell(transport, title, lines, fault, remedy, refusal)
    return [record[_DIGEST_BYTES + 1 :] for record in records]


def _gathered(transport: Transport, record: bytes) -> list[bytes]:
    if transport.size == 1:
        return [record]
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(transport.control_device)
    everyone = torch.empty(transport.size * len(record), dtype=torch.uint8, device=transport.control_device)
    transport.all_gather(everyone, mine, terms=_TERMS).wait()
    rows = bytes(everyone.tolist())
    return [rows[r * len(record) : (r + 1) * len(record)] for r in range(transport.size)]


def _tell(
    transport: Transport,
    title: str,
    lines: Sequence[str],
    fault: Exception | None,
    remedy: str,
    refusal: str | None,
) -> NoReturn:
    """Exchange everything, and raise the same on every rank."""
    reason = None if fault is None else [type(fault).__name__, str(fault), called_in(fault)]
    place = Place.of(transport.board, code=user_code(sys._getframe()))
    mine = json.dumps([title, list(lines), reason, remedy, refusal, str(place)]).encode()
    told = [json.loads(row) for row in transport.all_gather_bytes(mine)]
    reasons = {rank: tuple(reason) for rank, (_, _, reason, *_) in enumerate(told) if reason is not None}
    if reasons:
        first = told[min(reasons)]
        raise refusal_of(first[0], reasons, first[4]) from fault
    if len({title for title, *_ in told}) > 1:
        who_is_where = [f"  rank {rank}: {title}, {place}" for rank, (title, *_, place) in enumerate(told)]
        raise CollectiveMismatch("\n".join(["the ranks called different things:", *who_is_where, SAME_CALLS]))
    raise ContractMismatch(
        describe_difference(
            title,
            [lines for _, lines, *_ in told],
            remedy=max((remedy for _, _, _, remedy, *_ in told), key=len),
        )
    )
