"""The shape of the house, enforced: who may import whom, what is pure, who reads the environment, what is exported.

The linter of imports checks the direction; its contracts are in pyproject.toml. The other rules are functions of a tree
of sources, so that each is shown to fail on a made-up tree before it is applied to the real one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

import hangs

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "syncline"


def order_of_imports(pyproject: str) -> list[list[str]]:
    """Return the modules and rooms right below syncline, low to high, as the linter of imports has them."""
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["id"] == "downwards")["layers"]
    return [layer.split(" | ") for layer in reversed(layers)]


LEVELS = order_of_imports((ROOT / "pyproject.toml").read_text())
"""Modules and rooms of syncline, low to high. One imports only what is below it, never its neighbour."""

IMPURE = (
    *("asyncio", "ctypes", "datetime", "io", "mmap", "multiprocessing", "os", "pathlib", "random", "secrets"),
    *(
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
    ),
    *("torch.distributed", "torch.multiprocessing"),
)
"""What a pure module does not import: clocks, files, sockets, processes, chance."""

PURE = (
    *("contract", "trees", "words"),
    *(
        "debug.diagnosis",
        "ddp.plan",
        "resilience.membership",
        "ddp.report",
        "gradients.bucket_plan",
        "gradients.shard_plan",
        "gradients.stragglers",
        "liveness.deadlock",
    ),
    *("tensors.packing", "transport.statistics"),
)
"""Modules of functions of plain data, beside all of strategies/ but its execution/."""

ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})

Sources = Mapping[str, str]
"""Dotted module name (a package is its own name) -> source text."""


# ---------------------------------------------------------------------- reading a tree


def read_sources(package: Path) -> dict[str, str]:
    sources = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a source's tree. Every rule looks at them, and to walk a tree is most of the work."""
    return tuple(ast.walk(parsed(source)))


def is_package(module: str, sources: Sources) -> bool:
    return module == "syncline" or module in packages_among(frozenset(sources))


@functools.cache
def packages_among(modules: frozenset[str]) -> frozenset[str]:
    """Return the names of all modules that contain one of these modules."""
    return frozenset(
        ".".join(parts[:n]) for parts in (m.split(".") for m in modules) for n in range(1, len(parts))
    )


def imports_of(module: str, sources: Sources) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name) of every import, wherever it stands; name None: the module itself.

    `from package import module` counts as an import of that module.
    """
    for line, level, origin, name in imports_in(sources[module]):
        if name is None:
            yield line, origin, None
            continue
        if level:
            parts = module.split(".")
            kept = len(parts) - level + is_package(module, sources)
            origin = ".".join([*parts[:kept], *filter(None, [origin])])
        inner = f"{origin}.{name}"
        yield (line, inner, None) if inner in sources else (line, origin, name)


@functools.cache
def imports_in(source: str) -> list[tuple[int, int, str, str | None]]:
    """(line, number of leading dots, module, name) of every import in a source."""
    found: list[tuple[int, int, str, str | None]] = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found += [(node.lineno, 0, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, node.level, node.module or "", alias.name) for alias in node.names]
    return found + [(line, 0, module, None) for line, module in imports_by_string(source)]


def imports_by_string(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every call of import_module or __import__ with the name of a module."""
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def part_of(module: str) -> str:
    """The module or package right below syncline; "" for syncline itself."""
    return module.partition(".")[2].partition(".")[0]


# ---------------------------------------------------------------------- the rules


