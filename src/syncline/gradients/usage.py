"""Which parameters a backward will give a gradient to, and how often: asked of the engine, or learnt once."""

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
    """Whether the graph task that runs now gives gradients to some of `parameters`: not one of torch.autograd.grad.

    Also one in which checkpoints with `use_reentrant=True` run tasks of their own, which give the gradients.
    """
    if reaches_all_leaves():  # a backward without `inputs=`
        return True
    try:
        return GraphUsage(parameters).num_reached() > 0
    except SynclineError:
        raise
    except RuntimeError:  # raised where a parameter is what torch.autograd.grad was asked for
        return False


class GraphUsage:
    """Asks the autograd engine, in a running backward, which parameters it will not reach.

    So outputs of any type will do: nobody walks the graph from them, and nothing is cloned.

    Args:
        parameters: those to ask about.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        # Held here, for the engine knows a parameter's node by identity and a parameter holds it weakly.
        self._nodes = [graph.get_gradient_edge(parameter).node for parameter in parameters]

    def absent(self) -> frozenset[int]:
        """Indices of the parameters that get no gradient in the graph task that runs now."""
        return frozenset(index for index, node in enumerate(self._nodes) if not will_execute_node(node))

    def num_reached(self) -> int:
        """How many parameters get one."""
        return len(self._nodes) - len(self.absent())


class SharedUsage:
    """Which parameters any rank will give a gradient to: told at the start of a backward, read where it matters.

    For torch's `skip_all_reduce_unused_params`. torch's class looks at each rank alone and may hang where ranks
    differ; one small collective makes it right whatever the ranks use.

    Args:
        transport: what it travels by.
        num_parameters: how many there are.
    """

    def __init__(self, transport: Transport, num_parameters: int) -> None:
        self._message = TailMessage(transport, num_parameters)
        self._mine: Sequence[int] = ()
        self._all: Sequence[float] | None = None

    def tell(self, used: Sequence[int]) -> None:
        """Start to exchange: 1 for each parameter that this rank has something for, 0 for others."""
        self._mine, self._all = used, None
        self._message.launch(used)

    def is_unused_by_all(self, parameters: Sequence[int]) -> bool:
        """Whether no rank has anything for these; waits only where this one has not."""
        if any(self._mine[index] for index in parameters):
            return False
        used = self.wait()
        return not any(used[index] for index in parameters)

    def wait(self) -> Sequence[float]:
        """How many ranks have something for each parameter."""
        if self._all is None:
            self._all = self._message.read()
        return self._all


class StaticUsage:
    """Counts how often each parameter gets a gradient in one backward; the first backward's counts are what comes.

    Args:
        num_parameters: how many there are.
    """

    def __init__(self, num_parameters: int) -> None:
        self.is_learnt = False
        # Hooks close over these lists, which are only ever changed in place.
        self.counts = [0] * num_parameters
        """Gradients in this backward."""
        self.expected = [1] * num_parameters
        """The last of how many gradients completes a parameter; while learning, the first does."""

    def reset(self) -> None:
        """A backward begins."""
        self.counts[:] = [0] * len(self.counts)

    def has_changed(self) -> bool:
        """Whether any parameter got another number of gradients in this backward than was learnt. 0 is fine."""
        return self.is_learnt and self.counts != self.expected and bool(self.changed())

    def changed(self) -> list[tuple[int, int, int]]:
        """Those parameters: index, learnt, got."""
        return [
            (index, expected, count)
            for index, (expected, count) in enumerate(zip(self.expected, self.counts, strict=True))
            if count not in (0, expected)
        ]

    def learn(self) -> None:
        """Take the counts of the backward that ends as those of every backward to come; once."""
        if not self.is_learnt:
            self.is_learnt = True
            self.expected[:] = [max(1, count) for count in self.counts]
