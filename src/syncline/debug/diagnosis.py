"""Find the first difference between recordings of one computation, and name its causes. All functions are pure.

The texts are the same on every rank, so that equal findings of several ranks can be merged into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from syncline.debug.recording import Call, Event, Recording, Value, how_they_differ
from syncline.debug.report import Finding, differing
from syncline.words import describe_groups, describe_ranks, groups_of, outside_of_largest


class FirstDifference(NamedTuple):
    """The first difference between recordings of one computation, in the order of their events."""

    stage: str
    """The stage of the event that differs; "calls" if other modules are called from here on."""
    where: str
    """The call to which the event belongs, in words."""
    blamed: int
    """The index of the call whose own code causes the difference; -1 if the user's function causes it."""
    event: int
    """The index of the event."""
    place: int = 0
    """The index of the value in the event."""
    values: tuple[Value | None, ...] = ()
    """The value in each recording."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The indices of the recordings, grouped by equal values; the largest group comes first."""

    @property
    def name(self) -> str:
        """The name of the value, or its position in the inputs or outputs."""
        return next((value.name for value in self.values if value), "")


def first_difference(rows: Sequence[Sequence[Event]]) -> FirstDifference | None:
    """Return the first difference between the events of two or more recordings; None if all are equal."""
    for index, events in enumerate(zip_longest(*rows)):
        groups = groups_of([event and event[:4] for event in events])
        if len(groups) > 1:
            before = rows[0][index - 1]
            around = before.call if before.stage == "input" else before.parent
            return FirstDifference("calls", before.where, around, index, groups=groups)
        for place, values in enumerate(zip_longest(*(event.values for event in events))):
            groups = groups_of(values)
            if len(groups) > 1:
                stage, where = events[0].stage, events[0].where
                return FirstDifference(stage, where, _blamed(events[0]), index, place, values, groups)
    return None


def _blamed(event: Event) -> int:
    """Return the index of the call whose own code has computed the values of an event; -1 for the function itself."""
    return event.parent if event.stage in ("input", "received") else event.call


def first_nan(filled: Recording, ordinary: Recording) -> int | None:
    """Find the first call that computes NaN in a run with filled memory, but not in an ordinary run.

    Args:
        filled: the run in which uninitialized memory was filled with NaN.
        ordinary: the run without filling.

    Returns:
        The index of the call, or -1 if the function itself computed the NaN. None if there is no such call.
    """
    for now, then in zip(filled.events, ordinary.events, strict=False):
        if now[:4] != then[:4]:
            return None
        if any(a.has_nan and not b.has_nan for a, b in zip(now.values, then.values, strict=False)):
            return _blamed(now)
    return None


# ---------------------------------------------------------------------- words

_WHAT = {
    "state": "{name} differs before the run",
    "calls": "other modules are called, in {around}",
    "input": "input {name} of {where} differs, although everything before was equal: computed in {around}",
    "output": "{where} returns another output {name} for equal inputs",
    "received": "the gradient of output {name} of {where} differs, although its forward was equal: computed in the "
    "backward of {around}",
    "backward": "{where} returns another gradient of its {name} in backward, for equal gradients of its outputs",
    "result": "the result {name} of the function differs, although all modules and gradients agree",
    "gradients": "the gradient of {name} differs, although every module's forward agrees",
}

_STATE_OUTSIDE = (
    "state that is neither a parameter nor a buffer: its attribute {changed}. Such state is not restored before the "
    "second run, and is in no checkpoint. Make a tensor a buffer (register_buffer), compute a value from the inputs, "
    "and draw from torch's global generator instead of a random number generator of the module's own"
)

_NEVER_WRITTEN = (
    "memory that is read before it is written: the output changes if that memory is filled with NaN. Write to a tensor "
    "from torch.empty, empty_like or new_empty before you read it"
)

_NOT_DETERMINISTIC = (
    "a kernel that is not deterministic. The documentation of torch.use_deterministic_algorithms lists them. It makes "
    "torch use others, or raise an error that names the operation"
)

