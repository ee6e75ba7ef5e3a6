"""Find the first difference between recordings of one computation, and name its causes. All functions are pure.

The texts are the same on every rank, so that equal findings of several ranks can be merged into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from syncline.debug.recording import Call, Event, Recording, Value
from syncline.debug.report import Finding, differing
from syncline.words import describe_groups, describe_ranks, groups_of, outside_of_largest, ranks_with


class FirstDifference(NamedTuple):
    """The first difference between recordings of one computation, in the order of their events."""

    stage: str
    """The stage of the event that differs; "calls" if other modules are called from here on."""
    where: str
    """The call to which the event belongs, in words."""
    blamed: Call | None
    """The call whose own code causes the difference; None if the user's function causes it."""
    values: tuple[Value | None, ...] = ()
    """The value in each recording."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The indices of the recordings, grouped by equal values; the largest group comes first."""

    @property
    def name(self) -> str:
        """The name of the value, or its position in the inputs or outputs."""
        return next((value.name for value in self.values if value), "")

    @property
    def amounts(self) -> str:
        """The value in each of the groups: its type if the types differ, else its sum; "" if unknown."""
        one_each = [self.values[group[0]] for group in self.groups if self.values]
        abouts = [value.about if value else "nothing" for value in one_each]
        shown = abouts if len(set(abouts)) > 1 else [value.amount for value in one_each if value]
        return " | ".join(filter(None, shown))


def first_difference(rows: Sequence[Sequence[Event]], calls: Sequence[Call]) -> FirstDifference | None:
    """Return the first difference between the events of two or more recordings; None if all are equal.

    Args:
        rows: the events of each recording.
        calls: the calls of one of the recordings. Up to the first difference, they are those of all.
    """
    for index, events in enumerate(zip_longest(*rows)):
        groups = groups_of([event and event[:3] for event in events])
        if len(groups) > 1:
            before = rows[0][index - 1]
            around = _call_of(before, calls, is_outer=before.stage != "input")
            return FirstDifference("calls", before.where, around, groups=groups)
        for values in zip_longest(*(event.values for event in events)):
            groups = groups_of([value and value[:3] for value in values])
            if len(groups) > 1:
                stage, where = events[0].stage, events[0].where
                blamed = _call_of(events[0], calls, is_outer=stage in ("input", "received"))
                return FirstDifference(stage, where, blamed, values, groups)
    return None


def _call_of(event: Event, calls: Sequence[Call], *, is_outer: bool) -> Call | None:
    """Return the call to which an event belongs, or the call around it. None means the function itself."""
    call = calls[event.call] if event.call >= 0 else None
    return call.parent if call and is_outer else call


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

