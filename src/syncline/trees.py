"""Functions that visit or replace the leaves of nested containers, in an order that is the same on every rank."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each leaf of a nested container, and the leaf itself.

    Containers are dicts, lists, tuples, named tuples, and instances of dataclasses. Any other object is a leaf. A dict
    is visited in the order of the text of its keys. Of a dataclass instance, the fields that its constructor takes are
    visited.

    Args:
        tree: a container or a leaf.
        path: the path of `tree` itself. All paths begin with it.

    Examples:
        >>> list(leaves({"b": [1, 2], "a": 3}))
        [('a', 3), ('b[0]', 1), ('b[1]', 2)]
    """
    children = _children(tree)
    if children is None:
        yield path, tree
        return
    for step, child in children:
        yield from leaves(child, _joined(path, step))


def map_leaves(tree: Any, fn: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of a nested container in which `fn(path, leaf)` replaces each leaf.

    `fn` is called in the order in which `leaves` yields the leaves.

    Examples:
        >>> map_leaves({"b": (1, 2), "a": 3}, lambda path, leaf: leaf * 10)
        {'b': (10, 20), 'a': 30}
    """
    children = _children(tree)
    if children is None:
        return fn(path, tree)
    new = [map_leaves(child, fn, _joined(path, step)) for step, child in children]
    if isinstance(tree, dict):
        # A copy keeps the class (OrderedDict, defaultdict) and this rank's order of keys.
        clone = copy.copy(tree)
        for key, value in zip(_sorted_keys(tree), new, strict=True):
            clone[key] = value
        return clone
    if isinstance(tree, list):
        return new
    if isinstance(tree, tuple):
        cls: Any = type(tree)
        return cls._make(new) if hasattr(tree, "_fields") else tuple(new)
    names = [step.removeprefix(".") for step, _ in children]
    return dataclasses.replace(tree, **dict(zip(names, new, strict=True)))


def _children(node: Any) -> list[tuple[str, Any]] | None:
    if isinstance(node, dict):
        return [
            (f".{key}" if isinstance(key, str) else f"[{key!r}]", node[key]) for key in _sorted_keys(node)
        ]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if isinstance(node, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [
            (f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node) if field.init
        ]
    return None


def _sorted_keys(node: dict[Any, Any]) -> list[Any]:
    return sorted(node, key=lambda key: (str(key), type(key).__name__))


def _joined(path: str, step: str) -> str:
    return path + step if path else step.removeprefix(".")
