"""The causes of differences, and the findings of all ranks combined into one list. Pure.

The texts are the same on every rank, so that equal findings of several ranks can be merged into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.debug.compare import Found
from syncline.debug.recording import Call, Recording
from syncline.debug.report import Finding, by_value
from syncline.words import describe_groups, describe_ranks, outside_of_largest, ranks_with


@dataclass(frozen=True, kw_only=True)
class OwnFinding:
    """One rank's finding, as sent to the other ranks; a `Finding` without ranks."""

    module: str
    kind: str
    what: str
    """A description of the difference, without the rank and the size."""
    difference: str = ""
    """How much it differs, for this rank's own data; "" if unknown."""
    causes: tuple[str, ...] = ()


def put_together(of_ranks: Sequence[Sequence[OwnFinding]]) -> list[Finding]:
    """Merge the findings of all ranks, in the order of ranks and of each rank's findings.

    Args:
        of_ranks: the findings of each rank, in rank order.

    Example:
        >>> noise = OwnFinding(module="mix", kind="Mix", what="two runs: mix differs", difference="1 of 4 elements")
        >>> print(*put_together([[noise], [], [noise]]))
        ranks 0, 2, two runs: mix differs: 1 of 4 elements
    """
    differences: dict[tuple[str, str, str, tuple[str, ...]], dict[int, str]] = {}
    for rank, findings in enumerate(of_ranks):
        for one in findings:
            alike = (one.module, one.kind, one.what, one.causes)
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
    """Describe how large a difference is; if it differs between ranks, give the first known one and its ranks."""
    known = ranks_with({rank: difference for rank, difference in by_rank.items() if difference})
    if not known:
        return ""
    (first, ranks), *_ = known.items()
    return f": {first}" if len(ranks) == len(by_rank) else f"; on {describe_ranks(ranks)}: {first}"


# ---------------------------------------------------------------------- causes and remedies

_STATE_OUTSIDE = (
    "state outside of parameters and buffers: its attribute {changed}. An attribute that is neither parameter "
    "nor buffer "
    "is not restored before the second run, and is in no checkpoint: make it a buffer (register_buffer), or compute it "
    "from the inputs"
)

_OWN_GENERATOR = (
    "a generator of its own: its attribute {name} is {kind}, which is not restored. Draw from torch's global one, or "
    "save and load its state with the module's"
)

_NEVER_WRITTEN = (
    "memory that is read before it is written: the output changes if that memory is filled with NaN. "
    "Write a tensor from torch.empty, empty_like or new_empty before you read it"
)

_NOT_DETERMINISTIC = (
    "a kernel that is not deterministic: with torch.use_deterministic_algorithms(True) two runs agree, bit for bit. "
    "{operations}"
)

_ATOMICS = (
    "on CUDA these add in an order that changes from run to run: index_add_, scatter_add_, index_put_ with "
    "accumulate, bincount and cumsum, and in backward those of embeddings, gather, interpolate, pooling and padding"
)

_REDUCED = (
    "it is a mean over ranks, and another rank's own gradient differs (see its finding); if no rank's does, the "
    "transport sums in an order that changes"
)

_CHANGED_ELSEWHERE = "it could not be restored: something else than the function changes it, perhaps a thread"

_OTHER_DATA_EACH_TIME = (
    "the function takes other data each time: an iterator returns each batch once, and a generator of its own is not "
    "restored. Take the batch outside of the function, and pass it as inputs=(...)"
)

_STATE_NOT_RESTORED = (
    "state that is not restored: a global counter or cache, a generator of its own, a clock, a file, the order of a "
    "set"
)

_REPLICAS_APART = (
    "the replicas are not equal: sl.broadcast_(module) makes them equal, sl.check_replicas(module) names the "
    "differences. "
    "Usual causes: other seeds and no synchronization, a step on some ranks only, a bit that flipped"
)

_OTHER_DATA = "different data, but all ranks should have the same batch"

_ALL_ELSE_EQUAL = (
    "all that was compared is equal (versions, threads, settings, attributes). Remaining causes: state outside of the "
    "module, data that it reads on its own, the order of a set (PYTHONHASHSEED), or the hardware"
)

_SEEDS = (
    "{drawing} random numbers (dropout does), from the generator{s} {generators}, at another position on each rank. If "
    "ranks are to draw the same numbers, seed them alike, with torch.manual_seed(seed)"
)