_REDUCED = (
    "this gradient is a mean over ranks, and another rank's own gradient differs between its runs (see the finding of "
    "that rank). If there is no such finding, the transport sums in an order that changes from run to run"
)

_OTHER_DATA = (
    "the function takes other data in each run or on each rank, as from an iterator, or from a random number generator "
    "of its own. Take the batch outside of the function, and pass it as inputs=(...)"
)

_STATE_NOT_RESTORED = (
    "state that is not restored before the second run, such as a global counter, a cache, a random number generator "
    "of its own, a clock, a file, or the order of a set"
)

_REPLICAS_APART = (
    "the replicas are not equal: sl.check_replicas(module) names the differences, and sl.broadcast_(module) makes the "
    "replicas equal. Usual causes: different seeds without synchronization, a step on some ranks only, a flipped bit"
)

_ALL_ELSE_EQUAL = (
    "everything that was compared is equal (versions, threads, settings, attributes). Remaining causes: state outside "
    "of the module, data that the module reads on its own, the order of a set (PYTHONHASHSEED), or the hardware"
)

_NOT_REDUCED = (
    "the backward ran under no_sync(), or did not go through the wrapper, so the gradients were not reduced",
    "the gradients were changed after the reduction on some ranks: clipped, scaled or replaced",
)


def _named(found: FirstDifference, calls: Sequence[Call]) -> tuple[str, str, str]:
    """Return the module that causes a difference, its class, and the difference in words."""
    around = "the function itself" if found.blamed < 0 else calls[found.blamed]
    text = _WHAT[found.stage].format(name=found.name, where=found.where, around=around)
    return *_of_call(found.blamed, calls), " ".join(text.split())


def _of_call(index: int, calls: Sequence[Call]) -> tuple[str, str]:
    """Return the name and the class of a call's module. Return two empty strings if there is no call."""
    return (calls[index].module, calls[index].kind) if index >= 0 else ("", "")


# ---------------------------------------------------------------------- within a rank


class OwnFinding(NamedTuple):
    """A finding about the runs of one rank, which is sent to the other ranks; a `Finding` that does not name ranks."""

    module: str
    kind: str
    what: str
    """A description of the difference, without the rank and without the size."""
    causes: Sequence[str]
    size: str = ""
    """The size of the difference for this rank's own data, in words; "" if unknown."""


def own_findings(runs: Sequence[Recording], *, is_reduced: bool) -> list[OwnFinding]:
    """Return the findings about the runs of this rank, all of which began from the same state.

    An output that depends on memory that was never written is a finding even if two runs happen to agree.

    Args:
        runs: two ordinary runs; and two with deterministic algorithms, in which uninitialized memory was filled with
            NaN, unless these failed.
        is_reduced: whether the gradients of parameters are means over ranks.
    """
    first, second, *filled = runs
    found = first_difference([first.events, second.events])
    nan_call = first_nan(filled[0], first) if filled else None
    findings = []
    if found:
        module, kind, what = _named(found, first.calls)
        causes = []
        if found.blamed >= 0 and (changed := first.changed.get(module)):
            causes.append(_STATE_OUTSIDE.format(changed=", ".join(changed)))
        if nan_call == found.blamed:
            causes.append(_NEVER_WRITTEN)
        elif filled and first_difference([run.events for run in filled]) is None:
            causes.append(f"{_NOT_DETERMINISTIC}. With deterministic algorithms, two runs agree, bit by bit")
        key = found.event, found.place
        sized = key in first.copies and key in second.copies
        size = how_they_differ(first.copies[key], second.copies[key]) if sized else ""
        causes = causes or _usual_causes(found, first, is_reduced=is_reduced)
        findings.append(
            OwnFinding(module, kind, f"two runs from the same state: {what}", tuple(causes), size)
        )
    if nan_call is not None and (not found or found.blamed != nan_call):
        named = first.calls[nan_call] if nan_call >= 0 else "the function itself"
        what = f"in any run: an output of {named} depends on memory that was never written"
        findings.append(OwnFinding(*_of_call(nan_call, first.calls), what, (_NEVER_WRITTEN,)))
    return findings


