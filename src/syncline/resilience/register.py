"""The register of a job's members in the launcher's store: the keys that processes read and write.

G is the number of a generation, and NAME is the name of a process:

    loop                     the number of the call of `sl.steps` that runs now
    place RANK               the `Entry` of the process that began with this rank
    newcomer N               the `Entry` of the process that was the Nth to ask to join
    generation G             the `Membership` of generation G, once it has been decided
    report G NAME            the `Report` of a process for generation G
    stopping G               a member has stopped for generation G, so the others have to stop, too
    here G NAME              the process is about to connect to the other members of generation G
    pulse NAME               a number that grows as long as the process runs
    ended NAME               the process has left the loop
    fault STEP NAME          the `Fault` that has ended the process in this step

A launcher does not know the prefix of these keys. It writes without a prefix:

    syncline lost NAME       the launcher of another host has seen the end of the process
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from syncline.environment import patience
from syncline.errors import PeerLost, SynclineError
from syncline.liveness.connection import ANSWER_SECONDS, StoreConnection
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore, decode
from syncline.resilience.faults import Fault
from syncline.resilience.membership import Membership, Observation, Report, Rules
from syncline.user_code import warn_user

T = TypeVar("T")

SILENT_SECONDS = patience(3.0)
"""The time without a pulse after which a process shows no sign of life. A busy host delays pulses."""

_POLL_SECONDS = 0.001
"""The store is asked again and again only while a generation changes, which takes milliseconds."""

_STORE_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The data of one process that the other members need."""

    name: str
    host: str
    """The name of its host."""
    process: RankProcess | None = None
    """The process; None if its system does not show the states of processes."""


class Line:
    """A connection of one thread to the register.

    Args:
        store: the launcher's store. A new connection to it is opened.
        silence_seconds: how long the network may fail before the connection counts as lost.
        answer_seconds: how long the store may take to answer.
        note_silence: a function that is called with `answer_seconds` when an answer takes long. None for no function.
    """

    def __init__(
        self,
        store: Any,
        silence_seconds: float,
        answer_seconds: float = ANSWER_SECONDS,
        note_silence: Callable[[float], object] | None = None,
    ) -> None:
        connection = StoreConnection(
            store,
            _STORE_TIMEOUT,
            silence_seconds=silence_seconds,
            answer_seconds=answer_seconds,
            note_silence=note_silence,
        )
        self._store, self._whole = SignedStore(connection), SignedStore(connection.whole())

    def ask(self, question: Callable[[SignedStore], T]) -> T:
        """Return the answer of the store.

        Raises:
            PeerLost: the launcher, which holds the store, has ended, or cannot be reached.
            StoreSilent: the launcher does not answer in time.
        """
        return self._answer(self._store, question)

    def lost(self, names: Sequence[str]) -> set[str]:
        """Return the processes among `names` whose end a launcher has recorded."""
        keys = {_lost(name): name for name in names}
        found = self._answer(self._whole, partial(SignedStore.readable, keys=[*keys])) if keys else {}
        return {keys[key] for key in found}

    def record_lost(self, name: str) -> None:
        """Record that a process has ended. Only launchers call this."""
        self._answer(self._whole, partial(SignedStore.set, key=_lost(name), text="lost"))

    def _answer(self, store: SignedStore, question: Callable[[SignedStore], T]) -> T:
        try:
            return question(store)
        except (dist.DistNetworkError, dist.DistStoreError):
            raise PeerLost(
                "the launcher's store, through which the processes agree on membership, has ended or cannot be "
                "reached. So this process cannot continue. The last lines of the first host's launcher name the cause. "
                "Where there are several hosts, the network between them can be the cause"
            ) from None


class _Entries(dict[str, Entry]):
    def __missing__(self, name: str) -> NoReturn:
        raise SynclineError(
            f"the launcher's store has no readable entry of the process {name!r}, which takes part in the training. "
            "Another program may have deleted it"
        )


def _note_silence(seconds: float) -> None:
    warn_user(
        "sl.steps waits for the launcher's store, which does not answer: its launcher may be stopped by Ctrl-Z or a "
        f"debugger. Resume it (`fg`, or `kill -CONT PID`). This process raises an error after {seconds:g} s"
    )


def _lost(name: str) -> str:
    return f"syncline lost {name}"


