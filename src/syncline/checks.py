"""Functions that check arguments: counts, numbers, times, flags, paths, objects, functions, choices and names.

Every error names the argument, and says what was expected and what was given. A wrong type raises TypeError, and a
wrong value raises ValueError, as in Python itself. Python 3.13 proposes the names of unknown arguments, which
`suggests_arguments` does for all versions, in Syncline's own functions.

This module imports only the standard library.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


def checked_count(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """Check that `value` is an integer within the bounds, and return it as an `int`. NumPy integers are accepted.

    A bound of None does not limit the value.

    Raises:
        TypeError: the value is not an integer. True and False do not count as integers.
        ValueError: the value is out of bounds.

    Examples:
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
    """Check that `value` is a real number within the bounds, and return it as a float.

    A tensor or array of one element counts as a number. A bound of None does not limit the value.

    Raises:
        TypeError: the value is not a real number. True and False do not count as numbers.
        ValueError: the value is NaN or out of bounds, or it is infinite and `finite` is True.

    Examples:
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
    except OverflowError:  # an integer too large for a float
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
    """If `value` is a tensor or array of one element, return that element. Return any other value unchanged."""
    has_one = hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1
    return value.item() if has_one else value


def checked_seconds(name: str, value: Any) -> float:
    """Check that `value` is a time above 0, as a timedelta or a number of seconds, and return it in seconds.

    Raises:
        TypeError: the value is neither a timedelta nor a number.
        ValueError: the time is NaN, not above 0, or above a thousand million seconds (31 years).

    Examples:
        >>> checked_seconds("timeout", timedelta(minutes=1))
        60.0
    """
    text = f"expected {name} to be a timedelta or a number of seconds above 0, up to 1e9 (31 years), got {value!r}"
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(text)
    seconds = float(value)
    if not 0 < seconds <= 1e9:  # the clocks of torch.distributed count no further than some centuries
        raise ValueError(text)
    return seconds


def checked_flag(name: str, value: object) -> bool:
    """Check that `value` is True or False, and return it. Other values, such as 1, are not accepted.

    Raises:
        TypeError: the value is neither True nor False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"expected {name} to be True or False, got {value!r}")
    return value


def checked_truth(name: str, value: Any) -> bool:
    """Check that `value` is a valid flag of torch's API, and return it as a bool.

    As in torch's own code, 1 counts as True, and 0 and None count as False.

    Raises:
        TypeError: the value has another type. (Python would convert "False" or NaN to True, for example.)
        ValueError: the value is an integer other than 0 and 1.

    Examples:
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
    """Check that `value` is an instance of a class, and return it.

    Args:
        name: the name of the argument.
        value: the given object.
        kind: the expected class, or a tuple of classes.
        what: a text for the error that names the expected object with its article, such as "a list of names".
        hint: the end of the error, which says what to do.

    Raises:
        TypeError: the value is not an instance of the class.

    Examples:
        >>> checked_kind("rows", "a, b", list, "a list of names")
        Traceback (most recent call last):
        TypeError: expected rows to be a list of names, got a str
    """
    if not isinstance(value, kind):
        raise TypeError(f"expected {name} to be {what}, got {what_it_is(value)}{hint}")
    return value


def checked_state(value: Any) -> Mapping[str, Any]:
    """Check that the argument `state` of a `load_state_dict` method is a mapping, and return it.

    Raises:
        TypeError: the value is not a mapping.
    """
    state: Mapping[str, Any] = checked_kind("state", value, Mapping, "a dict, as returned by state_dict()")
    return state


def checked_function(name: str, value: object, what: str = "a function") -> Any:
    """Check that `value` is callable, and return it. The error names `what` as the expected object.

    Raises:
        TypeError: the value is not callable.
    """
    if not callable(value):
        raise TypeError(f"expected {name} to be {what}, got {value!r}")
    return value


def store(target: object, **checked: object) -> None:
    """Set fields of a frozen dataclass to their checked values. Call this function in `__post_init__`."""
    for name, value in checked.items():
        object.__setattr__(target, name, value)


def checked_choice(name: str, value: object, known: Iterable[str]) -> str:
    """Check that `value` is one of the known words, and return it.

    Raises:
        TypeError: the value is not a string.
        ValueError: the value is not one of the known words.

    Examples:
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
    """Return a text that names the type of `value`, for an error about a wrong type.

    Examples:
        >>> what_it_is("text"), what_it_is(str)
        ('a str', 'the class str')
    """
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word, which proposes the most similar known word.

    Returns "" if no known word is similar.

    Examples:
        >>> did_you_mean("Skip", ["ignore", "skip"]), did_you_mean("red", ["ignore", "skip"]), did_you_mean(3, ["skip"])
        (": did you mean 'skip'?", '', '')
    """
    if not isinstance(value, str):
        return ""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(value.lower(), by_lower, n=1)
    return f": did you mean {by_lower[near[0]]!r}?" if near else ""


def checked_path(name: str, value: object) -> str:
    """Return the path `value`, which was given as the argument `name`, as a string.

    Raises:
        TypeError: `value` is neither a string nor an os.PathLike of a string.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"expected {name} to be a path, a str or an os.PathLike of a str, got {value!r}")
    return path


# ---------------------------------------------------------------------- unknown arguments

_UNKNOWN = re.compile(r"\(\) got an unexpected keyword argument '(\w+)'$")


def suggests_arguments(target: T) -> T:
    """Decorate a function, or all public functions of a class: an error about an unknown argument proposes a known one.

    Examples:
        >>> @suggests_arguments
        ... def mean(values, weight=1.0): ...
        >>> mean([], wieght=2.0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: mean() got an unexpected keyword argument 'wieght'...id you mean 'weight'?
    """
    if not isinstance(target, type):
        suggesting: T = _suggesting(target)
        return suggesting
    for name, function in list(vars(target).items()):
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            setattr(target, name, _suggesting(function))
    return target


def _suggesting(function: Any) -> Any:
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return function
    names = [one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY and one.name != "self"]
    if not names:
        return function
    all_names = {one.name for one in parameters}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            text = str(error)
            unknown = _UNKNOWN.search(text)
            if unknown is not None and unknown[1] in kwargs and unknown[1] not in all_names:
                error.args = (text + did_you_mean(unknown[1], names),)
            raise

    return call
