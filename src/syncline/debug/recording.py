"""Record one run, module by module, with hooks. A recording is plain data that can be compared and sent."""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from syncline.checkpoint.objects import positions
from syncline.debug.values import Kept, Value, how_they_differ, named_leaves, values_of, values_of_named
from syncline.equality.fingerprint import fingerprint_of


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
    is_training: bool
    """Whether the module was in training mode."""
    drew: Sequence[str] = ()
    """The names of the random number generators that advanced in this call, but not in a call inside it."""
    output_grads: list[Value] = field(default_factory=list)
    """The gradients of the call's outputs, in the order in which the backward computed them."""
    input_grads: list[Value] = field(default_factory=list)
    """The gradients of the call's inputs, in the order in which the backward computed them."""


class Event(NamedTuple):
    """An event of a run: the beginning of a call with its inputs, or the end of a call with its outputs."""

    kind: Literal["input", "output"]
    call: int
    values: Sequence[Value]


@dataclass(kw_only=True)
class Recording:
    """The record of one run. Calls are in the order in which they began, events in the order in which they happened."""

    state: Sequence[Value] = ()
    """The fingerprints of parameters and buffers before the run."""
    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    result: Sequence[Value] = ()
    """The fingerprints of the values that the function returned."""
    gradients: Sequence[Value] = ()
    """The fingerprints of the parameters' gradients after the run."""
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """Descriptions of each module's plain attributes before the run, by the name of the module and of the attribute."""
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Descriptions of the attributes that the run has changed, by the qualified name of the module."""

    def compared(self) -> list[Any]:
        """Return the parts of the recording that must be equal in two runs, as plain data."""
        calls = [replace(call, is_training=False, drew=()) for call in self.calls]
        return [self.state, calls, self.events, self.result, self.gradients]

    def dumped(self) -> bytes:
        """Serialize the recording, so that it can be sent to another rank."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loaded(dumped: bytes) -> Recording:
        """Return the recording that was serialized into `dumped`."""
        found = json.loads(dumped)
        for row in (found, *found["calls"]):
            for name in ("state", "result", "gradients", "output_grads", "input_grads"):
                if name in row:
                    row[name] = _values(row[name])
        found["calls"] = [Call(**call) for call in found["calls"]]
        found["events"] = [Event(kind, call, _values(values)) for kind, call, values in found["events"]]
        return Recording(**found)


def _values(rows: Sequence[Sequence[Any]]) -> list[Value]:
    return [Value(*row) for row in rows]


# ---------------------------------------------------------------------- modules


def qualified(*parts: str) -> str:
    """Join the parts of a qualified name with dots. Empty parts are left out."""
    return ".".join(filter(None, parts))