class Register:
    """The access of one process to the register.

    Args:
        store: the launcher's store, with a prefix of this job.
        entry: this process.
        silence_seconds: how long the network may fail before the store counts as lost.
        timeout_seconds: how long the store may take to answer, at least 5 s.
    """

    def __init__(self, store: Any, entry: Entry, silence_seconds: float, timeout_seconds: float) -> None:
        self.entries: dict[str, Entry] = _Entries()
        """The processes that have taken part so far, by name."""
        self._line = Line(store, silence_seconds, max(timeout_seconds, ANSWER_SECONDS), _note_silence)
        self._name = entry.name
        self._entry = entry
        self._pulses: dict[str, tuple[str, float]] = {}
        """The last pulse of each process, and the time when it was first seen."""
        self._newcomers: list[str] = []
        self.first_size = 0
        """The number of members of the first generation."""

    def enrol(self, rank: int, size: int, rules: Rules) -> Membership:
        """Write the entry of this process, wait for those of all ranks, and return the first generation.

        Processes beyond the first `rules.max_ranks` are not members of it. They wait, and join when a rank is lost.
        """
        keys = [f"place {rank}" for rank in range(size)]
        mine = json.dumps(asdict(self._entry))
        self._line.ask(lambda store: store.set(keys[rank], mine))
        deadline = time.monotonic() + rules.timeout_seconds
        while not self._line.ask(lambda store: store.has(*keys)):
            if time.monotonic() > deadline:
                raise PeerLost(f"not all ranks have begun sl.steps within {rules.timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        texts = self._line.ask(lambda store: store.multi_get(keys))
        found = [decode(Entry, text, key) for key, text in zip(keys, texts, strict=True)]
        self.entries.update({entry.name: entry for entry in found})
        names = tuple(self.entries)[: rules.max_ranks or None]
        first = Membership(0, names, step=0, sources=names)
        self.first_size = len(names)
        self.propose(first)  # for processes that join later
        return first

    def ask_to_join(self) -> Membership:
        """Write the entry of this process as a newcomer, and return the present generation."""
        present = self._generation(0)
        self.first_size = len(present.members)
        rank = 0
        while not set(present.members) <= self.entries.keys():
            self._know(f"place {rank}")
            rank += 1
        mine = json.dumps(asdict(self._entry))
        while self._name not in self.newcomers():
            self._line.ask(partial(SignedStore.set_first, key=f"newcomer {len(self._newcomers)}", text=mine))
        return self.latest(present)

    def latest(self, known: Membership) -> Membership:
        """Return the present generation. `known` is this generation or an earlier one."""
        while self._read([f"generation {known.generation + 1}"]):
            known = self._generation(known.generation + 1)
        return known

    def _generation(self, number: int) -> Membership:
        key = f"generation {number}"
        return decode(Membership, self._line.ask(lambda store: store.get(key)), key)

    def _know(self, key: str) -> Entry:
        """Read the entry of a process."""
        entry = decode(Entry, self._line.ask(lambda store: store.get(key)), key)
        self.entries[entry.name] = entry
        return entry

    def newcomers(self) -> list[str]:
        """Return the names of all processes that have asked to join, since the loop began."""
        while self._read([key := f"newcomer {len(self._newcomers)}"]):
            self._newcomers.append(self._know(key).name)
        return self._newcomers

    def report(self, generation: int, report: Report) -> None:
        """Publish the report of this process for a generation."""
        text = json.dumps(asdict(report))
        self._line.ask(lambda store: store.set(f"report {generation} {report.member}", text))

    def stop_others(self, generation: int) -> None:
        """Ask the other members to stop for a new generation. This also reaches those whose transport still works."""
        self._line.ask(lambda store: store.set(f"stopping {generation}", self._name))

    def propose(self, membership: Membership) -> None:
        """Decide on a generation, if it has not been decided."""
        text = json.dumps(asdict(membership))
        self._line.ask(lambda store: store.set_first(f"generation {membership.generation}", text))

    def observe(self, current: Membership) -> Observation:
        """Return the observations about the generation after `current`."""
        number = current.generation + 1
        decided = self._read([f"generation {number}"])
        if decided:
            self.newcomers()  # `decided` may contain newcomers whose entries this process has not read
            [(key, text)] = decided.items()
            return Observation({}, decided=decode(Membership, text, key))
        newcomers = [name for name in self.newcomers() if name not in current.members]
        keys = {f"report {number} {name}": name for name in (*current.members, *newcomers)}
        reports = {keys[key]: decode(Report, text, key) for key, text in self._read([*keys]).items()}
        silent = [name for name in current.members if name not in reports]
        ended = self.ended([*current.members, *(name for name in newcomers if name in reports)])
        return Observation(reports, ended, self._alive([name for name in silent if name not in ended]))

    def meet(self, membership: Membership) -> None:
        """Wait until all members are about to connect to each other.

        Raises:
            PeerLost: a member has ended, or has stopped for the next generation.
        """
        generation = membership.generation
        keys = [f"here {generation} {name}" for name in membership.members]
        self._line.ask(lambda store: store.set(f"here {generation} {self._name}", "here"))
        silent_since = time.monotonic()
        while not self._line.ask(lambda store: store.has(*keys)):
            here = self._read(keys)
            missing = [name for key, name in zip(keys, membership.members, strict=True) if key not in here]
            gone = self.ended(missing)
            if self._alive([name for name in missing if name not in gone]):
                silent_since = time.monotonic()
            if gone or time.monotonic() - silent_since > SILENT_SECONDS:
                raise PeerLost(f"{self.in_words(gone or missing)} was lost while the ranks connected anew")
            self.check_generation(generation)
            time.sleep(_POLL_SECONDS)

    def check_generation(self, generation: int) -> None:
        """Check that no member has stopped in a generation, to agree with the others on the next one.

        Raises:
            PeerLost: a member has stopped.
        """
        if self._read([f"stopping {generation + 1}"]):
            raise PeerLost("the other ranks have stopped, because a rank was lost meanwhile")

    def end(self) -> None:
        """Record that this process has left the loop."""
        with contextlib.suppress(PeerLost):  # if the launcher has ended, no process reads the register
            self._line.ask(lambda store: store.set(f"ended {self._name}", "ended"))

    def ended(self, names: Sequence[str]) -> frozenset[str]:
        """Return the processes among `names` that have certainly ended or left the loop."""
        left = self._left(names)
        return left | self._killed([name for name in names if name not in left])

    def killed(self, names: Sequence[str]) -> frozenset[str]:
        """Return the processes among `names` that have certainly ended without leaving the loop."""
        left = self._left(names)
        return self._killed([name for name in names if name not in left])

    def _left(self, names: Sequence[str]) -> frozenset[str]:
        keys = {f"ended {name}": name for name in names}
        return frozenset(keys[key] for key in self._read([*keys]))

    def _killed(self, names: Sequence[str]) -> frozenset[str]:
        here = [name for name in names if self._is_here(self.entries[name].process)]
        elsewhere = [name for name in names if name not in here]
        processes = {name: self.entries[name].process for name in here}
        found = {name for name, process in processes.items() if process is not None and process.has_ended()}
        return frozenset(found | self._line.lost(elsewhere))

    def record_fault(self, step: int, fault: Fault) -> bool:
        """Record the exception that ends this process. Return whether another process had the same one in this step."""
        text = json.dumps(asdict(fault))
        self._line.ask(lambda store: store.set(f"fault {step} {self._name}", text))
        return fault in [one for name, one in self._faults(step).items() if name != self._name]

    def repeated_fault(self, step: int) -> Fault | None:
        """Return an exception that has ended several processes in this step; None if there is none."""
        faults = [*self._faults(step).values()]
        return next((one for one in faults if faults.count(one) > 1), None)

    def _faults(self, step: int) -> dict[str, Fault]:
        keys = {f"fault {step} {name}": name for name in self.entries}
        return {keys[key]: decode(Fault, text, key) for key, text in self._read([*keys]).items()}

    def in_words(self, names: Sequence[str] | frozenset[str]) -> str:
        """Return the names of the processes as text."""
        return ", ".join(sorted(names)) or "no process"

    def _alive(self, names: Sequence[str]) -> frozenset[str]:
        """Return the processes among `names` that show signs of life."""
        keys = {f"pulse {name}": name for name in names}
        now = time.monotonic()
        for key, text in self._read([*keys]).items():
            if self._pulses.get(keys[key], ("", 0.0))[0] != text:
                self._pulses[keys[key]] = text, now
        found = set()
        for name in names:
            process = self.entries[name].process
            _, seen = self._pulses.setdefault(name, ("", now))
            is_stopped = process is not None and self._is_here(process) and process.is_stopped()
            if now - seen < SILENT_SECONDS and not is_stopped:
                found.add(name)
        return frozenset(found)

    def _is_here(self, process: RankProcess | None) -> bool:
        own = self._entry.process
        return own is not None and process is not None and process.host == own.host

    def _read(self, keys: Sequence[str]) -> Mapping[str, str]:
        return self._line.ask(lambda store: store.readable(keys)) if keys else {}
