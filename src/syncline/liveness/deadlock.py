"""Detection of waits that can never end. All functions are pure functions of the places of all ranks.

A rank counts as stuck only if it is certain that its wait can never end. A place may be outdated. So a wait counts only
if it was seen twice (see `steady`), and only if no other thread of the rank starts collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from syncline.liveness.board import Place, Wait

Places = Mapping[int, Place]


def absent_ranks(wait: Wait, places: Places) -> list[int]:
    """Return the ranks that had not started the call of `wait` when they published their last place."""
    return [rank for rank, place in sorted(places.items()) if _is_absent(wait, place)]


def left_ranks(wait: Wait, places: Places) -> list[int]:
    """Return the ranks that will never start the call of `wait`, because they have shut down normally."""
    return [rank for rank in absent_ranks(wait, places) if places[rank].has_left]


def different_calls(places: Places) -> list[int]:
    """Return the ranks that wait in different calls, although the calls have the same lane and index.

    The list is empty if all calls agree.

    Examples:
        >>> different_calls({rank: Place(wait=Wait(lane="main", call=1, words=f"{rank}")) for rank in range(2)})
        [0, 1]
    """
    # Calls of torch are left out, because torch also counts messages, which not all ranks send.
    waits = {
        rank: place.wait
        for rank, place in sorted(places.items())
        if place.wait is not None and place.wait.call is not None and not place.wait.is_torchs
    }
    words: dict[tuple[str, int | None], set[str]] = {}
    for wait in waits.values():
        words.setdefault((wait.lane, wait.call), set()).add(wait.words)
    return [rank for rank, wait in waits.items() if len(words[wait.lane, wait.call]) > 1]


def stuck_ranks(places: Places) -> list[int]:
    """Return the ranks that wait for each other in different calls, so that none of the waits can ever end.

    Rank A waits for rank B if B has not started the call in which A waits. B cannot start this call while B itself
    waits. So if B waits for A, or for another rank that waits for A, neither wait can end.
    """
    absent: dict[tuple[str, int | None], Collection[int]] = {}  # many ranks wait in the same call
    waits_for: dict[int, Collection[int]] = {}
    for rank, place in places.items():
        if place.wait is not None and place.wait.blocks_rank:
            call = place.wait.lane, place.wait.call
            if call not in absent:
                absent[call] = absent_ranks(place.wait, places)
            waits_for[rank] = absent[call]
    return stuck_among(waits_for)


def stuck_among(waits_for: Mapping[int, Collection[int]]) -> list[int]:
    """Return the largest set of waiting ranks in which each rank waits for a member of the set.

    Args:
        waits_for: for each rank that does nothing but wait, the ranks for which it waits. Its wait ends only after
            all of these ranks have acted. Ranks that wait for the same ones may share one collection.

    Examples:
        >>> stuck_among({0: [1], 1: [0, 2], 3: [1], 4: [2]})
        [0, 1, 3]
    """
    stuck = set(waits_for)
    awaited = {id(ranks): ranks for ranks in waits_for.values()}
    waiting: dict[int, list[int]] = {}  # by the collection for which they wait
    for rank, ranks in waits_for.items():
        waiting.setdefault(id(ranks), []).append(rank)
    # How many of the awaited ranks cannot continue, and which collections contain a rank
    num_stuck = {one: sum(rank in stuck for rank in set(ranks)) for one, ranks in awaited.items()}
    contained_in: dict[int, list[int]] = {}
    for one, ranks in awaited.items():
        for rank in set(ranks):
            contained_in.setdefault(rank, []).append(one)
    can_continue = [one for one, number in num_stuck.items() if number == 0]
    while can_continue:
        for rank in waiting[can_continue.pop()]:
            stuck.remove(rank)
            for one in contained_in.get(rank, ()):
                num_stuck[one] -= 1
                if num_stuck[one] == 0:
                    can_continue.append(one)
    return sorted(stuck)


def steady(earlier: Places, later: Places) -> dict[int, Place]:
    """Return the places in `later`, by rank, but keep only the waits that were seen twice.

    A wait was seen twice if the places of its rank in `earlier` and in `later` show the same wait. Any other
    wait is removed from the returned place.
    """
    return {
        rank: place if rank in earlier and earlier[rank].wait == place.wait else replace(place, wait=None)
        for rank, place in later.items()
    }


def _is_absent(wait: Wait, place: Place) -> bool:
    # A rank that does not list the lane has closed it, which proves nothing about the call.
    return wait.call is not None and place.num_started.get(wait.lane, wait.call) < wait.call
