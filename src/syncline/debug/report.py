"""The report of a comparison, as data and as text, and the facts about this rank that can explain a difference."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import chain

import torch

from syncline.words import describe_ranks, format_count, ranks_with, wrapped

_WIDTH = 110


def facts() -> dict[str, str]:
    """Return the versions, hardware and settings of this process that can explain a difference, by name.

    Examples:
        >>> facts()["torch"] == torch.__version__
        True
    """
    found = {
        "host": socket.gethostname(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "syncline": metadata.version("syncline"),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": ("off", "on, warn only", "on")[torch.get_deterministic_debug_mode()],
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        found["device"] = torch.cuda.get_device_name(torch.cuda.current_device())
        found["cuDNN"] = f"benchmark={torch.backends.cudnn.benchmark}, TF32={torch.backends.cudnn.allow_tf32}"
    return found


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One disagreement: values that differ between runs or ranks, although they should be the same."""

    ranks: tuple[int, ...]
    """The ranks with the disagreement. If ranks differ from one another, these are all ranks outside of the largest
    group of equal ranks."""
    module: str
    """The qualified name of the module that causes the disagreement; "" for the outermost module or for no module."""
    kind: str
    """The class name of the module that causes the disagreement; "" if no module does, or if the class is unknown."""
    what: str
    """A description of the difference, with its size."""
    causes: tuple[str, ...] = ()
    """Possible causes, each with a remedy; the cause with the strongest evidence is the first."""

    def __str__(self) -> str:
        return "\n".join([self.what, *_listed(self.causes)])


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report on all checks and their results, which is the same on all ranks. `print(report)` shows it."""

    title: str
    """The name of the function that the user called to get the report."""
    num_ranks: int
    """The number of ranks that were compared."""
    checked: tuple[str, ...]
    """Descriptions of the comparisons that were made."""
    findings: tuple[Finding, ...] = ()
    """All disagreements: first those within ranks, then those between ranks."""
    notes: tuple[str, ...] = ()
    """Useful observations that are not disagreements."""
    doubts: tuple[str, ...] = ()
    """Short forms of those notes that limit the verdict. The verdict includes them."""
    facts: tuple[Mapping[str, str], ...] = field(default=(), repr=False)
    """The versions, hardware and settings of each rank, in rank order."""

    @property
    def agrees(self) -> bool:
        """Whether the report has no findings."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """The result of all checks in one line: the number of findings, and the doubts.

        Examples:
            >>> report = Report(title="", num_ranks=2, checked=(), doubts=("all ranks were given the same batch",))
            >>> report.verdict
            'no disagreement, but all ranks were given the same batch (see notes)'
        """
        found = "no disagreement" if self.doubts else "all agrees"
        if self.findings:
            found = format_count(len(self.findings), "disagreement")
        return found + (f", but {' and '.join(self.doubts)} (see notes)" if self.doubts else "")

    def __str__(self) -> str:
        lines = [f"{self.title}: {format_count(self.num_ranks, 'rank')}, {self.verdict}"]
        for number, finding in enumerate(self.findings, 1):
            lines += f"{number}. {finding}".splitlines()
        lines += ["checked", *_listed(self.checked)]
        lines += ["notes", *_listed(self.notes)] if self.notes else []
        lines += ["ranks", *_listed(self._facts())] if self.facts else []
        return "\n".join(part for line in lines for part in wrapped(line, _WIDTH))

    def _facts(self) -> list[str]:
        """Return one line with the facts that all ranks have in common, and one line for each fact that differs."""
        others = differing(self.facts)
        common = [f"{name} {fact}" for name, fact in self.facts[0].items() if name not in others]
        return ["; ".join(common), *(f"{name}: {text}" for name, text in others.items())]


def differing(rows: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return a description of the values that are not the same on all ranks, by name. Each
    value is written once, with the ranks that have it.

    Examples:
        >>> differing([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1}])
        {'b': '1 (rank 0), 2 (rank 1), nothing (rank 2)'}
    """
    found = {}
    for name in dict.fromkeys(chain(*rows)):
        ranks = ranks_with({rank: row.get(name, "nothing") for rank, row in enumerate(rows)})
        if len(ranks) > 1:
            found[name] = ", ".join(f"{value} ({describe_ranks(held)})" for value, held in ranks.items())
    return found


def _listed(texts: Sequence[str]) -> list[str]:
    return [f"  - {text}" for text in texts]
