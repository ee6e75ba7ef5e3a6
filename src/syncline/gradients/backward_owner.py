"""Which wrapper a backward belongs to, where several wrappers share parameters.

An actor and a critic may share an encoder, and a notebook may wrap the same module twice. Then one gradient is ready
for several wrappers at once, and only one of them may reduce it: the one whose forward made the graph. A hook on its
outputs tells, because the backward comes by an output before it comes to any parameter behind it.
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
    """Decides whether a backward belongs to one wrapper, where that has rivals. (Without, every backward does.)

    Args:
        parameters: those of the wrapper.
        is_inside: whether the graph task that runs now was started inside of another one.
    """

    def __init__(
        self, parameters: Sequence[Tensor], is_inside: Callable[[], bool] = is_inside_another_backward
    ) -> None:
        self.rivals: list[weakref.ref[Ownership]] = []
        """Those of other wrappers with some of the same parameters. The list stays the same object."""
        self._parameters = parameters
        self._is_inside = is_inside
        self.birth = next(_births)
        """Grows from wrapper to wrapper."""
        self._reached_in = _NEVER  # the last graph task that came by an output of the wrapper
        self._judged: tuple[int, bool] = (_NEVER, False)
        self._heir: Ownership | None = None

    def continues(self, former: Ownership) -> None:
        """Take the place of another, which outputs of earlier forwards hold on to."""
        former._heir = self
        self._reached_in = former._reached_in

    def share_with(self, others: Iterable[Ownership]) -> None:
        """Parameters are shared with these: each side is a rival of the other from now on."""
        for other in others:
            self.rivals.append(weakref.ref(other, self.rivals.remove))
            other.rivals.append(weakref.ref(self, other.rivals.remove))

    def withdraw(self) -> None:
        """The wrapper reduces nothing any more."""
        for rival in [rival for reference in self.rivals if (rival := reference()) is not None]:
            rival.rivals[:] = [one for one in rival.rivals if one() is not self]
        self.rivals.clear()

    def watch(self, output: object) -> None:
        """A forward of the wrapper ended: note the backward that comes by its output."""
        when_backward_reaches_any(output, self._note)

    def _note(self, gradient: object) -> None:
        if self._heir is not None:
            self._heir._note(gradient)
        self._reached_in = current_graph_task_id()
        self._judged = (_NEVER, False)  # without this output, the backward may have been taken for another's

    def owns(self, task: int) -> bool:
        """Return whether the graph task that runs now belongs to this wrapper.

        If it came by no output of any wrapper (the modules were called directly), it belongs to the wrapper with the
        most parameters in it; if there are several such, to the latest.
        """
        if self._judged[0] == task and not self._judged[1]:
            return False
        rivals = [rival for reference in self.rivals if (rival := reference()) is not None]
        latest = max(one._reached_in for one in (self, *rivals))
        # Tasks are numbered: one that runs inside of another has a higher number than that.
        if latest == task or (latest != _NEVER and self._is_inside()):
            is_ours = self._reached_in == latest
        else:
            is_ours = max((self, *rivals), key=Ownership._claim) is self
        self._judged = (task, is_ours)
        return is_ours

    def _claim(self) -> tuple[int, int]:
        trained = [
            parameter for parameter in self._parameters if parameter.requires_grad
        ]  # some may be frozen by now
        return GraphUsage(trained).num_reached(), self.birth
