"""Riders: parameters without a gradient, and graphs that changed under `static_graph=True`."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import ContractMismatch, UnreducedGradients
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words
from syncline.gradients.usage import StaticUsage


class MissingGradients(Rider):
    """Report of whether a parameter that should get a gradient got none.

    Args:
        names: names of all parameters, by index.
        are_allowed: whether a missing gradient counts as zero instead of being an error.
    """

    num_bits = 1

    def __init__(self, names: Sequence[str], *, are_allowed: bool) -> None:
        self._names = names
        self._are_allowed = are_allowed
        self._reported: list[str] = []

    def word(self, backward: Backward) -> int:
        """Return 1 if a gradient is missing."""
        self._reported = self._missing(backward) if backward.missing else []
        return int(bool(self._reported))

    def _missing(self, backward: Backward) -> list[str]:
        if self._are_allowed:
            return []
        return [self._names[index] for index in sorted(backward.missing)]

    def receive(self, words: Words) -> None:
        """Compare the words of all ranks.

        Raises:
            UnreducedGradients: gradients are missing on some rank; raised with the same text on every rank.
        """
        if words.any_set:
            raise self._error(words.exchange(self._reported), words.step)

    def check_alone(self, backward: Backward, *, rank: int, num_ranks: int) -> None:
        """Check this rank's step, because there is one rank or this backward is not reduced.

        Raises:
            UnreducedGradients: gradients are missing.
        """
        if names := self._missing(backward):
            raise self._error([names if r == rank else [] for r in range(num_ranks)], backward.step)

    def _error(self, missing: Sequence[Sequence[str]], step: int) -> UnreducedGradients:
        return UnreducedGradients(
            {rank: row for rank, row in enumerate(missing) if row},
            step=step,
            num_parameters=len(self._names),
            num_ranks=len(missing),
        )


class StaticGraph(Rider):
    """Report of whether, under `static_graph=True`, a parameter got another number of gradients than was learnt.

    Args:
        names: names of all parameters, by index.
        static: the counts of each parameter's gradients.
    """

    num_bits = 1

    def __init__(self, names: Sequence[str], static: StaticUsage) -> None:
        self._names = names
        self._static = static

    def word(self, backward: Backward) -> int:
        """Return 1 if the graph has changed."""
        return int(self._static.has_changed())

    def receive(self, words: Words) -> None:
        """Compare the words of all ranks.

        Raises:
            ContractMismatch: the graph of some rank has changed; raised with the same text on every rank.
        """
        if words.any_set:
            raise self._error(words.exchange(self._lines()), words.step)

    def check_alone(self, backward: Backward, *, rank: int, num_ranks: int) -> None:
        """Check this rank's step, because there is one rank or this backward is not reduced.

        Raises:
            ContractMismatch: its graph has changed.
        """
        if lines := self._lines():
            raise self._error([lines if r == rank else [] for r in range(num_ranks)], backward.step)

    def _lines(self) -> list[str]:
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
            f"step {step}, backward: static_graph=True, but the number of gradients of a parameter in one backward "
            "changed:\n" + "\n".join(lines) + "\n"
            "No optimizer may step with these gradients. Omit static_graph, or run the same graph in every step"
        )
