"""The code in the documents runs, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import syncline

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks() -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)):
            found.append((f"{path.relative_to(ROOT)}:{number}", code))
    return found


@pytest.mark.parametrize(("where", "code"), python_blocks(), ids=[where for where, _ in python_blocks()])
def test_python_in_documents_runs(where: str, code: str) -> None:
    try:
        exec(compile(code, where, "exec"), {"__name__": "__main__"})
    finally:
        syncline.shutdown()


def test_there_is_code_to_run() -> None:
    assert any(where.startswith("README.md") for where, _ in python_blocks())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_names_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
    for name in re.findall(r"\bsl\.([A-Za-z_]+)", text):
        assert hasattr(syncline, name), f"{path.name} names sl.{name}"
