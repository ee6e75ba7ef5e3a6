"""check_replicas: are the replicas equal, bit for bit?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.errors import ReplicaDivergence
from syncline.optim.attached import is_sharded
from syncline.plan.difference import describe_ranks
from syncline.sync.agreement import describe_tensors, exchange, gather_rows
from syncline.sync.divergence import have_met
from syncline.sync.fingerprint import Difference, differences, digest_of, fingerprint_of_number, fingerprints
from syncline.sync.optimizers import OptimizerNumbers, optimizer_leaves
from syncline.sync.tensors import named_tensors
from syncline.transport.base import Transport
from syncline.verbs.common import Group
from syncline.world import transport_of

__all__ = ["check_replicas"]

_TITLE = "sl.check_replicas"
_REMEDY = "Call it with the same tree of tensors on every rank. (Of tied tensors only the first is named.)"
_MAX_SHOWN = 5


def check_replicas(target: Any, *, group: Group = None) -> None:
    """Raise if `target` is not the same on all ranks, bit for bit.

    Each rank boils its tensors down to numbers of 64 bits, by exact integer arithmetic on the device that they are on;
    memory for copies is bounded. Replicas that are equal cost one small collective, others a second one. Equal means
    the same bits: 0.0 and -0.0 differ, and so do NaNs with different payloads. A difference is missed with a
    probability of about 2**-64. Nothing is changed.

    Args:
        target: a Module (parameters and buffers), an Optimizer (tensors and numbers of its state and of its parameter
            groups), a Tensor, or nested dicts, lists and tuples of tensors. Tied tensors are looked at once.
        group: see `broadcast_`.

    Raises:
        ReplicaDivergence: something differs: the first tensor in the target's order, how many there are, and which
            ranks are in the minority; the same text on every rank.
        ContractMismatch: the ranks' targets have different names, shapes or dtypes; the same text on every rank.
        TypeError, ValueError: `target` is or contains something else, or is a sharded optimizer; on every rank.

    Example:
        >>> import torch, syncline as sl
        >>> model = torch.nn.Linear(2, 1)
        >>> sl.check_replicas(model)
    """
    transport = transport_of(group)
    names: list[str] = []
    mine: list[int] = []
    lines: list[str] = []
    tensors: list[Tensor] = []
    fault = None
    try:
        if is_sharded(target):
            raise ValueError(
                "this optimizer is sharded: each rank has state for its own share, which no other has"
            )
        named = named_tensors(target, for_writing=False)
        lines = describe_tensors(named, kind="tensor", layout=False)
        names = [name for name, _ in named]
        tensors = [tensor for _, tensor in named]
        mine = fingerprints(tensors)
        if isinstance(target, Optimizer):
            lines += OptimizerNumbers(target).lines
            numbers = [
                (path, leaf) for path, leaf in optimizer_leaves(target) if not isinstance(leaf, Tensor)
            ]
            names += [path for path, _ in numbers]
            mine += [fingerprint_of_number(leaf) for _, leaf in numbers]
    except Exception as error:
        fault = error
    told = exchange(transport, _TITLE, lines, payload=digest_of(mine), fault=fault, remedy=_REMEDY)
    if len(set(told)) > 1:
        raise _divergence(differences(names, _gathered(mine, transport)), len(names), transport.size)
    have_met(tensors, by_writing=False)


def _gathered(mine: list[int], transport: Transport) -> list[list[int]]:
    signed = torch.tensor([one - (1 << 63) for one in mine], dtype=torch.int64)
    return [row.tolist() for row in gather_rows(transport, signed)]


def _divergence(found: list[Difference], num_leaves: int, num_ranks: int) -> ReplicaDivergence:
    minority = sorted({rank for difference in found for rank in difference.minority})
    source = "src=..."
    if minority:
        who = f"In the minority: {describe_ranks(minority)}."
        source = "src=<a rank of the majority>"
    elif num_ranks == 2:
        who = "With two ranks nobody can tell which one is right."
    else:
        who = "No more than half of the ranks agree, so nobody can tell which are right."
    shown = [f"  {difference}" for difference in found[:_MAX_SHOWN]]
    if len(found) > _MAX_SHOWN:
        shown.append(f"  and {len(found) - _MAX_SHOWN} more")
    problem = (
        f"{_TITLE}: expected the same bits on all {num_ranks} ranks, but {len(found)} of {num_leaves} tensors and "
        f"numbers differ, the first of them {found[0].name}. Who is equal with whom:"
    )
    remedy = (
        f"{who} sl.broadcast_(target, {source}) makes them equal again; what let them drift (a buffer, a seed, a step "
        "on some ranks) remains to be found."
    )
    return ReplicaDivergence(
        "\n".join([problem, *shown, remedy]),
        tensor=found[0].name,
        num_differing=len(found),
        minority_ranks=tuple(minority),
    )