_NOT_REDUCED = "they were not reduced: the backward ran under no_sync(), or it did not go through the wrapper"

_CHANGED_AFTERWARDS = "or they were changed afterwards, on some ranks: clipped, scaled or replaced"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Observations on one rank, in addition to two runs that differ."""

    nan_call: int | None = None
    """The call whose outputs become NaN if uninitialized memory is filled with NaN."""
    agrees_when_deterministic: bool | None = None
    """Whether two runs agree with deterministic algorithms; None if that was not tested."""
    without_determinism: tuple[str, ...] = ()
    """Operations without a deterministic implementation, from torch's warnings."""
    is_reduced: bool = False
    """Whether gradients are means over ranks."""


def _named(call: Call) -> str:
    times = f", call {call.nth}" if call.nth > 1 else ""
    return f"{call.module} ({call.kind}{times})" if call.module else f"{call.kind}{times}"


def _place(found: Found, what: str) -> str:
    return f"{what} {found.name}" if found.name else what


def _around(found: Found, calls: Sequence[Call]) -> Call | None:
    """Return the call whose own code is to blame; None means the function that was passed."""
    if found.call < 0:
        return None
    if found.stage == "input":
        parent = calls[found.call].parent
        return calls[parent] if parent >= 0 else None
    return calls[found.call]


# ---------------------------------------------------------------------- within a rank


def within_a_rank(found: Found, first: Recording, difference: str, evidence: Evidence) -> OwnFinding:
    """Return the finding for two runs of this rank that differ, though they began from the same state.

    Args:
        found: the first difference.
        first: one of the runs.
        difference: the size of the difference, in words; "" if unknown.
        evidence: other observations.
    """
    calls = first.calls
    blamed = _around(found, calls)
    what = f"two runs from the same state: {_what(found, calls, _given(found, calls))}"
    return _own_finding(blamed, what, _causes_within(found, blamed, first, evidence), difference)


def _given(found: Found, calls: Sequence[Call]) -> str:
    """Return the place of the differing code, for a differing input or call."""
    parent = _around(found, calls)
    return "the function itself" if parent is None else f"the forward of {_named(parent)}"


def _what(found: Found, calls: Sequence[Call], where: str) -> str:
    if found.stage == "state":
        return f"{found.name or 'the state'} differs before the run"
    if found.stage == "calls":
        return f"other modules are called, in {where}"
    if found.stage == "result":
        return (
            f"{_place(found, 'the result')} of the function differs, though all modules and gradients agree"
        )
    if found.stage == "gradients":
        return f"the gradient of {found.name} differs, though every module's forward agrees"
    named = _named(calls[found.call])
    if found.stage == "input":
        return f"{_place(found, 'input')} of {named} differs, though all before it was equal: computed in {where}"
    if found.stage == "output":
        return f"{named} returns another {_place(found, 'output')} for equal inputs"
    return (
        f"{named} returns another gradient of its {found.name or 'inputs'} in backward, for equal ones of its "
        "outputs"
    )


def _causes_within(found: Found, blamed: Call | None, first: Recording, evidence: Evidence) -> list[str]:
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


def _usual_causes(found: Found, blamed: Call | None, first: Recording, evidence: Evidence) -> list[str]:
    """Return the usual causes, for a difference that the observations do not explain."""
    if found.stage == "gradients" and evidence.is_reduced:
        return [_REDUCED]
    if found.stage == "state":
        return [_CHANGED_ELSEWHERE]
    if blamed is None and found.stage in ("input", "calls"):
        return [_OTHER_DATA_EACH_TIME]
    elsewhere = "; ".join(
        f"{name or 'the outermost'}: {', '.join(texts)}" for name, texts in first.changed.items()
    )
    seen = f"; attributes that the run has changed: {elsewhere}" if elsewhere else ""
    return [_STATE_NOT_RESTORED + seen, f"or a kernel that is not deterministic: {_ATOMICS}"]


def _operations(evidence: Evidence) -> str:
    if evidence.without_determinism:
        return f"Without a deterministic implementation: {', '.join(evidence.without_determinism)}"
    return _ATOMICS[0].upper() + _ATOMICS[1:]


def _is_generator(text: str) -> bool:
    return text.startswith(("a torch.Generator", "a random.Random", "a numpy.random."))


