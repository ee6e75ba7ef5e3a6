"""The report of a comparison, as data and as text, and the facts about this rank that can explain a difference."""

from __future__ import annotations

import platform
import socket
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import NamedTuple

import torch

from syncline.errors import SynclineError
from syncline.words import describe_ranks, ranks_with


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
        "syncline": _version(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": _deterministic(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        found["device"] = torch.cuda.get_device_name(torch.cuda.current_device())
        found["cuDNN"] = f"benchmark={torch.backends.cudnn.benchmark}, TF32={torch.backends.cudnn.allow_tf32}"
    return found


def _version() -> str:
    try:
        return metadata.version("syncline")
    except metadata.PackageNotFoundError:
        return "imported from its sources"


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "on, warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


_WIDTH = 110


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
        return "\n".join([_wrapped(self.what, ""), *(_wrapped(cause, "- ") for cause in self.causes)])


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
        num = len(self.findings)
        if not num and not self.doubts:
            return "all agrees"
        found = f"{num or 'no'} disagreement{'s' if num > 1 else ''}"
        if not self.doubts:
            return found
        return f"{found}, {'and' if num else 'but'} {', and '.join(self.doubts)} (see notes)"

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        lines = [_wrapped(f"{self.title}: {ranks}, {self.verdict}", "", indent="  "), *self._findings()]
        lines += ["checked", *(_wrapped(one, "  - ") for one in self.checked)]
        if self.notes:
            lines += ["notes", *(_wrapped(one, "  - ") for one in self.notes)]
        return "\n".join([*lines, *self._facts()])

    def _findings(self) -> list[str]:
        """Return the text of each finding, with a number. A cause is written only in the first finding that has it."""
        lines: list[str] = []
        printed: dict[str, int] = {}
        for number, finding in enumerate(self.findings, 1):
            new = [cause for cause in finding.causes if cause not in printed]
            earlier = sorted({printed[cause] for cause in finding.causes if cause in printed})
            causes = [*new, *(f"see finding {other}" for other in earlier)]
            lines.append(_indented(str(replace(finding, causes=tuple(causes))), f"{number}. "))
            printed |= dict.fromkeys(new, number)
        return lines

    def _facts(self) -> list[str]:
        """Return one line with the facts that all ranks have in common, and one line for each fact that differs."""
        if not self.facts:
            return []
        names = dict.fromkeys(name for row in self.facts for name in row)
        values = {name: [row.get(name, "none") for row in self.facts] for name in names}
        common = [f"{name} {own[0]}" for name, own in values.items() if len(set(own)) == 1]
        apart = [f"{name}: {by_value(own)}" for name, own in values.items() if len(set(own)) > 1]
        return ["ranks", *(_wrapped(one, "  - ") for one in ["; ".join(common), *apart] if one)]


class OwnFinding(NamedTuple):
    """A finding about the runs of one rank, which is sent to the other ranks; a `Finding` that does not name ranks."""

    module: str
    kind: str
    what: str
    """A description of the difference, without the rank and without the size."""
    difference: str = ""
    """The size of the difference for this rank's own data, in words; "" if unknown."""
    causes: Sequence[str] = ()


@dataclass(kw_only=True)
class OwnReport:
    """The report on one rank's own runs, which is sent to the other ranks."""

    facts: dict[str, str]
    positions: dict[str, str]
    """The positions of the random number generators before the runs, by the name of the generator."""
    batch: list[int]
    """The fingerprints of the input tensors of the module that is called first."""
    drew: list[str]
    """The names of the modules that drew random numbers."""
    generators: list[str]
    """The names of the random number generators from which modules drew."""
    state: list[int]
    """The fingerprints of parameters and buffers before the runs."""
    gradients: list[int]
    """The fingerprints of the gradients that are reduced."""
    findings: Sequence[OwnFinding]
    """The differences between this rank's own runs."""


class Disagreement(SynclineError):
    """Raised on every rank, with the same text, if the results of two runs or of two ranks are not the same.

    Attributes:
        report: the report with all findings.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def by_value(values: Sequence[str]) -> str:
    """Describe the values of all ranks in one line. Each value is written once, with the ranks that have it.

    Examples:
        >>> by_value(["1", "1"]), by_value(["1", "2"])
        ('1', '1 (rank 0), 2 (rank 1)')
    """
    ranks = ranks_with(dict(enumerate(values)))
    if len(ranks) == 1:
        return values[0]
    return ", ".join(f"{value} ({describe_ranks(held)})" for value, held in ranks.items())


def _wrapped(text: str, mark: str, *, indent: str | None = None) -> str:
    return "\n".join(
        textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=mark,
            subsequent_indent=" " * len(mark) if indent is None else indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _indented(text: str, mark: str) -> str:
    return mark + text.replace("\n", "\n" + " " * len(mark))
