"""What the models of programs are made of: layers of width 4, and layers around layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Branch", "Checkpoint", "Heads", "Residual", "Tied", "Twice", "Unused", "frozen"]


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


def frozen(module: nn.Module) -> nn.Module:
    """Without gradients."""
    return module.requires_grad_(False)
