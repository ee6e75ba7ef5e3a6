"""What a program is: models, wrappers, optimizers, and a tree of statements. Plain frozen data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "TRANSFORMS",
    "AllReduce",
    "Average",
    "Backward",
    "Clip",
    "Drop",
    "Flag",
    "Forward",
    "Freeze",
    "Join",
    "Layer",
    "Loop",
    "Mode",
    "Model",
    "NoSync",
    "OnRank",
    "Optimizer",
    "Program",
    "Prune",
    "Reload",
    "ReloadOptimizer",
    "Replace",
    "Rewrap",
    "Save",
    "Statement",
    "Step",
    "Swap",
    "Switch",
    "Wrapper",
    "ZeroGrad",
    "rewritten",
    "statements_of",
    "with_body",
]

TRANSFORMS = ("vmap", "grad", "jacobian", "call")
"""Of torch.func: kinds of layers, and of forwards."""


@dataclass(frozen=True)
class Layer:
    """A layer, of the same width in and out; some contain others."""

    kind: str
    inner: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Model:
    """Layers in a row; the first may be the first layer of an earlier model."""

    layers: tuple[Layer, ...]
    encoder_of: int | None = None
    has_heads: bool = False
    """The first layer is the head "a", the others are the head "b": two outputs of one input."""
    returns: str = "tensor"
    """Or "opaque", "slots", "closure", "leaf" or "view": how the output is packed."""
    around: int | None = None
    """The wrapper that is its second layer, and whose parameters and buffers its own wrapper ignores."""


@dataclass(frozen=True)
class Wrapper:
    """A model in the class under test. Options of torch's class, as pairs."""

    model: int
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Optimizer:
    """Of the parameters of some wrappers' models."""

    kind: str
    models: tuple[int, ...]


@dataclass(frozen=True)
class Statement:
    """One statement."""


@dataclass(frozen=True)
class Forward(Statement):
    """A forward, and the loss of its output, kept under a name or not."""

    wrapper: int
    seed: int
    sizes: tuple[int, int] = (3, 3)
    loss: str | None = None
    """The name that the loss is kept under."""
    is_bare: bool = False
    """Through `.module`."""
    no_grad: bool = False
    kind: str = "loss"
    """Or "penalty": of the gradient of the output with respect to the input. Or "heads": a loss of each head. Or one of
    `TRANSFORMS`, around the wrapper."""
    after: int | None = None
    """The wrapper whose output is the input."""
    detach: bool = False
    """That output is detached."""
    autocast: bool = False
    second: str | None = None
    """The name of the loss of the head "b", where `loss` is that of the head "a"."""


@dataclass(frozen=True)
class Backward(Statement):
    """Of the sum of some losses."""

    losses: tuple[str, ...]
    retain: bool = False
    create_graph: bool = False
    part: str | None = None
    """`inputs=` the parameters of this head of model 0."""
    hook: str | None = None
    """"read" or "clear": what hooks on all parameters do with `.grad`."""
    compiled: bool = False
    """By compiled autograd."""


@dataclass(frozen=True)
class Drop(Statement):
    """A loss and its graph are freed."""

    loss: str


@dataclass(frozen=True)
class ZeroGrad(Statement):
    """Of a wrapper's model."""

    wrapper: int
    set_to_none: bool = True


@dataclass(frozen=True)
class Step(Statement):
    optimizer: int


@dataclass(frozen=True)
class Clip(Statement):
    wrapper: int


@dataclass(frozen=True)
class Mode(Statement):
    """train() or eval()."""

    wrapper: int
    train: bool


@dataclass(frozen=True)
class Flag(Statement):
    """`require_backward_grad_sync` is set."""

    wrapper: int
    on: bool


@dataclass(frozen=True)
class Freeze(Statement):
    """`requires_grad_` of a wrapper's model."""

    wrapper: int
    on: bool


@dataclass(frozen=True)
class Switch(Statement):
    """Which of two branches a model takes."""

    model: int
    to: int


@dataclass(frozen=True)
class Swap(Statement):
    """The contents of all parameters of a model are swapped with those of copies."""

    model: int


@dataclass(frozen=True)
class Prune(Statement):
    """A linear layer of a model is pruned, on all ranks."""

    model: int


@dataclass(frozen=True)
class Replace(Statement):
    """A linear layer of a model is replaced by a new one, with values of its own on each rank or not."""

    model: int
    seed: int
    is_equal: bool


@dataclass(frozen=True)
class Average(Statement):
    """The program averages the gradients of a wrapper's model by itself."""

    wrapper: int


@dataclass(frozen=True)
class Reload(Statement):
    """A state_dict round trip of a wrapper, through bytes or not."""

    wrapper: int
    bytes: bool = False


@dataclass(frozen=True)
class ReloadOptimizer(Statement):
    optimizer: int


@dataclass(frozen=True)
class Save(Statement):
    """A wrapper's state_dict goes into a file."""

    wrapper: int


@dataclass(frozen=True)
class Rewrap(Statement):
    """The module is wrapped anew, in the place of its wrapper."""

    wrapper: int


@dataclass(frozen=True)
class AllReduce(Statement):
    """The program adds up a number of its own over the ranks."""

    wrapper: int


@dataclass(frozen=True)
class NoSync(Statement):
    wrapper: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Join(Statement):
    wrapper: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class OnRank(Statement):
    rank: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Loop(Statement):
    """So many times on rank 0, so many on rank 1."""

    counts: tuple[int, int]
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Program:
    """A training program for two ranks."""

    models: tuple[Model, ...]
    wrappers: tuple[Wrapper, ...]
    optimizers: tuple[Optimizer, ...]
    body: tuple[Statement, ...]
    dtype: str = "float64"
    seed: int = 0
    """Where it came from."""


def statements_of(body: tuple[Statement, ...]) -> list[Statement]:
    """All statements, also those inside of others."""
    found: list[Statement] = []
    for statement in body:
        found += [statement, *statements_of(getattr(statement, "body", ()))]
    return found


def rewritten(body: tuple[Statement, ...], change: Callable[[Any], Statement]) -> tuple[Statement, ...]:
    """With another statement in the place of each, also of those inside of others."""
    return tuple(change(with_body(s, rewritten(s.body, change)) if hasattr(s, "body") else s) for s in body)


def with_body(statement: Any, body: tuple[Statement, ...]) -> Any:
    """The same block around another body."""
    return replace(statement, body=body)
