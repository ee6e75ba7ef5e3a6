"""The samples that ranks have used, when ranks are lost under strategies that let replicas drift.

[Note: the samples of a lost rank]

Under `LocalSGD` and similar strategies, the steps that a rank has made since the last sync are lost with it. So the
samples of these steps are dealt again. Those of earlier steps stand, because the parameters of the other ranks contain
them. The ranks that are left may have made unequal numbers of steps since then, and all of these samples stand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from syncline.data import DistributedSampler
from syncline.strategies.execution import Rounds
from syncline.transport.base import Transport


class Samples:
    """The samples of one training state, which follow the membership.

    Args:
        sampler: the sampler, if there is one.
        rounds: the executions of the strategies under which replicas drift.
    """

    def __init__(self, sampler: DistributedSampler | None, rounds: Sequence[Rounds]) -> None:
        self.sampler = sampler
        self._rounds = rounds
        self._history: list[tuple[list[int], tuple[int, int]]] = []
        """The numbers of steps of the strategies, and where the sampler was after them, since the last sync."""
        self._is_new = self._has_loaded = False
        """Whether this rank has joined, or has loaded the state of another rank, since the samples were dealt."""
        self._lost: dict[int, tuple[int, int]] = {}
        """Where the samplers of lost ranks were after their last steps that the parameters contain."""
        self._used: dict[int, tuple[int, int]] = {}
        """Where the samplers of the other ranks are."""
        self._dealer = 0
        """The rank that computes where the samples are dealt from."""
        self.note()

    def note(self) -> None:
        """Record where the sampler is now. Call it when samples were counted as used, after the step."""
        if self.sampler is None or not self._rounds:
            return
        self._history.append(([rounds.step for rounds in self._rounds], self.sampler._where()))
        del self._history[: self._index_of([rounds.contained for rounds in self._rounds])]

    def _index_of(self, steps: Sequence[int]) -> int:
        """Return the index of the first entry at or after these numbers of steps."""
        for index, (then, _) in enumerate(self._history):
            if all(number >= step for number, step in zip(then, steps, strict=True)):
                return index
        return len(self._history) - 1

    def meet(self, transport: Transport, *, is_new: bool, has_loaded: bool) -> None:
        """Tell the other ranks which samples this rank has used. A collective call, before the parameters are synced.

        Args:
            transport: the transport between the ranks.
            is_new: whether this rank has just joined.
            has_loaded: whether this rank has loaded the state of another rank, with its place in the data.
        """
        sampler = self.sampler
        if sampler is None:
            return
        self._is_new |= is_new
        self._has_loaded |= has_loaded
        mine = None if self._is_new else [sampler.rank, None if self._has_loaded else sampler._where()]
        rows = [json.loads(row) for row in transport.all_gather_bytes(json.dumps(mine).encode())]
        here = {row[0]: row[1] for row in rows if row is not None}
        # The samples of a rank count up to its last step that the parameters of the others contain now.
        contained = self._history[self._index_of([rounds.contained for rounds in self._rounds])][1]
        for rank in range(sampler.num_replicas):
            if rank not in here:
                self._lost.setdefault(rank, contained)
        owners = [number for number, row in enumerate(rows) if row is not None and row[1] is not None]
        self._dealer = owners[0] if owners else 0
        first = tuple(rows[owners[0]][1]) if owners else sampler._where()
        self._used = {rank: first if where is None else tuple(where) for rank, where in here.items()}

    def place_after_meeting(self, transport: Transport) -> dict[str, Any] | None:
        """Return the position from which the samples are dealt to the ranks that have met. A collective call.

        None if there is no sampler.
        """
        if self.sampler is None:
            return None
        place = {}
        if transport.rank == self._dealer:
            has_place = self._is_new or self._has_loaded
            place = (
                self.sampler.state_dict() if has_place else self.sampler._place_after(self._lost | self._used)
            )
        found: dict[str, Any] = json.loads(
            transport.all_gather_bytes(json.dumps(place).encode())[self._dealer]
        )
        return found

    def were_dealt(self) -> None:
        """Record that the samples that are left were dealt to the present ranks."""
        self._is_new = self._has_loaded = False
        self._lost.clear()
        self._history.clear()
        self.note()
