"""Record one run, module by module, with hooks. A recording is a list of events, plain data that can be compared."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from syncline.checkpoint.objects import positions
from syncline.equality.fingerprint import fingerprint_of, fingerprints
from syncline.gradients.usage import tensors_in
from syncline.trees import leaves

Stage = Literal["state", "input", "output", "received", "backward", "result", "gradients"]

_MAX_TEXT = 80
"""The largest length of a value in words."""


class Value(NamedTuple):
    """The fingerprint of one tensor or plain value at one moment."""

    name: str
    """The name of the value, or its position in a nested container; "" if the value is not in a container."""
    about: str
    """The shape and dtype of a tensor, or the type of a plain value."""
    bits: int
    """The fingerprint of the value; 0 if the value cannot be read."""
    amount: str = ""
    """The sum of a tensor, or the text of a plain value; "" if it is unknown. It is not compared, because a sum depends
    on the order in which a device adds."""

    def __str__(self) -> str:
        return self.about


class Event(NamedTuple):
    """Values at one moment of a run. The stage names the moment:

    - "state": the parameters and buffers before the run.
    - "input": the inputs of a module, when its forward begins.
    - "output": the outputs of a module, when its forward ends.
    - "received": the gradients of a module's outputs.
    - "backward": the gradients that a module's backward computes: those of its inputs and of its own parameters.
    - "result": the value that the function returned.
    - "gradients": the gradients of all parameters.
    """

    stage: Stage
    call: int
    """The index of the call of a module; -1 for the function itself."""
    where: str
    """The name, the class and the number of the call."""
    values: Sequence[Value]


@dataclass(kw_only=True)
class Call:
    """The record of one call of a module's forward."""

    module: str
    """The qualified name of the module; "" for the outermost module."""
    kind: str
    """The class name of the module."""
    nth: int
    """The number of this call among the calls of the same module in the run, from 1."""
    parent: Call | None
    """The call that made this call; None if no recorded call made it."""
    received: list[Value] = field(default_factory=list)
    """The gradients of the call's outputs, in the order in which the backward computed them."""
    returned: list[Value] = field(default_factory=list)
    """The gradients of the call's inputs, in the order in which the backward computed them."""

    def __str__(self) -> str:
        kind = f"{self.kind}, call {self.nth}" if self.nth > 1 else self.kind
        return f"{self.module} ({kind})" if self.module else kind


class Recording:
    """The record of one run, module by module.

    Run the computation inside `with recording:`, then call `recording.finish(result, gradients)`.

    Args:
        modules: the modules to record, with their qualified names.
        state: parameters and buffers, with their names.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with Recording({module: name for name, module in net.named_modules()}) as recording:
        ...     y = net(torch.ones(1, 2))
        >>> [(event.stage, event.where) for event in recording.events[2:]]
        [('input', '0 (Linear)'), ('output', '0 (Linear)'), ('input', '1 (ReLU)'), ('output', '1 (ReLU)'), ...]
    """

    def __init__(self, modules: Mapping[nn.Module, str], state: Sequence[tuple[str, Tensor]] = ()) -> None:
        self.events: list[Event] = []
        """All events in the order in which they are compared: those of the backward after those of the forward."""
        self.calls: list[Call] = []
        """The calls of modules in the order in which they began."""
        self.drew: dict[str, str] = {}
        """The random number generators from which the run drew, with their positions before it."""
        self.settings: dict[str, dict[str, Value]] = {}
        """Each module's attributes other than its state before the run, by the qualified name of the module."""
        self._modules = modules
        self._nth: Counter[str] = Counter()
        self._open: list[tuple[nn.Module, int]] = []
        """The running calls with their indices, the innermost last."""
        self._handles: list[Any] = []
        self._add("state", -1, values_of(state))

    def __enter__(self) -> Recording:
        self.drew = positions()
        self.settings = {name: _settings(module) for module, name in self._modules.items()}
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        now = positions()
        self.drew = {name: one for name, one in self.drew.items() if now[name] != one}

    def finish(self, result: Any, gradients: Mapping[str, Tensor | None], *, are_own: bool) -> None:
        """Add the backward, the result and the gradients of the run.

        Args:
            result: the value that the function returned.
            gradients: the gradients of all parameters.
            are_own: whether these are gradients of this rank. A mean over ranks does not show which module computed
                another gradient.
        """
        found = values_of(gradients.items())
        for event in reversed(self.events[1:]):
            call = self.calls[event.call]
            if event.stage == "output":
                self._add("received", event.call, call.received)
                continue
            own = [one for one in found if one.name.rpartition(".")[0] == call.module and call.nth == 1]
            parameters = [one._replace(name=f"parameter {one.name}") for one in own if are_own]
            self._add("backward", event.call, [*call.returned, *parameters])
        self._add("result", -1, values_of(named_leaves(result)))
        self._add("gradients", -1, found)

    def _add(self, stage: Stage, index: int, values: Sequence[Value]) -> None:
        where = str(self.calls[index]) if index >= 0 else ""
        self.events.append(Event(stage, index, where, tuple(values)))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name, index = self._modules[module], len(self.calls)
        self._nth[name] += 1
        parent = self.calls[self._open[-1][1]] if self._open else None
        call = Call(module=name, kind=type(module).__name__, nth=self._nth[name], parent=parent)
        self.calls.append(call)
        inputs = (args, kwargs) if kwargs else args
        self._add("input", index, values_of(named_leaves(inputs)))
        self._watch(inputs, "input ", call.returned)
        self._open.append((module, index))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A forward that raised has left its call open. An activation checkpoint ends forwards that it repeats that way.
        while self._open and self._open[-1][0] is not module:
            self._open.pop()
        if not self._open:
            return
        _, index = self._open.pop()
        self._add("output", index, values_of(named_leaves(output)))
        self._watch(output, "", self.calls[index].received)

    def _watch(self, tree: Any, prefix: str, found: list[Value]) -> None:
        """Let each backward append the gradients of the tensors in `tree` to `found`."""

        def append(name: str, gradient: Tensor) -> None:
            found.extend(values_of([(name, gradient)]))

        for name, leaf in named_leaves(tree) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                hook = partial(append, f"{prefix}{name}".rstrip())
                self._handles.append(leaf.register_hook(hook))


