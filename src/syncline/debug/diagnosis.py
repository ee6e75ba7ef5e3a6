"""Name the causes of differences, and merge the findings of all ranks into one list. All functions are pure.

The texts are the same on every rank, so that equal findings of several ranks can be merged into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.debug.compare import FirstDifference
from syncline.debug.recording import Call, Recording
from syncline.debug.report import Finding, OwnFinding, OwnReport, by_value
from syncline.words import describe_groups, describe_ranks, outside_of_largest, ranks_with

MAX_NAMED = 6
"""The maximum number of names that a note shows."""


def put_together(of_ranks: Sequence[Sequence[OwnFinding]]) -> list[Finding]:
    """Merge the findings of all ranks into one list. Equal findings of several ranks become one finding.

    Args:
        of_ranks: the findings of each rank, in rank order. The result keeps this order.

    Examples:
        >>> noise = OwnFinding(module="mix", kind="Mix", what="two runs: mix differs", difference="1 of 4 elements")
        >>> print(*put_together([[noise], [], [noise]]))
        ranks 0, 2, two runs: mix differs: 1 of 4 elements
    """
    differences: dict[tuple[str, str, str, tuple[str, ...]], dict[int, str]] = {}
    for rank, findings in enumerate(of_ranks):
        for one in findings:
            alike = (one.module, one.kind, one.what, tuple(one.causes))
            differences.setdefault(alike, {}).setdefault(rank, one.difference)
    return [
        Finding(
            ranks=tuple(by_rank),
            module=module,
            kind=kind,
            what=f"{describe_ranks(list(by_rank))}, {what}{_how_much(by_rank)}",
            causes=causes,
        )
        for (module, kind, what, causes), by_rank in differences.items()
    ]


def _how_much(by_rank: dict[int, str]) -> str:
    """Describe the size of a difference. If the size differs between ranks, give the first known size and its ranks."""
    known = ranks_with({rank: difference for rank, difference in by_rank.items() if difference})
    if not known:
        return ""
    (first, ranks), *_ = known.items()
    return f": {first}" if len(ranks) == len(by_rank) else f"; on {describe_ranks(ranks)}: {first}"


# ---------------------------------------------------------------------- causes and remedies

_STATE_OUTSIDE = (
    "state outside of parameters and buffers: its attribute {changed}. An attribute that is neither a parameter nor a "
    "buffer is not restored before the second run, and is in no checkpoint: make it a buffer (register_buffer), or "
    "compute it from the inputs"
)

_OWN_GENERATOR = (
    "a random number generator of its own: its attribute {name} is {kind}, which is not restored before the second "
    "run. Draw from torch's global generator, or save and load the generator's state with the module's"
)

_NEVER_WRITTEN = (
    "memory that is read before it is written: the output changes if that memory is filled with NaN. Write to a tensor "
    "from torch.empty, empty_like or new_empty before you read it"
)

_NOT_DETERMINISTIC = (
    "a kernel that is not deterministic: with torch.use_deterministic_algorithms(True) two runs agree, bit for bit. "
    "{operations}"
)

_ATOMICS = (
    "on CUDA these operations add in an order that changes from run to run: index_add_, scatter_add_, index_put_ with "
    "accumulate, bincount and cumsum, and in backward those of embeddings, gather, interpolate, pooling and padding"
)

_REDUCED = (
    "this gradient is a mean over ranks, and another rank's own gradient differs between its runs (see the finding of "
    "that rank). If there is no such finding, the transport sums in an order that changes from run to run"
)

_CHANGED_ELSEWHERE = (
    "the state was changed after it was restored, by other code that runs meanwhile, such as another thread"
)

_OTHER_DATA_EACH_TIME = (
    "the function takes other data in each run: an iterator returns each batch once, and a random number generator of "
    "the function's own is not restored. Take the batch outside of the function, and pass it as inputs=(...)"
)

_STATE_NOT_RESTORED = (
    "state that is not restored before the second run, such as a global counter, a cache, a random number generator "
    "of its own, a clock, a file, or the order of a set"
)

_REPLICAS_APART = (
    "the replicas are not equal: sl.check_replicas(module) names the differences, and sl.broadcast_(module) makes the "
    "replicas equal. Usual causes: different seeds without synchronization, a step on some ranks only, a flipped bit"
)

_OTHER_DATA = "different data, although all ranks should have the same batch"

_ALL_ELSE_EQUAL = (
    "everything that was compared is equal (versions, threads, settings, attributes). Remaining causes: state outside "
    "of the module, data that the module reads on its own, the order of a set (PYTHONHASHSEED), or the hardware"
)

_SEEDS = (
    "{drawing} random numbers (dropout does, for example), and the position of the generator{s} {generators} differs "
    "between ranks. If all ranks should draw the same numbers, give all ranks the same seed: torch.manual_seed(seed)"
)

_NOT_REDUCED = (
    "the backward ran under no_sync(), or did not go through the wrapper, so the gradients were not reduced"
)

_CHANGED_AFTERWARDS = (
    "the gradients were changed after the reduction on some ranks: clipped, scaled or replaced"
)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The observations on one rank that can explain why two of its runs differ."""

    nan_call: int | None = None
    """The index of the first call whose outputs become NaN if uninitialized memory is filled with NaN.

    It is -1 for the function itself, and None if there is no such call.
    """
    agrees_when_deterministic: bool | None = None
    """Whether two runs agree with deterministic algorithms; None if that was not tested."""
    without_determinism: tuple[str, ...] = ()
    """The names of operations without a deterministic implementation, from torch's warnings."""
    is_reduced: bool = False
    """Whether the gradients of parameters are means over ranks."""


