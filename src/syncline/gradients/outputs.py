"""The outputs of a wrapper's forwards. A backward reaches an output before it reaches the parameters behind it.

So hooks on the outputs see each backward, also one in which no hook of a parameter runs. They find out to which forward
a backward belongs, and which outputs no backward has reached yet.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from torch import Tensor

from syncline._torch.autograd import NO_TASK, current_graph_task_id
from syncline._torch.transforms import without_transforms
from syncline.gradients.usage import tensors_in, when_backward_reaches

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
        self.is_local = False
        """Whether the output that was reached last belongs to a forward under `no_sync`."""
        self.synchronizes_all = False
        """Whether the next reduction may begin at the output of a forward under `no_sync`, as at any other."""
        self._era = 0
        """The number of reductions so far. Outputs of an earlier era no longer count."""
        self._when_reached: Callable[[int], object] | None = None

    def call_when_reached(self, call: Callable[[int], object]) -> None:
        """Call `call` with the number of the graph task whenever a graph task reaches its first output."""
        self._when_reached = call

    def watch(
        self,
        output: object,
        *,
        owner: object = None,
        is_counted: bool = False,
        is_local: bool = False,
        all_tensors: bool = False,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        """Watch for backwards that reach the tensors of an output.

        Args:
            output: the output of a forward, which may contain tensors in containers.
            owner: the object without which the backward is not synchronized. The output keeps it alive: a program may
                drop its wrapper before the backward.
            is_counted: whether `num_waiting` counts the forward. Outputs with many tensors are not counted.
            is_local: whether the forward ran under `no_sync`.
            all_tensors: whether each tensor must be watched, even if there are many.
            prepare: a function to call when a backward reaches the output, before anything else.
        """
        if isinstance(output, Tensor):
            tensors = [found] if (found := without_transforms(output)).requires_grad else []
        else:
            ordinary = map(without_transforms, tensors_in(output))
            differentiable = (tensor for tensor in ordinary if tensor.requires_grad)
            tensors = list(
                differentiable if all_tensors else islice(differentiable, _MAX_WATCHED_TENSORS + 1)
            )
        is_whole = 0 < len(tensors) <= _MAX_WATCHED_TENSORS
        if not all_tensors:
            del tensors[_MAX_WATCHED_TENSORS:]
        forward = _Forward(self, owner, self._era, is_counted and is_whole, is_local, prepare)
        self.num_waiting += forward.is_waiting
        self.num_open += len(tensors) + (not is_whole)
        for tensor in tensors:
            when_backward_reaches(tensor, _Hook(forward))

    def reduced(self) -> None:
        """Count anew, because gradients were reduced."""
        self.synchronizes_all = False
        if self.num_open:
            self.num_waiting = self.num_open = 0
            self._era += 1

    def _reached(self, forward: _Forward, *, is_first: bool) -> None:
        if is_first and forward.era == self._era:
            self.num_open -= 1
            if forward.is_waiting:
                forward.is_waiting = False
                self.num_waiting -= 1
        if forward.prepare is not None:
            forward.prepare()
        self.is_local = forward.is_local and not self.synchronizes_all
        task = current_graph_task_id()
        if task != self.reached_in:
            self.reached_in = task
            if self._when_reached is not None:
                self._when_reached(task)


class _Forward:
    """One forward, whose outputs are watched."""

    __slots__ = ("era", "is_local", "is_waiting", "outputs", "owner", "prepare")

    def __init__(
        self,
        outputs: Outputs,
        owner: object,
        era: int,
        is_waiting: bool,
        is_local: bool,
        prepare: Callable[[], object] | None,
    ) -> None:
        self.outputs, self.owner, self.era = outputs, owner, era
        self.is_waiting, self.is_local, self.prepare = is_waiting, is_local, prepare


class _Hook:
    """The hook on one tensor of an output."""

    __torch_unserializable__ = True  # pickling an output leaves the hook out

    __slots__ = ("_forward", "_is_reached")

    def __init__(self, forward: _Forward) -> None:
        self._forward, self._is_reached = forward, False

    def __call__(self, _: object) -> None:
        is_first, self._is_reached = not self._is_reached, True
        self._forward.outputs._reached(self._forward, is_first=is_first)
