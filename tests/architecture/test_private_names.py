"""torch's private names stay in `_torch/`, and a missing one is a clear error where it is used.

A name is private when it, or a module on the way to it, begins with an underscore. A file outside of `_torch/` may

- use a module's `_parameters`, `_buffers` and `_modules`: they are as old as torch 1.0, and everybody uses them;
- define a method by a private name of torch, for torch to call it: a definition depends on nothing;
- use private names of Python and pytest (`NOT_TORCHS`).

Methods and attributes of torch's classes may be replaced in `_torch/` only, also where their names are public.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.architecture.test_imports import nodes_of
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

import hangs
from syncline import SynclineError
from syncline._torch.lookup import TESTED, attribute, is_there, lookup

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "syncline"

STABLE = frozenset({"_parameters", "_buffers", "_modules"})
"""Of a module."""
NOT_TORCHS = frozenset(
    {
        *("_asdict", "_fields", "_make", "_replace"),  # named tuples
        *("_actions", "_current_frames", "_exit", "_getframe", "_NamedFuncPointer", "_Py_DumpTraceback"),
        *("_fixtureinfo", "_reprcompare"),  # pytest
    }
)
OFFERS = frozenset({"ddp.torch_names"})
"""These modules offer private names of torch's class to others. Strings in them are names that they define."""

_CLASSES = (
    *(torch.Tensor, torch.nn.Module, torch.nn.parallel.DistributedDataParallel, torch.nn.SyncBatchNorm),
    *(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler),
    *(dist.ProcessGroup, dist.ProcessGroupGloo, dist.Backend, dist.TCPStore, dist.Work),
    *(Join, Joinable, DeviceMesh, SubprocessContext),
)
TORCHS = frozenset(name for kind in _CLASSES for name in dir(kind)) | {"_scale", "_join_config", "_timeout"}
"""Attributes of torch's objects. One of these on anything but `self` counts even if Syncline has such a name, too."""

OURS = {
    ("frameworks.lightning_methods", "_ddp_kwargs"): "an attribute of Lightning's DDPStrategy",
    ("frameworks.lightning_methods", "_determine_ddp_device_ids"): "an attribute of Lightning's DDPStrategy",
    ("frameworks.lightning_methods", "_layer_sync"): "an attribute of Lightning's DDPStrategy",
    ("checkpoint.objects", "_it"): "an attribute of torchdata's Loader",
    ("testing.hosts", "_close"): "a method of Hosts",
}
"""Uses of such a name on an object that is Syncline's, and why."""


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


