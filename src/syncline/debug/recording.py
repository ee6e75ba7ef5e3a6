"""Record one run, module by module, with hooks. A recording is a list of events, plain data that can be compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from syncline.checkpoint.objects import positions
from syncline.equality.fingerprint import fingerprint_of, fingerprints
from syncline.gradients.usage import tensors_in
from syncline.trees import leaves

Stage = Literal["state", "input", "output", "received", "backward", "result", "gradients"]

COPIED_BYTES = 1 << 27
"""The size limit for the copies of the inputs and outputs in one run. The copies show how much two runs differ."""


class Value(NamedTuple):
    """The fingerprint of one tensor or plain value at one moment."""

    name: str
    """The name of the value, or its position in a nested container; "" if the value is not in a container."""
    about: str
    """The shape and dtype of a tensor, or the type of a plain value."""
    bits: int
    """The fingerprint of the value; 0 if the value cannot be read."""
    has_nan: bool = False
    """Whether the value is a tensor that contains NaN."""

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
    parent: int
    """The index of the call that made this call; -1 if no recorded call made it."""
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
    parent: int
    """The index of the call that made this call; -1 if no recorded call made it."""
    received: list[Value] = field(default_factory=list)
    """The gradients of the call's outputs, in the order in which the backward computed them."""
    returned: list[Value] = field(default_factory=list)
    """The gradients of the call's inputs, in the order in which the backward computed them."""

    def __str__(self) -> str:
        kind = f"{self.kind}, call {self.nth}" if self.nth > 1 else self.kind
        return f"{self.module} ({kind})" if self.module else kind


@dataclass(kw_only=True)
class Recording:
    """The record of one run."""

    events: list[Event] = field(default_factory=list)
    """All events in the order in which they are compared: those of the backward after those of the forward."""
    calls: list[Call] = field(default_factory=list)
    """The calls of modules in the order in which they began."""
    copies: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Copies of tensors on the CPU, by the index of the event and of the value in it, as far as the limit allows."""
    drew: dict[str, str] = field(default_factory=dict)
    """The random number generators from which the run drew, with their positions before it."""
    settings: dict[str, list[Value]] = field(default_factory=dict)
    """Each module's attributes other than its state before the run, by the qualified name of the module."""
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Descriptions of the attributes that the run has changed, by the qualified name of the module."""


class Recorder:
    """A recorder of the module calls in one run.

    Run the computation inside `with recorder:`, then call `recorder.finish(result, gradients)`.

    Args:
        modules: the modules to record, with their qualified names.
        state: parameters and buffers, with their names.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with Recorder({module: name for name, module in net.named_modules()}) as recorder:
        ...     y = net(torch.ones(1, 2))
        >>> [(event.stage, event.where) for event in recorder.recording.events[2:]]
        [('input', '0 (Linear)'), ('output', '0 (Linear)'), ('input', '1 (ReLU)'), ('output', '1 (ReLU)'), ...]
    """

    def __init__(self, modules: Mapping[nn.Module, str], state: Sequence[tuple[str, Tensor]] = ()) -> None:
        self.recording = Recording()
        self._modules = modules
        self._left_bytes = COPIED_BYTES
        self._nth: Counter[str] = Counter()
        self._open: list[tuple[nn.Module, int]] = []
        """The running calls with their indices, the innermost last."""
        self._handles: list[Any] = []
        self._add("state", -1, values_of(state))

    def __enter__(self) -> Recorder:
        self.recording.drew = positions()
        self.recording.settings = {name: _settings(module) for module, name in self._modules.items()}
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        now = positions()
        self.recording.drew = {name: one for name, one in self.recording.drew.items() if now[name] != one}
        for module, name in self._modules.items():
            if changed := _changed(self.recording.settings[name], _settings(module)):
                self.recording.changed[name] = changed

    def finish(self, result: Any, gradients: Mapping[str, Tensor | None], *, are_own: bool) -> Recording:
        """Add the backward, the result and the gradients of the run to the recording, and return the recording.

        Args:
            result: the value that the function returned.
            gradients: the gradients of all parameters.
            are_own: whether these are gradients of this rank. A mean over ranks does not show which module computed
                another gradient.
        """
        found = values_of(gradients.items())
        calls = self.recording.calls
        for event in reversed(self.recording.events[1:]):
            call = calls[event.call]
            if event.stage == "output":
                self._add("received", event.call, call.received)
                continue
            own = [one for one in found if one.name.rpartition(".")[0] == call.module and call.nth == 1]
            parameters = [one._replace(name=f"parameter {one.name}") for one in own if are_own]
            self._add("backward", event.call, [*call.returned, *parameters])
        self._add_tree("result", -1, result)
        self._add("gradients", -1, found)
        return self.recording

    def _add(self, stage: Stage, index: int, values: Sequence[Value]) -> None:
        call = self.recording.calls[index] if index >= 0 else None
        parent, where = (call.parent, str(call)) if call else (-1, "")
        self.recording.events.append(Event(stage, index, parent, where, tuple(values)))

    def _add_tree(self, stage: Stage, index: int, tree: Any) -> None:
        found = named_leaves(tree)
        for place, (_, leaf) in enumerate(found):
            if isinstance(leaf, Tensor) and is_ordinary(leaf) and leaf.nbytes <= self._left_bytes:
                self._left_bytes -= leaf.nbytes
                key = len(self.recording.events), place
                self.recording.copies[key] = leaf.detach().to("cpu", copy=True)
        self._add(stage, index, values_of(found))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name, index = self._modules[module], len(self.recording.calls)
        self._nth[name] += 1
        parent = self._open[-1][1] if self._open else -1
        call = Call(module=name, kind=type(module).__name__, nth=self._nth[name], parent=parent)
        self.recording.calls.append(call)
        inputs = (args, kwargs) if kwargs else args
        self._add_tree("input", index, inputs)
        self._watch(inputs, "input ", call.returned)
        self._open.append((module, index))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A forward that raised has left its call open. An activation checkpoint ends forwards that it repeats that way.
        while self._open and self._open[-1][0] is not module:
            self._open.pop()
        if not self._open:
            return
        _, index = self._open.pop()
        self._add_tree("output", index, output)
        self._watch(output, "", self.recording.calls[index].received)

    def _watch(self, tree: Any, prefix: str, found: list[Value]) -> None:
        """Let each backward append the gradients of the tensors in `tree` to `found`."""
        for name, leaf in named_leaves(tree) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self._handles.append(leaf.register_hook(_noting(f"{prefix}{name}".rstrip(), found)))


def _noting(name: str, found: list[Value]) -> Callable[[Tensor], None]:
    return lambda gradient: found.extend(values_of([(name, gradient)]))


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
    return tuple(Value(name, _about(leaf), bits, _has_nan(leaf)) for name, leaf, bits in rows)


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
    def is_sparse(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.layout != torch.strided

    try:
        return fingerprints([leaf.to_dense() if is_sparse(leaf) else leaf for leaf in found])
    except Exception:  # a tensor without memory; subclasses may raise any exception
        return [0] if len(found) == 1 else [bits for leaf in found for bits in _bits_of([leaf])]


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor has values in memory of its own, as tensors of torch's own class have."""
    return (
        tensor.layout == torch.strided and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
    )


