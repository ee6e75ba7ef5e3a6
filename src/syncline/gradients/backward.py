"""One backward: its state, the graph tasks that make it up, and the wrapper to which it belongs.

A backward is in one of these states. The hooks of parameters act only in FILLING.

| state    | meaning                                                                              | next states      |
|----------|--------------------------------------------------------------------------------------|------------------|
| LOCAL    | it is not reduced: under `no_sync`, in a world of one rank, or by a strategy         | ENDED, FAILED    |
| DEFERRED | it will be reduced, but its gradients may not be copied before it has ended          | FILLING, FAILED  |
| FILLING  | ready gradients are copied into their buckets, and complete buckets are sent         | SENT, FAILED     |
| SENT     | all buckets are sent, and are waited for                                             | ENDED, FAILED    |
| ENDED    | it is over; if it was reduced, `.grad` holds the result                              |                  |
| FAILED   | it ended with an error, or another backward began before its end                     |                  |

An ordinary backward is one graph task of the autograd engine. A re-entrant checkpoint runs a task inside another one.
The first gradient of such a backward may therefore come from an inner task; the outer task follows, and more inner
tasks may come. The engine reports only which task is running now (a growing number) and when a task has ended.

Several wrappers may share parameters: an actor and a critic may share an encoder, and a notebook may wrap the same
module twice. Then one gradient is ready for several wrappers at once, but only the wrapper whose forward built the
graph may reduce it. A hook on the outputs of that forward identifies it, because backward reaches an output before any
parameter behind it.
"""

from __future__ import annotations

import enum
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence, Set

from torch import Tensor

from syncline._torch.autograd import current_graph_task_id, is_inside_another_backward
from syncline.gradients.bucket import Bucket
from syncline.gradients.sparse import SparseBucket
from syncline.gradients.usage import GraphUsage, when_backward_reaches_any

_NONE = -1


class Entry(enum.Enum):
    """The meaning of a gradient that becomes ready in some task."""

    BEGINS = "a backward begins"
    CONTINUES = "the backward continues, perhaps in another of its tasks"
    INTERRUPTS = "a backward begins, but the one before has not ended"
    TOO_LATE = "the backward continues, but all its gradients were ready, so that it was ended"


class GraphTasks:
    """A state machine that assigns graph tasks to one backward after another.

    Args:
        is_inside: returns whether the running task was started inside another one; called a few times per backward.

    Example:
        >>> tasks = GraphTasks(is_inside=lambda: False)
        >>> tasks.enter(7).name
        'BEGINS'
        >>> tasks.join(7)
        >>> tasks.enter(7).name, tasks.ends_backward(7, is_complete=True)
        ('CONTINUES', True)
    """

    def __init__(self, is_inside: Callable[[], bool] = is_inside_another_backward) -> None:
        self.current = _NONE
        """The task that gradients currently come from; each gradient compares its task with it."""
        self._is_inside = is_inside
        self._tasks: set[int] = set()
        self.outermost: int | None = None
        """The task known not to run inside another, if the caller has set it."""
        self._ended_inside = False

    @property
    def is_running(self) -> bool:
        """Whether a backward has begun and has not ended."""
        return bool(self._tasks)

    def enter(self, task: int) -> Entry:
        """Classify a gradient from `task`, which is not the current one."""
        if self._tasks:
            if task in self._tasks:
                self.current = task
                return Entry.CONTINUES
            # Ids grow, so a task with a smaller id is the outer one, in which a re-entrant backward began.
            if task < max(self._tasks) or self._is_inside():
                return Entry.CONTINUES
            return Entry.INTERRUPTS
        if self._ended_inside and self._is_inside():
            return Entry.TOO_LATE
        self._ended_inside = False
        return Entry.BEGINS

    def join(self, task: int) -> None:
        """Add `task` to this backward; the caller must report its end through `ends_backward`."""
        self._tasks.add(task)
        self.current = task

    def knows(self, task: int) -> bool:
        """Return whether `task` is part of this backward."""
        return task in self._tasks

    def ends_backward(self, task: int, *, is_complete: bool) -> bool:
        """Return whether the backward ended with `task`, which has just ended.

        Args:
            task: the id of the task.
            is_complete: whether every gradient is ready.
        """
        if task not in self._tasks:
            return False
        if self.outermost is not None:
            return task == self.outermost
        if task != min(self._tasks):
            return False  # it ran inside the smallest task, which is still to end
        if self._is_inside():
            # The task ran inside another one that has produced no gradient yet. If all gradients are ready, no
            # more should follow.
            self._ended_inside = is_complete
            return is_complete
        return True

    def forget(self) -> None:
        """Clear the state after a backward, whether it completed or failed."""
        self._tasks.clear()
        self.current = _NONE
        self.outermost = None

    def forward_begins(self) -> None:
        """Note that a forward begins, so that the next backward starts a new step."""
        self._ended_inside = False


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