@functools.cache
def defined_in(source: str) -> frozenset[str]:
    """Names of functions, classes, variables and attributes that a file defines."""
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__slots__" for t in node.targets):
            found |= {str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
    return frozenset(found)


def _is_own(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()")


def torch_imports(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, name in this file, path in torch) of every import of torch."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield node.lineno, alias.asname or "torch", alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"


def private_names(source: str, defined: frozenset[str], *, offers: bool = False) -> list[tuple[int, str]]:
    """(line, text) of every use of a private name of torch, and of every attribute that is set on its objects.

    Args:
        source: of a file.
        defined: what Syncline defines anywhere.
        offers: strings are names that the file defines.
    """
    found, roots = [], set()
    for line, name, path in torch_imports(source):
        roots.add(name)
        if any(map(is_private, path.split("."))):
            found.append((line, path))
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            is_of_torch = chain.partition(".")[0] in roots
            if is_of_torch and isinstance(node.ctx, ast.Store | ast.Del):
                found.append((node.lineno, f"{chain} = ..."))
            elif is_private(node.attr) and node.attr not in STABLE | NOT_TORCHS:
                is_foreign = not _is_own(node.value) and node.attr in TORCHS
                if is_of_torch or is_foreign or node.attr not in defined:
                    found.append((node.lineno, chain))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not offers:
            text = node.value
            is_path = re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", text) is not None
            is_name = text.isidentifier() and is_private(text) and text not in STABLE | NOT_TORCHS | defined
            if is_path or (is_name and not text.startswith("_syncline")):
                found.append((node.lineno, repr(text)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            owner = ast.unparse(node.args[0]).partition(".")[0] if node.args else ""
            found += [(node.lineno, ast.unparse(node))] if owner in roots else []
    return found


def wrong_uses(sources: dict[str, str]) -> list[str]:
    """Uses of private names of torch outside of `_torch/`, by dotted module name below syncline."""
    defined = frozenset(name for source in sources.values() for name in defined_in(source))
    return [
        f"{module}:{line} uses {text}: it belongs in _torch/"
        for module, source in sources.items()
        if module.partition(".")[0] != "_torch"
        for line, text in private_names(source, defined, offers=module in OFFERS)
        if (module, text.rpartition(".")[2]) not in OURS
    ]


SOURCES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}


def test_private_names_of_torch_are_used_in_one_room() -> None:
    found = wrong_uses(SOURCES)
    assert not found, "\n".join(["", *found])


def test_exceptions_are_needed() -> None:
    for module, name in OURS:
        assert re.search(rf"\.{name}\b", SOURCES[module]), f"{module} uses {name} no more: take it from OURS"
    for module in OFFERS:
        assert module in SOURCES


def test_the_room_imports_only_the_environment_and_errors_of_syncline() -> None:
    for module, source in SOURCES.items():
        if module.startswith("_torch"):
            for imported in re.findall(r"^\s*(?:from|import) (syncline[\w.]*)", source, re.MULTILINE):
                is_below = imported in ("syncline.environment", "syncline.errors")
                assert is_below or imported.startswith("syncline._torch."), module


def test_the_list_of_files_is_complete() -> None:
    listed = set(re.findall(r"^(\w+\.py) ", SOURCES["_torch.__init__"], re.MULTILINE))
    assert listed == {path.name for path in (PACKAGE / "_torch").glob("*.py")} - {"__init__.py"}


def test_every_name_is_there_in_this_torch() -> None:
    """Otherwise a feature is off, or raises: write that down, or repair it."""
    missing = {
        f"{module} {name}"
        for module in SOURCES
        if module.startswith("_torch.")
        for name, value in vars(importlib.import_module(f"syncline.{module}")).items()
        if not is_there(value)
    }
    assert missing <= _missing_here()


def _missing_here() -> set[str]:
    is_old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
    return {"_torch.autograd _remove"} if is_old else set()


INSIDE = re.compile(r"[.]_replica\b|[\"']syncline[\w.:]*[.:]_(?!torch\b)\w")
"""The parts of a wrapper, or a private name of Syncline by its path."""


def test_one_file_of_the_tests_names_what_is_inside_of_other_rooms() -> None:
    assert all(map(INSIDE.search, ("ddp._replica", "'syncline.a:_b'", "'syncline._torch.a._b'")))
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in ROOT.glob("tests/**/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if INSIDE.search(line) and path.name != "inside.py" and path.parent.name != "architecture"
    ]
    assert not found, "use what is public, or a function of tests/support/inside.py"


# ---------------------------------------------------------------------- a name that is missing


def test_a_missing_name_is_an_error_when_it_is_used() -> None:
    missing = lookup("torch:_gone", "reduce gradients")
    version = re.escape(torch.__version__)
    expected = rf"torch {version} has no torch\._gone\. Syncline needs it to reduce gradients\. .*2\.11"
    assert not is_there(missing)
    with pytest.raises(SynclineError, match=expected):
        missing(1)
    with pytest.raises(SynclineError, match=expected):
        _ = missing.attribute

    class Derived(missing):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(SynclineError, match="Syncline needs it to reduce gradients"):
        Derived()
    assert not isinstance(1, missing)


@pytest.mark.parametrize("path", ["torch._gone:name", "torch._C:_gone.name", "torch:Tensor._gone"])
def test_a_missing_module_or_class_is_found_missing(path: str) -> None:
    assert not is_there(lookup(path, "test"))


def test_a_missing_attribute_is_an_error_when_it_is_read() -> None:
    with pytest.raises(SynclineError, match=r"has no Tensor\._gone\. Syncline needs it to test"):
        attribute("_gone", "test")(torch.zeros(1))


@pytest.mark.real
def test_syncline_is_imported_and_trains_alone_where_many_names_are_missing() -> None:
    program = """
import pkgutil, torch
find = pkgutil.resolve_name
gone = ("_foreach", "_get_root_mesh", "_JoinConfig", "SubprocessContext", "_optimizer", "_distributed_rpc",
        "_new_process_group_helper", "_amp_", "_nnz", "_BatchNorm", "_allgather_base", "_make_wrapper", "_tls")
def lacking(path):
    if any(name in path for name in gone):
        raise AttributeError(path)
    return find(path)
pkgutil.resolve_name = lacking
import syncline as sl
import syncline.tools.launch.supervise
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
ddp(torch.ones(1, 2)).sum().backward()
optimizer.step()
try:
    sl.nn.SyncBatchNorm(2)(torch.ones(2, 2))
except sl.errors.SynclineError as error:
    print(error)
"""
    result = hangs.run([sys.executable, "-c", program])
    assert result.returncode == 0, result.stderr
    assert "has no torch.nn.modules.batchnorm._BatchNorm. Syncline needs it to normalize" in result.stdout


def test_the_error_names_the_versions_that_are_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torchs,) = [one for one in declared if one.startswith("torch")]
    first, after = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torchs).groups()  # type: ignore[union-attr]
    assert (f"2.{first}", f"2.{int(after) - 1}") == TESTED


# ---------------------------------------------------------------------- the rule can fail


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C.f()",
        "from torch import _C",
        "import torch._dynamo",
        "from torch._dynamo import trace_rules",
        "from torch.distributed.algorithms.join import _JoinConfig as J",
        "import torch.distributed as dist\ndist.Backend._plugins",
        "def f(tensor):\n    return tensor._version",
        "def f(group):\n    return group._get_backend(0)",
        "class A:\n    def f(self):\n        return self._join_config",
        "def f(p):\n    return hasattr(p, '_in_backward_optimizers')",
        "import sys\n'torch._dynamo' in sys.modules",
        "from torch.amp import GradScaler\nGradScaler.scale = print",
        "from torch.amp import GradScaler\nsetattr(GradScaler, 'scale', print)",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert len(wrong_uses({"sync.a": source})) >= 1
    assert wrong_uses({"_torch.a": source}) == []


def test_names_that_are_not_private_to_torch_are_fine() -> None:
    source = (
        "import sys\nfrom torch import nn\n"
        "class A(nn.Module):\n"
        "    def _load_from_state_dict(self): self._mine = 1\n"
        "    def f(self, other): return self._mine, other._mine, self._parameters, sys._getframe(), nn.Linear\n"
    )
    assert wrong_uses({"sync.a": source}) == []
