"""Autograd's engine: its graph tasks, backwards inside of backwards, and what a thread keeps during a backward.

A graph task is one run of the engine: one `backward()`. Tasks are numbered in the order in which they begin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from syncline._torch.lookup import is_there, lookup
from syncline.errors import SynclineError

__all__ = [
    "call_without_context",
    "current_context_id",
    "current_graph_task_id",
    "gradients_in_context",
    "is_inside_another_backward",
    "is_rpc_in_use",
    "queue_callback",
    "reaches_all_leaves",
    "will_execute_node",
]


# ---------------------------------------------------------------------- graph tasks

current_graph_task_id: Callable[[], int] = lookup(
    "torch._C:_current_graph_task_id", "see which backward a gradient belongs to"
)
"""Return the number of the graph task that runs in this thread, -1 outside of any. torch's own function: each gradient
calls it."""

queue_callback: Callable[[Callable[[], object]], None] = lookup(
    "torch.autograd:Variable._execution_engine.queue_callback", "see the end of a backward"
)
"""Have a function called at the end of the graph task that runs now."""

reaches_all_leaves: Callable[[], bool] = lookup(
    "torch.autograd:Variable._execution_engine.is_checkpoint_valid",
    "tell a backward from torch.autograd.grad",
)
"""Return whether the graph task that runs now was asked for no particular inputs."""

will_execute_node: Callable[[Node], bool] = lookup(
    "torch._C:_will_engine_execute_node", "find the parameters that a backward does not reach"
)
"""Return whether the graph task that runs now will come to a node."""

# ---------------------------------------------------------------------- a backward inside of another

# Activation checkpointing with `use_reentrant=True` runs a backward of its own for each checkpoint, from inside the
# backward function of an autograd node. To the engine these are graph tasks like any other. Only the Python stack
# shows that another one goes on around them: torch's function that runs the engine, called from a node in Python.
_RUN_BACKWARD = lookup("torch.autograd.graph:_engine_run_backward.__code__", "use re-entrant checkpoints")

_NODE = lookup("torch.autograd.function:BackwardCFunction.apply.__code__", "use re-entrant checkpoints")


def is_inside_another_backward() -> bool:
    """Return whether an autograd node written in Python started the backward that runs in this thread.

    Walks up the Python stack: call it once a backward, not once a gradient. Where torch has no such functions, the
    answer is no. A re-entrant checkpoint is then taken for a whole backward, which raises `UnreducedGradients`.

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


# ---------------------------------------------------------------------- what a thread keeps during a backward

_CONTEXT = "context"
"""Where torch 2.12 and later keep the caller's contextvars while a backward runs."""

_is_kept = lookup("torch._C:_is_key_in_tls", "keep the context of a backward out of a collective")

_get = lookup("torch._C:_get_obj_in_tls", "keep the context of a backward out of a collective")

_stash = lookup("torch._C:_stash_obj_in_tls", "keep the context of a backward out of a collective")

_remove = lookup("torch._C:_remove_obj_from_tls", "keep the context of a backward out of a collective")

_CAN_REMOVE = all(is_there(one) for one in (_is_kept, _get, _stash, _remove))


def call_without_context(function: Callable[[], Any]) -> Any:
    """Call a function while this thread holds no context of a backward. torch 2.11 has none; then it is only called."""
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
_OVER_RPC = "reduce gradients of distributed autograd"

_is_agent_set = lookup("torch._C._distributed_rpc:_is_current_rpc_agent_set", _OVER_RPC)

_current_context = lookup("torch._C._distributed_autograd:_current_context", _OVER_RPC)

_get_gradients = lookup("torch._C._distributed_autograd:get_gradients", _OVER_RPC)


def is_rpc_in_use() -> bool:
    """Return whether this process has joined torch's RPC. Without its modules it cannot have."""
    return torch.distributed.rpc.is_available() and is_there(_is_agent_set) and bool(_is_agent_set())


def current_context_id() -> int | None:
    """Return the context of distributed autograd that this thread is in; None in an ordinary forward."""
    try:
        context_id: int = _current_context()._context_id()
    except SynclineError:
        raise
    except RuntimeError:
        return None
    return context_id


def gradients_in_context(context_id: int) -> dict[Tensor, Tensor] | None:
    """Return the gradients by parameter; None for a context that has ended."""
    try:
        gradients: dict[Tensor, Tensor] = _get_gradients(context_id)
    except SynclineError:
        raise
    except RuntimeError:
        return None
    return gradients