def _usual_causes(found: FirstDifference, first: Recording, *, is_reduced: bool) -> list[str]:
    """Return the usual causes of a difference that the observations do not explain."""
    if found.stage == "gradients" and is_reduced:
        return [_REDUCED]
    if found.blamed < 0 and found.stage in ("input", "calls"):
        return [_OTHER_DATA]
    seen = [f"{name or 'the outermost module'}: {', '.join(texts)}" for name, texts in first.changed.items()]
    elsewhere = f"; attributes that the run has changed: {'; '.join(seen)}" if seen else ""
    return [_STATE_NOT_RESTORED + elsewhere, _NOT_DETERMINISTIC]


def merged(of_ranks: Sequence[Sequence[OwnFinding]]) -> list[Finding]:
    """Merge the findings of all ranks into one list. Equal findings of several ranks become one finding.

    Args:
        of_ranks: the findings of each rank, in rank order. The result keeps this order.

    Examples:
        >>> noise = OwnFinding(module="mix", kind="Mix", what="two runs: mix differs", causes=(), size="by 1")
        >>> print(*merged([[noise], [], [noise]]))
        ranks 0, 2, two runs: mix differs (rank 0: by 1)
    """
    sizes: dict[OwnFinding, dict[int, str]] = {}
    for rank, findings in enumerate(of_ranks):
        for one in findings:
            alike = one._replace(causes=tuple(one.causes), size="")
            sizes.setdefault(alike, {})[rank] = one.size
    found = []
    for (module, kind, what, causes, _), by_rank in sizes.items():
        size = next((f" (rank {rank}: {size})" for rank, size in by_rank.items() if size), "")
        text = f"{describe_ranks([*by_rank])}, {what}{size}"
        found.append(Finding(ranks=tuple(by_rank), module=module, kind=kind, what=text, causes=tuple(causes)))
    return found


# ---------------------------------------------------------------------- between ranks


def between_ranks(
    found: FirstDifference,
    calls: Sequence[Call],
    size: str,
    *,
    settings: Sequence[Mapping[str, Value]],
    facts: Sequence[Mapping[str, str]],
) -> Finding:
    """Return the finding about ranks that have computed different values, although they should be equal.

    Args:
        found: the first difference. Its groups are groups of ranks.
        calls: the calls of the run on this rank.
        size: the size of the difference, in words; "" if unknown.
        settings: the attributes of the blamed module on each rank, by their names.
        facts: versions, hardware and settings of each rank.
    """
    module, kind, what = _named(found, calls)
    if found.stage == "state":
        module = found.name.rpartition(".")[0]
        kind = next((call.kind for call in calls if call.module == module), "")
        causes = [_REPLICAS_APART]
    else:
        causes = [f"its attribute {name} differs: {text}" for name, text in differing(settings).items()]
        causes += [_OTHER_DATA] if found.blamed < 0 else []
        causes += [f"{name}: {text}" for name, text in differing(facts).items() if name != "host"]
    return Finding(
        ranks=outside_of_largest(found.groups),
        module=module,
        kind=kind,
        what=f"between ranks ({describe_groups(found.groups)}): {what}{size and f': {size}'}",
        causes=tuple(causes) or (_ALL_ELSE_EQUAL,),
    )


def of_gradients(names: Sequence[str], groups: Sequence[tuple[int, ...]], num_gradients: int) -> Finding:
    """Return the finding about reduced gradients that are not the same on all ranks.

    Args:
        names: the names of the parameters whose gradients differ, in the module's order.
        groups: the ranks, grouped by equal gradients of the first of these parameters.
        num_gradients: the number of gradients that were compared.
    """
    what = (
        f"between ranks ({describe_groups(groups)}): after backward {len(names)} of {num_gradients} gradients differ, "
        f"although they should be the same mean on all ranks. The first of them is that of {names[0]}"
    )
    module = names[0].rpartition(".")[0]
    return Finding(ranks=outside_of_largest(groups), module=module, kind="", what=what, causes=_NOT_REDUCED)
