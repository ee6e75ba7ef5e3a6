"""One round of gossip: parts of this rank's values go to a few others, and theirs are added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.rounds.flat import flat_groups
from syncline.transport.base import Transport, Work

__all__ = ["PushSum"]


class PushSum:
    """A rank's values and the weight that goes with them.

    What is passed on is value times weight, and the weight; what a rank has are the sums of what it kept and got, so
    the total of both over all ranks never changes, and their quotient tends to the weighted mean on every rank.

    Args:
        weight: at the start.
        transport: what the parts travel by, for nothing else.
    """

    def __init__(self, weight: float, transport: Transport) -> None:
        self._initial = self.weight = weight
        self._transport = transport

    def push(self, tensors: Sequence[Tensor], to: Sequence[int], sources: Sequence[int]) -> None:
        """Keep an equal part, send one to each of `to`, add what comes from `sources`."""
        transport, share = self._transport, self.weight / (1 + len(to))
        groups = flat_groups(tensors)
        weights = torch.tensor([share], dtype=torch.float64, device=transport.control_device)
        kept = [group.read().mul_(share) for group in groups]
        wires = [
            weights,
            *(  # copies: what is kept is added to while they travel
                part.to(transport.sending_device(group.device), group.wire_dtype, copy=True)
                for group, part in zip(groups, kept, strict=True)
            ),
        ]
        sends: list[Work] = []
        arrivals: dict[int, list[tuple[Tensor, Work]]] = {}
        for rank in sorted({*to, *sources}):
            # Of two that send to each other the lower begins: where the messages of a pair go one after the other
            # (NCCL), each would wait for the other otherwise.
            if rank in to and transport.rank < rank:
                sends += [transport.send(wire, rank) for wire in wires]
            if rank in sources:
                blanks = [torch.empty_like(wire) for wire in wires]
                arrivals[rank] = [(blank, transport.recv(blank, rank)) for blank in blanks]
            if rank in to and transport.rank > rank:
                sends += [transport.send(wire, rank) for wire in wires]
        total = share
        for rank in sorted(arrivals):  # in the order of the ranks, so that a run can be repeated
            for (part, work), sum_ in zip(arrivals[rank], [None, *kept], strict=True):
                work.wait()
                if sum_ is None:
                    total += part.item()
                else:
                    sum_ += part.to(sum_.device, sum_.dtype)
        for work in sends:
            work.wait()
        self.weight = total
        for group, sum_ in zip(groups, kept, strict=True):
            group.write(sum_.div_(total))

    def restart(self) -> None:
        """All ranks are equal: each counts as at the start."""
        self.weight = self._initial

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, of this rank alone."""
        return {"weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.weight = float(state["weight"])
