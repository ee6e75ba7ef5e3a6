"""One backward: its state, the graph tasks that make it up, and the wrapper to which it belongs.

A backward is in one of these states. The hooks of parameters copy gradients only in FILLING.

| state    | meaning                                                                              | next states      |
|----------|--------------------------------------------------------------------------------------|------------------|
| LOCAL    | it is not reduced, due to `no_sync`, a world of one rank, or a strategy              | ENDED, FAILED    |
| DEFERRED | it will be reduced, but its gradients must not be copied before its end              | FILLING, FAILED  |
| FILLING  | ready gradients are copied into their buckets, and complete buckets are sent         | SENT, FAILED     |
| SENT     | all buckets are sent, and this rank waits for them                                   | ENDED, FAILED    |
| ENDED    | it is over; if it was reduced, `.grad` holds the result                              |                  |
| FAILED   | it ended with an error, or another backward began before its end                     |                  |

An ordinary backward is one graph task of the autograd engine. A re-entrant checkpoint runs an inner task inside the
outer task. The first gradient of such a backward may therefore come from an inner task, and later gradients may come
from the outer task or from more inner tasks. The engine reports only the number of the task that runs now, and the end
of each task. A task that begins later has a higher number.

Several wrappers may share parameters: an actor and a critic may share an encoder, and a notebook may wrap the same
module twice. Then one gradient is ready for several wrappers at once. As in torch's class, each wrapper with a forward
since its last reduction takes part, and the mean of equal means is the mean. `Ownership` leaves out a wrapper only if
the graph has none of the parameters that the wrapper shares with no other.
"""

from __future__ import annotations

import enum
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline._torch.autograd import NO_TASK, is_in_distributed_autograd, is_inside_another_backward
from syncline.errors import SynclineError
from syncline.gradients.bucket import Bucket
from syncline.gradients.options import Announced, Controls
from syncline.gradients.usage import num_reached


class Entry(enum.Enum):
    """The results of `GraphTasks.enter`. Each value states what a gradient from another graph task means."""

    BEGINS = "a backward begins"
    CONTINUES = "the present backward continues in another graph task"
    INTERRUPTS = "a backward begins, but the previous one has not ended"
    TOO_LATE = "a backward continues, although it was ended when all its gradients were ready"


class GraphTasks:
    """A state machine that decides which graph tasks belong to the same backward.

    Args:
        is_inside: a function that returns whether the running task was started inside another task. It is called a few
            times per backward.

    Examples:
        >>> tasks = GraphTasks(is_inside=lambda: False)
        >>> tasks.enter(7).name
        'BEGINS'
        >>> tasks.join(7)
        >>> tasks.enter(7).name, tasks.ends_backward(7, is_complete=True)
        ('CONTINUES', True)
    """

    def __init__(self, is_inside: Callable[[], bool] = is_inside_another_backward) -> None:
        self.current = NO_TASK
        """The graph task of the latest gradient. Each parameter's hook compares the running task with this task."""
        self.outermost: int | None = None
        """The outermost task, which does not run inside another task; None if the outermost task is unknown."""
        self._is_inside = is_inside
        self._tasks: set[int] = set()
        self._running: set[int] = set()
        """Those of the tasks that have not ended."""
        self.is_unfinished = False
        """Whether the tasks of the present backward have ended, although gradients are missing, which later tasks may
        bring. This is no property, because each forward reads it."""
        self.has_ended_inside = False
        """Whether the last backward was ended inside a task that can still produce gradients (see `ends_backward`)."""

    @property
    def is_running(self) -> bool:
        """Whether a backward has begun and has not ended."""
        return bool(self._tasks)

    def enter(self, task: int) -> Entry:
        """Decide whether a gradient from `task` begins a backward, continues the present one, or is an error.

        Call this method when a gradient comes from a different task than the gradient before it.
        """
        if self._tasks:
            if task in self._tasks:
                self.current = task
                return Entry.CONTINUES
            # Numbers grow, so a task with a smaller number is the outer one, in which a re-entrant backward began.
            if self.is_unfinished or task < max(self._tasks) or self._is_inside():
                return Entry.CONTINUES
            return Entry.INTERRUPTS
        if self.has_ended_inside and self._is_inside():
            return Entry.TOO_LATE
        self.has_ended_inside = False
        return Entry.BEGINS

    def join(self, task: int) -> None:
        """Add `task` to the present backward. The caller must call `ends_backward` when the task ends."""
        self._tasks.add(task)
        self._running.add(task)
        self.current = task
        self.is_unfinished = False

    def knows(self, task: int) -> bool:
        """Return whether `task` is part of the present backward."""
        return task in self._tasks

    def ends_backward(self, task: int, *, is_complete: bool) -> bool:
        """Return whether the end of `task` is also the end of the backward.

        Args:
            task: the number of the task that has just ended.
            is_complete: whether the gradients of all parameters are ready.
        """
        if task not in self._tasks:
            return False
        self._running.discard(task)
        if self.outermost is not None:
            return task == self.outermost
        if self._running:
            return False  # the task ran inside one of these
        if self._is_inside():
            # The task ran inside another one that has produced no gradient yet. If all gradients are ready, no
            # more should follow.
            self.has_ended_inside = is_complete
            self.is_unfinished = not is_complete
            return is_complete
        return True

    def wait_for_more(self) -> None:
        """Record that a later task may bring the gradients that are missing. Until then, the backward does not end."""
        self.is_unfinished = True

    def forget(self) -> None:
        """Remove all tasks of a backward that has completed or failed."""
        self._tasks.clear()
        self._running.clear()
        self.is_unfinished = False
        self.current = NO_TASK
        self.outermost = None

    def forward_begins(self) -> None:
        """Record that a forward begins, so that later gradients are not attributed to a backward that has ended."""
        self.has_ended_inside = False


