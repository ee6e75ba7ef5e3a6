"""The parameters that get a gradient in a backward, and how often: read from the autograd engine, or learnt once.

Three options need this: `find_unused_parameters` (`GraphUsage`), `skip_all_reduce_unused_params` (`SharedUsage`) and
`static_graph` (`StaticUsage`). `Usage` holds those that are in use, and the reducer calls only it. A search of the
graph begins at the tensors in the output of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.autograd import graph

from syncline._torch.autograd import is_inside_another_backward, reaches_all_leaves, will_execute_node
from syncline.errors import SynclineError
from syncline.gradients.options import GradientOptions
from syncline.gradients.tail import TailMessage
from syncline.transport.base import Transport


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dictionaries and dataclasses; other objects are not searched.

    Example:
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


def when_backward_reaches(tensor: Tensor, call: Callable[[Any], None]) -> None:
    """Register `call` to be called when a backward reaches `tensor`, which requires grad.

    Example:
        >>> import torch
        >>> y = torch.ones(1, requires_grad=True) * 2
        >>> when_backward_reaches(y, lambda _: print("here"))
        >>> y.backward()
        here
    """
    if tensor.grad_fn is None:
        tensor.register_hook(call)
    else:  # a hook on the node costs a third of one on the tensor
        tensor.grad_fn.register_prehook(call)


def when_backward_reaches_any(output: object, call: Callable[[Any], None]) -> None:
    """Register `call` to be called when a backward reaches any tensor of `output` that requires grad."""
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            when_backward_reaches(tensor, call)


def is_accumulating(parameters: Sequence[Tensor]) -> bool:
    """Return whether the running graph task writes gradients of some of `parameters`.

    A task of torch.autograd.grad does not. A task counts, too, if checkpoints with `use_reentrant=True` run tasks of
    their own inside it, and these write the gradients.
    """
    if reaches_all_leaves():  # a backward without `inputs=`
        return True
    try:
        return GraphUsage(parameters).num_reached() > 0
    except SynclineError:
        raise
    except RuntimeError:  # raised if torch.autograd.grad was called for one of the parameters
        return False


class GraphUsage:
    """The parameters that a running backward will not reach, as the autograd engine reports them.

    The forward's outputs may have any type, because the graph is not walked from them. Nothing is cloned.

    Args:
        parameters: the parameters to look up.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        # The nodes are held here, because the engine knows them by identity and a parameter holds its own weakly.
        self._nodes = [graph.get_gradient_edge(parameter).node for parameter in parameters]

    def absent(self) -> frozenset[int]:
        """Return the indices of the parameters that get no gradient in the running graph task."""
        return frozenset(index for index, node in enumerate(self._nodes) if not will_execute_node(node))

    def num_reached(self) -> int:
        """Return the number of parameters that get a gradient in the running graph task."""
        return len(self._nodes) - len(self.absent())


class SharedUsage:
    """The parameters that any rank has a gradient for: exchanged when a backward begins, read only when needed.

    For torch's `skip_all_reduce_unused_params`. torch's class decides on each rank alone and may hang if ranks differ.
    One small collective makes the decision the same on all ranks.

    Args:
        transport: the transport between the ranks.
        num_parameters: the number of parameters.
    """

    def __init__(self, transport: Transport, num_parameters: int) -> None:
        self._message = TailMessage(transport, num_parameters)
        self._mine: Sequence[int] = ()
        self._all: Sequence[float] | None = None

    def start(self, used: Sequence[int]) -> None:
        """Start the exchange, with 1 for each parameter that this rank has a gradient for and 0 for the others."""
        self._mine, self._all = used, None
        self._message.launch(used)

    def is_unused_by_all(self, parameters: Sequence[int]) -> bool:
        """Return whether no rank has a gradient for any of these; wait only if this rank has none."""
        if any(self._mine[index] for index in parameters):
            return False
        used = self.wait()
        return not any(used[index] for index in parameters)

    def wait(self) -> Sequence[float]:
        """Wait, then return the number of ranks that have a gradient for each parameter."""
        if self._all is None:
            self._all = self._message.read()
        return self._all