def _named(call: Call) -> str:
    times = f", call {call.nth}" if call.nth > 1 else ""
    return f"{call.module} ({call.kind}{times})" if call.module else f"{call.kind}{times}"


def _place(found: FirstDifference, what: str) -> str:
    return f"{what} {found.name}" if found.name else what


def _around(found: FirstDifference, calls: Sequence[Call]) -> Call | None:
    """Return the call whose own code causes the difference; None if the user's function causes it."""
    at = calls[found.call].parent if found.stage == "input" else found.call
    return calls[at] if at >= 0 else None


# ---------------------------------------------------------------------- within a rank


def within_a_rank(
    found: FirstDifference, first: Recording, difference: str, evidence: Evidence
) -> OwnFinding:
    """Return the finding about two runs of this rank that differ, although they began from the same state.

    Args:
        found: the first difference.
        first: the recording of one of the runs.
        difference: the size of the difference, in words; "" if unknown.
        evidence: the observations that can explain the difference.
    """
    blamed = _around(found, first.calls)
    what = f"two runs from the same state: {_what(found, first.calls)}"
    return _own_finding(blamed, what, _causes_within(found, blamed, first, evidence), difference)


def _what(found: FirstDifference, calls: Sequence[Call]) -> str:
    """Describe the first difference between recordings in words."""
    around = _around(found, calls)
    where = "the function itself" if around is None else f"the forward of {_named(around)}"
    named = _named(calls[found.call]) if found.call >= 0 else ""
    match found.stage:
        case "state":
            return f"{found.name or 'the state'} differs before the run"
        case "calls":
            return f"other modules are called, in {where}"
        case "result":
            return f"{_place(found, 'the result')} of the function differs, although all modules and gradients agree"
        case "gradients":
            return f"the gradient of {found.name} differs, although every module's forward agrees"
        case "input":
            place = _place(found, "input")
            return f"{place} of {named} differs, although everything before was equal: computed in {where}"
        case "output":
            return f"{named} returns another {_place(found, 'output')} for equal inputs"
        case "backward":
            place = found.name or "inputs"
            return f"{named} returns another gradient of its {place} in backward, for equal gradients of its outputs"


