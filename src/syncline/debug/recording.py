"""The recording of one run, module by module: made by hooks, compared as plain data."""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from syncline.checkpoint.objects import positions
from syncline.debug.values import Kept, Value, how_they_differ, named_leaves, values_of, values_of_named
from syncline.equality.fingerprint import fingerprint_of


@dataclass(kw_only=True)
class Call:
    """One call of a module's forward."""

    module: str
    """Qualified name of the module."""
    kind: str
    """Class of the module."""
    nth: int
    """Number of this call among the module's calls in the run, from 1."""
    parent: int
    """Index of the call around it; -1 if there is none."""
    is_training: bool
    drew: tuple[str, ...] = ()
    """Random number generators that advanced in this call, but not in a call inside it."""
    output_grads: list[Value] = field(default_factory=list)
    """Gradients of its outputs in backward, in the order in which they arrived."""
    input_grads: list[Value] = field(default_factory=list)
    """Gradients of its inputs, in the order in which they arrived."""


class Event(NamedTuple):
    """The begin of a call, with its inputs, or its end, with its outputs."""

    kind: Literal["input", "output"]
    call: int
    values: tuple[Value, ...]


@dataclass(kw_only=True)
class Recording:
    """One run. Calls are in the order in which they began, events in the order in which they happened."""

    state: tuple[Value, ...] = ()
    """Parameters and buffers before the run."""
    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    result: tuple[Value, ...] = ()
    """The returned values."""
    gradients: tuple[Value, ...] = ()
    """The parameters' gradients after the run."""
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """Plain attributes of each module before the run, by qualified name."""
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Attributes that the run has changed, in words, by qualified name of the module."""

    def compared(self) -> list[Any]:
        """Return the part that must be equal in two runs, as plain data."""
        calls = [
            (call.module, call.kind, call.nth, call.parent, call.output_grads, call.input_grads)
            for call in self.calls
        ]
        return [self.state, calls, self.events, self.result, self.gradients]

    def dumped(self) -> bytes:
        """Serialize the recording, to send it to another rank."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loaded(dumped: bytes) -> Recording:
        """Restore a recording from `dumped`."""
        found = json.loads(dumped)
        return Recording(
            state=_values(found["state"]),
            calls=[
                Call(
                    **{
                        **call,
                        "drew": tuple(call["drew"]),
                        "output_grads": list(_values(call["output_grads"])),
                        "input_grads": list(_values(call["input_grads"])),
                    }
                )
                for call in found["calls"]
            ],
            events=[Event(kind, call, _values(values)) for kind, call, values in found["events"]],
            result=_values(found["result"]),
            gradients=_values(found["gradients"]),
            settings=found["settings"],
            changed=found["changed"],
        )


def _values(rows: Sequence[Sequence[Any]]) -> tuple[Value, ...]:
    return tuple(Value(*row) for row in rows)


# ---------------------------------------------------------------------- modules


def named_modules(roots: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """Return all modules below the roots with their qualified names, each once.

    Args:
        roots: modules by the prefix of their parts' names; "" for a single root.
    """
    named: dict[nn.Module, str] = {}
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            named.setdefault(module, ".".join(filter(None, (prefix, name))))
    return named


def named_roots(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules by the prefix of their parts' names; the prefix is empty for a single module.

    Example:
        >>> [*named_roots([nn.ReLU()])], [*named_roots([nn.ReLU(), nn.GELU(), nn.ReLU()])]
        ([''], ['ReLU#1', 'GELU', 'ReLU#2'])
    """
    if len(modules) == 1:
        return {"": modules[0]}
    kinds = Counter(type(module).__name__ for module in modules)
    nth: Counter[str] = Counter()
    named = {}
    for module in modules:
        kind = type(module).__name__
        nth[kind] += 1
        named[f"{kind}#{nth[kind]}" if kinds[kind] > 1 else kind] = module
    return named


@contextlib.contextmanager
def watching_for_roots(on_root: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `on_root` once for each module that runs inside the block without a module around it, before its forward."""
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
    """A recorder of a run: `with recorder: ...`, then `recorder.finish(result, gradients)`.

    Args:
        modules: the modules to record, with their qualified names.
        state: parameters and buffers before the run.
        kept: a store for copies of the outputs, for another recorder's `against`.
        against: an earlier run of this rank, and the copies of its outputs. `difference` then describes the first
            input or output that differs.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with Recorder(named_modules({"": net})) as recorder:
        ...     y = net(torch.ones(1, 2))
        >>> [(event.kind, recorder.recording.calls[event.call].module) for event in recorder.recording.events[1:]]
        [('input', '0'), ('output', '0'), ('input', '1'), ('output', '1'), ('output', '')]
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, str],
        state: tuple[Value, ...] = (),
        *,
        kept: Kept | None = None,
        against: tuple[Recording, Kept] | None = None,
    ) -> None:
        self.recording = Recording(state=state)
        self.difference = ""
        """A description of how the first input or output that differs from `against` differs; "" if unknown."""
        self._modules = modules
        self._kept = kept
        self._against = against
        self._is_equal_so_far = True
        self._nth: Counter[str] = Counter()
        self._open: list[tuple[nn.Module, int, dict[str, str], set[str]]] = []
        """Running calls: module, index, generator positions at the begin, generators advanced by inner calls."""
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
        """Return the recording, with the results of the run added."""
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
        # A forward that raised (as the forwards do that a checkpoint runs again) has left its call open.
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
        """Record the gradients of the tensors in a tree."""
        if not torch.is_grad_enabled():
            return
        for name, leaf in named_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self._handles.append(leaf.register_hook(_noting(name, found)))

    def _compare(self, tree: Any) -> None:
        """Keep copies of the values of the last event, or describe how they differ from earlier copies."""
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
    """Return attributes that are plain values, unregistered tensors, or random number generators."""
    found: dict[str, str] = {}
    for name, value in vars(module).items():
        if name in _ATTRIBUTES_OF_A_MODULE:
            continue
        text = _text_of(value)
        if text is not None:
            found[name] = text
    return found


_FINGERPRINT = re.compile(r" \([0-9a-f]{16}\)$")


def _how_it_changed(key: str, before: str, after: str) -> str:
    """Describe a change without fingerprints, so that equal findings of several ranks can be merged.

    Example:
        >>> _how_it_changed("n", "1", "2"), _how_it_changed("h", "None", "a tensor (2,) torch.int64 (0123456789abcdef)")
        ('n went from 1 to 2', 'h went from None to a tensor (2,) torch.int64')
    """
    before, after = _FINGERPRINT.sub("", before), _FINGERPRINT.sub("", after)
    return f"{key} went from {before} to {after if after != before else 'another one'}"


def _text_of(value: Any) -> str | None:
    if isinstance(value, bool | int | float | str | torch.dtype | None):
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
        state = (
            value.bit_generator.state
            if isinstance(value, numpy.random.Generator)
            else value.get_state(legacy=False)
        )
        return f"a numpy.random.{type(value).__name__} ({fingerprint_of(state):016x})"
    if isinstance(value, list | tuple) and all(isinstance(one, bool | int | float | str) for one in value):
        return repr(value)[:_MAX_TEXT]
    return None
