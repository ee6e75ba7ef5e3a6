"""What a forward returns does not decide whether its backward is reduced: only the modes of the last forwards do."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.testing import run_ranks
from syncline.transport.base import Transport


@dataclass
class Fields:
    logits: Tensor


class Named(NamedTuple):
    logits: Tensor


class ModelOutput(OrderedDict[str, Tensor]):
    pass


class TensorDict:
    """It is found neither in a mapping nor in the fields of a dataclass."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]


class Custom:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Slots:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Net(nn.Module):
    def __init__(self, kind: str, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(3, width)
        self._pack = KINDS[kind][0]
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return self._pack(self, self.head(self.encoder(x).tanh()))


def keep(net: Net, y: Tensor) -> None:
    net.kept = y


def one_by_one(net: Net, y: Tensor) -> Iterator[Tensor]:
    yield y


def in_place(net: Any, y: Tensor) -> Tensor:
    y *= 2.0
    return y


Pack = Callable[[Net, Tensor], Any]

Unpack = Callable[[Net, Any], Tensor]

KINDS: dict[str, tuple[Pack, Unpack]] = {
    "tensor": (lambda net, y: y, lambda net, out: out),
    "dataclass": (lambda net, y: Fields(y), lambda net, out: out.logits),
    "named tuple": (lambda net, y: Named(y), lambda net, out: out.logits),
    "model output": (lambda net, y: ModelOutput(logits=y), lambda net, out: out["logits"]),
    "tensor dict": (lambda net, y: TensorDict(logits=y), lambda net, out: out["logits"]),
    "distribution": (lambda net, y: torch.distributions.Normal(y, 1.0), lambda net, out: out.mean),
    "custom class": (lambda net, y: Custom(y), lambda net, out: out.logits),
    "slots": (lambda net, y: Slots(y), lambda net, out: out.logits),
    "generator": (one_by_one, lambda net, out: next(out)),
    "on self": (keep, lambda net, out: net.kept),
    "closure": (lambda net, y: lambda: y, lambda net, out: out()),
    "a leaf, too": (lambda net, y: (net.head.bias, y), lambda net, out: out[1] + out[0]),
    "a view, in place": (lambda net, y: y[:, 0], in_place),
    "a view of all, in place": (lambda net, y: y.view(-1), in_place),
}


def detached(net: Net, out: Any) -> None:
    """Compute the gradients in two parts, as programs with replay buffers do."""
    leaf = KINDS["tensor"][1](net, out).detach().requires_grad_()
    leaf.square().mean().backward()
    out.backward(leaf.grad)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + number))


def with_values(module: Any) -> Any:
    """Give the parameters values that do not depend on torch's generator, which all threads share."""
    for number, parameter in enumerate(module.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def gradients(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def loss_of(kind: str, callables: list[Any], nets: list[Net], x: Tensor) -> Tensor:
    outputs = [call(x) for call in callables]  # all forwards run before any output is used
    parts = [KINDS[kind][1](net, out) for net, out in zip(nets, outputs, strict=True)]
    return sum((part.square().mean() for part in parts), torch.zeros(()))


def train(t: Transport, kind: str, situation: str) -> bool:
    """Return whether the gradients of each of three steps were the mean over all ranks."""
    encoder = with_values(nn.Linear(3, 3))
    nets = [with_values(Net(kind, encoder, 2))]
    if situation.startswith("shared"):
        nets.append(with_values(Net(kind, encoder, 1)))
    whole = nn.ModuleList(nets)
    reference: Any = copy.deepcopy(whole)
    wrapped: list[Any] = [
        sl.DistributedDataParallel(
            net,
            process_group=t,
            find_unused_parameters="find_unused" in situation,
            static_graph="static_graph" in situation,
        )
        for net in nets
    ]
    num_micro_batches = 2 if "accumulate" in situation else 1
    right = []
    for step in range(3):
        whole.zero_grad()
        reference.zero_grad()
        for micro in range(num_micro_batches):
            is_last = micro == num_micro_batches - 1
            x = batch(t.rank, 10 * step + micro)
            if is_last:
                loss_of(kind, wrapped, nets, x).backward()
            elif situation == "accumulate, the forward alone":
                with wrapped[0].no_sync():
                    loss = loss_of(kind, wrapped, nets, x)
                loss.backward()
            else:
                with wrapped[0].no_sync(), wrapped[-1].no_sync():
                    loss_of(kind, wrapped, nets, x).backward()
            for rank in range(t.size):
                x = batch(rank, 10 * step + micro)
                (loss_of(kind, list(reference), list(reference), x) / t.size).backward()
        pairs = zip(gradients(whole), gradients(reference), strict=True)
        right.append(all(torch.allclose(one, other, atol=1e-6) for one, other in pairs))
    return all(right)


def test_gradients_are_the_mean_whatever_a_forward_returns() -> None:
    situations = (
        "one",
        "one, find_unused",
        "one, static_graph",
        "shared",
        "shared, find_unused",
        "accumulate",
        "accumulate, the forward alone",
        "shared, accumulate",
    )

    def rank(t: Transport) -> list[tuple[str, str]]:
        return [how for how in product(KINDS, situations) if not train(t, *how)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_ranks(2, rank) == [[], []]


def test_an_output_that_is_detached_and_attached_again() -> None:
    def rank(t: Transport) -> list[Tensor]:
        net = with_values(Net("tensor", nn.Linear(3, 3), 2))
        ddp: Any = sl.DistributedDataParallel(net, process_group=t)
        detached(net, ddp(batch(t.rank, 0)))
        return gradients(net)

    one, other = run_ranks(2, rank)
    assert all(map(torch.equal, one, other))


def test_a_module_that_changes_needs_no_output_to_be_followed() -> None:
    """A layer is unfrozen, and forward returns nothing that can be watched."""

    def rank(t: Transport) -> list[Tensor]:
        net = with_values(Net("on self", nn.Linear(3, 3), 2))
        net.encoder.requires_grad_(False)
        ddp: Any = sl.DistributedDataParallel(net, process_group=t)
        for step in range(2):
            ddp(batch(t.rank, step))
            ddp.zero_grad()
            net.kept.square().sum().backward()
            net.encoder.requires_grad_()
        return gradients(net)

    one, other = run_ranks(2, rank)
    assert len(one) == 4
    assert all(map(torch.equal, one, other))