_NOT_DETERMINISTIC = (
    "a kernel that is not deterministic, or memory that is read before it is written (torch.empty). Call "
    "torch.use_deterministic_algorithms(True) and compare again: torch then uses other kernels, or raises an error "
    "that names the operation, and fills such memory with NaN"
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


def _named(found: FirstDifference) -> tuple[str, str, str]:
    """Return the module that causes a difference, its class, and the difference in words."""
    call = found.blamed
    around = call or "the function itself"
    text = " ".join(_WHAT[found.stage].format(name=found.name, where=found.where, around=around).split())
    return (call.module, call.kind, text) if call else ("", "", text)


# ---------------------------------------------------------------------- within a rank


class OwnFinding(NamedTuple):
    """A finding about the runs of one rank, which is sent to the other ranks; a `Finding` that does not name ranks."""

    module: str
    kind: str
    what: str
    """A description of the difference, without the rank and without the size."""
    causes: Sequence[str]
    amounts: str = ""
    """The two values, for this rank's own data; see `FirstDifference.amounts`."""


def own_finding(first: Recording, second: Recording, *, is_reduced: bool) -> OwnFinding | None:
    """Return the finding about two runs of this rank, which began from the same state; None if they are equal.

    Args:
        first: a run.
        second: another run.
        is_reduced: whether the gradients of parameters are means over ranks.
    """
    found = first_difference([first.events, second.events], first.calls)
    if found is None:
        return None
    module, kind, what = _named(found)
    changes = {name: _changes(before, second.settings[name]) for name, before in first.settings.items()}
    if found.blamed and changes[module]:
        causes = [_STATE_OUTSIDE.format(changed=", ".join(changes[module]))]
    elif found.stage == "gradients" and is_reduced:
        causes = [_REDUCED]
    elif not found.blamed and found.stage in ("input", "calls"):
        causes = [_OTHER_DATA]
    else:
        seen = [
            f"{name or 'the outermost module'}: {', '.join(texts)}"
            for name, texts in changes.items()
            if texts
        ]
        elsewhere = f"; attributes that the run has changed: {'; '.join(seen)}" if seen else ""
        causes = [_STATE_NOT_RESTORED + elsewhere, _NOT_DETERMINISTIC]
    return OwnFinding(module, kind, f"two runs from the same state: {what}", causes, found.amounts)


def _changes(before: Mapping[str, Value], after: Mapping[str, Value]) -> list[str]:
    """Describe the attributes of a module that have changed."""
    pairs = {name: (before.get(name, "nothing"), after.get(name, "nothing")) for name in {**before, **after}}
    return [
        f"{name} went from {was} to {now if str(now) != str(was) else 'another one'}"
        for name, (was, now) in pairs.items()
        if was != now
    ]


def merged(of_ranks: Sequence[Sequence[Any] | None]) -> list[Finding]:
    """Return the findings of all ranks. Equal findings of several ranks become one finding.

    Args:
        of_ranks: the fields of the `OwnFinding` of each rank, in rank order. The result keeps this order.

    Examples:
        >>> noise = OwnFinding(module="mix", kind="Mix", what="two runs: mix differs", causes=(), amounts="1 | 2")
        >>> print(*merged([noise, None, noise]))
        ranks 0, 2, two runs: mix differs (rank 0: 1 | 2)
    """
    own = {rank: OwnFinding(*fields) for rank, fields in enumerate(of_ranks) if fields}
    alike = ranks_with(
        {rank: one._replace(causes=tuple(one.causes), amounts="") for rank, one in own.items()}
    )
    found = []
    for (module, kind, what, causes, _), ranks in alike.items():
        amounts = f" (rank {ranks[0]}: {own[ranks[0]].amounts})" if own[ranks[0]].amounts else ""
        text = f"{describe_ranks(ranks)}, {what}{amounts}"
        found.append(Finding(ranks=tuple(ranks), module=module, kind=kind, what=text, causes=tuple(causes)))
    return found


# ---------------------------------------------------------------------- between ranks


def between_ranks(
    found: FirstDifference,
    calls: Sequence[Call],
    *,
    settings: Sequence[Mapping[str, Value]],
    facts: Sequence[Mapping[str, str]],
) -> Finding:
    """Return the finding about ranks that have computed different values, although they should be equal.

    Args:
        found: the first difference. Its groups are groups of ranks.
        calls: the calls of the run on this rank.
        settings: the attributes of the blamed module on each rank, by their names.
        facts: versions, hardware and settings of each rank.
    """
    module, kind, what = _named(found)
    if found.stage == "state":
        module = found.name.rpartition(".")[0]
        kind = next((call.kind for call in calls if call.module == module), "")
        causes = [_REPLICAS_APART]
    else:
        causes = [f"its attribute {name} differs: {text}" for name, text in differing(settings).items()]
        causes += [_OTHER_DATA] if not found.blamed else []
        causes += [f"{name}: {text}" for name, text in differing(facts).items() if name != "host"]
    amounts = f" ({found.amounts})" if found.amounts else ""
    return Finding(
        ranks=outside_of_largest(found.groups),
        module=module,
        kind=kind,
        what=f"between ranks ({describe_groups(found.groups)}): {what}{amounts}",
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