class StaticUsage:
    """Counts of the gradients that each parameter gets in one backward; the first backward's counts are expected later.

    Args:
        num_parameters: the number of parameters.
    """

    def __init__(self, num_parameters: int) -> None:
        self.is_learnt = False
        # Hooks close over these lists, so they are only changed in place.
        self.counts = [0] * num_parameters
        """Number of gradients of each parameter so far in this backward."""
        self.expected = [1] * num_parameters
        """Number of gradients that completes each parameter; 1 until it is learnt."""

    def reset(self) -> None:
        """Set the counts to 0 when a backward begins."""
        self.counts[:] = [0] * len(self.counts)

    def has_changed(self) -> bool:
        """Return whether any parameter got another number of gradients than was learnt; 0 gradients are allowed."""
        return self.is_learnt and self.counts != self.expected and bool(self.changed())

    def changed(self) -> list[tuple[int, int, int]]:
        """Return (index, learnt count, count in this backward) of each parameter whose number of gradients changed."""
        return [
            (index, expected, count)
            for index, (expected, count) in enumerate(zip(self.expected, self.counts, strict=True))
            if count not in (0, expected)
        ]

    def learn(self) -> None:
        """Store the counts of the first backward, when it ends, as those expected of all later ones."""
        if not self.is_learnt:
            self.is_learnt = True
            self.expected[:] = [max(1, count) for count in self.counts]


class Usage:
    """The parameters that a backward uses, according to the options.

    Args:
        parameters: the parameters whose gradients are reduced.
        transport: the transport between the ranks.
        options: the options of gradient synchronization.
    """

    def __init__(self, parameters: Sequence[Tensor], transport: Transport, options: GradientOptions) -> None:
        self.static = StaticUsage(len(parameters)) if options.static_graph else None
        """The counts of a static graph; None without `static_graph`."""
        self.num_ranks_using: Sequence[int] = ()
        """Number of ranks that used each parameter in the last backward; empty if unused ones are not detected."""
        self._parameters = parameters
        self._graph = GraphUsage(parameters) if options.allow_unused and not options.static_graph else None
        self._shared = SharedUsage(transport, len(parameters)) if options.skip_unused else None
        self.reads_graph = self._graph is not None
        """Whether each backward asks the autograd engine which parameters it will not reach."""
        self.is_exchanged = self._shared is not None
        """Whether the ranks exchange their use of parameters when a backward begins."""

    def absent(self) -> frozenset[int]:
        """Return the parameters that the backward that begins now will not reach, as far as that is known."""
        if self._graph is None or is_inside_another_backward():
            return frozenset()
        return self._graph.absent()

    def exchange(self, now: Set[int], unreduced: Set[int]) -> None:
        """Start to exchange the use of parameters, if ranks do.

        Args:
            now: the parameters that this rank uses in the present backward.
            unreduced: the parameters that it has used in earlier ones, which were not reduced.
        """
        if self._shared is not None:
            self._shared.start(self.uses(now, unreduced))

    def uses(self, now: Set[int], unreduced: Set[int]) -> list[int]:
        """Return 1 for each parameter for which this rank has a gradient, else 0. Arguments as for `exchange`."""
        return [
            int(index in now or (index in unreduced and parameter.grad is not None))
            for index, parameter in enumerate(self._parameters)
        ]

    def is_unused_by_all(self, parameters: Sequence[int]) -> bool:
        """Return whether it is known that no rank uses any of these parameters."""
        return self._shared is not None and self._shared.is_unused_by_all(parameters)

    def wait(self) -> None:
        """Wait for the exchange, if there is one."""
        if self._shared is not None:
            self._shared.wait()
