"""The native library: code in C that is optional, knows neither torch nor Python, and receives addresses.

Everything works without it, more slowly or over Gloo.

Imports: errors.

core.c      collectives between processes over shared memory
loading.py  find and load the library, and the types of its functions
reduce.h    element-wise reductions, compiled once for each instruction set
"""

from __future__ import annotations

from syncline.native.loading import Library, NativeUnavailable, find_library, library

__all__ = ["Library", "NativeUnavailable", "find_library", "library"]
