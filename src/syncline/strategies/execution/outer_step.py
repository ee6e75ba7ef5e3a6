"""The outer loop of DiLoCo: the common copy of the parameters, the distance moved from it, and the outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.compression.exchange import MeanExchange
from syncline.optimizers.contents import parameters_of
from syncline.strategies.execution.flat import FlatGroup, flat_groups
from syncline.transport.base import Transport
from syncline.user_code import calling


class OuterLoop:
    """A copy of the parameters that is equal on all ranks, stepped by an optimizer of its own.

    Args:
        named: the module's parameters with their names, the same on all ranks.
        fragments: for each fragment, the indices of its parameters, which sync together.
        outer: makes the optimizer of the copies.
        compression: how outer gradients are encoded; None for no encoding.
        transport: carries the outer gradients, and nothing else.
        keeps_sent: remember the parameters' values at each `send`. `receive` with `mixing=None` needs them.

    Raises:
        TypeError: `outer` does not return an optimizer.
        ValueError: `outer` returns an optimizer of other parameters.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        fragments: Sequence[Sequence[int]],
        outer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        compression: Any,
        transport: Transport,
        *,
        keeps_sent: bool = False,
    ) -> None:
        self._names = [name for name, _ in named]
        self._local = [parameter for _, parameter in named]
        self._common = [_copy_of(parameter) for parameter in self._local]
        with calling("outer(parameters)"):
            optimizer = outer(list(self._common))
        self.optimizer = _checked(optimizer, self._common)
        self._fragments = [
            _Fragment(
                [self._local[i] for i in members],
                [self._common[i] for i in members],
                compression,
                transport,
                keeps_sent=keeps_sent,
            )
            for members in fragments
        ]

    @property
    def is_under_way(self) -> bool:
        """Whether a fragment was sent and not yet received."""
        return any(fragment.is_under_way for fragment in self._fragments)

    @property
    def num_fragments(self) -> int:
        """Number of fragments."""
        return len(self._fragments)

    def restart(self) -> None:
        """Copy the current parameters, from which the next outer step starts."""
        with torch.no_grad():
            for common, local in zip(self._common, self._local, strict=True):
                common.copy_(local)

    def send(self, fragment: int) -> None:
        """Start to average the distance that a fragment has moved since its last outer step."""
        self._fragments[fragment].send()

    def advance(self, fragment: int) -> None:
        """Enter the next phase of a fragment's average, if it has one."""
        self._fragments[fragment].advance()

    def receive(self, fragment: int, mixing: float | None) -> None:
        """Take the outer step of a fragment, and write the result into the module's parameters.

        `mixing` is how much of the parameters' own values stays. With None, the distance that they have moved since
        `send` is added to the result.
        """
        part = self._fragments[fragment]
        part.take_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        part.write(mixing)

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the state. A collective call if an average is in flight.

        Residuals (in `"fragments"`) belong to this rank alone.
        """
        return {
            "parameters": dict(
                zip(self._names, (common.detach().clone() for common in self._common), strict=True)
            ),
            "optimizer": self.optimizer.state_dict(),
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned; local unless an average is in flight.

        Raises:
            ValueError: the state is of another module.
        """
        saved = state["parameters"]
        shapes = {name: tuple(common.shape) for name, common in zip(self._names, self._common, strict=True)}
        found = {name: tuple(value.shape) for name, value in saved.items()}
        if found != shapes:
            differing = sorted(
                name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)
            )
            raise ValueError(
                f"this state was saved from another module: {', '.join(differing[:5])} differ (expected "
                f"{shapes.get(differing[0])}, got {found.get(differing[0])} for {differing[0]})"
            )
        with torch.no_grad():
            for name, common in zip(self._names, self._common, strict=True):
                common.copy_(saved[name])
        self.optimizer.load_state_dict(state["optimizer"])
        for fragment, of_fragment in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(of_fragment)


