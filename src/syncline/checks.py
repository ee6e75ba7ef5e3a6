"""What was given where a count, a number, a time, a yes or no, or one of a few words is expected.

Each is checked here, with one wording: the argument's name, what was expected, and what came. A wrong type is a
TypeError, a wrong value a ValueError, as in Python itself.

This module needs nothing but the standard library.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from numbers import Integral, Real
from typing import Any

__all__ = [
    "checked_choice",
    "checked_count",
    "checked_flag",
    "checked_function",
    "checked_kind",
    "checked_number",
    "checked_seconds",
    "checked_state",
    "checked_truth",
    "did_you_mean",
    "number_in",
    "store",
    "what_it_is",
]


def checked_count(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """An integer within the bounds that are given, as an `int` (NumPy's are accepted).

    Raises:
        TypeError: not an integer; True and False are none.
        ValueError: out of bounds.

    Example:
        >>> checked_count("every", 8, at_least=1)
        8
        >>> checked_count("every", True, at_least=1)
        Traceback (most recent call last):
        TypeError: expected every to be an integer of at least 1, got True
    """
    bounds = "" if at_least is None else f" of at least {at_least}"
    if at_most is not None:
        bounds = f" of at most {at_most}" if at_least is None else f" from {at_least} to {at_most}"
    text = f"expected {name} to be an integer{bounds}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(text)
    number = int(value)
    if (at_least is not None and number < at_least) or (at_most is not None and number > at_most):
        raise ValueError(text)
    return number


def checked_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    finite: bool = True,
) -> float:
    """A real number within the bounds that are given; a tensor of one element counts as its number.

    Raises:
        TypeError: not a real number; True and False are none.
        ValueError: NaN, out of bounds, or infinite (unless `finite` is False).

    Example:
        >>> checked_number("mixing", 0.5, at_least=0, below=1)
        0.5
        >>> checked_number("mixing", float("nan"), at_least=0, below=1)
        Traceback (most recent call last):
        ValueError: expected mixing to be a finite number of at least 0 and below 1, got nan
    """
    number = number_in(value)
    limits = {"above": above, "of at least": at_least, "below": below, "of at most": at_most}
    bounds = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
    kind = "finite number" if finite else "number"
    text = f"expected {name} to be a {kind} {bounds}".rstrip() + f", got {value!r}"
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(text)
    try:
        number = float(number)
    except OverflowError:  # an integer that no float can hold
        raise ValueError(text) from None
    if (
        math.isnan(number)
        or (finite and math.isinf(number))
        or (above is not None and number <= above)
        or (at_least is not None and number < at_least)
        or (below is not None and number >= below)
        or (at_most is not None and number > at_most)
    ):
        raise ValueError(text)
    return number


def number_in(value: Any) -> Any:
    """The number in a tensor or an array of one element; anything else is itself."""
    has_one = hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1
    return value.item() if has_one else value


def checked_seconds(name: str, value: Any) -> float:
    """A time above 0, a timedelta or a number of seconds, in seconds.

    Raises:
        TypeError: neither of them.
        ValueError: not above 0, NaN or infinite.

    Example:
        >>> checked_seconds("timeout", timedelta(minutes=1))
        60.0
    """
    text = f"expected {name} to be a timedelta or a finite number of seconds above 0, got {value!r}"
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(text)
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def checked_flag(name: str, value: object) -> bool:
    """True or False, and nothing that would be taken for one of them.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"expected {name} to be True or False, got {value!r}")
    return value


def checked_truth(name: str, value: Any) -> bool:
    """Yes or no, for an argument of torch's: 1, 0 and None (no) are taken as well, as torch's own code takes them.

    Raises:
        TypeError: anything else, which Python would take for yes or no all the same: "False", say, or NaN.
        ValueError: a number other than 0 and 1.

    Example:
        >>> checked_truth("static_graph", 1), checked_truth("static_graph", None)
        (True, False)
    """
    text = f"expected {name} to be True or False, got {value!r}"
    is_numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not (value is None or is_numpys or isinstance(value, Integral)):
        raise TypeError(text)
    if value is not None and value not in (0, 1):
        raise ValueError(text)
    return bool(value)


def checked_kind(name: str, value: Any, kind: Any, what: str, *, hint: str = "") -> Any:
    """An object of a class.

    Args:
        name: of the argument.
        value: what was given.
        kind: the class.
        what: it in words, with an article.
        hint: what to do otherwise, the end of the error.

    Raises:
        TypeError: it is none.

    Example:
        >>> checked_kind("rows", "a, b", list, "a list of names")
        Traceback (most recent call last):
        TypeError: expected rows to be a list of names, got a str
    """
    if not isinstance(value, kind):
        raise TypeError(f"expected {name} to be {what}, got {what_it_is(value)}{hint}")
    return value


def checked_state(value: Any) -> Mapping[str, Any]:
    """The argument `state` of a `load_state_dict`.

    Raises:
        TypeError: no dict.
    """
    state: Mapping[str, Any] = checked_kind("state", value, Mapping, "a dict, as state_dict() gives it")
    return state


def checked_function(name: str, value: object, what: str = "a function") -> Any:
    """Something that can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"expected {name} to be {what}, got {value!r}")
    return value


def store(target: object, **checked: object) -> None:
    """Set fields of a frozen dataclass, in its `__post_init__`, to what a check returned."""
    for name, value in checked.items():
        object.__setattr__(target, name, value)


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
