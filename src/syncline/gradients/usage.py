"""The parameters that get a gradient in a backward, and how often: read from the autograd engine, or learnt once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd import graph

from syncline._torch.autograd import reaches_all_leaves, will_execute_node
from syncline.errors import SynclineError
from syncline.gradients.tail import TailMessage
from syncline.transport.base import Transport

__all__ = ["GraphUsage", "SharedUsage", "StaticUsage", "is_accumulating"]


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

    def tell(self, used: Sequence[int]) -> None:
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
