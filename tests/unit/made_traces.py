"""Traces that are made up: a run of ranks whose steps take given times, as rows. No clock and no process is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from syncline.tracing import rows

__all__ = ["MadeRank", "MadeRun", "rows", "written"]


def written(directory: Path, recorded: Sequence[Sequence[rows.Row]]) -> Path:
    """Write the rows of each rank into a file of a directory, and return the directory."""
    directory.mkdir(exist_ok=True)
    for rank, found in enumerate(recorded):
        path = directory / f"rank-{rank:05d}.host.{100 + rank}.000000.trace.jsonl"
        path.write_bytes(b"".join(map(rows.encode, found)))
    return directory


@dataclass(kw_only=True)
class MadeRank:
    """How long one rank takes for each phase of its steps, in microseconds."""

    data: int = 100
    forward: int = 1000
    backward: int = 2000
    update: int = 500
    clock: str = "one"
    """The key of its clock."""
    shift: int = 0
    """What its clock shows when the first clock shows 0."""


@dataclass(kw_only=True)
class MadeRun:
    """A run of several ranks. Each bucket is reduced `fixed + bytes * per_byte` after all ranks have sent it, one after
    the other."""

    ranks: Sequence[MadeRank]
    num_steps: int = 20
    bucket_bytes: Sequence[int] = (1_000_000, 1_000_000, 1_000_000, 1_000_000)
    fixed: float = 10.0
    per_byte: float = 0.0
    unused: Sequence[str] = ()
    looks_for_unused: bool = False
    discarded: Sequence[int] = ()
    after: dict[int, Sequence[rows.Row]] = field(default_factory=dict)
    """Rows of rank 0 after some steps."""

    def rows(self) -> list[list[rows.Row]]:
        """Return the rows of each rank."""
        found: list[list[rows.Row]] = [[self._process(at), self._module()] for at in range(len(self.ranks))]
        now = [0.0] * len(self.ranks)
        for step in range(1, self.num_steps + 1):
            ready = [at + rank.data + rank.forward for at, rank in zip(now, self.ranks, strict=True)]
            parts = [(number + 1) / len(self.bucket_bytes) for number in range(len(self.bucket_bytes))]
            sent = [
                [at + rank.backward * part for part in parts]
                for at, rank in zip(ready, self.ranks, strict=True)
            ]
            reduced, free = [], 0.0
            for number, size in enumerate(self.bucket_bytes):
                free = max(free, *(times[number] for times in sent)) + self.fixed + self.per_byte * size
                reduced.append(free)
            for rank, one in enumerate(self.ranks):
                self._step(found[rank], one, step, now[rank], ready[rank], sent[rank], reduced)
                ended = max(ready[rank] + one.backward, reduced[-1])
                now[rank] = ended + one.update
            found[0] += self.after.get(step, ())
        return found

    def _step(
        self,
        found: list[rows.Row],
        one: MadeRank,
        step: int,
        began: float,
        ready: float,
        sent: Sequence[float],
        reduced: Sequence[float],
    ) -> None:
        def at(time: float) -> int:
            return round(time) + one.shift

        forward = at(began + one.data)
        found.append(rows.ForwardRow("Net", step, forward, forward, at(ready), True, 0))
        wait, buckets = ready + one.backward, []
        for number, (when, end) in enumerate(zip(sent, reduced, strict=True)):
            buckets.append((number, at(when), at(wait), at(max(wait, end))))
            wait = max(wait, end)
        ended = at(wait)
        loss = {"loss": 1.0 / step}
        found.append(
            rows.BackwardRow("Net", step, at(ready), ended, 1, True, buckets, loss, list(self.unused))
        )
        found.append(rows.OptimizerRow("Net", "SGD", step, ended, ended + one.update, step in self.discarded))

    def _process(self, rank: int) -> rows.ProcessRow:
        one = self.ranks[rank]
        host = f"host {one.clock}"
        return rows.ProcessRow(
            rows.FORMAT, rank, len(self.ranks), host, one.clock, 100 + rank, 0, 1e9, "train.py", {}
        )

    def _module(self) -> rows.ModuleRow:
        buckets = [
            (number, size, [f"layer{number}.weight", f"layer{number}.bias"])
            for number, size in enumerate(self.bucket_bytes)
        ]
        gradients = {"what": "gradients", "when": "every backward outside no_sync", "how": "mean, all_reduce"}
        title = "Net, transport: shared memory"
        contract = {"title": title, "rows": [gradients], "transport": "shm", "reduction": "all_reduce"}
        return rows.ModuleRow("Net", 1, contract, self.looks_for_unused, buckets)