def named_modules(roots: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """Return the roots and all modules inside them, each once, with their qualified names.

    Args:
        roots: the outermost modules, by the prefix for the names of their parts; see `named_roots`.
    """
    named: dict[nn.Module, str] = {}
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            named.setdefault(module, qualified(prefix, name))
    return named


def named_roots(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules by the prefix for the names of their parts. If there is only one, its prefix is empty.

    Examples:
        >>> [*named_roots([nn.ReLU()])], [*named_roots([nn.ReLU(), nn.GELU(), nn.ReLU()])]
        ([''], ['ReLU#1', 'GELU', 'ReLU#2'])
    """
    if len(modules) == 1:
        return {"": modules[0]}
    kinds = [type(module).__name__ for module in modules]
    return {
        f"{kind}#{kinds[: index + 1].count(kind)}" if kinds.count(kind) > 1 else kind: modules[index]
        for index, kind in enumerate(kinds)
    }


@contextlib.contextmanager
def watching_for_roots(on_root: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `on_root` once for each outermost module that runs in the `with` block, before its first forward."""
    open_calls: list[nn.Module] = []
    known: set[nn.Module] = set()

    def before(module: nn.Module, args: Any) -> None:
        if not open_calls and module not in known:
            known.add(module)
            on_root(module)
        open_calls.append(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        while open_calls and open_calls.pop() is not module:
            pass

    handles = [
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------- recording


class Recorder:
    """A recorder of the module calls in one run.

    Run the computation inside `with recorder:`, then call `recorder.finish(result, gradients)`.

    Args:
        modules: the modules to record, with their qualified names.
        state: the fingerprints of parameters and buffers before the run.
        kept: a store into which inputs and outputs are copied, so that a later run can be compared with this one. Pass
            None to copy nothing.
        against: the recording of an earlier run of this rank, and the copies of its inputs and outputs. `difference`
            then describes the first input or output that differs.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with Recorder(named_modules({"": net})) as recorder:
        ...     y = net(torch.ones(1, 2))
        >>> [(event.kind, recorder.recording.calls[event.call].module) for event in recorder.recording.events[1:]]
        [('input', '0'), ('output', '0'), ('input', '1'), ('output', '1'), ('output', '')]
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, str],
        state: Sequence[Value] = (),
        *,
        kept: Kept | None = None,
        against: tuple[Recording, Kept] | None = None,
    ) -> None:
        self.recording = Recording(state=state)
        self.difference = ""
        """The size of the first difference from `against` in an input or output, in words; "" if unknown."""
        self._modules = modules
        self._kept = kept
        self._against = against
        self._is_equal_so_far = True
        self._nth: Counter[str] = Counter()
        self._open: list[tuple[nn.Module, int, dict[str, str], set[str]]] = []
        """The running calls, the innermost last.

        Each call is a tuple: its module, its index, the positions of the random number generators when it began, and
        the names of the generators that inner calls have advanced.
        """
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        self._settings_before = {name: _settings(module) for module, name in self._modules.items()}
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        recording = self.recording
        recording.settings = {name: found for name, found in self._settings_before.items() if found}
        for module, name in self._modules.items():
            before, after = self._settings_before[name], _settings(module)
            changed = [
                _how_it_changed(key, before.get(key, "nothing"), after.get(key, "nothing"))
                for key in {**before, **after}
                if before.get(key) != after.get(key)
            ]
            if changed:
                recording.changed[name] = changed

    def finish(self, result: Any, gradients: Mapping[str, Tensor | None]) -> Recording:
        """Add the result and the gradients of the run to the recording, and return the recording."""
        self.recording.result = values_of(result)
        self.recording.gradients = values_of_named(list(gradients.items()))
        return self.recording

    # ------------------------------------------------------------------ hooks

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        recording, index = self.recording, len(self.recording.calls)
        name = self._modules[module]
        self._nth[name] += 1
        call = Call(
            module=name,
            kind=type(module).__name__,
            nth=self._nth[name],
            parent=self._open[-1][1] if self._open else -1,
            is_training=module.training,
        )
        inputs = (args, kwargs) if kwargs else args
        recording.calls.append(call)
        recording.events.append(Event("input", index, values_of(inputs)))
        self._compare(inputs)
        self._watch(inputs, call.input_grads)
        self._open.append((module, index, positions(), set()))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A forward that raised has left its call open. An activation checkpoint ends forwards that it repeats that way.
        while self._open and self._open[-1][0] is not module:
            self._open.pop()
        if not self._open:
            return
        _, index, before, inside = self._open.pop()
        call = self.recording.calls[index]
        moved = {name for name, position in positions().items() if before.get(name) != position}
        call.drew = tuple(sorted(moved - inside))
        if self._open:
            self._open[-1][3].update(moved)
        self.recording.events.append(Event("output", index, values_of(output)))
        self._compare(output)
        self._watch(output, call.output_grads)

    def _watch(self, tree: Any, found: list[Value]) -> None:
        """Let each backward append the gradients of the tensors in `tree` to `found`."""
        if not torch.is_grad_enabled():
            return
        for name, leaf in named_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self._handles.append(leaf.register_hook(_noting(name, found)))

    def _compare(self, tree: Any) -> None:
        """Copy the tensors of the last event, and describe the first difference from the run in `against`.

        Args:
            tree: the inputs or outputs of the last event.
        """
        events = self.recording.events
        event = len(events) - 1
        if self._kept is not None:
            self._kept.keep(event, tree)
        if self._against is None or not self._is_equal_so_far:
            return
        earlier, kept = self._against
        if event < len(earlier.events) and earlier.events[event] == events[event]:
            return
        self._is_equal_so_far = False
        if event >= len(earlier.events) or len(earlier.events[event].values) != len(events[event].values):
            return
        rows = zip(earlier.events[event].values, events[event].values, named_leaves(tree), strict=True)
        for place, (expected, got, (_, leaf)) in enumerate(rows):
            copy = kept.get(event, place)
            if expected != got and copy is not None and isinstance(leaf, Tensor):
                self.difference = how_they_differ(copy, leaf.detach().cpu())
                return


def _noting(name: str, found: list[Value]) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        (value,) = values_of(gradient)
        found.append(value._replace(name=name))

    return note


# ---------------------------------------------------------------------- attributes of modules other than their state

_ATTRIBUTES_OF_A_MODULE = frozenset(vars(nn.Module()))

_MAX_TEXT = 80


def _settings(module: nn.Module) -> dict[str, str]:
    """Return a description of each compared attribute of a module, by name of the attribute.

    These attributes are plain values, unregistered tensors and random number generators.
    """
    texts = {name: _text_of(one) for name, one in vars(module).items() if name not in _ATTRIBUTES_OF_A_MODULE}
    return {name: text for name, text in texts.items() if text is not None}


_FINGERPRINT = re.compile(r" \([0-9a-f]{16}\)$")


def _how_it_changed(key: str, before: str, after: str) -> str:
    """Describe how an attribute changed. Leave out fingerprints, so that equal findings of several ranks can be merged.

    Examples:
        >>> _how_it_changed("n", "1", "2"), _how_it_changed("h", "None", "a tensor (2,) torch.int64 (0123456789abcdef)")
        ('n went from 1 to 2', 'h went from None to a tensor (2,) torch.int64')
    """
    before, after = _FINGERPRINT.sub("", before), _FINGERPRINT.sub("", after)
    return f"{key} went from {before} to {after if after != before else 'another one'}"


def _text_of(value: Any) -> str | None:
    """Describe the value of an attribute. Return None if values of its type are not compared."""
    plain = bool | int | float | str
    is_plain_list = isinstance(value, list | tuple) and all(isinstance(one, plain) for one in value)
    if is_plain_list or isinstance(value, plain | torch.dtype | None):
        return repr(value)[:_MAX_TEXT]
    if isinstance(value, Tensor):
        (found,) = values_of(value)
        return f"a tensor {found.about} ({found.bits:016x})"
    if isinstance(value, torch.Generator):
        return f"a torch.Generator ({values_of(value.get_state())[0].bits:016x})"
    if isinstance(value, random.Random):
        return f"a random.Random ({fingerprint_of(value.getstate()):016x})"
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        is_new = isinstance(value, numpy.random.Generator)
        state = value.bit_generator.state if is_new else value.get_state(legacy=False)
        return f"a numpy.random.{type(value).__name__} ({fingerprint_of(state):016x})"
    return None
