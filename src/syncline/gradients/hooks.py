"""The hooks of parameters, which run once per gradient: the only code whose cost grows with the number of parameters.

Creating hooks anew in each backward would be slow, so they refer to objects that stay: the lists of the layout, the
graph tasks, and the reducer, which holds the present backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from syncline._torch.autograd import current_graph_task_id
from syncline.gradients.backward import Backward, BackwardState, GraphTasks, Ownership
from syncline.gradients.bucket import copy_scaled
from syncline.gradients.reduction import Reduction
from syncline.gradients.usage import StaticUsage


class _Reducer(Protocol):
    """What hooks need of the reducer."""

    backward: Backward
    reduction: Reduction
    tasks: GraphTasks
    ownership: Ownership

    def begin(self) -> bool:
        """Register the running graph task; return whether it belongs to a backward of this wrapper."""


def gradient_hook(reducer: _Reducer, index: int) -> Callable[[Tensor], None]:
    """Return the hook of a parameter: it counts the gradient, copies it if it is large, and sends complete buckets."""
    reduction, begin = reducer.reduction, reducer.begin
    if reduction.usage.static is not None:
        return _static_hook(reducer, index, reduction.usage.static)
    places, tasks = reduction.layout.places, reducer.tasks
    current_task, filling = current_graph_task_id, BackwardState.FILLING
    as_view = reduction.options.as_bucket_view and reduction.options.reduce_dtype is None
    reads_graph, rivals = reduction.usage.reads_graph, reducer.ownership.rivals
    stand_in = reduction.layout.stand_in_of(index)

    def gradient_is_ready(parameter: Tensor) -> None:
        if current_task() != tasks.current and not begin():
            return
        backward = reducer.backward
        backward.ready.append(index)
        if backward.state is not filling:
            return
        if reads_graph and index in backward.absent:
            raise reduction.out_of_step.from_outside(backward.step, index)
        bucket, view = places[index]
        if view is not None:
            copy_scaled(view, parameter.grad, backward.scale)
            if as_view and not reads_graph and not rivals:
                parameter.grad = view  # frees the gradient while its memory is still in cache
            elif stand_in is not None:
                parameter.grad = stand_in
        bucket.num_pending -= 1
        if not bucket.num_pending:
            reduction.send_complete(backward)

    return gradient_is_ready


def _static_hook(reducer: _Reducer, index: int, static: StaticUsage) -> Callable[[Tensor], None]:
    """Return a hook for a static graph, in which a parameter may get several gradients in one backward."""
    reduction, begin, tasks = reducer.reduction, reducer.begin, reducer.tasks
    places = reduction.layout.places
    counts, expected = static.counts, static.expected
    current_task, filling = current_graph_task_id, BackwardState.FILLING

    def gradient_is_ready(parameter: Tensor) -> None:
        if current_task() != tasks.current and not begin():
            return
        counts[index] += 1
        if counts[index] != expected[index]:
            return
        backward = reducer.backward
        backward.ready.append(index)
        if backward.state is not filling:
            return
        bucket, view = places[index]
        if view is not None:
            copy_scaled(view, parameter.grad, backward.scale)
        bucket.num_pending -= 1
        if not bucket.num_pending:
            reduction.send_complete(backward)

    return gradient_is_ready
