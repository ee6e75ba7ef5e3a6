"""Functions that find and load the native library, and that declare the types of its functions.

The comments in `core.c`, `codec.c` and `factors.c` document these functions.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from syncline.errors import SynclineError

_NAME = "libsyncline_core.so"


def find_library() -> Path | None:
    """Return the path of the compiled native library.

    A wheel puts the library beside this file. An editable install leaves this file in the source tree and puts the
    library into site-packages, beside the other files of the distribution. Returns None if the package was installed
    without the library.
    """
    beside = Path(__file__).with_name(_NAME)
    if beside.is_file():
        return beside
    try:
        installed = distribution("syncline").locate_file(f"syncline/native/{_NAME}")
    except PackageNotFoundError:  # run from the sources, never installed
        return None
    found = Path(str(installed))  # not looked up in the list of files, which takes milliseconds to read
    return found if found.is_file() else None


_ABI = 7


class NativeUnavailable(SynclineError):
    """The error that is raised if the native library is needed but was not built, or cannot be loaded."""


_CODES = (c_int, c_int, c_size_t, c_size_t, c_size_t)
"""The types of isa, bits, block_numel, num_blocks and numel."""

_FACTORS = (c_int, c_int, c_void_p, c_size_t, c_size_t)
"""The types of isa, rank, shapes, num_tensors and numel."""

_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "isa": (c_char_p, [c_int]),
    "reduce": (c_int, [c_int, c_void_p, c_void_p, c_int, c_size_t, c_int, c_int]),
    "group_bytes": (c_size_t, [c_int]),
    "group_open": (c_void_p, [c_void_p, c_int, c_int, c_uint64, c_int]),
    "group_close": (None, [c_void_p]),
    "lane_bytes": (c_size_t, [c_int, c_int, c_size_t, c_size_t]),
    "lane_open": (c_void_p, [c_void_p, c_void_p, c_int, c_size_t, c_size_t]),
    "lane_close": (None, [c_void_p]),
    "start": (c_int64, [c_void_p, c_uint64, c_void_p, c_void_p, c_size_t, c_uint64]),
    "start_in_place": (
        c_int64,
        [c_void_p, c_uint64, c_void_p, c_size_t, c_uint64, c_size_t, c_void_p, c_size_t, c_size_t],
    ),
    "start_part": (c_int64, [c_void_p, c_uint64, c_void_p, c_size_t, c_size_t, c_size_t]),
    "poll": (c_int, [c_void_p, c_int, c_uint64]),
    "wait": (c_int, [c_void_p, c_int, c_uint64, c_uint64]),
    "abort": (c_int, [c_void_p, c_char_p, c_size_t]),
    "abort_text": (c_int64, [c_void_p, c_char_p]),
    "called": (c_int, [c_void_p, c_void_p]),
    "quantize": (c_int, [*_CODES, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int]),
    "mean_of_codes": (
        c_int,
        [*_CODES, c_void_p, c_int, c_size_t, c_int, c_void_p, c_size_t, c_void_p, c_int],
    ),
    "narrow": (c_int, [c_int, c_void_p, c_size_t, c_size_t, c_int, c_void_p, c_int]),
    "scale": (c_int, [c_int, c_void_p, c_size_t, c_float, c_void_p, c_int]),
    "select": (
        c_int,
        [c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_void_p, c_void_p, c_int],
    ),
    "left_factors": (c_int, [*_FACTORS, *[c_void_p] * 6, c_int]),
    "right_factors": (c_int, [*_FACTORS, *[c_void_p] * 5, c_int]),
    "lost_of_factors": (c_int, [*_FACTORS, *[c_void_p] * 3, c_int]),
    "mean_of_factors": (c_int, [*_FACTORS, *[c_void_p] * 4, c_int]),
}


class Library:
    """The native library. Its functions are attributes, whose names lack the prefix `syncline_`.

    Each function releases Python's global interpreter lock while it runs.

    Args:
        path: the path of the library.
    """

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        abi = loaded.syncline_abi
        abi.restype = c_uint32
        if abi() != _ABI:
            raise NativeUnavailable(
                f"the native library {path} belongs to another version of syncline: expected interface version {_ABI}, "
                f"got {abi()}. Install syncline again"
            )
        self._loaded = loaded

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        """Declare a function at its first use, and keep it as an attribute."""
        if name not in _PROTOTYPES:
            raise AttributeError(name)
        function: ctypes._NamedFuncPointer = getattr(self._loaded, f"syncline_{name}")
        function.restype, function.argtypes = _PROTOTYPES[name]
        setattr(self, name, function)
        return function


@functools.cache
def library() -> Library:
    """Return the native library. The first call loads it.

    Raises:
        NativeUnavailable: the library was not built, belongs to another version, or cannot be loaded.
    """
    if sys.platform != "linux":
        raise NativeUnavailable(f"the native library needs Linux, but this system is {sys.platform}")
    path = find_library()
    if path is None:
        raise NativeUnavailable(
            "the native library was not built when syncline was installed. Install a C compiler, then install syncline "
            "again"
        )
    try:
        return Library(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the native library cannot be loaded: {error}") from error


@functools.cache
def library_if_any() -> Library | None:
    """Return the native library, or None if there is none. The result is remembered, because a search takes long."""
    try:
        return library()
    except NativeUnavailable:
        return None
