"""Messages at a store of torch.distributed, signed when they are written and checked when they are read.

[Note: messages]

A store has no passwords, so any program that can connect to it can write any key. If the job has a token, which only
the job's processes know, a reader can verify that such a process wrote a message. The message is then signed with
HMAC-SHA256 over the key and the text. With or without a token, a reader that finds an invalid message raises a clear
error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import math
import time
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from syncline import environment
from syncline._torch.process_groups import TCPStore
from syncline.errors import SynclineError
from syncline.liveness.connection import (
    ANSWER_SECONDS,
    MEANWHILE_SECONDS,
    Requests,
    StoreConnection,
    clone_of,
    innermost,
)

T = TypeVar("T")

_MAX_BYTES = 1 << 20

_SHOWN_BYTES = 60

_SIGNED, _PLAIN = b"syncline signed ", b"syncline plain "

_DIGEST_CHARS = 2 * hashlib.sha256().digest_size


Ask = Callable[..., Any]
"""`Requests.make`, or a function with the same arguments."""


class SignedStore:
    """A store of text messages, which signs messages when it writes them, and checks them when it reads them.

    Args:
        store: the store of torch.distributed that holds the messages of all ranks, or a connection to it. A request to
            a store of another process raises `StoreSilent` if it is not answered in time.
        token: the secret that only the job's processes know. Pass None to use no signatures. The default is the value
            of SYNCLINE_TOKEN.

    Examples:
        >>> from torch.distributed import HashStore
        >>> store = SignedStore(HashStore(), token="a secret of the job")
        >>> store.set("rank 1", "here")
        >>> store.get("rank 1")
        'here'
    """

    def __init__(self, store: Any, *, token: str | types.EllipsisType | None = ...) -> None:
        self._ask: Ask = lambda request, *_: request()
        self._wait_seconds = 0.0
        """How long the store waits for a missing key; 0 if it is in this process."""
        if isinstance(store, StoreConnection):
            self._ask = store.ask
            store = store.store
        elif isinstance(innermost(store), TCPStore):
            self._ask = Requests(max(store.timeout.total_seconds(), ANSWER_SECONDS)).make
        if isinstance(innermost(store), TCPStore):
            self._wait_seconds = store.timeout.total_seconds()
        self._store = store
        self._token = environment.token() if token is ... else token

    def set(self, key: str, text: str) -> None:
        """Write a message under a key."""
        mine = self._signed(key, text)
        self._ask(lambda: self._store.set(key, mine), 0.0)

    def set_first(self, key: str, text: str) -> str:
        """Write a message under a key if the key has no message yet. Return the message that the key has then."""
        mine = self._signed(key, text)
        held = self._ask(lambda: self._store.compare_set(key, "", mine), 0.0)
        if held == mine and not environment.uses_libuv():
            # A store without libuv does not wake up waiting clients for compare_set.
            self._ask(lambda: self._store.set(key, mine), 0.0)
        return self._read(key, held)

    def get(self, key: str, *, max_bytes: int = _MAX_BYTES) -> str:
        """Return the message of a key. If the key has no message yet, wait for it, at most for the store's timeout.

        Args:
            key: the key.
            max_bytes: the size of the largest message that is accepted.
        """
        return self._read(
            key, self._ask(lambda: self._store.get(key), self._wait_seconds), max(max_bytes, _MAX_BYTES)
        )

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """Return the messages of several keys. Wait for missing messages, at most for the store's timeout."""
        values = self._ask(lambda: self._store.multi_get(list(keys)), self._wait_seconds) if keys else []
        return [self._read(key, value) for key, value in zip(keys, values, strict=True)]

    def readable(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the messages of these keys, by key. Missing and unreadable messages are left out."""
        if not self.has(*keys):  # `multi_get` would wait for missing keys
            keys = [key for key in keys if self.has(key)]
        found: dict[str, str] = {}
        try:
            values = self._ask(lambda: self._store.multi_get(list(keys)), self._wait_seconds) if keys else []
        except dist.DistStoreError:  # one was deleted just now
            return found
        for key, value in zip(keys, values, strict=True):
            with contextlib.suppress(SynclineError):
                found[key] = self._read(key, value)
        return found

    def has(self, *keys: str) -> bool:
        """Return whether all of these keys have messages."""
        return bool(self._ask(lambda: self._store.check(list(keys)), 0.0))

    def wait(
        self,
        keys: Sequence[str],
        timeout: timedelta,
        meanwhile: Callable[[], object] | None = None,
        *,
        may_raise: bool = False,
    ) -> None:
        """Wait until all of these keys have messages, at most for the time `timeout`.

        Args:
            keys: the keys.
            timeout: how long to wait.
            meanwhile: a function that is called repeatedly. It must use another connection; see `clone`.
            may_raise: whether `meanwhile` may raise an error, which ends the wait. torch's own wait cannot be ended, so
                the store is then polled, and `meanwhile` may use this connection.

        Raises:
            DistStoreError: some keys still have no message.
        """
        seconds = timeout.total_seconds()
        if meanwhile is None or (self._wait_seconds and not may_raise):
            self._ask(lambda: self._store.wait(list(keys), timeout), seconds, meanwhile)
        else:
            self._poll(keys, seconds, meanwhile)

    def _poll(self, keys: Sequence[str], seconds: float, meanwhile: Callable[[], object]) -> None:
        deadline, next_call = time.monotonic() + seconds, time.monotonic() + MEANWHILE_SECONDS
        pause_seconds = 0.001
        while not self.has(*keys):
            now = time.monotonic()
            if now > deadline:
                raise dist.DistStoreError(f"no process has written {', '.join(keys)} in time")
            if now > next_call:
                next_call = now + MEANWHILE_SECONDS
                meanwhile()
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, MEANWHILE_SECONDS)

    def clone(self) -> SignedStore:
        """Return a store of the same messages with a connection of its own."""
        return SignedStore(clone_of(self._store, self._store.timeout)[0], token=self._token)

    def delete(self, key: str) -> None:
        """Delete the message of a key, if the store can delete keys."""
        with contextlib.suppress(RuntimeError):
            self._ask(lambda: self._store.delete_key(key), 0.0)

    def count_up(self, key: str) -> int:
        """Add 1 to the number that is the message of a key, and return the new number. A missing number counts as 0.

        Only one rank may write to this key, because this method does not use the store's `add`. That method makes the
        store close the connection if the message is not a number.
        """
        text = self.get(key) if self.has(key) else "0"
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            _refuse(_at(key), "a number", text)
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

    def _read(self, key: str, value: bytes, max_bytes: int = _MAX_BYTES) -> str:
        where = _at(key)
        if len(value) > max_bytes:
            _refuse(where, f"a message of at most {max_bytes} bytes, not of {len(value)} bytes", value)
        if self._token is None:
            if value.startswith(_SIGNED):
                _refuse(
                    where, "an unsigned message, because SYNCLINE_TOKEN is not set in this process", value
                )
            return _text(where, value, _PLAIN)
        if not value.startswith(_SIGNED):
            _refuse(where, "a message signed with this job's token (SYNCLINE_TOKEN)", value)
        signature = value[len(_SIGNED) :][:_DIGEST_CHARS]
        text = value[len(_SIGNED) + _DIGEST_CHARS :]
        if not hmac.compare_digest(signature, self._digest(key, text)):
            _refuse(where, "a message signed with this job's token (SYNCLINE_TOKEN)", value)
        return _text(where, value, value[: len(_SIGNED) + _DIGEST_CHARS])


def _at(key: str) -> str:
    return f"key {key!r} at the store"


def _text(where: str, value: bytes, beginning: bytes) -> str:
    if not value.startswith(beginning):
        _refuse(where, "a message of Syncline", value)
    try:
        return value[len(beginning) :].decode()
    except UnicodeDecodeError:
        _refuse(where, "text", value)


def _refuse(where: str, expected: str, got: str | bytes) -> NoReturn:
    raise SynclineError(
        f"{where}: expected {expected}, got {got[:_SHOWN_BYTES]!r}. Either another program wrote this message, or the "
        "ranks run different versions of Syncline, or they have different tokens (SYNCLINE_TOKEN). "
        'The page "Security" of the documentation says which programs can connect to the store, and how to close its '
        "port to others"
    )


# ---------------------------------------------------------------------- text into objects


def decode(kind: type[T], text: str | bytes, where: str) -> T:
    """Create an object of a dataclass from its JSON text, and check the type of every field.

    Args:
        kind: the dataclass. The types of its fields are int, float, str, bool, None, an enum, list, tuple with an
            ellipsis, dict with str keys, or another such dataclass.
        text: a JSON object, which needs no entries for fields that have a default.
        where: the place where the text was found. Error messages begin with it.

    Raises:
        SynclineError: `text` does not describe an object of this dataclass.
    """
    try:
        value = json.loads(text)
        kinds: Any = kind
        found: T = _converter(kinds)(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        _refuse(where, f"the JSON text of a {kind.__name__.strip('_')}", text)
    return found


Convert = Callable[[Any], Any]
"""A function that converts a part of parsed JSON to a type. It raises TypeError or ValueError if that is impossible."""


@functools.cache
def _converter(hint: Any) -> Convert:
    """Return the function that converts a part of parsed JSON to the type `hint`.

    Each rank decodes messages of all ranks, so the types are inspected once, and not for each message.
    """
    if isinstance(hint, types.UnionType):
        (only,) = (choice for choice in typing.get_args(hint) if choice is not types.NoneType)
        convert = _converter(only)
        return lambda value: None if value is None else convert(value)
    if is_dataclass(hint) and isinstance(hint, type):
        return _converter_of_dataclass(hint)
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        item = _converter(typing.get_args(hint)[0])
        return lambda value: origin(item(one) for one in _checked(value, list))
    if origin is dict:
        item = _converter(typing.get_args(hint)[1])
        return lambda value: {_as_text(key): item(one) for key, one in _checked(value, dict).items()}
    if hint is float:
        return _as_float
    if hint is str:
        return _as_text
    if issubclass(hint, Enum):
        return lambda value: hint(value)
    return lambda value: _checked(value, hint)


def _converter_of_dataclass(kind: type) -> Convert:
    hints = typing.get_type_hints(kind)
    converters = {field.name: _converter(hints[field.name]) for field in fields(kind)}
    required = {
        field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING
    }

    def convert(value: Any) -> Any:
        given = _checked(value, dict)
        if not required <= given.keys() <= converters.keys():
            raise ValueError(
                f"missing: {required - given.keys()}, unknown: {given.keys() - converters.keys()}"
            )
        return kind(**{name: converters[name](one) for name, one in given.items()})

    return convert


def _as_float(value: Any) -> float:
    number = float(value if type(value) is float else _checked(value, int))
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _as_text(value: Any) -> str:
    text: str = _checked(value, str)
    text.encode()  # raises for half a surrogate pair
    return text


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:  # not isinstance, because True is an int
        raise TypeError(value)
    return value
