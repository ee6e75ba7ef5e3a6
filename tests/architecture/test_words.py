"""No code decides by printed words: enums and fields decide, and words are made when something is printed."""

from __future__ import annotations

import ast

from tests.architecture.test_imports import PACKAGE, nodes_of

WORDS = {"detail", "error", "headline", "how", "phase", "reason", "title", "when", "words"}
"""Names of variables and fields with texts for people."""

OUTSIDE = {"liveness/failed_wait.py"}
"""The files that read texts of others, which have no fields: the messages of torch's backends."""


def decisions(source: str) -> list[str]:
    found = []
    for node in nodes_of(source):
        match node:
            case (
                ast.Call(func=ast.Attribute(value=text, attr="startswith" | "endswith"))
                | ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[text])
            ) if getattr(text, "attr", getattr(text, "id", "")) in WORDS:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_code_decides_by_printed_words() -> None:
    for source in (
        'here.phase.startswith("after ")',
        '"nccl" in title',
        "any(one in row.reason for one in all)",
    ):
        assert len(decisions(source)) == 1, source
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := decisions(path.read_text()))
    }
    assert found.keys() == OUTSIDE, found