def never_written(call: Call | None) -> OwnFinding:
    """Return the finding that uninitialized memory reaches an output, even if two runs happened to agree."""
    named = _named(call) if call is not None else "the function itself"
    what = f"in any run: an output of {named} depends on memory that was never written"
    return _own_finding(call, what, [_NEVER_WRITTEN])


def _own_finding(blamed: Call | None, what: str, causes: Sequence[str], difference: str = "") -> OwnFinding:
    module, kind = _of_call(blamed)
    return OwnFinding(module=module, kind=kind, what=what, difference=difference, causes=tuple(causes))


def _of_call(blamed: Call | None) -> tuple[str, str]:
    return (blamed.module, blamed.kind) if blamed is not None else ("", "")


# ---------------------------------------------------------------------- between ranks


def between_ranks(
    found: Found,
    recordings: Sequence[Recording],
    difference: str,
    *,
    facts: Sequence[Mapping[str, str]],
    positions: Sequence[Mapping[str, str]] | None,
) -> Finding:
    """Return the finding for ranks that should have computed the same, but differ.

    Args:
        found: the first difference; its groups are ranks.
        recordings: the recordings of all ranks.
        difference: the size of the difference, in words; "" if unknown.
        facts: versions, hardware and settings of each rank.
        positions: the positions of each rank's generators; None if they were set to rank 0's.
    """
    calls = recordings[0].calls
    blamed = _around(found, calls)
    ranks = describe_groups(found.groups)
    what = f"between ranks ({ranks}): {_what(found, calls, _given(found, calls))}"
    if difference:
        what += f": {difference}"
    causes = _causes_between(found, blamed, recordings, facts, positions)
    minority = outside_of_largest(found.groups)
    if found.stage == "state":
        module = found.name.rpartition(".")[0]
        kind = next((call.kind for call in calls if call.module == module), "")
        return Finding(ranks=minority, module=module, kind=kind, what=what, causes=tuple(causes))
    module, kind = _of_call(blamed)
    return Finding(ranks=minority, module=module, kind=kind, what=what, causes=tuple(causes))


def _causes_between(
    found: Found,
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
        modes = by_value(["training" if call.is_training else "evaluation" for call in same])
        if "(rank" in modes:
            causes.append(f"its mode: {modes}. Call train() or eval() on all ranks")
        held = [recording.settings.get(blamed.module, {}) for recording in recordings]
        for name in held[0]:
            values = by_value([one.get(name, "nothing") for one in held])
            if "(rank" in values:
                causes.append(f"its attribute {name}: {values}")
        drew = sorted({generator for call in same for generator in call.drew})
        causes += _seed_causes(drew, positions, "it draws")
    elif found.stage in ("input", "calls"):
        causes.append(_OTHER_DATA)
        causes += _seed_causes(sorted(positions[0]) if positions else [], positions, "the function may draw")
    for name in facts[0]:
        values = by_value([row.get(name, "none") for row in facts])
        if name != "host" and "(rank" in values:
            causes.append(f"{name}: {values}")
    return causes or [_ALL_ELSE_EQUAL]


def _seed_causes(
    generators: Sequence[str], positions: Sequence[Mapping[str, str]] | None, drawing: str
) -> list[str]:
    """Return a cause if one of these random number generators is in another state on another rank; else none."""
    apart = [name for name in generators if len({row.get(name) for row in positions or ()}) > 1]
    if not apart:
        return []
    return [_SEEDS.format(drawing=drawing, s="s" if len(apart) > 1 else "", generators=" and ".join(apart))]


def of_gradients(names: Sequence[str], groups: Sequence[tuple[int, ...]], num_gradients: int) -> Finding:
    """Return the finding for reduced gradients that are not the same on all ranks.

    Args:
        names: names of the parameters whose gradients differ, in the module's order.
        groups: groups of ranks with equal gradients of the first of them.
        num_gradients: number of all compared gradients.
    """
    ranks = describe_groups(groups)
    return Finding(
        ranks=outside_of_largest(groups),
        module=names[0].rpartition(".")[0],
        kind="",
        what=(
            f"between ranks ({ranks}): after backward {len(names)} of {num_gradients} gradients differ that should be "
            f"the same mean on all ranks, the first of them that of {names[0]}"
        ),
        causes=(_NOT_REDUCED, _CHANGED_AFTERWARDS),
    )
