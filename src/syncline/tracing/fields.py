"""Checks of the fields of rows that were read. A trace may come from anybody, and a report computes with every field.

The types of a row's fields say what they hold. Texts are made printable here, in one place for all that show a trace.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from syncline.words import printable

Check = Callable[[Any], Any]
"""A function that returns a value as a field holds it. It raises a ValueError or TypeError if the field cannot."""

_MAX_INTEGER = 2**53
"""Larger integers have no exact float. Times in microseconds reach it after 285 years."""


def checks_of(row: Any) -> Mapping[str, Check]:
    """Return a check for each field of a class of rows, in order.

    Examples:
        >>> from typing import NamedTuple
        >>> class Row(NamedTuple):
        ...     names: Sequence[str]
        >>> check = checks_of(Row)["names"]
        >>> check(["a", "\\x1b[2J"])
        ['a', '\\\\x1b[2J']
        >>> check([1])
        Traceback (most recent call last):
        ValueError: expected str, got 1
    """
    return {name: _check_of(hint) for name, hint in get_type_hints(row).items()}


def _check_of(hint: Any) -> Check:
    kind, parts = get_origin(hint), [one for one in get_args(hint) if one is not Ellipsis]
    if kind in (Union, types.UnionType):
        (inner,) = [_check_of(one) for one in parts if one is not type(None)]
        return lambda value: None if value is None else inner(value)
    checks = [_check_of(one) for one in parts]
    if kind is tuple:
        return lambda value: _like(
            value, [check(one) for check, one in zip(checks, _of_kind(list | tuple, value), strict=True)]
        )
    if kind is Sequence:
        return lambda value: _like(value, [checks[0](one) for one in _of_kind(list | tuple, value)])
    if kind is Mapping:
        return lambda value: {_text(name): checks[1](one) for name, one in _of_kind(dict, value).items()}
    return _PLAIN[hint]


def _of_kind(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {getattr(kind, '__name__', kind)}, got {str(value)[:80]}")
    return value


def _like(value: Any, found: list[Any]) -> Any:
    return tuple(found) if isinstance(value, tuple) else found


def _text(value: Any) -> str:
    return " ".join(printable(_of_kind(str, value)).split("\n"))


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > _MAX_INTEGER:
        raise ValueError(f"expected an integer of at most 2**53, got {str(value)[:80]}")
    return value


def _number(value: Any) -> float:
    return float(_of_kind(float, value) if type(value) is not int else _integer(value))


def _of_contract(value: Any) -> Any:
    """Check a value in a contract, which is a text or a list of rows."""
    if isinstance(value, str):
        return _text(value)
    rows = _check_of(Sequence[Mapping[str, str]])(value)
    if not all("what" in row for row in rows):
        raise ValueError("expected rows of a contract, each with the name of a group")
    return rows


_PLAIN: Mapping[Any, Check] = {
    Any: _of_contract,
    str: _text,
    int: _integer,
    float: _number,
    bool: lambda value: _of_kind(bool, value),
}


_MAX_UNIX_SECONDS = 2.0**33
"""The year 2242."""

_MAX_RANKS = 2**20

_COUNTS = (
    "rank",
    "step",
    "buffer_bytes",
    "payload_bytes",
    "num_cores",
    "num_threads",
    "num_differing",
    "layout",
)


def is_possible(row: Any) -> bool:
    """Return whether the numbers of a row fit together: no count is below 0, and nothing ends before it begins."""
    counts = [getattr(row, name, 0) for name in _COUNTS]
    spans = [(getattr(row, "began", 0), getattr(row, "ended", getattr(row, "began", 0)))]
    for index, *numbers in getattr(row, "buckets", ()):
        counts.append(index)
        if len(numbers) == 2:  # the bytes, and the names of the parameters
            counts.append(numbers[0])
        else:
            spans.append((numbers[1], numbers[2]))
    contract = getattr(row, "contract", {})
    return (
        all(one is None or one >= 0 for one in counts)
        and all(began <= ended for began, ended in spans)
        and 0 <= getattr(row, "unix_seconds", 0.0) < _MAX_UNIX_SECONDS
        and all(0 <= getattr(row, name, 0) <= _MAX_RANKS for name in ("rank", "num_ranks"))
        and isinstance(contract.get("title", ""), str)
        and isinstance(contract.get("rows", []), list)
    )
