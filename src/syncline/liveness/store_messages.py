"""Messages that ranks exchange through a store: signed if the job has a token, and checked when read.

A store has no passwords, so any program that can connect can write any key. With a token that only the job's processes
know, a reader can verify that a message is from one of them (HMAC-SHA256 over the key and the text). In any case, bytes
that are not a valid message raise one clear error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from syncline import environment
from syncline.errors import SynclineError

__all__ = ["SignedStore", "decode"]


T = TypeVar("T")

_MAX_BYTES = 1 << 20

_SHOWN_BYTES = 60

_SIGNED, _PLAIN = b"syncline signed ", b"syncline plain "

_DIGEST_CHARS = 2 * hashlib.sha256().digest_size


class SignedStore:
    """A store of torch.distributed for text messages.

    Args:
        store: the same for all ranks.
        token: a secret that only the job's processes know; None for no signatures. The default is the launcher's token.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = SignedStore(HashStore(), token="one that nobody guesses")
        >>> store.set("rank 1", "here")
        >>> store.get("rank 1")
        'here'
    """

    def __init__(self, store: Any, *, token: str | types.EllipsisType | None = ...) -> None:
        self._store = store
        self._token = environment.token() if token is ... else token

    def set(self, key: str, text: str) -> None:
        """Write a message."""
        self._store.set(key, self._signed(key, text))

    def set_first(self, key: str, text: str) -> str:
        """Write a message if the key has none, and return the message that the key has now."""
        return self._read(key, self._store.compare_set(key, "", self._signed(key, text)))

    def get(self, key: str) -> str:
        """Return a message; wait for it up to the store's timeout."""
        return self._read(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """Return several messages, see `get`."""
        values = self._store.multi_get(list(keys)) if keys else []
        return [self._read(key, value) for key, value in zip(keys, values, strict=True)]

    def readable(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the messages at these keys, without missing and unreadable ones."""
        if not self.has(*keys):  # `multi_get` would wait for missing keys
            keys = [key for key in keys if self.has(key)]
        found = {}
        for key, value in zip(keys, self._store.multi_get(list(keys)) if keys else [], strict=True):
            with contextlib.suppress(SynclineError):
                found[key] = self._read(key, value)
        return found

    def has(self, *keys: str) -> bool:
        """Return whether all of these keys exist."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all of these keys exist."""
        self._store.wait(list(keys), timeout)

    def count_up(self, key: str) -> int:
        """Return the number of calls of this method with `key`, which only one rank may write.

        This does not use the store's `add`, because a store closes the connection if the value is not a number.
        """
        text = self.get(key) if self.has(key) else "0"
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            _refuse(f"key {key!r} at the store", "a number", text)
        self.set(key, str(int(text) + 1))
        return int(text) + 1

    def _signed(self, key: str, text: str) -> bytes:
        if self._token is None:
            return _PLAIN + text.encode()
        return _SIGNED + self._digest(key, text.encode()) + text.encode()

    def _digest(self, key: str, text: bytes) -> bytes:
        assert self._token is not None
        name = key.encode()
        signed = b"%d %b%b" % (len(name), name, text)
        return hmac.new(self._token.encode(), signed, hashlib.sha256).hexdigest().encode()

    def _read(self, key: str, value: bytes) -> str:
        where = f"key {key!r} at the store"
        if len(value) > _MAX_BYTES:
            _refuse(where, f"at most {_MAX_BYTES} bytes, not {len(value)}", value)
        if self._token is None:
            if value.startswith(_SIGNED):
                _refuse(where, "a message without a signature, for SYNCLINE_TOKEN is not set here", value)
            return _text(where, value, _PLAIN)
        if not value.startswith(_SIGNED):
            _refuse(where, "a message signed with this job's token (SYNCLINE_TOKEN)", value)
        signature = value[len(_SIGNED) :][:_DIGEST_CHARS]
        text = value[len(_SIGNED) + _DIGEST_CHARS :]
        if not hmac.compare_digest(signature, self._digest(key, text)):
            _refuse(where, "a message signed with this job's token (SYNCLINE_TOKEN)", value)
        return _text(where, value, value[: len(_SIGNED) + _DIGEST_CHARS])


def _text(where: str, value: bytes, beginning: bytes) -> str:
    if not value.startswith(beginning):
        _refuse(where, "a message of Syncline", value)
    try:
        return value[len(beginning) :].decode()
    except UnicodeDecodeError:
        _refuse(where, "text", value)


def _refuse(where: str, expected: str, got: str | bytes) -> NoReturn:
    raise SynclineError(
        f"{where}: expected {expected}, got {got[:_SHOWN_BYTES]!r}. Another program wrote there, or the ranks run "
        "different versions of Syncline or have different tokens (SYNCLINE_TOKEN). Who may connect to the store, and "
        "how to close its port to others: docs/security.md"
    )


# ---------------------------------------------------------------------- text into objects


def decode(kind: type[T], text: str | bytes, where: str) -> T:
    """Return the dataclass that JSON describes, with every field of its declared type.

    Args:
        kind: a dataclass with fields of type int, float, str, bool, None, list, dict with str keys, or such a
            dataclass.
        text: a JSON object. Fields that have a default may be left out.
        where: the place where the text was found, for messages.

    Raises:
        SynclineError: the text is not such an object.
    """
    try:
        value = json.loads(text)
        found: T = _converted(value, kind)
    except (ValueError, TypeError, OverflowError, RecursionError):
        _refuse(where, f"a {kind.__name__.strip('_')} as JSON", text)
    return found


def _converted(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`; raise TypeError or ValueError if it has another type."""
    if isinstance(hint, types.UnionType):
        choices = typing.get_args(hint)
        if value is None and types.NoneType in choices:
            return None
        (only,) = (choice for choice in choices if choice is not types.NoneType)
        return _converted(value, only)
    if is_dataclass(hint) and isinstance(hint, type):
        return _as_dataclass(value, hint)
    if typing.get_origin(hint) is list:
        (of,) = typing.get_args(hint)
        return [_converted(item, of) for item in _checked(value, list)]
    if typing.get_origin(hint) is dict:
        _, of = typing.get_args(hint)
        return {_converted(key, str): _converted(item, of) for key, item in _checked(value, dict).items()}
    if hint is float:
        number = float(_checked(value, int) if type(value) is int else _checked(value, float))
        if not math.isfinite(number):
            raise ValueError(value)
        return number
    if hint is str:
        _checked(value, str).encode()  # raises for half a surrogate pair
    return _checked(value, hint)


def _as_dataclass(value: Any, kind: type) -> Any:
    given = dict(_checked(value, dict))
    hints = _hints(kind)
    found = {}
    for field in fields(kind):
        if field.name in given:
            found[field.name] = _converted(given.pop(field.name), hints[field.name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(field.name)
    if given:
        raise ValueError(f"unknown: {given}")
    return kind(**found)


_hints = functools.cache(typing.get_type_hints)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:  # not isinstance, because True is an int
        raise TypeError(value)
    return value
