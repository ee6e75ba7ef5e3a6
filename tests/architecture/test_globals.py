"""Mutable state of a module: only what is listed here, each with its reason.

State belongs to an object that its users are given. What a process has once (its session, the registry of attached
objects, its forks and threads) is in a module-level variable that is listed in `ALLOWED`.

A module-level variable counts as mutable if a function rebinds it (`global`), if it is an object with a state (a weak
set, a lock, a counter, an instance of one of our classes that is not frozen), or if it is a list, dict or set that is
not named as a constant or that some code of the module changes. Variables of a class count in the same way. What
`functools.cache` remembers does not count: a call returns the same with it and without.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest
from tests.architecture.test_imports import SOURCES, Sources, assert_none, nodes_of, parsed

ALLOWED = {
    "syncline.events.observer.OBSERVERS": "what happens in the process is passed to its observers",
    "syncline.faces._IMPORTING": "threads that ask for public names at once import one module after the other",
    "syncline._torch.process_groups._MAKER": "threads create groups at once, by one name of torch",
    "syncline._torch.modules._in_this_thread": "torch stores the wrapper whose forward runs in a class, of all threads",
    "syncline._torch.modules._is_kept_out": "torch's compiler, which is configured, is of the process",
    "syncline._torch.optimizers._lock": "guards _scalers",
    "syncline._torch.optimizers._scalers": "torch's GradScaler, a class, reports scalers; torch keeps no list of them",
    "syncline.checkpoint.objects._READING": "torch's generators, and the garbage collector, are of the process",
    "syncline.gradients.backward._births": "numbers objects in the order of their creation",
    "syncline.gradients.riders.nonfinite._numbers": "numbers steps, so that marks of two reducers differ",
    "syncline.gradients.step_guard._CHECKS": "torch's hooks before the steps of all optimizers are of the process",
    "syncline.liveness.at_exit.AT_EXIT": "what the end of the process waits for",
    "syncline.liveness.processes._inherited": "filled once in a fork",
    "syncline.liveness.processes._live": "the hook on forks is of the process",
    "syncline.liveness.connection._lock": "guards the file descriptors of the process",
    "syncline.session.registry.REGISTRY": "what is attached to a user's modules, found by kind",
    "syncline.session.world._SESSION": "the session of the process",
    "syncline.transport.watched.under_way": "each wait drives the operations of all groups of the process",
    "syncline.torch_backend.work.ENDED": "all calls that have ended share it: it has ended, and makes one future",
    "syncline.user_code._main_state": "an address that is noted when the process starts, and in a fork",
}
"""Dotted name of a variable: the reason why it is mutable and no field of an object."""

WITH_STATE = ("collections", "contextvars", "itertools", "queue", "threading", "weakref")
"""Modules whose calls make objects with a state."""

MUTATORS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
    | {"setdefault", "update"}
)


def frozen_classes(sources: Sources) -> dict[str, bool]:
    """Return for each class of the tree whether its instances keep their fields: frozen, a tuple, or set once."""
    return {name: is_frozen for source in sources.values() for name, is_frozen in classes_in(source).items()}


@functools.cache
def classes_in(source: str) -> dict[str, bool]:
    """Return the classes of one source, see `frozen_classes`."""
    found = {}
    for node in nodes_of(source):
        if isinstance(node, ast.ClassDef):
            is_frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
            is_tuple = any("NamedTuple" in ast.unparse(base) for base in node.bases)
            assigns = any(
                isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
                for method in node.body
                if getattr(method, "name", "") != "__init__" or list(containers_in(method))
                for one in ast.walk(method)
            )
            found[node.name] = is_frozen or is_tuple or not assigns
    return found


def containers_in(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the lists, dicts, sets and objects with a state that some code makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and (is_container(node) or is_stateful(node, {})):
            yield node


def is_stateful(value: ast.expr, frozen: dict[str, bool]) -> bool:
    """Return whether a call makes an object with a state."""
    if not isinstance(value, ast.Call):
        return False
    maker = ast.unparse(value.func).partition("[")[0]
    return maker.partition(".")[0] in WITH_STATE or not frozen.get(maker.rpartition(".")[2], True)


def is_container(value: ast.expr) -> bool:
    kinds = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    is_made = isinstance(value, ast.Call) and ast.unparse(value.func) in ("dict", "list", "set", "sorted")
    return isinstance(value, kinds) or is_made


@functools.cache
def changed_names(source: str) -> set[str]:
    """Return the names of variables on which some code calls a mutator, or whose items or itself it assigns anew."""
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Global):
            found.update(node.names)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found.add(ast.unparse(node.value))
        elif isinstance(node, ast.AugAssign):
            found.add(ast.unparse(node.target))
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS
        ):
            found.add(ast.unparse(node.func.value))
    return found


def variables_of(source: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables of a module and of its classes, with their first values."""
    bodies = [("", parsed(source).body)]
    bodies += [(f"{node.name}.", node.body) for node in nodes_of(source) if isinstance(node, ast.ClassDef)]
    for prefix, body in bodies:
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield prefix + target.id, node.value


def mutable_globals(sources: Sources) -> list[str]:
    """Return the dotted names of all variables of modules and classes that are mutable."""
    frozen = frozen_classes(sources)
    found = []
    for module, source in sources.items():
        changed = changed_names(source)
        for name, value in variables_of(source):
            last = name.rpartition(".")[2]
            if last == "__all__":
                continue
            is_constant = last.isupper() and last not in changed
            if (
                (last in changed and "." not in name)
                or is_stateful(value, frozen)
                or (is_container(value) and not is_constant)
            ):
                found.append(f"{module}.{name}")
    return found


def test_no_module_has_mutable_state_that_is_not_listed() -> None:
    assert_none([name for name in mutable_globals(SOURCES) if name not in ALLOWED])


def test_what_is_listed_exists() -> None:
    found = mutable_globals(SOURCES)
    assert_none([name for name in ALLOWED if name not in found])


@pytest.mark.parametrize(
    "source",
    [
        "import weakref\n_known = weakref.WeakSet()",
        "import threading\n_LOCK = threading.Lock()",
        "import itertools\n_numbers = itertools.count()",
        "_x = 0\ndef f():\n    global _x\n    _x = 1",
        "_x: int | None = None\ndef f():\n    global _x\n    _x = 1",
        "_known = {}",
        "_KNOWN = {}\ndef f(a):\n    _KNOWN[a] = 1",
        "_KNOWN: list[int] = []\ndef f(a):\n    _KNOWN.append(a)",
        "_NUM = []\n_NUM += [1]",
        "class A:\n    known = {}",
        "class A:\n    def set(self):\n        self.x = 1\nONE = A()",
        "class A:\n    def __init__(self):\n        self.x = {}\nclass B:\n    one = A()",
    ],
)
def test_mutable_state_is_found(source: str) -> None:
    assert len(mutable_globals({"syncline.a": source})) == 1


def test_constants_and_values_are_fine() -> None:
    source = (
        "import re\n_SIZES = {'a': 1}\n_WORD = re.compile('x')\nLIMIT = 3\n__all__ = ['f']\n"
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n    x: int = 1\nONE = A()\n"
        "class B:\n    def __init__(self):\n        self.x = 1\nTWO = B()\n"
        "def f(known):\n    known[1] = 2\n    known.append(3)"
    )
    assert mutable_globals({"syncline.a": source}) == []
