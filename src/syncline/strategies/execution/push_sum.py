"""One round of gossip: a rank sends parts of its values to a few others and adds the parts that it receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.strategies.execution.flat import FlatGroup, flat_groups
from syncline.transport.base import Transport
from syncline.transport.work import Work


class PushSum:
    """A rank's values and their push-sum weight.

    A rank holds a weighted sum of values and the sum of the weights. It computes with their quotient. It sends parts of
    both to other ranks, so their totals over all ranks change only by what the ranks learn. A rank's learning counts
    with the rank's own weight, so all ranks tend to the weighted mean over all ranks.

    Args:
        weights: the weights of all ranks, above 0.
        transport: carries the parts, and nothing else.
    """

    def __init__(self, weights: Sequence[float], transport: Transport) -> None:
        mean = sum(weights) / len(weights)
        self._own = self.weight = weights[transport.rank] / mean
        self._has_equal = len(set(weights)) == 1
        self._transport = transport
        self._written: list[Tensor] = []
        """The values as last written. Kept only where weights differ, because learning then needs its own weight."""

    def push(self, tensors: Sequence[Tensor], to: Sequence[int], sources: Sequence[int]) -> None:
        """Keep one of 1 + len(to) equal parts, send one to each rank of `to`, and add the parts from `sources`."""
        transport = self._transport
        groups = flat_groups(tensors)
        values = self._values(groups)
        share = self.weight / (1 + len(to))
        weight = torch.tensor([share], dtype=torch.float64, device=transport.control_device)
        wires = [weight]
        for group, value in zip(groups, values, strict=True):
            wires.append(value.to(transport.sending_device(group.device), group.wire_dtype, copy=True))
        sends: list[Work] = []
        arrivals: dict[int, list[tuple[Tensor, Work]]] = {}
        for rank in sorted({*to, *sources}):
            # Of two ranks that send to each other the lower one sends first. Transports that order the messages of a
            # pair (NCCL) would deadlock otherwise.
            if rank in to and transport.rank < rank:
                sends += [transport.send(wire, rank) for wire in wires]
            if rank in sources:
                blanks = [torch.empty_like(wire) for wire in wires]
                arrivals[rank] = [(blank, transport.recv(blank, rank)) for blank in blanks]
            if rank in to and transport.rank > rank:
                sends += [transport.send(wire, rank) for wire in wires]
        total, sums = share, [value.mul_(share) for value in values]
        for rank in sorted(arrivals):  # in rank order, so that runs are reproducible
            for _, work in arrivals[rank]:
                work.wait()
            (part, _), *others = arrivals[rank]
            its = part.item()
            total += its
            for sum_, (value, _) in zip(sums, others, strict=True):
                sum_.add_(value.to(sum_.device, sum_.dtype), alpha=its)
        for work in sends:
            work.wait()
        self.weight = total
        self._write(groups, [sum_.div_(total) for sum_ in sums])

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace all ranks' values by their weighted mean, and reset the weights. A collective call."""
        transport = self._transport
        groups = flat_groups(tensors)
        total = torch.tensor([self.weight], dtype=torch.float64, device=transport.control_device)
        transport.all_reduce(total).wait()
        means = []
        for group, value in zip(groups, self._values(groups), strict=True):
            wire = value.mul_(self.weight / total.item()).to(transport.sending_device(group.device))
            transport.all_reduce(wire).wait()
            means.append(wire.to(group.device))
        self.weight = self._own
        self._write(groups, means)

    def _values(self, groups: Sequence[FlatGroup]) -> list[Tensor]:
        """Return the values. Changes since they were last written count with this rank's own weight."""
        values = [group.read() for group in groups]
        if self._has_equal or len(self._written) != len(values):
            return values
        factor = self._own / self.weight
        return [
            written + factor * (value - written) for value, written in zip(values, self._written, strict=True)
        ]

    def _write(self, groups: Sequence[FlatGroup], values: Sequence[Tensor]) -> None:
        for group, value in zip(groups, values, strict=True):
            group.write(value)
        if not self._has_equal:
            self._written = [group.read() for group in groups]  # includes the rounding of the write

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which belongs to this rank alone."""
        return {"weight": self.weight, "written": [written.clone() for written in self._written]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.weight = float(state["weight"])
        self._written = [written.clone() for written in state["written"]]
