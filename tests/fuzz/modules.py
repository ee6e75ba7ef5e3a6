"""What the models of programs are made of: layers of width 4, and layers around layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

__all__ = [
    "ActNorm",
    "Bank",
    "Branch",
    "Checkpoint",
    "Heads",
    "Lazy",
    "Residual",
    "Returning",
    "Scaled",
    "Tied",
    "Transformed",
    "Twice",
    "Unused",
    "frozen",
    "halved",
    "pruned",
    "replace",
    "scripted",
    "transformed",
    "unpacked",
]


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


class Residual(Twice):
    """What is added to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Unused(Twice):
    """Parameters that no forward uses."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Checkpoint(Twice):
    """Activations are computed again in backward."""

    def __init__(self, *inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__(*inner)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Branch(nn.Module):
    """One of two layers, as `switch` says."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.to = 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.b if self.to else self.a)(x)


class Heads(nn.Module):
    """Two outputs, which have no parameters in common."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Scaled(nn.Module):
    """A buffer that a forward reads. If it has several rows, they are one memory."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        # What is ignored has to be the same on all ranks from the first.
        scale = torch.rand(1, 4) if rows == 1 else torch.linspace(0.5, 2.0, 4)
        self.register_buffer("scale", scale.expand(rows, 4))

    def forward(self, x: Tensor) -> Any:
        return x * self.scale[0]  # type: ignore[index]


class Lazy(nn.Module):
    """A mask that a forward makes, and makes anew for a larger batch. Batches have other sizes on other ranks."""

    def forward(self, x: Tensor) -> Tensor:
        if "mask" not in self._buffers or len(self.get_buffer("mask")) < len(x):
            self.register_buffer("mask", torch.ones(len(x), 1), persistent=False)
        return x * self.get_buffer("mask")[: len(x)]


class Bank(nn.Module):
    """A memory of this rank's own samples, of another size than on the other rank."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.register_buffer("bank", torch.ones(2 + (rank or 0), 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("bank").mean(0)


class ActNorm(nn.Module):
    """A scale that the first forward in training sets from its batch, so it differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_set:
            self.is_set = True
            with torch.no_grad():
                self.scale.copy_(1 / (x.abs().mean(0) + 0.5))
        return x * self.scale


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Opaque:
    """An output whose tensor is found by nobody."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Returning(nn.Sequential):
    """Layers whose output is packed in some way."""

    def __init__(self, how: str, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        match self.how:
            case "opaque":
                return Opaque(y)
            case "slots":
                return Slots(y)
            case "closure":
                return lambda: y
            case "leaf":
                return next(self.parameters()), y
        return y[:, :]


def halved(output: Tensor) -> Tensor:
    """Change an output in place, as programs do."""
    output *= 0.5
    return output


def unpacked(output: Any) -> Any:
    """The tensor, or the tensors of two heads, in an output."""
    if isinstance(output, Opaque | Slots):
        return output.held
    if callable(output) and not isinstance(output, Tensor):
        return output()
    if isinstance(output, tuple) and isinstance(output[0], nn.Parameter):
        return output[1]
    return output


def scripted(layer: nn.Module) -> Any:
    """Compile a layer by TorchScript, whose tables of parameters are no dictionaries."""
    return torch.jit.script(layer)


def pruned(module: nn.Module) -> None:
    """Prune one linear layer, if there is one that is not pruned: its weight becomes a mask and a parameter."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and "weight" in layer._parameters:
            prune.l1_unstructured(layer, "weight", amount=0.25)
            return


def replace(module: nn.Module, seed: int) -> None:
    """Put a new layer into the place of the first linear one, if there is one."""
    for name, layer in module.named_children():
        if type(layer) is nn.Linear:
            new = nn.Linear(4, 4)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in new.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            setattr(module, name, new)
            return


class Transformed(Twice):
    """Layers inside of a transform of torch.func."""

    def __init__(self, how: str, *inner: nn.Module) -> None:
        super().__init__(*inner)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return transformed(self.how, self.inner, x)


def transformed(how: str, model: nn.Module, x: Tensor) -> Any:
    """Call a model by a transform of torch.func; the output is as wide as the input."""

    def squares(x: Tensor) -> Any:
        return model(x).square()

    match how:
        case "vmap":
            return vmap(model)(x)
        case "grad":
            return grad(lambda x: squares(x).sum())(x)
        case "jacobian":
            return vmap(jacrev(squares))(x).sum(1)
    values: Callable[..., Any] = functional_call
    return values(model, {name: 2 * value for name, value in model.named_parameters()}, (x,))


def frozen(module: nn.Module) -> nn.Module:
    """Without gradients."""
    return module.requires_grad_(False)
