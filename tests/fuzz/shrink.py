"""Finds a smaller program that fails in the same way: parts are left out, or made plainer, as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from .program import Layer, Loop, Optimizer, Program, Statement, statements_of, with_body

__all__ = ["shrink", "smaller", "weight"]

_PLAIN: dict[str, Any] = {
    "sizes": (3, 3),
    "is_bare": False,
    "no_grad": False,
    "kind": "loss",
    "after": None,
    "detach": False,
    "autocast": False,
    "retain": False,
    "create_graph": False,
    "part": None,
    "hook": None,
    "compiled": False,
    "set_to_none": True,
    "bytes": False,
}
"""What is plainest, by the name of a statement's field."""


def shrink(program: Program, first_failing: Callable[[Sequence[Program]], Program | None]) -> Program:
    """The smallest program found.

    Args:
        program: one that fails.
        first_failing: the first of some programs that fails in the same way, if one does.
    """
    while True:
        candidates = sorted(set(smaller(program)), key=weight)
        found = None
        for at in range(0, len(candidates), 10):
            found = first_failing(candidates[at : at + 10])
            if found is not None:
                break
        if found is None:
            return program
        program = found


def weight(program: Program) -> tuple[int, int]:
    """How much there is to read."""
    statements = statements_of(program.body)
    odd = sum(
        getattr(s, name) != plain for s in statements for name, plain in _PLAIN.items() if hasattr(s, name)
    )
    odd += sum(max(s.counts) + (s.counts[0] != s.counts[1]) for s in statements if isinstance(s, Loop))
    odd += sum(len(getattr(s, "losses", ())) for s in statements)
    odd += sum(len(wrapper.options) for wrapper in program.wrappers)
    odd += sum(len(o.models) + (o.kind != "sgd") for o in program.optimizers)
    odd += program.dtype != "float64"
    layers = sum(
        _num_layers(m.layers) + (m.encoder_of is not None) + (m.around is not None) for m in program.models
    )
    return 3 * len(statements) + layers + 2 * len(program.optimizers) + 2 * len(program.wrappers), odd


def _num_layers(layers: tuple[Layer, ...]) -> int:
    return sum(1 + (layer.kind != "linear") + _num_layers(layer.inner) for layer in layers)


def smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, by one change each."""
    for body in _smaller_bodies(program.body):
        yield replace(program, body=body)
    if program.dtype != "float64":
        yield replace(program, dtype="float64")
    for at, wrapper in enumerate(program.wrappers):
        for left_out in range(len(wrapper.options)):
            options = wrapper.options[:left_out] + wrapper.options[left_out + 1 :]
            yield replace(program, wrappers=_with(program.wrappers, at, replace(wrapper, options=options)))
    for at, optimizer in enumerate(program.optimizers):
        if optimizer.kind != "sgd":
            yield replace(program, optimizers=_with(program.optimizers, at, replace(optimizer, kind="sgd")))
        for left_out in range(len(optimizer.models) if len(optimizer.models) > 1 else 0):
            models = optimizer.models[:left_out] + optimizer.models[left_out + 1 :]
            yield replace(
                program, optimizers=_with(program.optimizers, at, replace(optimizer, models=models))
            )
    for at, model in enumerate(program.models):
        if model.encoder_of is not None:
            yield replace(program, models=_with(program.models, at, replace(model, encoder_of=None)))
        if model.returns != "tensor":
            yield replace(program, models=_with(program.models, at, replace(model, returns="tensor")))
        if model.around is not None:
            yield replace(program, models=_with(program.models, at, replace(model, around=None)))
        for layers in _smaller_layers(model.layers):
            if layers:
                yield replace(program, models=_with(program.models, at, replace(model, layers=layers)))
    for at in range(len(program.optimizers)):
        yield from _without_optimizer(program, at)
    for at in range(len(program.models)):
        yield from _without_model(program, at)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _smaller_bodies(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    length = len(body)
    while length > 0:  # first large parts
        for at in range(0, len(body) - length + 1, max(1, length // 2)):
            yield body[:at] + body[at + length :]
        length //= 2
    for at, statement in enumerate(body):
        inner = getattr(statement, "body", None)
        if inner is not None:
            yield body[:at] + inner + body[at + 1 :]
            for less in _smaller_bodies(inner):
                if less:
                    yield _with(body, at, with_body(statement, less))
        for plainer in _plainer(statement):
            yield _with(body, at, plainer)


def _plainer(statement: Statement) -> Iterator[Statement]:
    for field in fields(statement):
        value = getattr(statement, field.name)
        if field.name in _PLAIN and value != _PLAIN[field.name]:
            yield replace(statement, **{field.name: _PLAIN[field.name]})
        if field.name == "losses" and len(value) > 1:
            for loss in value:
                yield replace(statement, losses=(loss,))  # type: ignore[call-arg]
    if isinstance(statement, Loop):
        a, b = statement.counts
        for counts in ((1, 1), (a - 1, b - 1), (a, a), (b, b)):
            if min(counts) >= 0 and sum(counts) <= a + b and counts != (a, b):
                yield replace(statement, counts=counts)


def _smaller_layers(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    for at, layer in enumerate(layers):
        yield layers[:at] + layers[at + 1 :]
        if layer.kind != "linear":
            yield _with(layers, at, Layer("linear"))
        if layer.inner:
            yield layers[:at] + layer.inner + layers[at + 1 :]
            for inner in _smaller_layers(layer.inner):
                if inner and (layer.kind != "branch" or len(inner) == 2):
                    yield _with(layers, at, replace(layer, inner=inner))


def _without_optimizer(program: Program, at: int) -> Iterator[Program]:
    body = _renumbered(program.body, "optimizer", at)
    if body is not None:
        optimizers = program.optimizers[:at] + program.optimizers[at + 1 :]
        yield replace(program, optimizers=optimizers, body=body)


def _without_model(program: Program, at: int) -> Iterator[Program]:
    """Without a model that has one wrapper, of the same number, and no optimizer; that wrapper goes, too."""
    numbers = [wrapper.model for wrapper in program.wrappers]
    if numbers != list(range(len(program.models))) or len(numbers) == 1:
        return
    if any(at in optimizer.models for optimizer in program.optimizers):
        return
    if any(at in (model.encoder_of, model.around) for model in program.models):
        return
    body: tuple[Statement, ...] | None = program.body
    for name in ("wrapper", "after", "model"):
        body = None if body is None else _renumbered(body, name, at)
    if body is None:
        return

    def renumbered(number: Any) -> Any:
        return number if number is None else number - (number > at)

    models = [
        replace(model, encoder_of=renumbered(model.encoder_of), around=renumbered(model.around))
        for number, model in enumerate(program.models)
        if number != at
    ]
    wrappers = [
        replace(w, model=renumbered(w.model)) for number, w in enumerate(program.wrappers) if number != at
    ]
    optimizers = [Optimizer(o.kind, tuple(map(renumbered, o.models))) for o in program.optimizers]
    yield replace(
        program, models=tuple(models), wrappers=tuple(wrappers), optimizers=tuple(optimizers), body=body
    )


def _renumbered(body: tuple[Statement, ...], name: str, without: int) -> tuple[Statement, ...] | None:
    """With higher numbers one less, where nothing refers to the one that goes."""
    found = []
    for statement in body:
        number = getattr(statement, name, None)
        if number == without:
            return None
        if number is not None and number > without:
            statement = replace(statement, **{name: number - 1})
        if hasattr(statement, "body"):
            inner = _renumbered(statement.body, name, without)
            if inner is None:
                return None
            statement = with_body(statement, inner)
        found.append(statement)
    return tuple(found)
