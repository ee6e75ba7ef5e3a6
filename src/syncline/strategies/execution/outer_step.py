"""The outer loop of DiLoCo: an optimizer that steps a copy of the parameters by the mean of the ranks' changes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from syncline.compression.exchange import MeanExchange
from syncline.optimizers.contents import made_optimizer
from syncline.strategies.actions import (
    Action,
    AdvanceOuter,
    OuterCopies,
    ReceiveOuter,
    RestartOuter,
    SendOuter,
)
from syncline.strategies.execution.flat import InPlaceMean, Wires, flat_groups
from syncline.strategies.execution.kept import Kept
from syncline.strategies.execution.standing import Standing
from syncline.tensors.targets import as_real
from syncline.transport.base import Transport

_LEAST_PART = 0.1
"""The part of the ranks' mean change that an outer optimizer is expected to apply at least, in the long run."""


def _warn_of_small_steps(optimizer: torch.optim.Optimizer) -> None:
    """Warn of an outer SGD that applies hardly any of the ranks' mean change, as with torch's default lr=0.001."""
    if type(optimizer) is not torch.optim.SGD:
        return  # the updates of other optimizers do not scale with the gradient, or are unknown
    for group in optimizer.param_groups:
        rate, momentum = float(group["lr"]), group["momentum"]
        if momentum < 1 and rate / (1 - momentum) < _LEAST_PART:
            warnings.warn(
                f"DiLoCo: the outer optimizer is SGD with lr={rate:g} and momentum={momentum:g}, so it keeps "
                f"{rate / (1 - momentum):.2%} of the mean change that the ranks make between two parameter syncs, and "
                "the training hardly advances. The default is lr=0.7, momentum=0.9, nesterov=True",
                stacklevel=2,
            )
            return


class OuterLoop(Kept):
    """The outer loop of DiLoCo: a copy of the parameters, equal on all ranks, and the optimizer that steps the copy.

    Args:
        named: the module's parameters with their names. The names are the same on all ranks.
        copies: the fragments, the function that makes the optimizer, and the compression of outer gradients.
        transport: the lane for the outer gradients. It carries no other data.
        standing: the two-phase commit of outer steps.

    Raises:
        TypeError: `copies.outer` does not return an optimizer.
        ValueError: `copies.outer` returns an optimizer of other parameters than the copies.
    """

    name = "outer"
    has_copies = True

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        copies: OuterCopies,
        transport: Transport,
        standing: Standing,
    ) -> None:
        self._standing = standing
        self._local = dict(named)
        self._common = {name: _copy_of(parameter) for name, parameter in named}
        common = list(self._common.values())
        self.optimizer: torch.optim.Optimizer = made_optimizer(
            "outer(parameters)",
            lambda: copies.outer(list(common)),
            common,
            hint=(
                ". The outer optimizer steps copies of the module's parameters, which are the argument of outer(). "
                "Write outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7), without module.parameters()"
            ),
        )
        if transport.rank == 0:
            _warn_of_small_steps(self.optimizer)
        self.num_fragments = len(copies.fragments)
        wires = Wires(transport, self._local.values())
        self._fragments = [
            _Fragment([named[i][1] for i in indices], [common[i] for i in indices], copies, wires)
            for indices in copies.fragments
        ]

    def start(self) -> None:
        with torch.no_grad():
            for name, common in self._common.items():
                common.copy_(self._local[name])

    def restart(self) -> None:
        if not any(fragment.is_under_way for fragment in self._fragments):
            self.start()

    def run(self, action: Action) -> None:
        match action:
            case RestartOuter():
                self.start()
            case SendOuter(fragment):
                self._fragments[fragment].send(keeps=self._standing.confirms)
            case AdvanceOuter(fragment):
                self._fragments[fragment].advance()
            case ReceiveOuter(fragment, mixing):
                self._fragments[fragment].receive_gradients()
                self._standing.write(partial(self._step, fragment, mixing))
            case _:
                super().run(action)

    def _step(self, fragment: int, mixing: float | None) -> None:
        try:
            self.optimizer.step()
        except BaseException:
            self._fragments[fragment].undo()
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self._fragments[fragment].write(mixing)

    def follow(self, transport: Transport) -> None:
        """Average over the ranks of this lane from now on, and discard the averages in flight.

        The copies, their optimizer and the residuals of this rank are kept.
        """
        self.optimizer.zero_grad(set_to_none=True)
        wires = Wires(transport, self._local.values())
        for fragment in self._fragments:
            fragment.follow(wires)

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the copies of the parameters, the state of their optimizer, and the state of each fragment.

        This is a collective call if an average is in flight. The copies are equal on all ranks. The states of the
        fragments contain the residuals of the compression, which differ between ranks.
        """
        return {
            "parameters": {name: common.detach().clone() for name, common in self._common.items()},
            "optimizer": self.optimizer.state_dict(),
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. This is a collective call if an average is in flight.

        Raises:
            ValueError: the state was saved from a module with other parameters.
        """
        saved = state["parameters"]
        expected = {name: tuple(common.shape) for name, common in self._common.items()}
        found = {name: tuple(value.shape) for name, value in saved.items()}
        differing = sorted({name for name, _ in expected.items() ^ found.items()})
        if differing:
            first = differing[0]
            raise ValueError(
                f"this state of DiLoCo was saved from another module. Expected {first} to have shape "
                f"{expected.get(first)}, got {found.get(first)} (None if there is no such parameter). These parameters "
                f"differ: {', '.join(differing[:5])}. Load a state that was saved from the same module"
            )
        with torch.no_grad():
            for name, common in self._common.items():
                common.copy_(saved[name])
        self.optimizer.load_state_dict(state["optimizer"])
        for fragment, of_fragment in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(of_fragment)