_births = itertools.count()


class Ownership:
    """The record by which a wrapper decides whether it takes part in a backward that its rivals see, too.

    The rivals of a wrapper are the other wrappers that have some of its parameters. A wrapper without rivals takes part
    in every backward.

    Args:
        parameters: the parameters of the wrapper.
        controls: the requests of the wrapper, which know whether it has run a forward since the last reduction.
        tasks: the graph tasks of the present backward of the wrapper.
        allows_unused: whether a backward may lack gradients of the wrapper's parameters.
    """

    def __init__(
        self, parameters: Sequence[Tensor], controls: Controls, tasks: GraphTasks, *, allows_unused: bool
    ) -> None:
        self.rivals: list[weakref.ref[Ownership]] = []
        """Weak references to the rivals' ownerships. The list stays the same object, because hooks refer to it."""
        self.birth = next(_births)
        """A number that orders wrappers by creation: a later wrapper has a higher number."""
        self._parameters = parameters
        self._controls, self._tasks, self._allows_unused = controls, tasks, allows_unused
        self._refused_task = NO_TASK  # the last graph task that was left to the rivals

    @property
    def hook_key(self) -> int:
        """The key of the wrapper's hook in the table of each parameter. torch's own keys are positive."""
        return -1 - self.birth

    def add_rivals(self, others: Iterable[Ownership]) -> None:
        """Let this wrapper know other wrappers of the same parameters as its rivals, and let them know it as theirs.

        Args:
            others: the ownerships of other wrappers that have some of the same parameters.
        """
        for other in others:
            self.rivals.append(weakref.ref(other, self.rivals.remove))
            other.rivals.append(weakref.ref(self, other.rivals.remove))

    def withdraw(self) -> None:
        """Remove this wrapper from the rivals of all other wrappers, because it no longer reduces gradients."""
        for rival in self._living_rivals():
            rival.rivals[:] = [other for other in rival.rivals if other() is not self]
        self.rivals.clear()

    def _living_rivals(self) -> list[Ownership]:
        return [rival for reference in self.rivals if (rival := reference()) is not None]

    def takes_part_in(self, task: int) -> bool:
        """Return whether the wrapper takes part in the backward of `task`, the graph task that runs now.

        If no wrapper has run a forward since its last reduction (because the modules were called directly), only one
        takes part: the wrapper with the most parameters in the graph. If several have as many, one whose parameters are
        all in the graph is preferred, and then the one that was created last.
        """
        if task == self._refused_task:
            return False
        contenders = [self, *self._living_rivals()]
        found = [one for one in contenders if one._controls.announced is not Announced.NOTHING]
        if not found:
            found = [max(contenders, key=Ownership._priority)]
        elif any(one._tasks.is_running for one in found) and is_inside_another_backward():
            found = [one for one in found if one._tasks.is_running]
        else:
            found = [one for one in found if one._allows_unused or one._reaches_own()] or found
        takes_part = self in found
        self._refused_task = NO_TASK if takes_part else task
        return takes_part

    def _reaches_own(self) -> bool:
        """Return whether the graph has any parameter that this wrapper shares with no other; True if there is none."""
        shared = {id(parameter) for rival in self._living_rivals() for parameter in rival._parameters}
        own = [p for p in self._parameters if id(p) not in shared and p.requires_grad]
        return not own or num_reached(own) > 0

    def _priority(self) -> tuple[int, bool, int]:
        trained = [p for p in self._parameters if p.requires_grad]  # some may have been frozen since
        reached = num_reached(trained)
        return reached, reached == len(trained), self.birth


NO_INDICES: frozenset[int] = frozenset()


class BackwardState(enum.Enum):
    """The state of a backward. The table at the top of this module defines each state."""

    LOCAL = "local"
    DEFERRED = "deferred"
    FILLING = "filling"
    SENT = "sent"
    ENDED = "ended"
    FAILED = "failed"

    __hash__ = object.__hash__  # that of enum.Enum is a Python function, and slower