def _causes_within(
    found: FirstDifference, blamed: Call | None, first: Recording, evidence: Evidence
) -> list[str]:
    """Return the causes for which there is evidence. If there is no evidence, return the usual causes."""
    causes = []
    if blamed is not None:
        changed = first.changed.get(blamed.module, [])
        if changed:
            causes.append(_STATE_OUTSIDE.format(changed=", ".join(changed)))
        for name, text in first.settings.get(blamed.module, {}).items():
            if _is_generator(text):
                causes.append(_OWN_GENERATOR.format(name=name, kind=text.partition(" (")[0]))
    if evidence.nan_call is not None and evidence.nan_call == found.call:
        causes.append(_NEVER_WRITTEN)
    elif evidence.agrees_when_deterministic:
        causes.append(_NOT_DETERMINISTIC.format(operations=_operations(evidence)))
    elif evidence.without_determinism:
        causes.append(_operations(evidence))
    return causes or _usual_causes(found, blamed, first, evidence)


def _usual_causes(
    found: FirstDifference, blamed: Call | None, first: Recording, evidence: Evidence
) -> list[str]:
    """Return the usual causes of a difference that the observations do not explain."""
    if found.stage == "gradients" and evidence.is_reduced:
        return [_REDUCED]
    if found.stage == "state":
        return [_CHANGED_ELSEWHERE]
    if blamed is None and found.stage in ("input", "calls"):
        return [_OTHER_DATA_EACH_TIME]
    elsewhere = "; ".join(
        f"{name or 'the outermost module'}: {', '.join(texts)}" for name, texts in first.changed.items()
    )
    seen = f"; attributes that the run has changed: {elsewhere}" if elsewhere else ""
    return [_STATE_NOT_RESTORED + seen, f"a kernel that is not deterministic: {_ATOMICS}"]


def _operations(evidence: Evidence) -> str:
    if evidence.without_determinism:
        return f"Without a deterministic implementation: {', '.join(evidence.without_determinism)}"
    return _ATOMICS[0].upper() + _ATOMICS[1:]


def _is_generator(text: str) -> bool:
    return text.startswith(("a torch.Generator", "a random.Random", "a numpy.random."))


def never_written(call: Call | None) -> OwnFinding:
    """Return the finding that an output of a call depends on memory that was never written.

    Such a dependence is a finding even if two runs happen to agree.

    Args:
        call: the call; None if the output belongs to the function itself.
    """
    named = _named(call) if call is not None else "the function itself"
    what = f"in any run: an output of {named} depends on memory that was never written"
    return _own_finding(call, what, [_NEVER_WRITTEN])


def _own_finding(blamed: Call | None, what: str, causes: Sequence[str], difference: str = "") -> OwnFinding:
    return OwnFinding(*_of_call(blamed), what, difference, tuple(causes))


def _of_call(blamed: Call | None) -> tuple[str, str]:
    """Return the name and the class of a call's module. Return two empty strings if there is no call."""
    return (blamed.module, blamed.kind) if blamed is not None else ("", "")


# ---------------------------------------------------------------------- between ranks


def between_ranks(
    found: FirstDifference,
    recordings: Sequence[Recording],
    difference: str,
    *,
    facts: Sequence[Mapping[str, str]],
    positions: Sequence[Mapping[str, str]] | None,
) -> Finding:
    """Return the finding about ranks whose runs differ, although they should be the same.

    Args:
        found: the first difference. Its groups are groups of ranks.
        recordings: the recordings of all ranks.
        difference: the size of the difference, in words; "" if unknown.
        facts: versions, hardware and settings of each rank.
        positions: the positions of each rank's random number generators. Pass None if all ranks used rank 0's
            random numbers.
    """
    calls = recordings[0].calls
    blamed = _around(found, calls)
    what = f"between ranks ({describe_groups(found.groups)}): {_what(found, calls)}"
    if difference:
        what += f": {difference}"
    module, kind = _of_call(blamed)
    if found.stage == "state":
        module = found.name.rpartition(".")[0]
        kind = next((call.kind for call in calls if call.module == module), "")
    causes = tuple(_causes_between(found, blamed, recordings, facts, positions))
    return Finding(ranks=outside_of_largest(found.groups), module=module, kind=kind, what=what, causes=causes)


