"""New tensors name their device, so that `torch.set_default_device` of a program does not move them."""

from __future__ import annotations

import ast
from pathlib import Path

import syncline

MAKERS = {"tensor", "empty", "zeros", "ones", "full", "arange", "randn", "rand", "randperm", "randint", "eye"}

OUTSIDE = ("tools", "testing")
"""Rooms that run programs of their own, in which nothing sets a default device."""

ALLOWED = {
    "ddp/torch_names.py": 1,  # a result that torch's class returns
}
"""The number of calls without a device in a file. It may only fall."""


def without_device(path: Path) -> int:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return sum(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in MAKERS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and "device" not in {keyword.arg for keyword in call.keywords}
        for call in calls
    )


def test_new_tensors_name_their_device() -> None:
    root = Path(syncline.__file__).parent
    found = {
        name: number
        for path in sorted(root.rglob("*.py"))
        if not (name := path.relative_to(root).as_posix()).startswith(OUTSIDE)
        and (number := without_device(path))
    }
    assert found == ALLOWED