class _Fragment:
    """Parameters that sync together."""

    def __init__(
        self,
        local: Sequence[Tensor],
        common: Sequence[Tensor],
        compression: Any,
        transport: Transport,
        *,
        keeps_sent: bool,
    ) -> None:
        self._local, self._common = local, common
        self._groups = flat_groups(common)
        self._exchanges = [
            MeanExchange(
                compression, group.shapes, dtype=group.dtype, device=group.device, transport=transport
            )
            for group in self._groups
        ]
        self._arrived: list[Tensor] | None = None
        """The means, if a save had to wait for them before they were due."""
        self.is_under_way = False
        self._keeps_sent = keeps_sent
        self._sent: list[Tensor] = []
        """The parameters' values when their distance was sent."""

    def send(self) -> None:
        # The copy is first rounded as it was written into the parameters. Otherwise that rounding would count as a
        # move, and the outer step would take it back.
        moved = [
            common.detach().to(local.dtype).to(common.dtype) - local.detach().to(common.dtype)
            for common, local in zip(self._common, self._local, strict=True)
        ]
        for group, exchange in zip(self._groups, self._exchanges, strict=True):
            exchange.start(FlatGroup([moved[i] for i in group.indices], group.indices).read())
        self.is_under_way = True
        self._sent = [local.detach().clone() for local in self._local] if self._keeps_sent else []

    def advance(self) -> None:
        if self._arrived is None:
            for exchange in self._exchanges:
                exchange.advance()

    def take_gradients(self) -> None:
        """Wait for the mean distances and make them the gradients of the copies."""
        means = self._arrived or [exchange.wait() for exchange in self._exchanges]
        self._arrived, self.is_under_way = None, False
        for group, mean in zip(self._groups, means, strict=True):
            for index, part in zip(group.indices, group.views(mean), strict=True):
                common = self._common[index]
                common.grad = torch.view_as_complex(part) if common.is_complex() else part

    def write(self, mixing: float | None) -> None:
        for position, (local, common) in enumerate(zip(self._local, self._common, strict=True)):
            if mixing is None:
                learnt = local.detach().to(common.dtype) - self._sent[position].to(common.dtype)
                local.data.copy_(learnt.add_(common.detach()))
            elif mixing:
                mixed = local.detach().to(common.dtype).lerp_(common.detach(), 1 - mixing)
                local.data.copy_(mixed)
            else:
                local.data.copy_(common.detach())
        torch.autograd.graph.increment_version(list(self._local))
        self._sent = []

    def state_dict(self) -> dict[str, Any]:
        if self.is_under_way and self._arrived is None:
            self._arrived = [exchange.wait() for exchange in self._exchanges]
        return {
            "arrived": None if self._arrived is None else [mean.clone() for mean in self._arrived],
            "sent": [sent.clone() for sent in self._sent],
            "exchanges": [exchange.state_dict() for exchange in self._exchanges],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.is_under_way and self._arrived is None:
            for exchange in self._exchanges:  # all ranks have started it, so its messages must be received
                exchange.wait()
        arrived = state["arrived"]
        self._arrived = None if arrived is None else [mean.clone() for mean in arrived]
        self.is_under_way = arrived is not None
        self._sent = [sent.clone() for sent in state["sent"]]
        for exchange, saved in zip(self._exchanges, state["exchanges"], strict=True):
            exchange.load_state_dict(saved)


def _copy_of(parameter: Tensor) -> Tensor:
    """Return an independent copy with at least 32 bits, because 16 bits would lose many small steps."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    copy = parameter.detach().to(dtype, copy=True, memory_format=torch.preserve_format)
    return nn.Parameter(copy)


def _checked(optimizer: object, own: Sequence[Tensor]) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"expected outer to make a torch.optim.Optimizer of the parameters that it is given; it made a "
            f"{type(optimizer).__name__}"
        )
    has = {id(parameter) for parameter in parameters_of(optimizer)}
    expected = {id(parameter) for parameter in own}
    if has != expected:
        raise ValueError(
            f"the outer optimizer, {type(optimizer).__name__}, has other parameters: expected the "
            f"{len(expected)} that outer was given, got {len(has & expected)} of them and {len(has - expected)} "
            "others. The outer optimizer steps copies of the module's parameters: write "
            "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7), not an optimizer of module.parameters()"
        )
    return optimizer
