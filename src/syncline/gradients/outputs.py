"""The outputs of a wrapper's forwards. A backward reaches an output before it reaches the parameters behind it.

Hooks on the outputs count the forwards that no backward has reached, for a warning, and tell whether a further backward
may bring gradients that are missing. They decide nothing else: an output can hide its tensors from the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from torch import Tensor

from syncline._torch.autograd import NO_TASK, current_graph_task_id, node_before_views
from syncline._torch.tensors import without_transforms
from syncline.gradients.usage import tensors_in

_MAX_WATCHED_TENSORS = 8
"""The largest number of tensors that are watched in one output. To watch a tensor costs a microsecond."""


class Outputs:
    """The outputs of all forwards of one wrapper. The object stays the same if the module or its group changes.

    Examples:
        >>> import torch
        >>> outputs, y = Outputs(), torch.ones(2, requires_grad=True) * 2
        >>> outputs.watch(y, is_counted=True)
        >>> outputs.num_waiting, outputs.num_open
        (1, 1)
        >>> y.sum().backward()
        >>> outputs.num_waiting, outputs.num_open
        (0, 0)
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        """The number of counted forwards after the last reduction that no backward has reached."""
        self.num_open = 0
        """The number of tensors in outputs after the last reduction that no backward has reached, as far as known."""
        self.reached_in = NO_TASK
        """The last graph task that has reached an output."""
        self._era = 0
        """The number of reductions so far. Outputs of an earlier era no longer count."""
        self._when_reached: Callable[[int], object] | None = None

    def call_when_reached(self, call: Callable[[int], object]) -> None:
        """Call `call` with the number of the graph task whenever a graph task reaches its first output."""
        self._when_reached = call

    def watch(
        self, output: object, *, owner: object = None, is_counted: bool = False, all_tensors: bool = False
    ) -> None:
        """Watch for backwards that reach the tensors of an output.

        A leaf is not watched: a hook on it would outlive the graph. An output that is a view is watched at the tensor
        that it is a view of, because a view that is changed in place leaves the graph.

        Args:
            output: the output of a forward, which may contain tensors in containers.
            owner: the object without which the backward is not synchronized. The output keeps it alive: a program may
                drop its wrapper before the backward.
            is_counted: whether `num_waiting` counts the forward, if each of its tensors is watched.
            all_tensors: whether each tensor must be watched, even if there are many.
        """
        if isinstance(output, Tensor):
            tensors = [found] if (found := without_transforms(output)).requires_grad else []
        else:
            ordinary = map(without_transforms, tensors_in(output))
            differentiable = (tensor for tensor in ordinary if tensor.requires_grad)
            tensors = list(
                differentiable if all_tensors else islice(differentiable, _MAX_WATCHED_TENSORS + 1)
            )
        nodes = [node for tensor in tensors if (node := node_before_views(tensor)) is not None]
        is_whole = 0 < len(tensors) == len(nodes) <= _MAX_WATCHED_TENSORS
        if not all_tensors:
            del nodes[_MAX_WATCHED_TENSORS:]
        forward = _Forward(self, owner, self._era, is_counted and is_whole)
        self.num_waiting += forward.is_waiting
        self.num_open += len(nodes) + (not is_whole)
        for node in nodes:
            node.register_prehook(_Hook(forward))  # costs a third of a hook on the tensor

    def reduced(self) -> None:
        """Count anew, because gradients were reduced."""
        if self.num_open:
            self.num_waiting = self.num_open = 0
            self._era += 1

    def _reached(self, forward: _Forward, *, is_first: bool) -> None:
        if is_first and forward.era == self._era:
            self.num_open -= 1
            if forward.is_waiting:
                forward.is_waiting = False
                self.num_waiting -= 1
        task = current_graph_task_id()
        if task != self.reached_in:
            self.reached_in = task
            if self._when_reached is not None:
                self._when_reached(task)


class _Forward:
    """One forward, whose outputs are watched."""

    __slots__ = ("era", "is_waiting", "outputs", "owner")

    def __init__(self, outputs: Outputs, owner: object, era: int, is_waiting: bool) -> None:
        self.outputs, self.owner, self.era, self.is_waiting = outputs, owner, era, is_waiting


class _Hook:
    """The hook on one tensor of an output."""

    __torch_unserializable__ = True  # pickling an output leaves the hook out

    __slots__ = ("_forward", "_is_reached")

    def __init__(self, forward: _Forward) -> None:
        self._forward, self._is_reached = forward, False

    def __call__(self, _: object) -> None:
        is_first, self._is_reached = not self._is_reached, True
        self._forward.outputs._reached(self._forward, is_first=is_first)
