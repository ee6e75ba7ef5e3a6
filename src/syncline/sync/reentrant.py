"""Is the backward that runs now inside of another backward?

Activation checkpointing with `use_reentrant=True` runs a backward of its own for each checkpoint, from inside the
backward function of an autograd node. To the engine these are graph tasks like any other: each has its own end
at which callbacks run. Only the Python stack tells that something further out goes on.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch.autograd import graph
from torch.autograd.function import BackwardCFunction

__all__ = ["is_inside_another_backward"]

_RUN_BACKWARD = graph._engine_run_backward.__code__
_NODE = BackwardCFunction.apply.__code__


def is_inside_another_backward() -> bool:
    """Whether an autograd node written in Python started the backward that runs in this thread.

    Costs a walk up the Python stack: ask once a backward, not once a gradient.

    Example:
        >>> is_inside_another_backward()
        False
    """
    frame: FrameType | None = sys._getframe(1)
    in_backward = False
    while frame is not None:
        code = frame.f_code
        if code is _RUN_BACKWARD:
            in_backward = True
        elif in_backward and code is _NODE:
            return True
        frame = frame.f_back
    return False
