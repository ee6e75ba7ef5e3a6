"""What must come out when ranks are lost in `sl.steps` under strategies that let replicas drift.

`replay` repeats in one process what the ranks have written down: each local step with its samples, and each sync of the
replicas that took part in it. So a sync without a survivor, with a lost rank, or made twice gives other weights.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from elastic import SAMPLES, Net, Plan, check_ends, optimizer_of, sample
from torch import Tensor

Lines = list[dict[str, Any]]


class Replica:
    """The replica of one process, which repeats the lines that the process has written."""

    def __init__(self, lines: Lines) -> None:
        self.net = Net()
        self._optimizer, self._scheduler = optimizer_of(self.net)
        self._lines = lines
        self._at = 0
        self._ids: list[int] = []
        self.unsynced: list[int] = []
        """The samples of the steps since the last sync."""
        self.made = 0

    def run(self, until: int | None) -> None:
        """Repeat the lines before the sync with this number, or to the end."""
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if "sync" in line and (until is None or line["sync"] >= until):
                assert until is not None
                return
            self._at += 1
            if "ids" in line:
                self._ids = line["ids"]
            elif "stepped" in line:
                self._step(line["stepped"])

    def _step(self, number: int) -> None:
        while self._scheduler.last_epoch < number - 1:  # the steps of other ranks that this one has not made
            self._scheduler.step()
        self._optimizer.zero_grad()
        self.net(torch.stack([sample(index) for index in self._ids])).sum().backward()
        self._optimizer.step()
        self.unsynced += self._ids

    @property
    def values(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()])

    def write(self, values: Tensor) -> None:
        torch.nn.utils.vector_to_parameters(values.clone(), self.net.parameters())
        if self._at < len(self._lines):
            self._at += 1  # the line of the sync

    def has_sync(self, number: int) -> bool:
        return any(line.get("sync") == number for line in self._lines)


def replay(notes: list[Lines]) -> tuple[Tensor, list[int]]:
    """Return the weights after the last sync, and the samples of all steps that stand."""
    replicas = [Replica(lines) for lines in notes]
    common = torch.nn.Parameter(Replica([]).values)
    outer = torch.optim.SGD([common], lr=0.7, momentum=0.9, nesterov=True)
    stand: list[int] = []
    syncs = sorted({line["sync"] for lines in notes for line in lines if "sync" in line})
    assert syncs == list(range(len(syncs)))
    for number in syncs:
        of_sync = [
            (rank, line) for rank, lines in enumerate(notes) for line in lines if line.get("sync") == number
        ]
        # A rank that has the result, but no confirmation, writes it in the next generation.
        generation = min(line["generation"] for _, line in of_sync)
        members = [
            replica
            for replica, lines in zip(replicas, notes, strict=True)
            if generation == 0 or any(line.get("member") == generation for line in lines)
        ]
        for replica in members:
            replica.run(number)
        mean = torch.stack([replica.values for replica in members]).mean(0)
        if {line["is_outer"] for _, line in of_sync} == {True}:
            common.grad = common.detach() - mean
            outer.step()
        else:
            common.data.copy_(mean)
        for replica in members:
            replica.write(common.detach())
            stand += replica.unsynced
            replica.unsynced = []
    return common.detach(), stand


def check(plan: Plan, notes: list[Lines], *, has_reference: bool = True) -> list[dict[str, Any]]:
    """Check all invariants, and return the last note of each process that has finished."""
    finals = check_ends(notes, plan.steps, num_forwards=plan.steps)
    start, end = Net(), torch.tensor(finals[0]["values"], dtype=torch.float64)
    assert not torch.equal(end, torch.cat([p.detach().flatten() for p in start.parameters()]))
    if has_reference:
        weights, stand = replay(notes)
        torch.testing.assert_close(end, weights, rtol=1e-9, atol=1e-9)
        counts = Counter(stand)
        fewest = min(counts[index] for index in range(SAMPLES))
        padding = sum(number - fewest - 1 for number in counts.values() if number > fewest + 1)
        assert fewest >= 1, sorted(counts.items())
        assert padding <= 2, sorted(counts.items())
    return finals
