"""The native library: code in C that is optional, knows neither torch nor Python, and receives addresses.

Everything works without it, more slowly or over Gloo.

Imports: errors.

codec.c     encoding and decoding of values that are averaged, for compressions
core.c      collectives between processes over shared memory
each_isa.h  include a header of kernels once for each instruction set
encode.h    the kernels of codec.c, compiled once for each instruction set
factors.c   encoding and decoding of matrices as two thin factors, for PowerSGD
factors.h   the kernels of factors.c, compiled once for each instruction set
half.h      conversions between fp32 and 16-bit types, compiled once for each instruction set
isa.h       the instruction sets, and the choice of one at run time
loading.py  find and load the library, and the types of its functions
parts.h     threads that divide the work of one call
reduce.h    element-wise reductions, compiled once for each instruction set
"""

from __future__ import annotations

from syncline.native.loading import Library, NativeUnavailable, find_library, library, library_if_any

__all__ = ["Library", "NativeUnavailable", "find_library", "library", "library_if_any"]
