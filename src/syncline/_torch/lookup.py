"""Lookup of torch's private names. A missing name raises a clear error, but only when the code uses the name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import torch

from syncline.errors import SynclineError

TESTED = ("2.11", "2.15")
"""The oldest and the newest version of torch with which Syncline is tested."""


def lookup(path: str, used_for: str) -> Any:
    """Return the object at `path` in torch. If torch lacks it, return a stand-in that raises an error when it is used.

    Args:
        path: the name of a module, a colon, and names inside the module, as in "torch._C:_current_graph_task_id".
        used_for: the feature that needs the object, in words that complete the sentence "Syncline needs it to ...".

    Examples:
        >>> lookup("torch:add", "add")(torch.ones(1), 1)
        tensor([2.])
        >>> lookup("torch:_no_such_name", "show this")()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        syncline.errors.SynclineError: torch ... has no torch._no_such_name. Syncline needs it to show this. ...
    """
    try:
        return pkgutil.resolve_name(path)
    except (ModuleNotFoundError, AttributeError):
        return _Missing(path.replace(":", "."), (), {"_used_for": used_for})


def is_there(found: object) -> bool:
    """Return whether `found`, a result of `lookup`, is an object of torch and not a stand-in.

    Examples:
        >>> is_there(lookup("torch:_no_such_name", "show this"))
        False
    """
    return not isinstance(found, _Missing)


def attribute(path: str, used_for: str) -> Callable[[Any], Any]:
    """Return a function that reads a private attribute of an object. Use it for attributes that only instances have.

    If an object lacks the attribute, the returned function raises the same error as `lookup`'s stand-in.

    Args:
        path: the name of the attribute, or several names with dots between them.
        used_for: the feature that needs the attribute; see `lookup`.

    Examples:
        >>> attribute("_version", "see changes")(torch.zeros(1).add_(1))
        1
    """
    get = attrgetter(path)

    def read(owner: Any) -> Any:
        try:
            return get(owner)
        except AttributeError:
            _raise_missing(f"{type(owner).__qualname__}.{path}", used_for)

    return read


class _Missing(type):
    """The metaclass of stand-ins for missing names of torch.

    A stand-in is a class, so it can be a base class or the second argument of `isinstance`. A call of the stand-in, or
    access to an attribute of it, raises an error.
    """

    _used_for: str

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        _raise_missing(cls.__name__, cls._used_for)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and tools read such names, and accept that they are missing
            raise AttributeError(name)
        _raise_missing(cls.__name__, cls._used_for)


def _raise_missing(name: str, used_for: str) -> NoReturn:
    raise SynclineError(
        f"torch {torch.__version__} has no {name}. Syncline needs it to {used_for}. Install torch {TESTED[0]} to "
        f"{TESTED[1]}, the versions with which Syncline is tested, or do not use this feature"
    )
