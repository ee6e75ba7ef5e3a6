"""What was found, as data and as a text.

What a rank computes with: facts that explain why another one gets other bits.
"""

from __future__ import annotations

import platform
import socket
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata

import torch

from syncline.differences import describe_ranks, ranks_with
from syncline.errors import SynclineError

__all__ = ["Disagreement", "Finding", "Report", "by_value", "facts"]


def facts() -> dict[str, str]:
    """By name: versions, hardware and settings of this process.

    Example:
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
        "deterministic algorithms": _deterministic(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        found["device"] = torch.cuda.get_device_name(torch.cuda.current_device())
        found["cuDNN"] = f"benchmark={torch.backends.cudnn.benchmark}, TF32={torch.backends.cudnn.allow_tf32}"
    return found


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "on, warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One disagreement."""

    ranks: tuple[int, ...]
    """On which it was found; of one between ranks, those that are not of the largest group of equal ones."""
    module: str
    """Qualified name of the module that is to blame; "" where none is, or where it is the outermost."""
    kind: str
    """Its class; "" where none is to blame."""
    what: str
    """What differs, and how much."""
    causes: tuple[str, ...] = ()
    """What was seen that explains it, the strongest evidence first; each with what to do."""

    def __str__(self) -> str:
        return "\n".join([_wrapped(self.what, ""), *(_wrapped(cause, "- ") for cause in self.causes)])


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was checked and what came of it; the same on all ranks. `print(report)` shows it."""

    title: str
    num_ranks: int
    checked: tuple[str, ...]
    """What was computed and compared."""
    findings: tuple[Finding, ...] = ()
    """Disagreements: those within ranks, then those between them."""
    notes: tuple[str, ...] = ()
    """What is worth knowing, and no disagreement."""
    doubts: tuple[str, ...] = ()
    """Those of the notes without which the verdict says too much, in a few words each; they stand beside it."""
    facts: tuple[Mapping[str, str], ...] = field(default=(), repr=False)
    """What each rank computes with, in rank order."""

    @property
    def agrees(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """In one line: how many findings there are, and the doubts.

        Example:
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
        """Each with its number, and each cause where it is met first."""
        lines: list[str] = []
        said: dict[str, int] = {}
        for number, finding in enumerate(self.findings, 1):
            new = [cause for cause in finding.causes if cause not in said]
            earlier = sorted({said[cause] for cause in finding.causes if cause in said})
            causes = [*new, *(f"as said under {other}" for other in earlier)]
            lines.append(_indented(str(replace(finding, causes=tuple(causes))), f"{number}. "))
            said |= dict.fromkeys(new, number)
        return lines

    def _facts(self) -> list[str]:
        """What the ranks compute with: in one line what they have in common, in one each what they have not."""
        if not self.facts:
            return []
        names = dict.fromkeys(name for row in self.facts for name in row)
        values = {name: [row.get(name, "none") for row in self.facts] for name in names}
        common = [f"{name} {own[0]}" for name, own in values.items() if len(set(own)) == 1]
        apart = [f"{name}: {by_value(own)}" for name, own in values.items() if len(set(own)) > 1]
        return ["ranks", *(_wrapped(one, "  - ") for one in ["; ".join(common), *apart] if one)]


class Disagreement(SynclineError):
    """What was computed twice, or on two ranks, is not the same. The same text on every rank.

    Attributes:
        report: all that was found.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def by_value(values: Sequence[str]) -> str:
    """What each rank has, in words.

    Example:
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