# ---------------------------------------------------------------------- values


@torch.no_grad()
def values_of(named: Iterable[tuple[str, Any]]) -> tuple[Value, ...]:
    """Return the fingerprints of named tensors and plain values, in their order.

    Examples:
        >>> x, n = values_of(named_leaves((torch.zeros(2), {"n": 3})))
        >>> x.name, x.about, n.name, n.about
        ('[0]', '(2,) torch.float32', '[1].n', 'int')
    """
    names, found = [list(column) for column in zip(*named, strict=True)] or ([], [])
    rows = zip(names, found, _bits_of(found), strict=True)
    return tuple(Value(name, _about(leaf), bits, _amount(leaf)) for name, leaf, bits in rows)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the tensors and plain values of a nested container, with their positions.

    Tensors inside mappings that are not dicts (such as a tokenizer's batch) are included. Other objects are ignored.
    """
    found: list[tuple[str, Any]] = []
    for name, leaf in leaves(tree):
        if isinstance(leaf, Tensor | int | float | complex | str | bytes | bool | None):
            found.append((name, leaf))
        else:
            found += [(f"{name}#{index}", tensor) for index, tensor in enumerate(tensors_in(leaf))]
    return found


def _bits_of(found: Sequence[Any]) -> list[int]:
    try:
        is_sparse = [isinstance(leaf, Tensor) and leaf.layout != torch.strided for leaf in found]
        return fingerprints([leaf.to_dense() if is_sparse[at] else leaf for at, leaf in enumerate(found)])
    except Exception:  # a tensor without memory; subclasses may raise any exception
        return [0] if len(found) == 1 else [bits for leaf in found for bits in _bits_of([leaf])]


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor has values in memory of its own, as tensors of torch's own class have."""
    return (
        tensor.layout == torch.strided and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
    )


def _about(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _amount(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:_MAX_TEXT]
    if is_ordinary(value):
        dtype = torch.complex128 if value.is_complex() else torch.float64
        with contextlib.suppress(RuntimeError):  # torch adds up no quantized tensors
            return f"sum {value.sum(dtype=dtype).item():.12g}"
    return ""


# ---------------------------------------------------------------------- attributes of modules other than their state

_NOT_COMPARED = frozenset(vars(nn.Module())) - {"training"}


def _settings(module: nn.Module) -> dict[str, Value]:
    """Return the plain values, unregistered tensors and random number generators among a module's attributes."""
    found = {name: _described(one) for name, one in vars(module).items() if name not in _NOT_COMPARED}
    return {name: Value(name, *one) for name, one in found.items() if one}


def _described(value: Any) -> tuple[str, int] | None:
    """Return a description and a fingerprint of an attribute; None if values of its type are not compared."""
    plain = bool | int | float | str
    is_plain_list = isinstance(value, list | tuple) and all(isinstance(one, plain) for one in value)
    if is_plain_list or isinstance(value, plain | torch.dtype | None):
        return repr(value)[:_MAX_TEXT], fingerprint_of(value)
    if isinstance(value, Tensor):
        (found,) = values_of([("", value)])
        return f"a tensor {found.about}", found.bits
    if isinstance(value, torch.Generator):
        return "a torch.Generator", fingerprint_of(value.get_state().tolist())
    if isinstance(value, random.Random):
        return "a random.Random", fingerprint_of(value.getstate())
    if type(value).__module__.startswith("numpy.random.") and hasattr(value, "bit_generator"):
        return "a numpy.random.Generator", fingerprint_of(value.bit_generator.state)
    return None
