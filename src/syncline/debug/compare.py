"""Find the first difference between recordings of one computation. All functions are pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from syncline.debug.recording import Call, Recording
from syncline.debug.values import Value
from syncline.words import groups_of

Stage = Literal["state", "calls", "input", "output", "backward", "gradients", "result"]


class FirstDifference(NamedTuple):
    """The first difference between recordings of one computation.

    The stage names the kind of value that differs:

    - "state": a parameter or buffer before the run.
    - "calls": the module that is called next.
    - "input": an input of a module, although everything before this call was equal.
    - "output": an output of a module, although its inputs were equal.
    - "backward": a gradient that a module's backward returns, although the gradients that it received were equal.
    - "result": the value that the function returned, although the forward of every module was equal.
    - "gradients": the gradient of a parameter, although the forward of every module was equal.
    """

    stage: Stage
    call: int = -1
    """The index of the call that differs; -1 if it is unknown.

    At the stage "calls", it is the index of the call from inside which the recordings call different modules.
    """
    event: int = -1
    """The index of the event that differs; -1 if the difference is not in an event."""
    place: int = 0
    """The index of the differing value among the compared values."""
    name: str = ""
    """The name of the differing tensor, or its position in the inputs or outputs."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The indices of the recordings, grouped by equal values; the largest group comes first."""


def first_difference(recordings: Sequence[Recording], *, is_reduced: bool = False) -> FirstDifference | None:
    """Return the first difference between recordings of one computation, in the order of execution.

    Returns None if all recordings agree.

    Args:
        recordings: the recordings, at least two.
        is_reduced: whether gradients of parameters are means over ranks. If so, a differing gradient does not show
            which module caused the difference.
    """
    return (
        _in_values("state", [recording.state for recording in recordings])
        or _in_forward(recordings)
        or _in_backward(recordings, is_reduced=is_reduced)
        or _in_values("result", [recording.result for recording in recordings])
        or _in_values("gradients", [recording.gradients for recording in recordings])
    )


def _in_values(stage: Stage, rows: Sequence[Sequence[Value]]) -> FirstDifference | None:
    """Return the first difference between rows of values; None if all rows are equal. Each recording has one row."""
    names = [[value.name for value in row] for row in rows]
    if any(other != names[0] for other in names):
        return FirstDifference(stage, groups=groups_of(list(map(tuple, names))))
    for place, values in enumerate(zip(*rows, strict=True)):
        groups = groups_of(values)
        if len(groups) > 1:
            return FirstDifference(stage, place=place, name=values[0].name, groups=groups)
    return None


def _in_forward(recordings: Sequence[Recording]) -> FirstDifference | None:
    num_events = [len(recording.events) for recording in recordings]
    for index in range(min(num_events)):
        events = [recording.events[index] for recording in recordings]
        first = events[0]
        steps = [
            (event.kind, _identity(recording.calls[event.call]))
            for event, recording in zip(events, recordings, strict=True)
        ]
        if len(set(steps)) > 1:
            around = recordings[0].calls[first.call].parent if first.kind == "input" else first.call
            return FirstDifference("calls", around, index, groups=groups_of(steps))
        found = _in_values(first.kind, [event.values for event in events])
        if found is not None:
            return found._replace(call=first.call, event=index)
    if len(set(num_events)) > 1:
        return FirstDifference("calls", event=min(num_events), groups=groups_of(num_events))
    return None


def _identity(call: Call) -> tuple[str, str, int, int]:
    return call.module, call.kind, call.nth, call.parent


def _in_backward(recordings: Sequence[Recording], *, is_reduced: bool) -> FirstDifference | None:
    """Find the first call in backward that received equal gradients but returned different ones.

    The received gradients are those of the call's outputs. The returned gradients are those of its inputs and of its
    module's parameters. Calls are visited in the reverse of the order in which they began, so inner calls come before
    the call that made them.
    """
    tuples = [recording.calls for recording in recordings]
    came_equal = [_equal(call.output_grads for call in calls) for calls in zip(*tuples, strict=True)]
    own = {} if is_reduced else _groups_of_own_gradients(recordings)
    calls_of: dict[str, list[int]] = {}
    for index, call in enumerate(recordings[0].calls):
        calls_of.setdefault(call.module, []).append(index)
    for index in reversed(range(len(came_equal))):
        call = recordings[0].calls[index]
        if not came_equal[index] or not call.output_grads:
            continue
        found = _in_values("backward", [calls[index].input_grads for calls in tuples])
        if found is not None:
            return found._replace(call=index, name=f"input {found.name}".rstrip())
        if call.module in own and all(came_equal[other] for other in calls_of[call.module]):
            name, groups = own[call.module]
            return FirstDifference("backward", index, name=f"parameter {name}", groups=groups)
    return None


def _equal(values: Iterable[list[Value]]) -> bool:
    first, *others = values
    return all(other == first for other in others)


def _groups_of_own_gradients(
    recordings: Sequence[Recording],
) -> dict[str, tuple[str, tuple[tuple[int, ...], ...]]]:
    """Return the first differing gradient among each module's own parameters, by the name of the module.

    Each value of the dict has the name of the parameter, and the indices of the recordings, grouped by equal gradients.
    """
    found: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {}
    rows = [{value.name: value for value in recording.gradients} for recording in recordings]
    for name in rows[0]:
        groups = groups_of([row.get(name) for row in rows])
        if len(groups) > 1:
            found.setdefault(name.rpartition(".")[0], (name, groups))
    return found


def first_nan(filled: Recording, ordinary: Recording) -> int | None:
    """Find the first call whose outputs have NaN in a run with filled memory, but not in an ordinary run.

    Args:
        filled: the run in which uninitialized memory was filled with NaN.
        ordinary: the run without filling.

    Returns:
        The index of the call, or -1 if the function itself computed the NaN. None if there is no such call.
    """
    for index, event in enumerate(filled.events):
        if index >= len(ordinary.events) or len(event.values) != len(ordinary.events[index].values):
            return None
        pairs = zip(event.values, ordinary.events[index].values, strict=True)
        if any(now.has_nan and not then.has_nan for now, then in pairs):
            if event.kind == "output":
                return event.call
            return filled.calls[event.call].parent  # the call around it has computed its inputs
    return None
