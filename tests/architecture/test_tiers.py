"""The first tier of the tests is certain on any machine: no clock, no sleep, no kill, no process but the warm ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from conftest import ONE_IN, TIERS, tier_of

TESTS = Path(__file__).parents[1]

STARTS_PROCESSES = {"forks", "hangs", "launched", "meeting", "multiprocessing", "subprocess"}
"""Modules, and a fixture."""

CALLS = {"time.sleep", "time.monotonic", "time.perf_counter", "time.time", "os.kill", "os.fork"}


def names_in(node: ast.AST, imported: set[str]) -> Iterator[str]:
    """Yield what must not be there. A signal to the own process is certain."""
    if isinstance(node, ast.Call) and ast.unparse(node).startswith("os.kill(os.getpid()"):
        return
    name = node.arg if isinstance(node, ast.arg) else ""
    if isinstance(node, ast.Name | ast.Attribute):
        name = ast.unparse(node)
    if name in CALLS or name in imported:
        yield name
    for child in ast.iter_child_nodes(node):
        yield from names_in(child, imported)


def uncertain_in(source: str) -> list[str]:
    """Return the tests that use a clock or processes, also by functions beside them, and are not marked as real.

    Examples:
        >>> uncertain_in("import time\\ndef wait(): time.sleep(1)\\ndef test_it(): wait()")
        ['test_it']
        >>> uncertain_in("import time\\n@pytest.mark.real\\ndef test_it(): time.sleep(1)")
        []
    """
    body = ast.parse(source).body
    uncertain = {"forks"}
    for node in body:
        if isinstance(node, ast.Import):
            uncertain |= {a.asname or a.name for a in node.names if a.name in STARTS_PROCESSES}
        elif isinstance(node, ast.ImportFrom) and node.module in STARTS_PROCESSES:
            uncertain |= {a.asname or a.name for a in node.names if a.name != "in_threads"}
    parts = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    found: set[str] = set()
    while more := {node.name for node in parts if any(names_in(node, uncertain))} - found:
        found |= more
        uncertain |= more
    return [
        node.name
        for node in parts
        if node.name in found
        and node.name.lower().startswith("test")
        and not any(ast.unparse(mark).startswith("pytest.mark.real") for mark in node.decorator_list)
    ]


def test_the_first_tier_has_no_clock_and_no_processes() -> None:
    found = {
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("test_*.py")
        if tier_of(str(path.relative_to(TESTS))) == "first"
        for name in uncertain_in(path.read_text())
    }
    assert sorted(found) == []


def test_the_tables_name_what_is_there() -> None:
    assert [name for name in TIERS if not (TESTS / name).exists()] == []
    assert [name for name in ONE_IN if not any(TESTS.rglob(name))] == []