NO_INDICES: frozenset[int] = frozenset()


class BackwardState(enum.Enum):
    """The state of a backward; the table of this module states what each means."""

    LOCAL = "local"
    DEFERRED = "deferred"
    FILLING = "filling"
    SENT = "sent"
    ENDED = "ended"
    FAILED = "failed"


ALLOWED_MOVES: dict[BackwardState, frozenset[BackwardState]] = {
    BackwardState.LOCAL: frozenset({BackwardState.ENDED, BackwardState.FAILED}),
    BackwardState.DEFERRED: frozenset({BackwardState.FILLING, BackwardState.FAILED}),
    BackwardState.FILLING: frozenset({BackwardState.SENT, BackwardState.FAILED}),
    BackwardState.SENT: frozenset({BackwardState.ENDED, BackwardState.FAILED}),
    BackwardState.ENDED: frozenset(),
    BackwardState.FAILED: frozenset(),
}


class Backward:
    """One backward of a module's parameters, from its first gradient to its end.

    Args:
        step: the step that this backward ends.
        state: the state in which it begins.
        num_items: the items behind this rank's gradients, under `normalize_by`; None if they are not counted.
        num_ranks: the number of ranks whose gradients count.
        scale: the factor by which gradients are multiplied when they are copied into buckets.
        unreduced: indices of parameters that hold gradients of earlier backwards, which were not reduced.
        context_id: the context of torch's distributed autograd; None for an ordinary backward.
        has_graph: whether it runs under create_graph=True, so that `.grad` has a graph and must stay the same tensor.

    Example:
        >>> backward = Backward(step=1, state=BackwardState.LOCAL)
        >>> backward.move(BackwardState.ENDED)
        >>> backward.move(BackwardState.SENT)
        Traceback (most recent call last):
        AssertionError: the backward of step 1: ended -> sent
    """

    __slots__ = (
        "absent",
        "began_at",
        "context_id",
        "has_graph",
        "is_synchronized",
        "missing",
        "num_items",
        "num_launched",
        "num_ranks",
        "ready",
        "scale",
        "sent",
        "state",
        "step",
        "unreduced",
    )

    def __init__(
        self,
        *,
        step: int,
        state: BackwardState,
        num_items: int | None = None,
        num_ranks: int = 1,
        scale: float = 1.0,
        unreduced: Set[int] = NO_INDICES,
        context_id: int | None = None,
        has_graph: bool = False,
    ) -> None:
        self.step = step
        self.state = state
        self.num_items = num_items
        self.num_ranks = num_ranks
        self.scale = scale
        self.unreduced = unreduced
        self.context_id = context_id
        self.has_graph = has_graph
        self.is_synchronized = state in (BackwardState.DEFERRED, BackwardState.FILLING)
        """Whether it is, or was to be, reduced."""
        self.began_at = time.perf_counter()
        self.ready: list[int] = []
        """Indices of the parameters in the order in which their gradients were ready."""
        self.absent = NO_INDICES
        """Indices of the parameters that it will not reach, as the autograd engine reported when it began."""
        self.missing = NO_INDICES
        """Indices of the parameters that have got no gradient; known once all buckets are filled."""
        self.num_launched = 0
        """Number of buckets, in index order, that were sent or left out because no rank uses their parameters."""
        self.sent: list[Bucket | SparseBucket] = []

    def move(self, to: BackwardState) -> None:
        """Enter another state."""
        assert to in ALLOWED_MOVES[self.state], (
            f"the backward of step {self.step}: {self.state.value} -> {to.value}"
        )
        self.state = to
