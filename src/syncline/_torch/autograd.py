"""The autograd engine: its graph tasks, nested backwards, thread-local data of a backward, and ranges of its profiler.

A graph task is one run of the engine, such as one `backward()`. The ids of graph tasks increase in the order in which
the tasks begin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

from torch import Tensor
from torch.autograd import profiler
from torch.autograd.graph import Node

from syncline._torch.lookup import attribute, is_there, lookup
from syncline.errors import SynclineError

# ---------------------------------------------------------------------- graph tasks

current_graph_task_id: Callable[[], int] = lookup(
    "torch._C:_current_graph_task_id", "find the backward to which a gradient belongs"
)
"""Return the id of the graph task that runs in this thread, or -1 if no task runs.

This is torch's own function without a wrapper, because it is called for each gradient and must be fast.
"""

NO_TASK = -1
"""A number that no graph task has. It is used where there is no graph task."""

queue_callback: Callable[[Callable[[], object]], None] = lookup(
    "torch.autograd:Variable._execution_engine.queue_callback", "detect the end of a backward"
)
"""Register a function that the engine calls at the end of the current graph task."""

reaches_all_leaves: Callable[[], bool] = lookup(
    "torch.autograd:Variable._execution_engine.is_checkpoint_valid",
    "distinguish a backward from torch.autograd.grad",
)
"""Return whether the current graph task computes the gradients of all leaves, as `backward()` without `inputs` does."""

will_execute_node: Callable[[Node], bool] = lookup(
    "torch._C:_will_engine_execute_node", "find the parameters that a backward does not reach"
)
"""Return whether the current graph task will execute a node of the autograd graph."""

set_grad_enabled: Callable[[bool], None] = lookup(
    "torch._C:_set_grad_enabled", "work on gradients without recording a graph"
)
"""Enable or disable gradients in this thread. `torch.no_grad` as a decorator calls nine Python functions beside it."""

_base: Callable[[Tensor], Tensor | None] = attribute("_base", "watch outputs that are views")


def node_before_views(tensor: Tensor) -> Node | None:
    """Return the node of the graph that computed a tensor, or the tensor of which it is a view; None for a leaf."""
    base = _base(tensor)
    return tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn


# ---------------------------------------------------------------------- hooks on parameters

post_accumulate_hooks: Callable[[Tensor], Any] = attribute(
    "_post_accumulate_grad_hooks", "keep the hooks of parameters"
)
"""Return the dictionary of the hooks that run when the gradient of a tensor is in `.grad`; None if there is none."""


def set_post_accumulate_hooks(tensor: Tensor, hooks: dict[int, Callable[[Tensor], object]]) -> None:
    """Let torch call the hooks in this dictionary from now on, also if it has the dictionary already."""
    tensor._post_accumulate_grad_hooks = hooks


_contents = attrgetter("_cdata")


def contents_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number for each tensor that changes if the contents of the tensor are swapped, which loses its hooks."""
    return list(map(_contents, tensors))


# ---------------------------------------------------------------------- compiled autograd

_COMPILED = "torch._dynamo.compiled_autograd"


def is_in_compiled_backward() -> bool:
    """Return whether compiled autograd runs the present backward. It calls hooks, but no callbacks at its end."""
    found = sys.modules.get(_COMPILED)
    return found is not None and bool(getattr(found, "in_compiled_autograd_region", False))


# ---------------------------------------------------------------------- nested backwards

# Activation checkpointing with `use_reentrant=True` runs a separate backward for each checkpoint, inside the backward
# function of an autograd node. For the engine these are ordinary graph tasks. Only the Python stack shows the outer
# backward: an autograd node written in Python called torch's function that runs the engine.
_RUN_BACKWARD = lookup("torch.autograd.graph:_engine_run_backward.__code__", "use re-entrant checkpoints")

_NODE = lookup("torch.autograd.function:BackwardCFunction.apply.__code__", "use re-entrant checkpoints")


def is_inside_another_backward() -> bool:
    """Return whether an autograd node written in Python started the backward that runs in this thread.

    This function searches the Python stack, which is slow, so call it once per backward, not once per gradient. If
    torch lacks the functions that mark a nested backward, the result is False. A re-entrant checkpoint then counts as a
    whole backward, so the program gets the error `UnreducedGradients`.

    Examples:
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


# ---------------------------------------------------------------------- thread-local data of a backward

_CONTEXT = "context"
"""The key of the thread-local data in which torch 2.12 and later keep the caller's contextvars during a backward."""

_WITHOUT_CONTEXT = "keep the context of a backward out of a collective"

_is_kept = lookup("torch._C:_is_key_in_tls", _WITHOUT_CONTEXT)

_get = lookup("torch._C:_get_obj_in_tls", _WITHOUT_CONTEXT)

_stash = lookup("torch._C:_stash_obj_in_tls", _WITHOUT_CONTEXT)

_remove = lookup("torch._C:_remove_obj_from_tls", _WITHOUT_CONTEXT)

_CAN_REMOVE = all(is_there(one) for one in (_is_kept, _get, _stash, _remove))


def call_without_context(function: Callable[[], Any]) -> Any:
    """Call a function while this thread's data lacks the contextvars of a backward. Restore the contextvars afterwards.

    torch 2.11 keeps no contextvars, so there the function is simply called.
    """
    if not (_CAN_REMOVE and _is_kept(_CONTEXT)):
        return function()
    context = _get(_CONTEXT)
    _remove(_CONTEXT)
    try:
        return function()
    finally:
        _stash(_CONTEXT, context)


# ---------------------------------------------------------------------- distributed autograd, over RPC

# These modules exist only in builds of torch with RPC.
_OVER_RPC = "refuse distributed autograd"

_is_agent_set = lookup("torch._C._distributed_rpc:_is_current_rpc_agent_set", _OVER_RPC)

_current_context = lookup("torch._C._distributed_autograd:_current_context", _OVER_RPC)

is_rpc_in_use: Callable[[], bool] = _is_agent_set if is_there(_is_agent_set) else bool
"""Return whether this process has initialised torch's RPC."""


def is_in_distributed_autograd() -> bool:
    """Return whether this thread is in a context of distributed autograd."""
    try:
        _current_context()
    except SynclineError:
        raise
    except RuntimeError:
        return False
    return True


# ---------------------------------------------------------------------- ranges for torch.profiler

# Ranges for torch.profiler. A range shows one phase of Syncline in a trace, by name.
#
# A range costs about 10 microseconds while a profiler runs, and a tenth of a microsecond while none runs. So a phase
# and a bucket have a range, but a parameter has none.

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
