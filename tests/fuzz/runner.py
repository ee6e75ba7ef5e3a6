"""Gives programs to pairs of warm ranks, judges what comes back, and replaces ranks that hang or die.

Wrong programs spend their time in waiting for ranks that do not come, and in the end of processes under torch's class.
So there are more pairs than the machine has cores for.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from syncline import environment
from syncline.testing import RankPool, Task

from .facts import facts_of
from .interpreter import Outcome, alone
from .oracle import Report, Verdict, judge
from .program import Program
from .ranks import WAYS, Entry, Job, run_programs
from .shrink import shrink
from .text import text_of

__all__ = ["Runner", "Tally", "report_of"]

_NUM_PAIRS = 4
_BATCH = 10
_JOB_SECONDS = 600.0
_GRACE_SECONDS = 0.5
"""How long a rank goes on when the other one has died: it waits for that one."""

Both = tuple[Report, Report]
"""Of one program, on each rank."""


@dataclass
class Tally:
    """How many programs ran, and how they fared."""

    num_programs: int = 0
    torch: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_alone: int = 0
    """Programs that were compared with one process, too."""

    def add(self, program: Program, verdict: Verdict) -> None:
        self.num_programs += 1
        self.torch[verdict.torch] += 1
        self.num_alone += facts_of(program).has_one_process_meaning
        for ours in verdict.ours:
            self.pairs[verdict.torch, ours] += 1

    def __str__(self) -> str:
        torch = ", ".join(f"{count} {how}" for how, count in self.torch.most_common())
        pairs = ", ".join(f"{t}/{o} {count}" for (t, o), count in self.pairs.most_common())
        return (
            f"{self.num_programs} programs ({self.num_alone} of them in one process, too); torch's class: {torch}; "
            f"torch's class/ours: {pairs}"
        )


class Runner:
    """Runs programs on a pool of two ranks.

    Args:
        wraps: the class for each way, where it is not the usual one.
    """

    def __init__(self, wraps: dict[str, Any] | None = None) -> None:
        # Not torch's own warnings of lost connections: many programs lose them.
        self._environment = environment.export({"TORCH_CPP_LOG_LEVEL": "ERROR"})
        self._pool = RankPool(grace_seconds=_GRACE_SECONDS)
        self._threads = ThreadPoolExecutor(_NUM_PAIRS)
        self._wraps = wraps

    def wrapping(self, wraps: dict[str, Any]) -> Runner:
        """A runner with other classes on the same ranks, which end with this one."""
        other = copy.copy(self)
        other._wraps = wraps
        return other

    def close(self) -> None:
        """End the ranks."""
        self._threads.shutdown()
        self._pool.close()
        environment.restore(self._environment)

    def verdicts(
        self, programs: Iterable[Program], ways: tuple[str, ...] = WAYS, batch_size: int = _BATCH
    ) -> Iterator[tuple[Program, Verdict]]:
        """Each program with its verdict, in order."""
        left = iter(programs)
        under_way: deque[tuple[list[Program], Future[list[Both]]]] = deque()
        try:
            while True:
                while len(under_way) <= _NUM_PAIRS and (batch := list(islice(left, batch_size))):
                    under_way.append((batch, self._threads.submit(self._reports, batch, ways)))
                if not under_way:
                    return
                batch, reports = under_way.popleft()
                for program, both in zip(batch, reports.result(), strict=True):
                    one = alone(program) if facts_of(program).has_one_process_meaning else None
                    yield program, judge(program, both, one)
        finally:
            for _, reports in under_way:
                reports.cancel()

    def fails_alike(self, program: Program, verdict: Verdict) -> Verdict | None:
        """The verdict of another run, if it has the same first fault."""
        return self._first_alike([program], verdict)[1]

    def shrunk(self, program: Program, verdict: Verdict) -> tuple[Program, Verdict]:
        """A smaller program with the same first fault, and its verdict."""
        verdicts = {program: verdict}

        def first_failing(candidates: Sequence[Program]) -> Program | None:
            found, its = self._first_alike(candidates, verdict)
            if found is not None and its is not None:
                verdicts[found] = its
            return found

        least = shrink(program, first_failing)
        return least, verdicts[least]

    def _first_alike(
        self, programs: Sequence[Program], verdict: Verdict
    ) -> tuple[Program | None, Verdict | None]:
        fault = verdict.faults[0]
        batch_size = -(-len(programs) // _NUM_PAIRS)
        for program, its in self.verdicts(programs, ("torch", fault.way), batch_size):
            alike = its.faults and its.faults[0].signature == fault.signature and its.torch == verdict.torch
            if alike:
                return program, its
        return None, None

    def _reports(self, programs: list[Program], ways: tuple[str, ...]) -> list[Both]:
        """The outcomes of each program, on both ranks."""
        found: list[Both] = [({}, {}) for _ in programs]
        while left := _left(programs, ways, found):
            text = self._job(left, found)
            if _left(programs, ways, found) == left:
                raise RuntimeError(f"no program ran:\n{text}")
            # A job ends early where a rank dies: what is left goes to fresh ranks.
        return found

    def _job(self, left: list[Job], found: list[Both]) -> str:
        """Add outcomes to what was found; the words of the ranks."""
        with tempfile.TemporaryDirectory(prefix="syncline-fuzz-") as folder:
            task = Task(
                module=run_programs.__module__,
                qualname=run_programs.__qualname__,
                arguments={"jobs": left, "folder": folder, "wraps": self._wraps},
                timeout_seconds=_JOB_SECONDS,
                warning_filters=("ignore",),
            )
            text = "\n".join(outcome.text for outcome in self._pool.run(2, task))
            entries = [_entries(Path(folder) / str(rank)) for rank in range(2)]
        for number, way, _ in (entry for of_rank in entries for entry in of_rank):
            for report, of_rank in zip(found[number], entries, strict=True):
                ended = [outcome for n, w, outcome in of_rank if (n, w) == (number, way) and outcome]
                report[way] = ended[0] if ended else Outcome(error=f"Died: {text}", kinds=("Died",))
        return text


def _left(programs: list[Program], ways: tuple[str, ...], found: list[Both]) -> list[Job]:
    """What has not run yet."""
    return [
        Job(number, program, way)
        for number, program in enumerate(programs)
        for way in ways
        if any(way not in report for report in found[number])
    ]


def report_of(program: Program, verdict: Verdict) -> str:
    """A program that fails, and how, to be read."""
    lines = [f"torch's class: {verdict.torch}"]
    for fault in verdict.faults:
        lines += [f"{fault.way}: {fault.kind}", *(f"  {line}" for line in fault.text.splitlines())]
    return "\n".join(f"# {line}" for line in lines) + "\n" + text_of(program)


def _entries(path: Path) -> list[Entry]:
    found: list[Entry] = []
    if path.exists():
        with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                found.append(pickle.load(file))
    return found
