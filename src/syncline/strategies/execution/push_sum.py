"""Push-sum, the method of gossip: a rank sends parts of its values to a few ranks, and adds the parts it receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.strategies.actions import Action, Push
from syncline.strategies.execution.flat import FlatGroup, flat_groups
from syncline.strategies.execution.kept import Kept
from syncline.tensors.reduction import TensorReducer
from syncline.transport.base import Transport
from syncline.transport.work import Work


class PushSum(Kept):
    """The push-sum state of one rank: its current weight, and the values that it last wrote.

    A rank's values, multiplied by its current weight, are a weighted sum of the values of several ranks. A rank sends
    equal parts of this sum and of its weight to other ranks. So rounds change neither the total of the sums nor the
    total of the weights over all ranks. Changes by the steps of a rank are weighted by its initial weight.
    Therefore the values of all ranks approach the weighted mean over all ranks.

    Args:
        weights: the initial weights of all ranks, in rank order, above 0.
        transport: the lane for the parts. It carries no other data.
        tensors: a function that returns the tensors to average.
    """

    name = "push_sum"

    def __init__(
        self, weights: Sequence[float], transport: Transport, tensors: Callable[[], list[Tensor]]
    ) -> None:
        mean = sum(weights) / len(weights)
        self._own = self.weight = weights[transport.rank] / mean
        self._has_equal = len(set(weights)) == 1
        self._transport = transport
        self._tensors = tensors
        self._written: list[Tensor] = []
        """The values that were last written into the tensors, to measure changes. Empty if all weights are equal."""

    def run(self, action: Action) -> None:
        groups = flat_groups(self._tensors())
        values = self._values(groups)
        if isinstance(action, Push):
            values = self._pushed(values, [group.wire_dtype for group in groups], action)
        else:
            values = self._averaged(values)
        for group, value in zip(groups, values, strict=True):
            group.write(value)
        if not self._has_equal:
            self._written = [group.read() for group in groups]  # includes the rounding of the write

    def _pushed(self, values: list[Tensor], wire_dtypes: Sequence[torch.dtype], push: Push) -> list[Tensor]:
        """Send a part of this rank's values to each rank of `push.to`, and add the parts that arrive.

        Args:
            values: one flat tensor with the values of each group of tensors. These flat tensors are overwritten.
            wire_dtypes: the dtype in which the values of each group are sent.
            push: the ranks to send to, and the ranks to receive from.

        Returns:
            The new values of each group.
        """
        transport, to, sources = self._transport, push.to, push.sources
        total = self.weight / (1 + len(to))
        wires = [torch.tensor([total], dtype=torch.float64, device=transport.control_device)]
        for value, dtype in zip(values, wire_dtypes, strict=True):
            wires.append(value.to(transport.sending_device(value.device), dtype, copy=True))
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
        sums = [value.mul_(total) for value in values]
        for rank in sorted(arrivals):  # in rank order, so that runs are reproducible
            for _, work in arrivals[rank]:
                work.wait()
            (part, _), *others = arrivals[rank]
            weight = part.item()
            total += weight
            for sum_, (value, _) in zip(sums, others, strict=True):
                sum_.add_(value.to(sum_.device, sum_.dtype), alpha=weight)
        for work in sends:
            work.wait()
        self.weight = total
        return [sum_.div_(total) for sum_ in sums]

    def _averaged(self, values: list[Tensor]) -> list[Tensor]:
        """Return the weighted mean of all ranks' values, in their memory. A collective call.

        The weight of this rank gets its initial value again.
        """
        transport = self._transport
        total = torch.tensor([self.weight], dtype=torch.float64, device=transport.control_device)
        transport.all_reduce(total).wait()
        TensorReducer(values, transport, "sum", fraction=self.weight / total.item()).run()
        self.weight = self._own
        return values

    def _values(self, groups: Sequence[FlatGroup]) -> list[Tensor]:
        """Return the values of the tensors. Changes since the last write are weighted by this rank's initial weight."""
        values = [group.read() for group in groups]
        if self._has_equal or len(self._written) != len(values):
            return values
        factor = self._own / self.weight
        return [
            written + factor * (value - written) for value, written in zip(values, self._written, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's weight and the values that it last wrote. Both differ between ranks."""
        return {"weight": self.weight, "written": [written.clone() for written in self._written]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.weight = float(state["weight"])
        self._written = [written.clone() for written in state["written"]]