class _Fragment:
    """A fragment: a part of the module's parameters. All parameters of a fragment sync after the same step.

    Args:
        local: the module's parameters that belong to the fragment.
        common: the outer optimizer's copies of these parameters, in the same order.
        copies: the settings of DiLoCo, of which `compression`, `keeps_sent` and `replaces` are used.
        wires: the lane that carries the outer gradients, and memory for averages in place.
    """

    def __init__(
        self, local: Sequence[Tensor], common: Sequence[Tensor], copies: OuterCopies, wires: Wires
    ) -> None:
        self._local, self._common = local, common
        self._groups = flat_groups(common)
        self._wires, self._compression = wires, copies.compression
        self._exchanges = self._new_exchanges(wires.transport)
        self._is_open = False
        """Whether the fragment's outer gradient was sent, and its outer step has not been written yet."""
        self._arrived: list[Tensor] | None = None
        """The mean outer gradients, if `state_dict` waited for them before the outer step; otherwise None."""
        self._keeps_sent = copies.keeps_sent
        self._sent: list[Tensor] = []
        """The values of the parameters at the last send; empty if they are not needed."""
        self._may_replace = copies.replaces and copies.compression is None
        self._in_place: InPlaceMean | None = None
        """The mean outer gradient in the memory of the parameters, until the outer step is written; None otherwise."""

    @property
    def is_under_way(self) -> bool:
        """Whether the fragment's outer gradient was sent, and its outer step has not been taken yet."""
        return self._arrived is not None or any(exchange.is_under_way for exchange in self._exchanges)

    def _new_exchanges(self, transport: Transport) -> list[MeanExchange]:
        return [
            MeanExchange(
                self._compression, group.shapes, dtype=group.dtype, device=group.device, transport=transport
            )
            for group in self._groups
        ]

    def follow(self, wires: Wires) -> None:
        """Average over the ranks of this lane from now on. Discard an average that was not written."""
        self._wires = wires
        former, self._exchanges = self._exchanges, self._new_exchanges(wires.transport)
        for before, exchange in zip(former, self._exchanges, strict=True):
            if self._is_open:
                before._undo()
            for index, memory in enumerate(before.memory()):
                exchange.remember(index, memory)
        self._arrived, self._in_place, self._sent, self._is_open = None, None, [], False

    def send(self, *, keeps: bool) -> None:
        """Start to average the outer gradient.

        Args:
            keeps: whether the average may be discarded, so that the present residuals are kept until its outer step.
        """
        self._is_open = True
        self._in_place = InPlaceMean(self._local, self._common) if self._replaces(keeps=keeps) else None
        if self._in_place is not None:
            return  # `receive_gradients` follows at once, and averages
        for group, exchange in zip(self._groups, self._exchanges, strict=True):
            if keeps:
                exchange._keep()
            flat = torch.empty(group.numel, dtype=group.dtype, device=group.device)
            for index, moved in zip(group.indices, group.views(flat), strict=True):
                common, local = as_real(self._common[index]), as_real(self._local[index])
                # The copy is first rounded as it was written into the parameters. Otherwise that rounding would count
                # as a move, and the outer step would undo it.
                torch.sub(common.to(local.dtype).to(common.dtype), local, out=moved)
            exchange.start(flat)
        self._sent = [local.detach().clone() for local in self._local] if self._keeps_sent else []

    def _replaces(self, *, keeps: bool) -> bool:
        """Return whether the mean outer gradient replaces the values of the parameters until the outer step.

        Args:
            keeps: whether the average may be discarded, so that the parameters must keep their values.
        """
        transport = self._wires.transport
        return (
            self._may_replace
            and not keeps
            and transport.size > 1
            and all(
                local.dtype is common.dtype
                and not local.is_complex()
                and transport.sending_device(local.device) == local.device
                for local, common in zip(self._local, self._common, strict=True)
            )
        )

    def advance(self) -> None:
        for exchange in self._exchanges:
            exchange.advance()

    def receive_gradients(self) -> None:
        """Wait for the mean outer gradients, and store them in `.grad` of the copies."""
        if self._in_place is not None:
            self._in_place.run(self._wires)
            for local, common in zip(self._local, self._common, strict=True):
                common.grad = local.data
            return
        means = self._arrived or [exchange.wait() for exchange in self._exchanges]
        self._arrived = None
        for group, mean in zip(self._groups, means, strict=True):
            for index, part in zip(group.indices, group.views(mean), strict=True):
                common = self._common[index]
                common.grad = torch.view_as_complex(part) if common.is_complex() else part

    def write(self, mixing: float | None) -> None:
        """Write the copies, combined with this rank's own values, into the parameters. The copies do not change.

        Args:
            mixing: the weight of this rank's own values in the written values. Pass None to write the copies plus this
                rank's changes since the send.
        """
        for position, (local, common) in enumerate(zip(self._local, self._common, strict=True)):
            if mixing is None:
                moved = local.detach().to(common.dtype) - self._sent[position].to(common.dtype)
                local.data.copy_(moved.add_(common.detach()))
            elif mixing:
                local.data.copy_(local.detach().to(common.dtype).lerp_(common.detach(), 1 - mixing))
            else:
                local.data.copy_(common.detach())
        torch.autograd.graph.increment_version(list(self._local))
        self._in_place, self._sent, self._is_open = None, [], False

    def undo(self) -> None:
        """Restore the parameters, because the outer step has failed."""
        if self._in_place is not None:
            self._in_place.undo()
            self._in_place = None

    def state_dict(self) -> dict[str, Any]:
        if self._arrived is None and self.is_under_way:
            self._arrived = [exchange.wait() for exchange in self._exchanges]
        return {
            "arrived": None if self._arrived is None else [mean.clone() for mean in self._arrived],
            "sent": [sent.clone() for sent in self._sent],
            "exchanges": [exchange.state_dict() for exchange in self._exchanges],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for exchange in self._exchanges:
            if exchange.is_under_way:  # all ranks have started it, so its messages must be received
                exchange.wait()
        arrived = state["arrived"]
        self._arrived = None if arrived is None else [mean.clone() for mean in arrived]
        self._sent = [sent.clone() for sent in state["sent"]]
        for exchange, saved in zip(self._exchanges, state["exchanges"], strict=True):
            exchange.load_state_dict(saved)


def _copy_of(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter with at least 32 bits per value, because 16 bits would lose small steps."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    copy = parameter.detach().to(dtype, copy=True, memory_format=torch.preserve_format)
    return nn.Parameter(copy)
