"""What one of many ranks computes to agree with the others, without processes: the second part of `scale.py`.

The code is that of the library. A store in this process counts the requests, and never waits.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from syncline.gradients.step_times import NUM_DIGITS
from syncline.gradients.stragglers import StragglerRule, Stragglers
from syncline.gradients.tail import TailForm
from syncline.liveness import Place, SignedStore, StepPhase, Wait
from syncline.liveness.deadlock import different_calls, left_ranks, steady, stuck_ranks
from syncline.resilience.membership import Membership, Observation, Report, Rules, next_membership
from syncline.session.rendezvous import Presence, wait_for_all
from syncline.transport.hosts import Hosts
from syncline.words import describe_difference


class CountingStore:
    """A store in this process that counts requests. It never waits: a missing key is an error."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self.num_requests += 1
        self._values[key] = value

    def compare_set(self, key: str, expected: str, value: bytes) -> bytes:
        """Write a value unless there is one, and return the value that is there then."""
        self.num_requests += 1
        return self._values.setdefault(key, value)

    def get(self, key: str) -> bytes:
        """Return a value."""
        self.num_requests += 1
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values: one request, which reads each of them."""
        self.num_requests += len(keys)
        return [self._values[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Check that all keys are there."""
        self.num_requests += 1
        assert all(key in self._values for key in keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        self.num_requests += 1
        return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing, because no request waits."""

    @property
    def num_bytes(self) -> int:
        """The size of all values."""
        return sum(map(len, self._values.values()))


def control_plane(size: int) -> dict[str, float]:
    """Return the figures for `size` ranks without processes."""
    return {**rendezvous(size), **search_for_deadlocks(size), **one_step(size), **change_of_ranks(size)}


def rendezvous(size: int) -> dict[str, float]:
    """Let all ranks meet at a store. The last ranks stand for the others, which do the same."""
    store = CountingStore()
    ranks = [
        Presence(rank=rank, size=size, host="host", pid=1000 + rank, gpu=None, asked=["a", "b"])
        for rank in range(size)
    ]
    messages = SignedStore(store)
    for presence in ranks[1:]:  # as `wait_for_all` does
        messages.set_first(f"rank {presence.rank}", json.dumps(vars(presence)))
    first_ms = milliseconds(lambda: wait_for_all(store, ranks[0], 1.0), times=1)  # type: ignore[arg-type]
    before = store.num_requests
    other_ms = milliseconds(lambda: wait_for_all(store, ranks[-1], 1.0), times=1)  # type: ignore[arg-type]
    each = store.num_requests - before
    lines = [["an argument", "another"] for _ in range(size)]
    lines[-1] = ["an argument", "a third"]
    return {
        "rendezvous: store requests of all": before + (size - 1) * each - (size - 1),
        "rendezvous: requests of one rank": each,
        "rendezvous: kB at the store": store.num_bytes / 1e3,
        "rendezvous: ms, rank 0": first_ms,
        "rendezvous: ms, another rank": other_ms,
        "compare arguments: ms": milliseconds(lambda: describe_difference("sl.init", lines, remedy="")),
    }


def search_for_deadlocks(size: int) -> dict[str, float]:
    """Read the places of all ranks and look for waits that cannot end, as a rank does that waits long."""
    wait = Wait(lane="main", call=7, words="all_reduce(mean) of 100 elements", number=1)
    texts = [
        Place(step=3, phase=StepPhase.BACKWARD, wait=wait, num_started={"main": 7}, seen=1.0).to_json()
        for _ in range(size - 1)
    ]
    texts.append(Place(step=3, phase=StepPhase.FORWARD, num_started={"main": 6}, seen=1.0).to_json())

    def search(places: Mapping[int, Place]) -> None:
        left_ranks(wait, places), different_calls(places), stuck_ranks(steady(places, places))

    places = {rank: Place.from_json(text) for rank, text in enumerate(texts)}
    crossed = {
        rank: Place(
            wait=Wait(lane=f"lane {rank % 2}", call=1, words="barrier"),
            num_started={f"lane {rank % 2}": 1, f"lane {1 - rank % 2}": 0},
        )
        for rank in range(size)
    }
    assert stuck_ranks(crossed) == list(range(size))
    return {
        "read places: ms": milliseconds(lambda: [Place.from_json(text) for text in texts]),
        "find deadlocks: ms, all wait for one": milliseconds(lambda: search(places)),
        "find deadlocks: ms, two calls": milliseconds(lambda: search(crossed)),
    }


def one_step(size: int) -> dict[str, float]:
    """Decode what all ranks send behind the gradients of a step."""
    form = TailForm(num_ranks=size, widths=(1, 1, 8, 8, 24, 1, 49), num_noted=NUM_DIGITS)
    words = tuple(1 for _ in form.widths)
    tail = form.encode(words, rank=0)
    stragglers, digits = Stragglers(), [1.0] * (size * NUM_DIGITS)
    stragglers.use(StragglerRule(num_steps=5))
    return {
        "riders: elements behind the gradients": form.numel,
        "riders: encode ms": milliseconds(lambda: form.encode(words, rank=size - 1)),
        "riders: decode ms": milliseconds(lambda: form.decode(tail)),
        "stragglers: ms a window": milliseconds(lambda: [stragglers.add(digits, step) for step in range(5)]),
    }


def change_of_ranks(size: int) -> dict[str, float]:
    """Divide the ranks by hosts, and compute the next generation after the loss of one."""
    names = tuple(f"host{rank // 8} {rank}" for rank in range(size))
    reports = {name: Report(name, 7) for name in names[:-1]}
    seen = Observation(reports, ended=frozenset(names[-1:]))
    current = Membership(0, names, step=0, sources=names)
    return {
        "hosts: ms": milliseconds(lambda: Hosts.of([name.split()[0] for name in names])),
        "next generation: ms": milliseconds(
            lambda: next_membership(current, seen, Rules(), waited_seconds=0.0)
        ),
    }


def milliseconds(work: Callable[[], object], times: int = 3) -> float:
    """Return the CPU time of a call: the median of some calls."""
    found = []
    for _ in range(times):
        before = time.process_time()
        work()
        found.append(1000 * (time.process_time() - before))
    return statistics.median(found)
