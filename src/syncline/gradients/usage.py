"""The use of parameters in a backward: which parameters get gradients, and how many gradients each one gets.

Three options depend on this. With `find_unused_parameters`, the engine reports which parameters a backward
reaches. With `skip_all_reduce_unused_params`, the ranks exchange these reports. With `static_graph`, the gradients of
the first backward are counted (`StaticUsage`). `Usage` combines the three for the reducer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass

from torch import Tensor
from torch.autograd import graph

from syncline._torch.autograd import (
    contents_of,
    is_inside_another_backward,
    reaches_all_leaves,
    will_execute_node,
)
from syncline.errors import SynclineError
from syncline.gradients.options import GradientOptions
from syncline.gradients.tail import Tail, TailMessage
from syncline.transport.base import Transport


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors in `output`, also those in nested lists, tuples, dictionaries and dataclasses.

    Objects of other types are not searched.

    Examples:
        >>> import torch
        >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
        [1, 2]
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))


def is_accumulating(parameters: Sequence[Tensor]) -> bool:
    """Return whether the running graph task writes gradients of any of these parameters to `.grad`.

    The result is False for a task of torch.autograd.grad. It is True for a task in which checkpoints with
    `use_reentrant=True` run inner tasks that write the gradients.
    """
    if reaches_all_leaves():  # a backward without `inputs=`
        return True
    try:
        return num_reached(parameters) > 0
    except SynclineError:
        raise
    except RuntimeError:  # raised if torch.autograd.grad was called for one of the parameters
        return False


_requires_grad = operator.attrgetter("requires_grad")


def accumulation_nodes(parameters: Sequence[Tensor]) -> list[graph.Node]:
    """Return one graph node per parameter: the node that adds gradients to `.grad` of the parameter.

    The caller must keep the nodes alive. The engine compares nodes by identity, and a parameter has only a weak
    reference to its node. A parameter that was frozen gets a node that no backward reaches.
    """
    return [
        graph.get_gradient_edge(one if one.requires_grad else one.detach().requires_grad_()).node
        for one in parameters
    ]


def num_reached(parameters: Sequence[Tensor]) -> int:
    """Return the number of parameters that get a gradient in the running graph task."""
    return sum(will_execute_node(node) for node in accumulation_nodes(parameters))


class StaticUsage:
    """A counter of the gradients that each parameter gets in one backward of a static graph.

    In a later backward, each parameter must get as many gradients as in the first one, or none.

    Args:
        num_parameters: the number of parameters.
    """

    def __init__(self, num_parameters: int) -> None:
        self.is_learnt = False
        """Whether the first backward has ended, so that `expected` contains its counts."""
        # Hooks refer to these lists, so they are only changed in place.
        self.counts = [0] * num_parameters
        """Number of gradients of each parameter so far in this backward."""
        self.expected = [1] * num_parameters
        """Number of gradients after which each parameter is ready; 1 until the first backward has ended."""

    def reset(self) -> None:
        """Set the counts to 0 when a backward begins."""
        self.counts[:] = [0] * len(self.counts)

    def has_changed(self) -> bool:
        """Return whether any parameter got more or fewer gradients than expected, apart from those that got none."""
        return self.is_learnt and self.counts != self.expected and bool(self.changed())

    def changed(self) -> list[tuple[int, int, int]]:
        """Return (index, expected count, actual count) of each parameter whose count is neither 0 nor as expected."""
        return [
            (index, expected, count)
            for index, (expected, count) in enumerate(zip(self.expected, self.counts, strict=True))
            if count not in (0, expected)
        ]

    def learn(self) -> None:
        """Store the counts of the first backward. All later backwards are expected to have the same counts.

        Only the first call has an effect.
        """
        if not self.is_learnt:
            self.is_learnt = True
            self.expected[:] = [max(1, count) for count in self.counts]


class Usage:
    """The use of parameters in each backward, which is determined only if the options require it.

    With `skip_all_reduce_unused_params`, torch's DistributedDataParallel decides on each rank alone which buckets to
    leave out, and can hang if the decisions differ. Here one small collective makes the decision the same on all ranks.
    The collective is started when a backward begins, and its result is read only when it is needed.

    Args:
        parameters: the parameters whose gradients are reduced.
        transport: the transport between the ranks.
        options: the options of gradient synchronization.
    """

    def __init__(self, parameters: Sequence[Tensor], transport: Transport, options: GradientOptions) -> None:
        self.static = StaticUsage(len(parameters)) if options.static_graph else None
        """The counter of gradients in a static graph; None without `static_graph`."""
        self.num_ranks_using: Sequence[int] = ()
        """Number of ranks that used each parameter in the last backward; empty without `allow_unused`."""
        self.reads_graph = options.allow_unused and not options.static_graph
        """Whether to ask the autograd engine in each backward which parameters the backward will not reach."""
        self.is_exchanged = options.skip_unused
        """Whether the ranks exchange at the beginning of each backward which parameters they use in it."""
        self._parameters = parameters
        self._nodes: list[graph.Node] = []
        self._contents: list[int] = []
        self._message = TailMessage(transport, len(parameters) if self.is_exchanged else 0)
        self._own: Sequence[int] = ()
        self._exchanged: Sequence[float] | None = None

    def absent(self) -> frozenset[int]:
        """Return the indices of the parameters that will get no gradient in the backward that begins now.

        If this backward runs inside another backward, the engine cannot find these parameters, and the result is empty.
        """
        if is_inside_another_backward():
            return frozenset()
        contents = contents_of(self._parameters) + list(map(_requires_grad, self._parameters))
        if contents != self._contents:  # a swap of a parameter's contents, or a thaw, gives it another node
            self._contents, self._nodes = contents, accumulation_nodes(self._parameters)
        return frozenset(index for index, node in enumerate(self._nodes) if not will_execute_node(node))

    def exchange(self, now: Set[int], unreduced: Set[int]) -> None:
        """Start to exchange which parameters each rank uses, if the options require it.

        Args:
            now: indices of the parameters that this rank uses in the present backward.
            unreduced: indices of the parameters that this rank used in earlier backwards without reduction.
        """
        if self.is_exchanged:
            self._own, self._exchanged = self.uses(now, unreduced), None
            self._message.launch(Tail(self._own))

    def uses(self, now: Set[int], unreduced: Set[int]) -> list[int]:
        """Return one flag per parameter: 1 if this rank has a gradient of the parameter, 0 if not.

        The arguments are those of `exchange`.
        """
        return [
            int(index in now or (index in unreduced and parameter.grad is not None))
            for index, parameter in enumerate(self._parameters)
        ]

    def is_unused_by_all(self, parameters: Sequence[int]) -> bool:
        """Return whether the exchange has shown that no rank uses any of these parameters.

        This method waits for the other ranks only if this rank uses none of these parameters.
        """
        if not self.is_exchanged or any(self._own[index] for index in parameters):
            return False
        used = self.wait()
        return not any(used[index] for index in parameters)

    def wait(self) -> Sequence[float]:
        """Wait for the exchange, and return the number of ranks that use each parameter.

        Returns () if `is_exchanged` is False.
        """
        if self.is_exchanged and self._exchanged is None:
            self._exchanged = self._message.read()
        return self._exchanged or ()
