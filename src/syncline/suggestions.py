"""Names that users may have meant instead of a name that does not exist: arguments, functions and attributes.

Python 3.13 itself proposes the names of arguments. This module does so for all versions, in Syncline's own functions.

This module imports only the standard library.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_UNKNOWN = re.compile(r"\(\) got an unexpected keyword argument '(\w+)'$")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name, which proposes the most similar known name, or "".

    Examples:
        >>> did_you_mean("bild", ["build", "main"]), did_you_mean("x", ["build"])
        ("; did you mean 'build'?", '')
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


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
