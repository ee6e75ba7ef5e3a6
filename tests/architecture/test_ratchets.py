"""Sizes of the house, and habits that it loses: ratchets.toml has a bound for each, and a bound only falls.

`make ratchet` writes the numbers that have fallen. One that must rise is written by hand, with the reason in the same
line: `resilience = 1812  # ranks of a lost host are ...`.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.test_imports import nodes_of
from tests.architecture.test_private_names import STABLE, is_private

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS, BOUNDS = ROOT / "src/syncline", ROOT / "tests", Path(__file__).with_name("ratchets.toml")

_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_BOUND = re.compile(r"^(?P<name>\w+) = (?P<number>[\d.]+)(?P<reason> .*)?$")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """The number of lines without comments, docstrings and empty ones."""
    strings: set[int] = set()
    for node in nodes_of(source):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            strings.update(_lines_of(node))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({token.start[0] for token in tokens if token.type not in _LAYOUT} - strings)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _targets(node: ast.AST) -> list[ast.expr]:
    found = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AugAssign | ast.AnnAssign)
        else []
    )
    return [one for target in found for one in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _is_own(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls")


def num_fields(kind: ast.ClassDef) -> int:
    """The number of attributes that the methods of a class set on `self`."""
    return len(
        {
            t.attr
            for node in ast.walk(kind)
            for t in _targets(node)
            if isinstance(t, ast.Attribute) and _is_own(t.value)
        }
    )


def ceremony(source: str) -> int:
    """The number of lines of imports and of signatures."""
    found: set[int] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(_lines_of(node))
        elif isinstance(node, _Function):
            found.update(range(node.lineno, max(node.body[0].lineno, node.lineno + 1)))
    return len(found)


def _own_names(source: str) -> Iterator[str]:
    """Private attributes that a file gives to its own objects."""
    for node in nodes_of(source):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                yield from (
                    [each.name]
                    if isinstance(each, _Function)
                    else (getattr(t, "id", "") for t in _targets(each))
                )
        yield from (t.attr for t in _targets(node) if isinstance(t, ast.Attribute) and _is_own(t.value))


def _foreign_names(source: str, own: frozenset[str]) -> Iterator[str]:
    """Private names of other rooms that a file uses, each time."""
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("syncline"):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_own(node.value):
            yield from [node.attr] if node.attr not in own | STABLE else []


def room_of(path: Path) -> str:
    """The room of a file of the package; each tool is one."""
    folders = path.parts[:-1]
    return "_".join(folders[: 2 if folders[0] == "tools" else 1]) if folders else "top_level"


def measure() -> dict[str, dict[str, float]]:
    """Every number, by its table in ratchets.toml and by its name there."""
    sources = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    tests = [path.read_text() for path in sorted(TESTS.rglob("*.py"))]
    rooms = {path: room_of(path) for path in sources}
    lines: Counter[str] = Counter()
    own: defaultdict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        lines[rooms[path]] += code_lines(source)
        own[rooms[path]] |= set(_own_names(source))
    nodes = [node for source in sources.values() for node in nodes_of(source)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, _Function)]
    (transport,) = (kind for kind in classes if kind.name == "Transport")
    all_ours = frozenset(name for names in own.values() for name in names)
    foreign = [
        name
        for path, source in sources.items()
        for name in _foreign_names(source, frozenset(own[rooms[path]]))
        if name in all_ours
    ]
    whole = lines.total()
    num_none = sum(
        isinstance(n, ast.Compare)
        and any(isinstance(c, ast.Constant) and c.value is None for c in n.comparators)
        for n in nodes
    )
    return {
        "all": {
            "code_lines": whole,
            "files": len(sources),
            "lines_of_the_longest_file": max(source.count("\n") for source in sources.values()),
            "lines_of_the_longest_function": max(len(_lines_of(function)) for function in functions),
            "fields_of_the_widest_class": max(map(num_fields, classes)),
            "assignments_to_fields_of_others": sum(
                isinstance(t, ast.Attribute) and not _is_own(t.value)
                for node in nodes
                for t in _targets(node)
            ),
            "lines_with_former": sum(len(re.findall(r".*\bformer.*", source)) for source in sources.values()),
            "is_none_in_1000_lines": round(1000 * num_none / whole, 1),
            "methods_of_transport": sum(isinstance(each, _Function) for each in transport.body),
            "class_names_that_occur_twice": sum(
                n > 1 for n in Counter(kind.name for kind in classes).values()
            ),
            "percent_imports_and_signatures": round(100 * sum(map(ceremony, sources.values())) / whole, 1),
            "private_names_of_other_rooms": len(foreign),
            "lines_of_tests": sum(source.count("\n") for source in tests),
            "replicas_in_tests": sum(source.count("._" + "replica") for source in tests),
        },
        "code_lines": dict(sorted(lines.items())),
        "files": dict(sorted(Counter(rooms.values()).items())),
    }


def against(text: str, now: dict[str, dict[str, float]]) -> tuple[str, list[str]]:
    """The bounds after what has fallen, and what is above its bound or has none.

    Args:
        text: of ratchets.toml.
        now: what `measure` has found.
    """
    table, lines, wrong = "", [], []
    missing = {(table, name) for table, numbers in now.items() for name in numbers}
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        elif found := _BOUND.match(line):
            name, bound = found["name"], float(found["number"])
            if (table, name) not in missing:
                continue  # there is no such room any more
            missing.remove((table, name))
            number = now[table][name]
            if number > bound:
                wrong.append(f"{table}.{name} is {number:g}, and was at most {bound:g}")
            elif number < bound:
                line = f"{name} = {number:g}"
        lines.append(line)
    wrong += [f"{table}.{name} is {now[table][name]:g}, and has no bound" for table, name in sorted(missing)]
    return "\n".join(lines) + "\n", wrong


def test_numbers_only_fall() -> None:
    fallen, wrong = against(BOUNDS.read_text(), measure())
    assert not wrong, "\n".join(
        ["make it smaller again, or write the number and the reason in ratchets.toml:", *wrong]
    )
    if os.environ.get("SYNCLINE_RATCHETS") == "write":
        BOUNDS.write_text(fallen)


def test_a_number_that_rises_or_has_no_bound_is_named() -> None:
    text = "[all]\nfiles = 3\n\n[code_lines]\ngone = 5\nddp = 20  # since the wrapper has ...\n"
    assert against(text, {"all": {"files": 3}, "code_lines": {"gone": 5, "ddp": 20}}) == (text, [])
    fallen, wrong = against(text, {"all": {"files": 4}, "code_lines": {"ddp": 19, "data": 2}})
    assert fallen == "[all]\nfiles = 3\n\n[code_lines]\nddp = 19\n"
    assert wrong == ["all.files is 4, and was at most 3", "code_lines.data is 2, and has no bound"]


def test_what_is_counted() -> None:
    source = (
        '"""A file."""\nimport os\n\ndef f(\n    a: int,\n) -> int:\n    """Why."""\n    return a  # so\n'
    )
    assert (code_lines(source), ceremony(source)) == (5, 4)
