"""What was given where a count, a yes or no, or one of a few words is expected: checked, with one error for each.

This module needs nothing but the standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["checked_choice", "checked_count", "checked_flag", "did_you_mean", "what_it_is"]


def checked_count(name: str, value: object, *, at_least: int) -> int:
    """An integer that is large enough.

    Raises:
        TypeError: not an integer; True and False are none.
        ValueError: too small.

    Example:
        >>> checked_count("every", 8, at_least=1)
        8
        >>> checked_count("every", True, at_least=1)
        Traceback (most recent call last):
        TypeError: expected every to be an integer of at least 1, got True
    """
    text = f"expected {name} to be an integer of at least {at_least}, got {value!r}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(text)
    if value < at_least:
        raise ValueError(text)
    return value


def checked_flag(name: str, value: object) -> bool:
    """True or False, and nothing that would be taken for one of them.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"expected {name} to be True or False, got {value!r}")
    return value


def checked_choice(name: str, value: object, known: Iterable[str]) -> str:
    """One of a few words.

    Raises:
        TypeError: it is no word.
        ValueError: it is another one.

    Example:
        >>> checked_choice("on_divergence", "repiar", ("raise", "repair", "warn"))
        Traceback (most recent call last):
        ValueError: expected on_divergence to be one of 'raise', 'repair', 'warn', got 'repiar': did you mean 'repair'?
    """
    known = tuple(known)
    text = f"expected {name} to be one of {', '.join(map(repr, known))}, got {value!r}"
    if not isinstance(value, str):
        raise TypeError(text)
    if value not in known:
        raise ValueError(text + did_you_mean(value, known))
    return value


def what_it_is(value: object) -> str:
    """What was given where something of another type is expected.

    Example:
        >>> what_it_is("text"), what_it_is(str)
        ('a str', 'the class str')
    """
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """The end of an error about a word that is not known; "" where none is like it.

    Example:
        >>> did_you_mean("Skip", ["ignore", "skip"]), did_you_mean("red", ["ignore", "skip"]), did_you_mean(3, ["skip"])
        (": did you mean 'skip'?", '', '')
    """
    if not isinstance(value, str):
        return ""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(value.lower(), by_lower, n=1)
    return f": did you mean {by_lower[near[0]]!r}?" if near else ""