ALLOWED_MOVES: dict[BackwardState, frozenset[BackwardState]] = {
    BackwardState.LOCAL: frozenset({BackwardState.ENDED, BackwardState.FAILED}),
    BackwardState.DEFERRED: frozenset({BackwardState.FILLING, BackwardState.FAILED}),
    BackwardState.FILLING: frozenset({BackwardState.SENT, BackwardState.FAILED}),
    BackwardState.SENT: frozenset({BackwardState.ENDED, BackwardState.FAILED}),
    BackwardState.ENDED: frozenset(),
    BackwardState.FAILED: frozenset(),
}


@dataclass(kw_only=True, slots=True, eq=False)
class Backward:
    """The state of one backward, from its first gradient to its end.

    Examples:
        >>> backward = Backward(step=1, state=BackwardState.LOCAL)
        >>> backward.move(BackwardState.ENDED)
        >>> backward.move(BackwardState.SENT)
        Traceback (most recent call last):
        AssertionError: the backward of step 1: ended -> sent
    """

    step: int
    """The number of the step to which this backward belongs."""
    state: BackwardState
    """The present state. A backward that is not reduced stays in LOCAL until its end."""
    num_items: int | None = None
    """The number of items that this rank reports, under `normalize_by`; None if items are not counted."""
    num_ranks: int = 1
    """Number of ranks by which gradients are divided if items are not counted (see `Controls.count_ranks`)."""
    scale: float = 1.0
    """The factor by which gradients are multiplied when they are copied into buckets."""
    accumulates: bool = False
    """Whether a later backward reduces the gradients, because this one, or its forward, runs under `no_sync`."""
    is_local_by_forward: bool = False
    """Whether it ran outside of `no_sync`, but all forwards before it inside, so that a later backward reduces the
    gradients."""
    reaches_all: bool = False
    """Whether each graph task so far was started without `inputs=`, so that it reaches all parameters in its graph."""
    is_compiled: bool = False
    """Whether compiled autograd runs the backward. Then its end is not seen: it ends when no gradient is missing."""
    keeps_tensors: bool = False
    """Whether `.grad` must stay the same tensor when it receives the result (see `Bucket.hand_out`)."""
    missing: frozenset[int] = NO_INDICES
    """Indices of the parameters that get no gradient. Until the end of the backward, these are only the parameters that
    the backward does not reach, according to the autograd engine."""
    undefined: frozenset[int] = NO_INDICES
    """Indices of parameters whose hook ran without a gradient in `.grad`, as far as hooks looked for one."""
    num_launched: int = 0
    """Number of buckets that were launched so far, in index order. A bucket whose parameters no rank uses is not sent,
    but it is counted, too."""
    began_at: float = field(default_factory=time.perf_counter)
    ready: list[int] = field(default_factory=list)
    """Indices of the parameters in the order in which their gradients were ready."""
    sent: list[Bucket] = field(default_factory=list)

    def move(self, to: BackwardState) -> None:
        """Move the backward to the state `to`. `ALLOWED_MOVES` must allow this move."""
        assert to in ALLOWED_MOVES[self.state], (
            f"the backward of step {self.step}: {self.state.value} -> {to.value}"
        )
        self.state = to


def refuse_graph_capture(*, rank: int, step: int, phase: str) -> None:
    """Raise an error if the current CUDA stream is being captured into a CUDA graph.

    A replay of a graph runs its kernels only. It would skip the Python code that sends, counts and checks gradients.

    Args:
        rank: the number of this rank, for the message.
        step: the number of the step, for the message.
        phase: "forward" or "backward", for the message.

    Raises:
        SynclineError: the stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise SynclineError(
            f"rank {rank}, step {step}, {phase}: expected to run outside of the capture of a CUDA graph, but the "
            "current CUDA stream is being captured. A replay of the graph would neither reduce nor check gradients. "
            "Capture the module, not the wrapper: before you wrap the module, call "
            "torch.cuda.make_graphed_callables(module, sample_args) or "
            'torch.compile(module, mode="reduce-overhead"). Gradients are then reduced outside of the graphs'
        )


def refuse_distributed_autograd(*, rank: int, step: int) -> None:
    """Raise an error if this thread is in a context of torch's distributed autograd.

    Args:
        rank: the number of this rank, for the message.
        step: the number of the step, for the message.

    Raises:
        SynclineError: the thread is in such a context.
    """
    if is_in_distributed_autograd():
        raise SynclineError(
            f"rank {rank}, step {step}: expected a forward outside of torch.distributed.autograd.context(), which "
            "keeps gradients out of .grad, so that they would stay local. Call loss.backward() outside of such a "
            "context, or average what it holds by sl.average_"
        )
