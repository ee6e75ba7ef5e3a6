"""The hooks on parameters. A hook reports the gradient of its parameter as soon as the gradient is ready.

The hook of a parameter runs once per gradient, so its cost grows with the number of parameters. To create hooks anew in
each backward would be slow. So hooks refer to objects that stay the same: the reduction (which holds the present
backward), the lists of the layout, and the graph tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from syncline._torch.autograd import contents_of, current_graph_task_id
from syncline.gradients.backward import BackwardState, GraphTasks, Ownership
from syncline.gradients.reduction import Reduction
from syncline.gradients.user_hooks import HookTable, UserHook, table_of


def gradient_hook(
    index: int,
    reduction: Reduction,
    tasks: GraphTasks,
    *,
    stand_in: Tensor | None,
    begin: Callable[[int], bool],
    complete: Callable[[], None],
    rivals: Sequence[object],
) -> Callable[[Tensor], None]:
    """Return the hook of one parameter.

    The hook counts the gradient, copies it if it is large, and sends the buckets that are complete.

    Args:
        index: index of the parameter.
        reduction: the reduction, which holds the present backward and the buckets.
        tasks: the graph tasks of the present backward.
        stand_in: the tensor that replaces `.grad` when the gradient is copied; None if gradients are not sharded.
        begin: a function that registers the running graph task. Its argument is the index of the parameter. It returns
            False if this reducer does not take the gradient.
        complete: a function that ends the backward if it has all gradients, called where the engine reports no end.
        rivals: the list `Ownership.rivals`, which is empty if no other wrapper has any of the same parameters.
    """
    places, static, reads_graph = reduction.layout.places, reduction.usage.static, reduction.usage.reads_graph
    current_task, filling = current_graph_task_id, BackwardState.FILLING
    counts: list[int] = [] if static is None else static.counts
    expected: list[int] = [] if static is None else static.expected
    has_views = reduction.options.as_bucket_view and reduction.options.reduce_dtype is None
    # While `.grad` may still get another gradient, or be read by another wrapper, it must not become a view.
    as_view = has_views and static is None and not reads_graph
    if static is not None:  # `.grad` may still get another gradient
        stand_in = None

    def gradient_is_ready(parameter: Tensor) -> None:
        if current_task() != tasks.current and not begin(index):
            return
        if counts:  # in a static graph, a parameter may get several gradients in one backward
            counts[index] += 1
            if counts[index] != expected[index]:
                return
        backward = reduction.backward
        backward.ready.append(index)
        if backward.state is not filling:
            if backward.is_compiled:
                complete()
            return
        if reads_graph and index in backward.missing:
            raise reduction.out_of_step.from_outside(backward.step, index)
        bucket, view = places[index]
        if view is not None:
            bucket.take(view, parameter.grad, backward.scale)
            if as_view and not rivals:
                parameter.grad = view  # frees the gradient while its memory is still in cache
            elif stand_in is not None:
                parameter.grad = stand_in
        elif parameter.grad is None:
            backward.undefined |= {index}
        bucket.num_pending -= 1
        if not bucket.num_pending:
            reduction.send_complete()

    return gradient_is_ready


class ParameterHooks:
    """All hooks that one reducer has registered on its parameters.

    Args:
        reduction: the reduction, which holds the parameters, the buckets and the present backward.
        tasks: the graph tasks of the present backward.
        ownership: the ownership of the wrapper, which holds the rivals.
        begin: see `gradient_hook`.
        complete: see `gradient_hook`.
    """

    def __init__(
        self,
        reduction: Reduction,
        tasks: GraphTasks,
        ownership: Ownership,
        *,
        begin: Callable[[int], bool],
        complete: Callable[[], None],
    ) -> None:
        # `begin` is not stored, because the reducer holds this object and a cycle would keep its buckets in memory.
        self._reduction, self._tasks = reduction, tasks
        self._key = ownership.hook_key
        self.deferred: dict[tuple[UserHook, int], Tensor] = {}
        """The calls of hooks of the program that wait for the end of the backward, with the parameter of each."""
        self._tables: list[HookTable] = []
        for index, (parameter, stand_in) in enumerate(
            zip(reduction.parameters, reduction.layout.stand_ins(), strict=True)
        ):
            hook = gradient_hook(
                index,
                reduction,
                tasks,
                stand_in=stand_in,
                begin=begin,
                complete=complete,
                rivals=ownership.rivals,
            )
            table = table_of(parameter)
            table.add(self._key, hook, self)
            self._tables.append(table)
        self._contents = contents_of(reduction.parameters)
        """The contents of all parameters when `restore_swapped` last looked."""
        self.are_registered = True
        """Whether the hooks are registered; False after `remove`."""

    def remove(self) -> None:
        """Remove all hooks."""
        if self.are_registered:
            self.are_registered = False
            for parameter in self._reduction.parameters:
                table_of(parameter).drop(self._key, self)

    def report(self, parameter: Tensor) -> None:
        """Report that the gradient of a parameter is ready, which this object's hook has not seen."""
        for index, one in enumerate(self._reduction.parameters):
            if one is parameter:
                self._tables[index][self._key](parameter)

    # ------------------------------------------------------------------ hooks that were lost

    def restore_swapped(self) -> None:
        """Register hooks again for parameters whose contents were swapped. Usually, this only compares the contents."""
        contents = contents_of(self._reduction.parameters)
        if contents != self._contents:
            self._contents = contents
            self.restore(range(len(contents)))

    def restore(self, indices: Collection[int]) -> list[int]:
        """Register hooks again for those of the parameters whose contents were swapped. Return their indices.

        `torch.utils.swap_tensors` gives a parameter the contents of another tensor, and hooks belong to the contents.
        Conversions of modules and `load_state_dict` swap under
        `torch.__future__.set_swap_module_params_on_conversion(True)`, and for parameters that are subclasses.
        """
        parameters = self._reduction.parameters
        found = dict(zip(indices, contents_of([parameters[index] for index in indices]), strict=True))
        # All wrappers of a parameter share its table, so another wrapper may have registered it already.
        lost = [index for index, contents in found.items() if contents != self._tables[index].contents]
        for index in lost:
            self._tables[index] = table_of(parameters[index])
        return lost

    # ------------------------------------------------------------------ hooks of the program

    def defers(self, hook: UserHook, parameter: Tensor) -> bool:
        """Keep a call of a hook until `.grad` holds the mean. Return False if this backward averages nothing."""
        if self._tasks.current != current_graph_task_id():
            return False
        if self._reduction.backward.state not in (BackwardState.FILLING, BackwardState.DEFERRED):
            return False
        self.deferred[hook, id(parameter)] = parameter
        return True

    def run_deferred(self) -> None:
        """Run the hooks of the program that were kept for the end of the backward."""
        while self.deferred:  # a hook that raises drops those after it
            kept, self.deferred = self.deferred, {}
            for (hook, _), parameter in kept.items():
                hook.run_deferred(parameter)

    def drop_deferred(self) -> None:
        """Forget the hooks of the program, because the backward has failed."""
        self.deferred.clear()
