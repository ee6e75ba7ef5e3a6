"""Launchers on two hosts, whose ranks are those of `elastic`, or another program."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import elastic
import elastic_program
from elastic import Fault, Plan

from forks import Forks, Process, is_running, wait_for_all
from support.states import wait_until
from syncline.testing import SimulatedHosts

__all__ = ["NUM_ON_A", "Job", "Training"]

_WITHOUT_A_NAME = re.compile(
    r"^(\[rank \d+\] )?\[W.*The hostname of the client socket cannot be retrieved.*\n", re.M
)
"""A warning of torch's, whose level was set before the fork: DNS does not know the hosts."""

MOMENT = {"step": 3, "place": "first bucket"}
NUM_ON_A = 3


@dataclass
class Job:
    """One launcher on each host."""

    hosts: SimulatedHosts
    folder: Path
    forks: Forks
    launchers: dict[str, Process] = field(default_factory=dict)

    def start(self, letter: str, num_ranks: int, *command: object) -> None:
        options = (
            "--node-rank",
            "ab".index(letter),
            "--master-addr",
            SimulatedHosts.address_of("a"),
            "-n",
            num_ranks,
        )
        words = ("--resilient", "--nnodes", "2", *options, *command)
        self.launchers[letter] = self.forks.launch(
            self.folder,
            *words,
            warm_ranks=True,
            host=self.hosts.names[letter],
            variables=self.variables(letter),
        )

    def variables(self, letter: str) -> Mapping[str, str]:
        """The environment variables of a host's launcher."""
        return {
            **self.hosts.variables_of_rank(0, letter),
            "SYNCLINE_TOKEN": "a token of this test only",
        }

    def wait(self, letter: str) -> tuple[int, str, str]:
        [ended] = wait_for_all([self.launchers[letter]], others=self.launchers.values())
        return ended.returncode, ended.stdout, _WITHOUT_A_NAME.sub("", ended.stderr)

    def kill(self, letter: str) -> None:
        """The launcher and, by the kernel, its ranks."""
        os.kill(self.launchers[letter].pid, signal.SIGKILL)

    def close(self) -> None:
        """End what a failed test has left."""
        for launcher in self.launchers.values():
            launcher.kill()


@dataclass
class Training(Job):
    """Ranks of `elastic`, on both hosts."""

    num_on: dict[str, int] = field(default_factory=lambda: {"a": NUM_ON_A, "b": 2})

    @property
    def size(self) -> int:
        return sum(self.num_on.values())

    def begin(self, *faults: Fault, **settings: Any) -> None:
        plan = Plan(size=self.size, transport="auto", faults=faults, **settings)
        for letter, num_ranks in self.num_on.items():
            self.start(letter, num_ranks, *elastic_program.command(self.folder, plan))

    def begin_and_halt(self, **settings: Any) -> None:
        """All ranks wait in the same step, until `go_on`."""
        self.begin(*(Fault(rank=rank, kind="wait", **MOMENT) for rank in range(self.size)), **settings)
        wait_until(
            lambda: sum("fault" in line for lines in self.notes() for line in lines) >= self.size, self.notes
        )

    def kill(self, letter: str) -> None:
        """The launcher and its ranks. Call it while they wait, so that none of them goes on a little."""
        first = 0 if letter == "a" else self.num_on["a"]
        here = self.notes()[first : first + self.num_on[letter]]
        pids = [line["pid"] for lines in here for line in lines if "fault" in line]
        super().kill(letter)
        wait_until(lambda: not any(map(is_running, pids)))

    def go_on(self) -> None:
        (self.folder / "go").touch()

    def notes(self) -> list[list[dict[str, Any]]]:
        paths = [self.folder / str(rank) for rank in range(self.size)]
        return [elastic.notes_in(path) if path.exists() else [] for path in paths]

    def finished(self) -> list[int]:
        """The first ranks of the processes that have finished, all with the right weights."""
        notes = self.notes()
        elastic.check(notes)
        return [rank for rank, lines in enumerate(notes) if "done" in lines[-1]]

    def left(self, ranks: Sequence[int]) -> set[str]:
        """With which errors these ranks have left."""
        notes = self.notes()
        return {notes[rank][-1]["left"] for rank in ranks}
