"""Functions that find and load the native library, and that declare the types of its functions.

The comments in `core.c` and `codec.c` document these functions.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from syncline.errors import SynclineError

_NAME = "libsyncline_core.so"


def find_library() -> Path | None:
    """Return the path of the compiled native library.

    A wheel puts the library beside this file. An editable install leaves this file in the source tree and puts the
    library into site-packages, where the distribution's list of files contains it. Returns None if the package was
    installed without the library.
    """
    beside = Path(__file__).with_name(_NAME)
    if beside.is_file():
        return beside
    try:
        installed = files("syncline") or []
    except PackageNotFoundError:  # run from the sources, never installed
        return None
    for file in installed:
        if file.name == _NAME:
            found = Path(str(file.locate()))
            return found if found.is_file() else None
    return None


_ABI = 5


class NativeUnavailable(SynclineError):
    """The error that is raised if the native library is needed but was not built, or cannot be loaded."""


_CODES = (c_int, c_int, c_size_t, c_size_t, c_size_t)
"""The types of isa, bits, block_numel, num_blocks and numel."""

_PROTOTYPES: dict[str, tuple[object, list[object]]] = {
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
    "select": (
        c_int,
        [c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_void_p, c_void_p, c_int],
    ),
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
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(loaded, f"syncline_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(name)  # only for type checkers: all functions are set in the constructor


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