_LINT = """
import sys
sys.meta_path = [one for one in sys.meta_path if "editable" not in one.__module__]  # an editable install comes first
sys.path.insert(0, sys.argv.pop(1))
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def linted(sources: Path = PACKAGE.parent) -> subprocess.CompletedProcess[str]:
    """Run the linter of imports, whose contracts are in pyproject.toml, on a tree of sources."""
    options = ("--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo")
    command = [sys.executable, "-c", _LINT, str(sources), *options]
    return hangs.run(command)


def is_pure(module: str) -> bool:
    """Return whether a module promises to be pure."""
    inner = module.partition(".")[2]
    return inner in PURE or (inner.startswith("strategies") and "execution" not in inner)


def impure_plans(sources: Sources) -> list[str]:
    """What the pure modules import, call or reach for that is not pure."""
    found = []
    for module in sources:
        if not is_pure(module):
            continue
        for line, imported, name in imports_of(module, sources):
            full = f"{imported}.{name}" if name else imported
            if any(full == root or full.startswith(f"{root}.") for root in IMPURE):
                found.append(f"{module}:{line} imports {full}")
        for node in nodes_of(sources[module]):
            if isinstance(node, ast.Name) and node.id in ("open", "print", "input"):
                found.append(f"{module}:{node.lineno} uses {node.id}()")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in IMPURE:
                found.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
    return found


def environment_readers(sources: Sources) -> list[str]:
    """Where the environment is read or written outside of environment.py."""
    found = []
    for module in sources:
        if part_of(module) == "environment":
            continue
        nodes = nodes_of(sources[module])
        names_of_os = {
            alias.asname or "os"
            for node in nodes
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "os"
        }
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
                if isinstance(node.value, ast.Name) and node.value.id in names_of_os:
                    found.append(f"{module}:{node.lineno} uses os.{node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                taken = [alias.name for alias in node.names if alias.name in ENVIRONMENT]
                found += [f"{module}:{node.lineno} imports os.{name}" for name in taken]
    return found


def exported_by(source: str) -> list[str] | None:
    """`__all__` as written, or what a lazy face imports for type checkers; None where there is neither."""
    if is_lazy_face(source):
        return [alias.name for _, alias in imports_for_type_checkers(source)]
    for node in parsed(source).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


@functools.cache
def defined_by(source: str) -> frozenset[str]:
    """The names that a module defines, and those that it imports in order to hand them out (`import x as x`)."""
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names if alias.asname == alias.name)
    return frozenset(found)


def wrong_exports(sources: Sources) -> list[str]:
    """Imports of names that start with an underscore, or that their module does not define itself.

    A package hands out what its `__all__` lists, and so does a module that users see. Other modules need no list: what
    they define without an underscore is for the rest of the library.
    """
    found = []
    for module, source in sources.items():
        exported = exported_by(source)
        if exported is not None and not is_package(module, sources) and module not in NAMESPACES:
            found.append(f"{module}: only the __init__ of a package has __all__")
        if exported is not None and len(exported) != len(set(exported)):
            found.append(f"{module}: __all__ names something twice")
        for line, origin, name in imports_of(module, sources):
            if origin not in sources or name is None:
                continue
            of_package = is_package(origin, sources)
            offered = (exported_by(sources[origin]) or []) if of_package else defined_by(sources[origin])
            if name.startswith("_") or name not in offered:
                found.append(f"{module}:{line} imports {name}, which {origin} does not hand out")
    return found


FACES = "syncline.faces"

NAMESPACES = frozenset({"syncline.nn"})
"""Modules that are no packages, whose names users import."""


def is_lazy_face(source: str) -> bool:
    """Return whether a package imports its names when they are asked for, see `syncline.faces`."""
    return "\nhand_out(__name__)\n" in source


def imports_for_type_checkers(source: str) -> list[tuple[int, ast.alias]]:
    """(line, name) of every import in a source that only type checkers read."""
    return [
        (node.lineno, alias)
        for block in parsed(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def wrong_lazy_imports(source: str) -> list[str]:
    """Imports of a lazy face that happen at once, or that type checkers take for private; a second list of names."""
    found = []
    for node in parsed(source).body:
        text = ast.unparse(node)
        if isinstance(node, ast.ImportFrom | ast.Import) and "syncline" in text.replace(FACES, ""):
            found.append(f"line {node.lineno}: imported at once: {text}")
        if isinstance(node, ast.Assign) and text.startswith("__all__"):
            found.append(f"line {node.lineno}: hand_out sets __all__")
    for line, alias in imports_for_type_checkers(source):
        if alias.asname != alias.name:
            found.append(
                f"line {line}: write `{alias.name} as {alias.name}`, or it is private to type checkers"
            )
    return found


# ---------------------------------------------------------------------- the real tree


SOURCES = read_sources(PACKAGE)


def assert_none(found: list[str]) -> None:
    assert not found, "\n".join(["", *found])


def test_imports_run_downwards_and_in_no_circle() -> None:
    result = linted()
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_module_of_ours_is_imported_by_a_string() -> None:
    """The linter of imports would not see it."""
    assert_none(
        [
            f"{module}:{line} imports {imported} by a string"
            for module, source in SOURCES.items()
            for line, imported in imports_by_string(source)
            if imported.startswith("syncline")
        ]
    )


def test_every_pure_module_exists() -> None:
    assert_none([name for name in PURE if f"syncline.{name}" not in SOURCES])


def test_plans_are_pure() -> None:
    assert_none(impure_plans(SOURCES))


def test_the_environment_is_read_in_one_place() -> None:
    assert_none(environment_readers(SOURCES))


def test_a_module_is_asked_only_for_what_it_hands_out() -> None:
    assert_none(wrong_exports(SOURCES))


@pytest.mark.parametrize("room", [room for room, source in SOURCES.items() if is_lazy_face(source)])
def test_a_lazy_face_hands_out_what_it_imports_for_type_checkers(room: str) -> None:
    assert_none(wrong_lazy_imports(SOURCES[room]))
    face = importlib.import_module(room)
    assert sorted(exported_by(SOURCES[room]) or []) == face.__all__
    for block in parsed(SOURCES[room]).body:
        if isinstance(block, ast.If):
            of_face = {name: getattr(face, name) for name in face.__all__}
            by_imports: dict[str, object] = {}
            exec(compile(ast.Module(block.body, []), room, "exec"), by_imports)
            assert {name: by_imports[name] for name in of_face} == of_face


def test_exported_names_exist() -> None:
    exports = {module: names for module, source in SOURCES.items() if (names := exported_by(source))}
    assert len(exports) > 10
    assert_none(
        [
            f"{module}.{name}"
            for module, names in exports.items()
            for name in names
            if not hasattr(importlib.import_module(module), name)
        ]
    )


_PROBE = """
import json, os, random, signal, sys, threading
import torch, torch.distributed as dist

