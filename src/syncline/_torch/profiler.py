"""Ranges for torch.profiler. A range shows one phase of Syncline in a trace, by name.

A range costs about 10 microseconds while a profiler runs, and a tenth of a microsecond while none runs. So a phase and
a bucket have a range, but a parameter has none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.autograd import profiler

is_profiling: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled", True)
"""Return whether a profiler runs. If torch cannot tell, ranges are always recorded, which is slower.

This is no Python function, because each bucket calls it several times and a call of a Python function costs more.
"""

UNPROFILED: AbstractContextManager[Any] = nullcontext()
"""A context that does nothing. Code that runs for each bucket uses it instead of a call of `profiled`."""


def profiled(name: str, *values: object) -> AbstractContextManager[Any]:
    """Return a context that torch.profiler shows as a range. While no profiler runs, the context does nothing.

    Args:
        name: the name of the range, without the prefix "syncline::".
        values: the values for the fields `{}` in the name. They are formatted only if a profiler runs.

    Examples:
        >>> from torch.profiler import profile
        >>> with profile() as run, profiled("wait bucket {}", 0):
        ...     pass
        >>> [event.key for event in run.key_averages()]
        ['syncline::wait bucket 0']
    """
    if not is_profiling():
        return UNPROFILED
    return profiler.record_function(f"syncline::{name.format(*values)}")
