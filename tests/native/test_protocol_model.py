"""Models of what the native core does with its counters and doorbells, checked in every order there is.

A model is a start and, for each process, the atomic steps that it can take next. `explore` follows all of them,
breadth first. The memory of the models is sequentially consistent: that the core asks for enough order is what
`test_sanitizers.py` and the notes in core.c are for. Every rule that the core relies on is also broken here on purpose,
and that must be noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from support.cases import case


class BrokenError(Exception):
    """What must never be."""


def explore(
    start: object, steps: Callable[[object], Iterator[object]], is_end: Callable[[object], bool]
) -> int:
    """Every state that can be reached. Raises when one is wrong, or is no end and has no next.

    Returns:
        How many there are.
    """
    seen = {start}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        is_stuck = True
        for after in steps(state):
            is_stuck = False
            if after not in seen:
                seen.add(after)
                queue.append(after)
        if is_stuck and not is_end(state):
            raise BrokenError(f"nobody can go on: {state}")
    return len(seen)


# ---------------------------------------------------------------------- the ring of slots

NUM_SLOTS = 2
ONE, TWO, PIECES = "one phase", "two phases", "in pieces"
NUM_PIECES = 2


@dataclass(frozen=True)
class Slot:
    """What is shared of a slot, and what its cells hold: the chunk that a rank filled in, whether it was reduced."""

    arrived: int = 0
    consumed: int = 0
    reduced: int = 0
    claimed: int = 0
    done: int = 0
    cells: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    pieces: tuple[int, ...] = (-1,) * NUM_PIECES
    """The chunk for which each piece was reduced last."""


@dataclass(frozen=True)
class Rank:
    """How far a rank is in its chunks, and in the steps of the one that it is at."""

    fill_at: int = 0
    reduce_at: int = 0
    consume_at: int = 0
    doing: tuple[object, ...] = ()
    """Within a phase: what is left of it."""


@dataclass(frozen=True)
class Ring:
    slots: tuple[Slot, ...]
    ranks: tuple[Rank, ...]


@dataclass(frozen=True)
class RingModel:
    """Ranks that step through chunks. `broken` names the rule that is not kept."""

    size: int
    kinds: tuple[str, ...]
    broken: str = ""

    def start(self) -> Ring:
        slot = Slot(cells=(-1,) * self.size, parts=(-1,) * self.size)
        return Ring((slot,) * NUM_SLOTS, (Rank(),) * self.size)

    def is_end(self, state: Ring) -> bool:
        return all(rank.consume_at == len(self.kinds) for rank in state.ranks)

    def steps(self, state: Ring) -> Iterator[Ring]:
        for r in range(self.size):
            yield from self.steps_of(state, r)

    def all_of(self, at: int) -> int:
        return (at // NUM_SLOTS + 1) * self.size

    def steps_of(self, state: Ring, r: int) -> Iterator[Ring]:
        """A rank fills, reduces or consumes, whatever it can; once begun, it ends that first."""
        rank = state.ranks[r]
        if rank.doing:
            yield from self.go_on(state, r)
            return
        at = rank.fill_at
        if at < len(self.kinds):
            needed = self.all_of(at - NUM_SLOTS) if at >= NUM_SLOTS else 0
            if self.broken == "filled before all have consumed":
                needed = max(0, needed - 1)
            if state.slots[at % NUM_SLOTS].consumed >= needed:
                yield with_rank(state, r, doing=("write",))
        at = rank.reduce_at
        if at < rank.fill_at:
            needed = self.all_of(at) - (self.broken == "reduced before all have arrived")
            if state.slots[at % NUM_SLOTS].arrived >= needed:
                yield with_rank(state, r, doing=("reduce",))
        at = rank.consume_at
        if at < rank.reduce_at:
            slot, kind = state.slots[at % NUM_SLOTS], self.kinds[at]
            if kind == PIECES and slot.claimed < NUM_PIECES:
                yield with_rank(state, r, doing=("claim",))
            enough = {
                ONE: True,
                TWO: slot.reduced >= self.size - (self.broken == "consumed before all have reduced"),
                PIECES: slot.done >= NUM_PIECES - (self.broken == "consumed before all pieces are done"),
            }
            if enough[kind]:
                yield with_rank(state, r, doing=("read", 0))

    def go_on(self, state: Ring, r: int) -> Iterator[Ring]:
        rank = state.ranks[r]
        what, *more = rank.doing
        if what in ("write", "arrive"):
            yield self.fill(state, r, what)
        elif what == "reduce":
            yield self.reduce(state, r)
        elif what in ("claim", "take", "did"):
            yield self.take(state, r, what, more)
        else:
            yield self.consume(state, r, what, more)

    def fill(self, state: Ring, r: int, what: str) -> Ring:
        rank = state.ranks[r]
        at = rank.fill_at
        slot = state.slots[at % NUM_SLOTS]
        if what == "write":
            if not all(has_consumed(other, at - NUM_SLOTS) for other in state.ranks):
                raise BrokenError(f"chunk {at} is filled in while a rank has not consumed the one before it")
            state = with_slot(state, at, cells=put(slot.cells, r, at))
            return with_rank(state, r, doing=("arrive",))
        state = with_slot(state, at, arrived=slot.arrived + 1)
        return with_rank(state, r, doing=(), fill_at=at + 1)

    def reduce(self, state: Ring, r: int) -> Ring:
        at = state.ranks[r].reduce_at
        slot = state.slots[at % NUM_SLOTS]
        self.check_cells(slot, at)
        if self.kinds[at] == TWO:
            state = with_slot(state, at, parts=put(slot.parts, r, at), reduced=slot.reduced + 1)
        return with_rank(state, r, doing=(), reduce_at=at + 1)

    def take(self, state: Ring, r: int, what: str, more: list[object]) -> Ring:
        at = state.ranks[r].consume_at
        slot = state.slots[at % NUM_SLOTS]
        if what == "claim":
            state = with_slot(state, at, claimed=slot.claimed + 1)
            if slot.claimed >= NUM_PIECES:
                return with_rank(state, r, doing=())
            if self.broken == "claimed in two steps":
                state = with_slot(state, at, claimed=slot.claimed)
            return with_rank(state, r, doing=("take", slot.claimed))
        piece = more[0]
        assert isinstance(piece, int)
        if what == "take":
            self.check_cells(slot, at)
            if slot.pieces[piece] == at:
                raise BrokenError(f"piece {piece} of chunk {at} is reduced twice")
            state = with_slot(state, at, pieces=put(slot.pieces, piece, at))
            if self.broken == "claimed in two steps":
                state = with_slot(state, at, claimed=slot.claimed + 1)
            return with_rank(state, r, doing=("did", piece))
        state = with_slot(state, at, done=slot.done + 1)
        return with_rank(state, r, doing=())

    def consume(self, state: Ring, r: int, what: object, more: list[object]) -> Ring:
        """Reads the cells one by one, counts, and the last sets back what is counted by use, one by one."""
        rank = state.ranks[r]
        at = rank.consume_at
        slot, kind = state.slots[at % NUM_SLOTS], self.kinds[at]
        if what == "read":
            peer = more[0]
            assert isinstance(peer, int)
            if kind == PIECES:  # the results lie where the rank wants them
                if set(slot.pieces) != {at}:
                    raise BrokenError(f"rank {r} takes chunk {at} whose pieces are {slot.pieces}")
                return with_rank(state, r, doing=("count",))
            read = slot.parts if kind == TWO else slot.cells
            if read[peer] != at:
                raise BrokenError(f"rank {r} reads chunk {read[peer]} of rank {peer} for chunk {at}")
            is_last_read = peer + 1 == self.size
            return with_rank(state, r, doing=("count",) if is_last_read else ("read", peer + 1))
        if what == "count":
            count = slot.consumed + 1
            state = with_slot(state, at, consumed=count)
            is_last = count == self.all_of(at)
            if self.broken == "set back by the first":
                is_last = count == self.all_of(at) - self.size + 1
            if self.broken == "set back by nobody":
                is_last = False
            if is_last:
                return with_rank(state, r, doing=("reset", "reduced"))
        else:
            field = more[0]
            assert isinstance(field, str)
            state = with_slot(state, at, **{field: 0})
            following = {"reduced": "claimed", "claimed": "done"}.get(field)
            if following:
                return with_rank(state, r, doing=("reset", following))
        return with_rank(state, r, doing=(), consume_at=at + 1)

    def check_cells(self, slot: Slot, at: int) -> None:
        if set(slot.cells) != {at}:
            raise BrokenError(f"chunk {at} is reduced where the cells hold {slot.cells}")


def has_consumed(rank: Rank, at: int) -> bool:
    return rank.consume_at > at or (rank.consume_at == at and rank.doing[:1] == ("reset",))


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def with_rank(state: Ring, r: int, **changes: object) -> Ring:
    ranks = list(state.ranks)
    ranks[r] = replace(ranks[r], **changes)
    return replace(state, ranks=tuple(ranks))


def with_slot(state: Ring, at: int, **changes: object) -> Ring:
    slots = list(state.slots)
    slots[at % NUM_SLOTS] = replace(slots[at % NUM_SLOTS], **changes)
    return replace(state, slots=tuple(slots))


@pytest.mark.real
def test_nobody_reads_too_early_or_overwrites_too_soon() -> None:
    for size, kinds in (
        (2, (ONE, TWO, PIECES, ONE, TWO)),
        (2, (PIECES, PIECES, PIECES, PIECES)),
        (2, (TWO, PIECES, TWO, PIECES)),
        (2, (TWO, TWO, TWO, TWO, TWO)),
        (3, (TWO, ONE, TWO)),
        (3, (PIECES, ONE, PIECES)),
    ):
        model = RingModel(size, kinds)
        with case(size, kinds):
            assert explore(model.start(), model.steps, model.is_end) > 100  # type: ignore[arg-type]


def test_a_rule_of_the_ring_that_is_broken_is_noticed() -> None:
    for broken, kinds in (
        ("filled before all have consumed", (ONE, ONE, ONE)),
        ("reduced before all have arrived", (ONE, ONE)),
        ("consumed before all have reduced", (TWO, TWO)),
        ("consumed before all pieces are done", (PIECES,)),
        ("claimed in two steps", (PIECES,)),
        ("set back by the first", (PIECES, ONE, PIECES)),
        ("set back by the first", (TWO, ONE, TWO)),
        ("set back by nobody", (TWO, ONE, TWO)),
        ("set back by nobody", (PIECES, ONE, PIECES)),
    ):
        model = RingModel(2, kinds, broken)
        with case(broken, kinds), pytest.raises(BrokenError):
            explore(model.start(), model.steps, model.is_end)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- sleep and wake


@dataclass(frozen=True)
class Thread:
    """Where a thread is in its program: a word, and what it has read on the way."""

    at: str
    round: int = 1
    num_rings: int = 0
    to_ring: tuple[int, ...] = ()
    is_to_ring: bool = False
    """Whether the thread has completed a count within an operation, and rings for it before it sleeps."""


@dataclass(frozen=True)
class Bells:
    count: int
    sleeping: frozenset[int]
    num_rings: tuple[int, ...]
    threads: tuple[Thread, ...]


@dataclass(frozen=True)
class SleepModel:
    """Threads that meet: each counts up, the last to count rings, all wait until all have counted; and again.

    Args:
        rank_of: the rank of each thread; threads of one rank share a bit and a doorbell.
        counts: whether each thread counts, or only waits.
        num_rounds: how often they meet.
        defers: whether the last to count may do more work before it rings.
        broken: the rule that is not kept.
    """

    rank_of: tuple[int, ...]
    counts: tuple[bool, ...]
    num_rounds: int
    defers: bool = False
    broken: str = ""

    def start(self) -> Bells:
        threads = tuple(Thread("count" if counts else "look") for counts in self.counts)
        return Bells(0, frozenset(), (0,) * (max(self.rank_of) + 1), threads)

    def is_end(self, state: Bells) -> bool:
        return all(thread.at == "end" for thread in state.threads)

    def steps(self, state: Bells) -> Iterator[Bells]:
        for t, thread in enumerate(state.threads):
            if thread.at not in ("end", "asleep"):
                yield self.step(state, t, thread)

    def step(self, state: Bells, t: int, thread: Thread) -> Bells:
        rank, needed = self.rank_of[t], thread.round * sum(self.counts)

        def go(at: str, state: Bells = state, **changes: object) -> Bells:
            threads = list(state.threads)
            threads[t] = replace(threads[t], at=at, **changes)
            return replace(state, threads=tuple(threads))

        if thread.at == "count":
            count = state.count + 1
            rings = count == needed
            if self.broken == "the first rings, not the last":
                rings = count == needed - sum(self.counts) + 1
            if self.broken == "sleepers are looked for before it is published" and count == needed:
                asleep = tuple(sorted(state.sleeping))
                return go("publish", to_ring=asleep)
            if rings and self.defers:
                return go("look", replace(state, count=count), is_to_ring=True)
            return go("find sleepers" if rings else "look", replace(state, count=count))
        if thread.at == "publish":
            return go("exchange" if thread.to_ring else "look", replace(state, count=state.count + 1))
        if thread.at == "find sleepers":
            return go("exchange" if state.sleeping else "look")
        if thread.at == "exchange":
            to_ring = tuple(sorted(state.sleeping))
            return go("ring" if to_ring else "look", replace(state, sleeping=frozenset()), to_ring=to_ring)
        if thread.at in ("ring", "wake"):
            return self.ring(state, t, thread)

        if thread.at in ("look", "look again"):
            may_end = thread.round == self.num_rounds or state.count < needed
            if thread.is_to_ring and may_end and self.broken != "it sleeps before it rings":
                return go("find sleepers", is_to_ring=False)
            if state.count >= needed:
                if thread.round == self.num_rounds:
                    return go("end", num_rings=0)
                return go("count" if self.counts[t] else "look", round=thread.round + 1, num_rings=0)
            if thread.at == "look":
                return go("read the doorbell")
            if self.broken == "the doorbell is read after the second look":
                return go("read the doorbell late")
            late = self.broken == "the bit is set after the second look"
            return go("set the bit late" if late else "futex_wait")
        if thread.at == "read the doorbell":
            skip = self.broken == "the bit is set after the second look"
            return go("look again" if skip else "set the bit", num_rings=state.num_rings[rank])
        if thread.at == "read the doorbell late":
            return go("futex_wait", num_rings=state.num_rings[rank])
        if thread.at in ("set the bit", "set the bit late"):
            skip = thread.at == "set the bit late" or self.broken == "there is no second look"
            after = replace(state, sleeping=state.sleeping | {rank})
            return go("futex_wait" if skip else "look again", after)
        assert thread.at == "futex_wait"
        return go("asleep" if state.num_rings[rank] == thread.num_rings else "look")

    def ring(self, state: Bells, t: int, thread: Thread) -> Bells:
        """Bump the doorbell of a rank, then wake who sleeps at it: two steps for each rank."""
        rank, *others = thread.to_ring
        threads = list(state.threads)
        if thread.at == "ring":
            threads[t] = replace(thread, at="wake")
            if self.broken == "the doorbell is not bumped":
                return replace(state, threads=tuple(threads))
            num_rings = put(state.num_rings, rank, state.num_rings[rank] + 1)
            return replace(state, num_rings=num_rings, threads=tuple(threads))
        for other, sleeper in enumerate(threads):
            if sleeper.at == "asleep" and self.rank_of[other] == rank:
                threads[other] = replace(sleeper, at="look")
                if self.broken == "only one sleeper is woken":
                    break
        threads[t] = replace(thread, at="ring" if others else "look", to_ring=tuple(others))
        return replace(state, threads=tuple(threads))


MEETINGS = {
    "2 ranks": SleepModel((0, 1), (True, True), 3),
    "3 ranks": SleepModel((0, 1, 2), (True, True, True), 2),
    "2 ranks, two threads of one": SleepModel((0, 0, 1), (True, False, True), 2),
    "2 ranks that ring later": SleepModel((0, 1), (True, True), 4, defers=True),
    "3 ranks that ring later": SleepModel((0, 1, 2), (True, True, True), 2, defers=True),
}


@pytest.mark.real
def test_nobody_sleeps_for_ever() -> None:
    for name, model in MEETINGS.items():
        with case(name):
            assert explore(model.start(), model.steps, model.is_end) > 100  # type: ignore[arg-type]


def test_a_rule_of_sleeping_that_is_broken_is_noticed() -> None:
    for meeting, broken in (
        ("2 ranks", "there is no second look"),
        ("2 ranks", "the bit is set after the second look"),
        ("2 ranks", "the doorbell is read after the second look"),
        ("2 ranks", "the doorbell is not bumped"),
        ("2 ranks", "the first rings, not the last"),
        ("2 ranks", "sleepers are looked for before it is published"),
        ("2 ranks, two threads of one", "only one sleeper is woken"),
        ("2 ranks that ring later", "it sleeps before it rings"),
    ):
        model = replace(MEETINGS[meeting], broken=broken)
        with case(meeting, broken), pytest.raises(BrokenError, match="nobody can go on"):
            explore(model.start(), model.steps, model.is_end)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- completed, then aborted


@dataclass(frozen=True)
class Ending:
    has_arrived: bool = False
    """The last of the others; now the operation can be completed."""
    is_aborted: bool = False
    is_completed: bool = False
    holder: str = ""
    """Which thread of the waiting rank holds the lane."""
    helper_at: str = "lock"
    looker_at: str = "read"
    has_read: bool = False
    outcome: str = ""


@dataclass(frozen=True)
class AbortModel:
    """A rank waits, by a thread that looks, while another one helps now and then; a peer arrives, and then aborts.

    What all had come for before the abort is done, whoever looks when.
    """

    broken: str = ""

    def is_end(self, state: Ending) -> bool:
        return bool(state.outcome)

    def steps(self, state: Ending) -> Iterator[Ending]:
        if state.outcome == "aborted" and state.has_arrived:
            raise BrokenError(f"an operation that all had come for was aborted: {state}")
        if not state.has_arrived and not state.is_aborted:
            yield replace(state, has_arrived=True)
        if not state.is_aborted:  # whether it has arrived or not
            yield replace(state, is_aborted=True)
        yield from self.help(state)
        if not state.outcome:
            yield from self.look(state)

    def help(self, state: Ending) -> Iterator[Ending]:
        if state.helper_at == "lock" and not state.holder:
            yield replace(state, holder="helper", helper_at="progress")
        if state.helper_at == "progress":
            yield replace(state, is_completed=state.is_completed or state.has_arrived, helper_at="unlock")
        if state.helper_at == "unlock":
            yield replace(state, holder="", helper_at="lock")

    def look(self, state: Ending) -> Iterator[Ending]:
        reads_last = self.broken == "looked for the abort last"
        if state.looker_at == "read":
            yield replace(state, has_read=state.is_aborted and not reads_last, looker_at="lock")
        if state.looker_at == "lock":
            if not state.holder:
                yield replace(state, holder="looker", looker_at="progress")
            elif not state.has_read or self.broken == "did not wait for the lock":
                yield replace(state, looker_at="decide")
        if state.looker_at == "progress":
            yield replace(state, is_completed=state.is_completed or state.has_arrived, looker_at="unlock")
        if state.looker_at == "unlock":
            yield replace(state, holder="", looker_at="decide")
        if state.looker_at == "decide":
            outcome = "aborted" if (state.is_aborted if reads_last else state.has_read) else ""
            yield replace(state, outcome="done" if state.is_completed else outcome, looker_at="read")


def test_what_all_had_come_for_is_done_before_the_abort_counts() -> None:
    model = AbortModel()
    assert explore(Ending(), model.steps, model.is_end) > 30  # type: ignore[arg-type]


def test_an_abort_that_overtakes_is_noticed() -> None:
    for broken in ("looked for the abort last", "did not wait for the lock"):
        model = AbortModel(broken)
        with case(broken), pytest.raises(BrokenError):
            explore(Ending(), model.steps, model.is_end)  # type: ignore[arg-type]