def state():
    return {
        "torch.distributed": dist.is_initialized(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "seeds": (torch.initial_seed(), str(torch.get_rng_state().tolist()), str(random.getstate())),
        "dtype": str(torch.get_default_dtype()),
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "hooks": (str(sys.excepthook), str(threading.excepthook)),
        "directory": os.getcwd(),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
    }

for statement in sys.argv[1:]:
    before = state()
    exec(statement)
    after = state()
    print(json.dumps([name for name in before if before[name] != after[name]]))
"""


def side_effects_of(*statements: str) -> list[list[str]]:
    """What each of some statements changes, run one after the other in a process of its own."""
    result = hangs.run([sys.executable, "-c", _PROBE, *statements])
    assert (result.returncode, result.stderr) == (0, "")
    return [list(json.loads(line)) for line in result.stdout.splitlines()]


HEAVY = (
    *("torch._dynamo", "torch._inductor", "torch.export", "torch.fx.experimental.symbolic_shapes", "sympy"),
    *("torch.distributed.checkpoint", "torch.distributed.elastic", "torch.distributed.fsdp"),
    *("torch.distributed.rpc", "torch.distributed.run", "torch.distributed.tensor", "torch.testing"),
    *("asyncio", "concurrent.futures.process", "matplotlib", "pytest", "safetensors", "unittest"),
)
"""What takes long to import, and no training program needs from us; torch itself may import some of it."""


def loaded_by(*statements: str) -> list[list[str]]:
    """The modules that are loaded after each of some statements, run one after the other in a process of its own."""
    code = "import json, sys\n" + "".join(f"{one}\nprint(json.dumps([*sys.modules]))\n" for one in statements)
    result = hangs.run([sys.executable, "-c", code])
    assert (result.returncode, result.stderr) == (0, "")
    return [list(json.loads(line)) for line in result.stdout.splitlines()]


def test_importing_syncline_imports_no_more_than_is_asked_for() -> None:
    at_first, then, with_torch, with_names = loaded_by(
        "import syncline",
        "from syncline import SynclineError",
        "import torch",
        "from syncline import Checkpointer, DistributedDataParallel, init, world",
    )
    assert [name for name in at_first if name.startswith(("torch", "syncline."))] == [FACES]
    assert [name for name in then if name.startswith(("torch", "syncline."))] == [FACES, "syncline.errors"]
    assert sorted(set(with_names) & set(HEAVY) - set(with_torch)) == []


_NAMES_PROBE = """
import random, threading
from syncline.launchers import parse  # a program may import a module first
import syncline

def ask_for_all() -> None:
    for name in random.Random().sample(syncline.__all__, len(syncline.__all__)):
        getattr(syncline, name)

ranks = [threading.Thread(target=ask_for_all) for _ in range(4)]
[rank.start() for rank in ranks]
[rank.join() for rank in ranks]
assert callable(syncline.world) and syncline.world.__module__ == "syncline.session.world"
assert set(syncline.__all__) <= set(dir(syncline))
from syncline import *
assert world is syncline.world and {*syncline.__all__} <= {*globals()}
assert syncline.debug.__name__ == "syncline.debug"
assert all(name in vars(syncline) for name in syncline.__all__)
"""


@pytest.mark.parametrize("name", ["syncline", "syncline.session", "syncline.testing"])
def test_cloudpickle_sends_the_package_by_its_name(name: str) -> None:
    """Ray and submitit send functions of a script with it. It sends modules by name, but not objects of subclasses."""
    assert type(importlib.import_module(name)) is ModuleType


def test_imports_have_no_side_effects_and_threads_find_all_names_of_the_package() -> None:
    with_effects = "torch.manual_seed(1); os.environ['A'] = 'b'; sys.excepthook = print"
    found = side_effects_of("import syncline", _NAMES_PROBE, with_effects)
    assert found == [[], [], ["seeds", "environment", "hooks"]]


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    package = importlib.import_module("syncline")
    with pytest.raises(AttributeError, match=r"module 'syncline' has no attribute 'DistributedDataParalel'"):
        package.DistributedDataParalel  # noqa: B018


# ---------------------------------------------------------------------- the rules can fail


def test_imports_upwards_circles_and_rooms_without_a_place_are_found(tmp_path: Path) -> None:
    package = shutil.copytree(
        PACKAGE, tmp_path / "syncline", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    wrong = {
        "words.py": "\ndef f() -> None:\n    from syncline import checks\n",
        "checks.py": "\nimport syncline\n",
        "trees.py": "\nif TYPE_CHECKING:\n    from syncline.transport.base import Transport\n",
        "transport/work.py": "\nif TYPE_CHECKING:\n    from .watched import under_way\n",
        "newcomer.py": "\n",
    }
    for name, text in wrong.items():
        with (package / name).open("a") as file:
            file.write(text)
    found = linted(sources=tmp_path).stdout
    assert "newcomer" in found
    (package / "newcomer.py").unlink()
    found = linted(sources=tmp_path).stdout
    for place in ("words -> syncline.checks", "checks -> syncline ", "trees -> syncline.transport.base"):
        assert f"syncline.{place}" in found
    assert "No cycles are allowed in syncline.transport." in found


def test_an_import_by_a_string_is_found() -> None:
    assert [*imports_by_string("import importlib\nimportlib.import_module('syncline.cli')")] == [
        (2, "syncline.cli")
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch\nx = torch.distributed.get_rank()",
        "import time",
        "from os import path",
        "def f():\n    import socket",
        "import io",
        "text = open('x').read()",
    ],
)
def test_an_impure_plan_is_found(source: str) -> None:
    assert len(impure_plans({"syncline.strategies.a": source})) == 1
    assert impure_plans({"syncline.world": source}) == []


def test_a_pure_plan_is_fine() -> None:
    assert (
        impure_plans({"syncline.strategies.a": "import torch, math\nfrom collections import Counter"}) == []
    )


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os as o\no.getenv('A')",
        "from os import environ",
        "import os\nos.putenv",
    ],
)
def test_a_reader_of_the_environment_is_found(source: str) -> None:
    assert len(environment_readers({"syncline.world": source})) == 1
    assert environment_readers({"syncline.environment": source}) == []


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ({"syncline.a": "__all__ = []"}, "only the __init__ of a package has __all__"),
        ({"syncline": "__all__ = ['x', 'x']\nx = 1"}, "names something twice"),
        (
            {"syncline.a": "from os import x", "syncline.b": "from syncline.a import x"},
            "imports x, which syncline.a does not",
        ),
        (
            {"syncline.a": "", "syncline.a.c": "def x(): ...", "syncline.b": "from syncline.a import x"},
            "imports x, which syncline.a does not",
        ),
        (
            {"syncline.a": "_x = 1", "syncline.b": "from .a import _x"},
            "imports _x, which syncline.a does not",
        ),
    ],
)
def test_a_wrong_export_is_found(sources: Sources, complaint: str) -> None:
    found = wrong_exports({"syncline": "", **sources})
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("from syncline.a import x", "line 6: imported at once"),
        ("import syncline.a", "line 6: imported at once"),
        ("__all__ = ['x']", "line 6: hand_out sets __all__"),
        ("if TYPE_CHECKING:\n    from syncline.a import x", "line 7: write `x as x`"),
        ("if TYPE_CHECKING:\n    from syncline.a import x as y", "line 7: write `x as x`"),
    ],
)
def test_a_wrong_import_of_a_lazy_face_is_found(wrong: str, complaint: str) -> None:
    right = (
        "import sys\nfrom syncline.faces import hand_out\nif TYPE_CHECKING:\n    from syncline.a import x as x\n"
        "hand_out(__name__)\n"
    )
    assert wrong_lazy_imports(right) == []
    found = wrong_lazy_imports(right + wrong)
    assert len(found) == 1
    assert complaint in found[0]
