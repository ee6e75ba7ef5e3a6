"""Riders: reports of parameters without a gradient, and of graphs that changed under `static_graph=True`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from syncline.errors import ContractMismatch, SynclineError, UnreducedGradients
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words
from syncline.gradients.usage import StaticUsage


class _Fault(Rider):
    """A report of a fault in this rank's backward. If any rank reports a fault, every rank raises the same error.

    A fault is described by lines of text.
    """

    num_bits = 1

    def __init__(self) -> None:
        self._reported: list[str] = []

    @abstractmethod
    def _lines(self, backward: Backward) -> list[str]:
        """Return the lines that describe this rank's fault. Return no lines if there is no fault."""

    @abstractmethod
    def _error(self, rows: Sequence[Sequence[str]], step: int) -> SynclineError:
        """Return the error.

        Args:
            rows: the lines that describe each rank's fault, in rank order.
            step: the step of the backward.
        """

    def word(self, backward: Backward) -> int:
        """Return 1 if this rank's backward has the fault, else 0."""
        self._reported = self._lines(backward)
        return int(bool(self._reported))

    def receive(self, words: Words) -> None:
        """Raise the error if any rank has reported the fault. Every rank raises the error with the same text."""
        if words.any_set:
            raise self._error(words.exchange(self._reported), words.step)

    def check_alone(self, backward: Backward, *, rank: int, num_ranks: int) -> None:
        """Raise the error if this rank's backward has the fault. Nothing is exchanged with other ranks.

        Args:
            backward: this rank's backward.
            rank: this rank.
            num_ranks: the number of ranks.
        """
        if lines := self._lines(backward):
            raise self._error([lines if r == rank else [] for r in range(num_ranks)], backward.step)


class MissingGradients(_Fault):
    """A report of parameters that should have got a gradient and got none. The error is `UnreducedGradients`.

    Args:
        names: names of all parameters, by index.
        are_allowed: whether a missing gradient counts as zero. If not, a missing gradient is an error.
    """

    subject = "missing gradients"

    def __init__(self, names: Sequence[str], *, are_allowed: bool) -> None:
        super().__init__()
        self._names = names
        self._are_allowed = are_allowed

    def word(self, backward: Backward) -> int:
        """Return 1 if a gradient is missing and none may be, else 0."""
        if not backward.missing:  # as in almost every step
            self._reported = []
            return 0
        return super().word(backward)

    def _lines(self, backward: Backward) -> list[str]:
        return [] if self._are_allowed else [self._names[index] for index in sorted(backward.missing)]

    def _error(self, rows: Sequence[Sequence[str]], step: int) -> UnreducedGradients:
        return UnreducedGradients(
            {rank: row for rank, row in enumerate(rows) if row},
            step=step,
            num_parameters=len(self._names),
            num_ranks=len(rows),
        )


class StaticGraph(_Fault):
    """A report of parameters that got more or fewer gradients than in the first backward, under `static_graph=True`.

    The error is `ContractMismatch`.

    Args:
        names: names of all parameters, by index.
        static: the number of gradients of each parameter, in the first backward and in the present one.
    """

    subject = "changes of a static graph"

    def __init__(self, names: Sequence[str], static: StaticUsage) -> None:
        super().__init__()
        self._names = names
        self._static = static

    def _lines(self, backward: Backward) -> list[str]:
        if not self._static.has_changed():
            return []
        return [f"{self._names[i]} ({learnt} before, {got} now)" for i, learnt, got in self._static.changed()]

    def _error(self, rows: Sequence[Sequence[str]], step: int) -> ContractMismatch:
        lines = [
            f"  rank {rank}: {', '.join(row[:5])}"
            + (f", ... ({len(row)} parameters)" if len(row) > 5 else "")
            for rank, row in enumerate(rows)
            if row
        ]
        return ContractMismatch(
            f"step {step}, backward: with static_graph=True, expected each parameter to get as many gradients as in "
            "the first backward, but some parameters got more or fewer:\n" + "\n".join(lines) + "\n"
            "No optimizer may step with these gradients. Omit static_graph, or run the same graph in every step"
        )
