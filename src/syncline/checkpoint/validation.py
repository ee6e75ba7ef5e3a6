"""Checks of a file's content. A matching checksum only proves that a file is unchanged, not that it is well formed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from syncline.errors import CheckpointCorrupt

__all__ = ["check", "is_count", "json_object", "malformed_is_corrupt"]


_MAX_COUNT = 2**63
"""torch's largest size plus one; steps are stored in as many bits."""


@contextmanager
def malformed_is_corrupt(path: str) -> Iterator[None]:
    """Turn errors about malformed content into a `CheckpointCorrupt` that names the file.

    Use it only around code that interprets the content of the file. A MemoryError is passed on.

    Example:
        >>> with malformed_is_corrupt("manifest.json"):
        ...     {}["step"]
        Traceback (most recent call last):
        syncline.errors.CheckpointCorrupt: manifest.json is malformed: KeyError: 'step'
    """
    try:
        yield
    except RecursionError:
        raise CheckpointCorrupt(f"{path} is malformed: it is nested too deep") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointCorrupt(f"{path} is malformed: {type(error).__name__}: {error}") from error


def json_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8, with unique names and finite numbers only.

    Raises:
        ValueError: it is not such an object.
        RecursionError: it is nested too deep.

    Example:
        >>> json_object(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
        >>> json_object(b'{"a": NaN}')
        Traceback (most recent call last):
        ValueError: NaN is no number that we write
    """
    found = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    check(isinstance(found, dict), "expected an object", found)
    return found  # type: ignore[no-any-return]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number that we write")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def check(holds: bool, expected: str, found: object) -> None:
    """Raise a ValueError that names the expected and the found value, unless `holds` is true."""
    if not holds:
        shown = repr(found)
        raise ValueError(f"{expected}, found {shown[:80]}{'...' if len(shown) > 80 else ''}")


def is_count(value: object) -> bool:
    """Return whether `value` is an integer from 0 to torch's largest size; True and False are not.

    Example:
        >>> [is_count(value) for value in (3, -1, True, 1.0, 2**63)]
        [True, False, False, False, False]
    """
    return type(value) is int and 0 <= value < _MAX_COUNT