def _causes_between(
    found: FirstDifference,
    blamed: Call | None,
    recordings: Sequence[Recording],
    facts: Sequence[Mapping[str, str]],
    positions: Sequence[Mapping[str, str]] | None,
) -> list[str]:
    if found.stage == "state":
        return [_REPLICAS_APART]
    causes = []
    if blamed is not None:
        index = next(i for i, call in enumerate(recordings[0].calls) if call is blamed)
        same = [recording.calls[index] for recording in recordings]
        modes = ["training" if call.is_training else "evaluation" for call in same]
        causes += [f"{cause}. Call train() or eval() on all ranks" for cause in _differing("its mode", modes)]
        held = [recording.settings.get(blamed.module, {}) for recording in recordings]
        for name in held[0]:
            causes += _differing(f"its attribute {name}", [one.get(name, "nothing") for one in held])
        drew = sorted({generator for call in same for generator in call.drew})
        causes += _seed_causes(drew, positions, "it draws")
    elif found.stage in ("input", "calls"):
        causes.append(_OTHER_DATA)
        causes += _seed_causes(sorted(positions[0]) if positions else [], positions, "the function may draw")
    for name in [name for name in facts[0] if name != "host"]:  # in the same order on all ranks
        causes += _differing(name, [row.get(name, "none") for row in facts])
    return causes or [_ALL_ELSE_EQUAL]


def _differing(what: str, values: Sequence[str]) -> list[str]:
    """Return a list with one cause: the values of `what` on all ranks. The list is empty if the values are equal."""
    return [f"{what}: {by_value(values)}"] if len(set(values)) > 1 else []


def _seed_causes(
    generators: Sequence[str], positions: Sequence[Mapping[str, str]] | None, drawing: str
) -> list[str]:
    """Return a list with one cause if the position of any of these generators differs between ranks.

    Returns an empty list if all positions are equal or unknown.
    """
    apart = [name for name in generators if len({row.get(name) for row in positions or ()}) > 1]
    if not apart:
        return []
    return [_SEEDS.format(drawing=drawing, s="s" if len(apart) > 1 else "", generators=" and ".join(apart))]


def of_gradients(names: Sequence[str], groups: Sequence[tuple[int, ...]], num_gradients: int) -> Finding:
    """Return the finding about reduced gradients that are not the same on all ranks.

    Args:
        names: the names of the parameters whose gradients differ, in the module's order.
        groups: the ranks, grouped by equal gradients of the first of these parameters.
        num_gradients: the number of gradients that were compared.
    """
    return Finding(
        ranks=outside_of_largest(groups),
        module=names[0].rpartition(".")[0],
        kind="",
        what=(
            f"between ranks ({describe_groups(groups)}): after backward {len(names)} of {num_gradients} gradients "
            f"differ, although they should be the same mean on all ranks. The first of them is that of {names[0]}"
        ),
        causes=(_NOT_REDUCED, _CHANGED_AFTERWARDS),
    )


def notes_on_generators(reports: Sequence[OwnReport]) -> list[str]:
    """Return a list with one note: which modules draw random numbers, and whether all ranks draw the same numbers.

    Returns an empty list if no module draws random numbers.
    """
    drew = reports[0].drew
    if not drew:
        return []
    names = ", ".join(drew[:MAX_NAMED]) + (f" and {len(drew) - MAX_NAMED} more" if drew[MAX_NAMED:] else "")
    generators = {name for one in reports for name in one.generators}
    if all(len({one.positions.get(name) for one in reports}) == 1 for name in generators):
        consequence = (
            "All ranks draw the same ones (the same dropout masks), because their generators are at the same position. "
            "If each rank is to draw its own, seed each with its rank: torch.manual_seed(seed + rank)"
        )
    else:
        consequence = "Each rank draws its own, because their generators are at different positions"
    return [f"random numbers are drawn by {names}. {consequence}"]