def _about(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and is_ordinary(value) and bool(value.isnan().any())


def how_they_differ(expected: Tensor, got: Tensor) -> str:
    """Describe how many elements differ between two tensors on the CPU, and by how much.

    Examples:
        >>> how_they_differ(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 2.0]))
        '2 of 3 elements differ, by up to 1; the first at [1]: 2 and 2.5'
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return f"{_about(expected)} and {_about(got)}"
    differs = (expected != got) & ~(expected.isnan() & got.isnan())
    if not differs.any():
        return "only in the sign of a zero or the payload of a NaN"
    one, other = expected[differs], got[differs]
    largest = (one.to(torch.complex128) - other.to(torch.complex128)).abs().max().item()
    return (
        f"{len(one)} of {expected.numel()} elements differ, by up to {largest:.3g}; the first at "
        f"{differs.nonzero()[0].tolist()}: {one[0].item():.9g} and {other[0].item():.9g}"
    )


# ---------------------------------------------------------------------- attributes of modules other than their state

_NOT_COMPARED = frozenset(vars(nn.Module())) - {"training"}

_MAX_TEXT = 80


def _settings(module: nn.Module) -> list[Value]:
    """Return the plain values, unregistered tensors and random number generators among a module's attributes."""
    found = {name: _described(one) for name, one in vars(module).items() if name not in _NOT_COMPARED}
    return [Value(name, *one) for name, one in found.items() if one]


def _changed(before: Sequence[Value], after: Sequence[Value]) -> list[str]:
    """Describe the attributes that have changed. The mode is left out, because it is restored after each run."""
    old, new = ({one.name: one for one in values if one.name != "training"} for values in (before, after))
    texts = []
    for name in {**old, **new}:
        was, now = old.get(name, "nothing"), new.get(name, "nothing")
        if was != now:
            texts.append(f"{name} went from {was} to {now if str(now) != str(was) else 'another one'}")
    return texts


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
