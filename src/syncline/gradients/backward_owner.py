"""The wrapper to which a backward belongs if several wrappers share parameters.

An actor and a critic may share an encoder, and a notebook may wrap the same module twice. Then one gradient is ready
for several wrappers at once, but only the wrapper whose forward built the graph may reduce it. A hook on the outputs
of that forward identifies it, because backward reaches an output before any parameter behind it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from syncline._torch.autograd import current_graph_task_id, is_inside_another_backward
from syncline.gradients.outputs import when_backward_reaches_any
from syncline.gradients.usage import GraphUsage

__all__ = ["Ownership"]


_NEVER = -1

_births = itertools.count()


class Ownership:
    """Decides whether a backward belongs to one wrapper if that wrapper has rivals.

    A wrapper without rivals owns every backward.

    Args:
        parameters: the parameters of the wrapper.
        is_inside: returns whether the running graph task was started inside another one.
    """

    def __init__(
        self, parameters: Sequence[Tensor], is_inside: Callable[[], bool] = is_inside_another_backward
    ) -> None:
        self.rivals: list[weakref.ref[Ownership]] = []
        """The owners of other wrappers that share parameters with this one. The list stays the same object."""
        self._parameters = parameters
        self._is_inside = is_inside
        self.birth = next(_births)
        """A creation number; later wrappers have higher ones."""
        self._reached_in = _NEVER  # the last graph task that passed through an output of the wrapper
        self._judged: tuple[int, bool] = (_NEVER, False)
        self._heir: Ownership | None = None

    def continues(self, former: Ownership) -> None:
        """Replace `former`, which outputs of earlier forwards still refer to."""
        former._heir = self
        self._reached_in = former._reached_in

    def share_with(self, others: Iterable[Ownership]) -> None:
        """Register wrappers with shared parameters: each side becomes a rival of the other."""
        for other in others:
            self.rivals.append(weakref.ref(other, self.rivals.remove))
            other.rivals.append(weakref.ref(self, other.rivals.remove))

    def withdraw(self) -> None:
        """Remove this wrapper from its rivals; it reduces nothing from now on."""
        for rival in [rival for reference in self.rivals if (rival := reference()) is not None]:
            rival.rivals[:] = [one for one in rival.rivals if one() is not self]
        self.rivals.clear()

    def watch(self, output: object) -> None:
        """Watch an output of the wrapper's forward for the backward that passes through it."""
        when_backward_reaches_any(output, self._note)

    def _note(self, gradient: object) -> None:
        if self._heir is not None:
            self._heir._note(gradient)
        self._reached_in = current_graph_task_id()
        self._judged = (_NEVER, False)  # decide again: the backward may have been assigned to another

    def owns(self, task: int) -> bool:
        """Return whether the graph task that runs now belongs to this wrapper.

        If it passed through no output of any wrapper (the modules were called directly), it belongs to the wrapper with
        the most parameters in the graph; if there are several, to the latest of them.
        """
        if self._judged[0] == task and not self._judged[1]:
            return False
        rivals = [rival for reference in self.rivals if (rival := reference()) is not None]
        latest = max(one._reached_in for one in (self, *rivals))
        # Task ids grow, so a task that runs inside another one has the higher id.
        if latest == task or (latest != _NEVER and self._is_inside()):
            is_ours = self._reached_in == latest
        else:
            is_ours = max((self, *rivals), key=Ownership._claim) is self
        self._judged = (task, is_ours)
        return is_ours

    def _claim(self) -> tuple[int, int]:
        trained = [
            parameter for parameter in self._parameters if parameter.requires_grad
        ]  # parameters may have been frozen since construction
        return GraphUsage(trained).num_reached(), self.birth
