"""Functions that read files and JSON which other programs may have written: bounded in time and memory, and strict.

A file can be a FIFO that blocks for ever, a device, a file of the kernel without an end, or a hole of any size. JSON
can have names twice, numbers that are not finite, or millions of levels. Each of these is an error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Sequence
from typing import Any, BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | os.PathLike[str]) -> tuple[BinaryIO, int]:
    """Open a regular file for reading, and return it with its size in bytes. A link to a regular file is followed.

    Other kinds of files are refused, because reading a FIFO may block for ever. Read no more than the size: files of
    the kernel, such as /proc/kmsg, have size 0 and may block as well.

    Raises:
        OSError: the path is not a regular file, or the file cannot be opened.
    """
    # First, because opening a device may change the state of the device.
    _check_is_regular(os.stat(path), path)
    fd = os.open(path, os.O_RDONLY | _flags("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
    try:
        found = os.fstat(fd)
        _check_is_regular(found, path)
    except OSError:
        os.close(fd)
        raise
    return open(fd, "rb"), found.st_size


def read_regular(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the path of the file.
        max_bytes: the largest size of the file.

    Raises:
        OSError: the path is not a regular file; the file cannot be read; or it is larger than `max_bytes`.
    """
    file, size = open_regular(path)
    with file:
        if size > max_bytes:
            raise OSError(
                errno.EFBIG,
                f"expected a file of at most {max_bytes} bytes, found {size} bytes",
                os.fspath(path),
            )
        return file.read(size) if size else b""


def _flags(*names: str) -> int:
    """Return these flags of `os.open`. A flag that this system does not have counts as 0."""
    found = 0
    for name in names:
        found |= getattr(os, name, 0)
    return found


def _check_is_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "another kind of file")
        raise OSError(errno.EINVAL, f"expected a regular file, found {kind}", os.fspath(path))


# ---------------------------------------------------------------------- JSON


def json_value(text: bytes | str) -> Any:
    """Parse JSON. The names in an object must be unique, and all numbers must be finite.

    Raises:
        ValueError: the text is not such JSON, or its values are nested too deep.

    Examples:
        >>> json_value(b'{"a": NaN}')
        Traceback (most recent call last):
        ValueError: expected a finite number, found NaN
    """
    if isinstance(text, bytes):
        text = text.decode()
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def json_object(text: bytes | str) -> dict[str, Any]:
    """Parse a JSON object; see `json_value`.

    Examples:
        >>> json_object(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
    """
    found = json_value(text)
    check(isinstance(found, dict), "a JSON object", found)
    return found  # type: ignore[no-any-return]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"expected the names in a JSON object to be unique, found {name!r} twice")
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"expected a finite number, found {text}")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def check(holds: bool, expected: str, found: object) -> None:
    """Raise a ValueError with the text "expected ..., found ..." if `holds` is false."""
    if not holds:
        raise not_as_expected(expected, found)


def not_as_expected(expected: str, found: object) -> ValueError:
    """Return a ValueError with the text "expected ..., found ...". Only the beginning of `found` is shown."""
    shown = repr(found)
    return ValueError(f"expected {expected}, found {shown[:80]}{'...' if len(shown) > 80 else ''}")


_MAX_COUNT = 2**63
"""One more than the largest size that torch can represent. Counts and sizes in a file are below it."""

MAX_DIMENSIONS = 64
"""As many dimensions as torch's kernels accept."""


def is_count(value: object) -> bool:
    """Return whether `value` is an integer from 0 to 2**63 - 1. True and False do not count as integers.

    Examples:
        >>> [is_count(value) for value in (3, -1, True, 1.0, 2**63)]
        [True, False, False, False, False]
    """
    return type(value) is int and 0 <= value < _MAX_COUNT


def are_counts(value: object) -> bool:
    """Return whether `value` is a list of integers from 0 to 2**63 - 1."""
    return isinstance(value, list) and all(map(is_count, value))


def is_shape(value: object) -> bool:
    """Return whether `value` is a list of at most 64 sizes, and the product of all sizes but zeros is below 2**63.

    Examples:
        >>> [is_shape(value) for value in ([2, 3], [], [2**62, 0], [2**62, 2, 0], [1] * 65, (2, 3))]
        [True, True, True, False, False, False]
    """
    return are_counts(value) and _is_small(value)  # type: ignore[arg-type]


def _is_small(sizes: Sequence[int]) -> bool:
    return len(sizes) <= MAX_DIMENSIONS and math.prod(size or 1 for size in sizes) < _MAX_COUNT
