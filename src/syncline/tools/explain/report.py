"""What rank 0 reports to `syncline explain`, and its text (pure functions).

The report travels as JSON, so that the command itself needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from syncline.tools.explain.picture import Row, Style, legend, picture
from syncline.words import format_count, format_time, wrapped

MOST_STEPS = 100
"""Without `--step`, a script whose ranks send nothing in a step runs up to this step, until they do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command asks of the ranks."""

    num_ranks: int
    step: int | None
    """The step to show; None for the first one that shows what is usual, see `Options.is_enough`."""
    report: str
    """The path of the file to which rank 0 writes the report."""

    def is_enough(self, step: int, *, meets_others: bool) -> bool:
        """Return whether the script can end after this step.

        Args:
            step: the number of the step, from 1.
            meets_others: whether this rank sent gradients or parameters in the step.

        Examples:
            >>> options = Options(num_ranks=2, step=None, report="")
            >>> options.is_enough(2, meets_others=True), options.is_enough(3, meets_others=True)
            (False, True)
            >>> options.is_enough(3, meets_others=False), options.is_enough(100, meets_others=False)
            (False, True)
        """
        if self.step:
            return step >= self.step
        return step >= SETTLED_STEP and (meets_others or self.num_ranks == 1 or step >= MOST_STEPS)


SETTLED_STEP = 3
"""The first step with final buckets and usual times: buckets are laid out again after the first step, and the first
steps allocate memory."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """One wrapped module in the step."""

    contract: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The last complete step of a script."""

    step: int
    """The number of complete steps; 0 if there was none. The other fields are empty then."""
    num_ranks: int = 1
    seconds: float = 0.0
    modules: Sequence[Module] = ()
    rows: Sequence[Row] = ()
    meets_others: bool = False
    uses_torch_class: bool = False
    """Whether the script has a module in torch's own DistributedDataParallel."""

    def encode(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Report:
        """Return the report that `encode` has returned as JSON.

        Examples:
            >>> Report.decode(Report(step=0).encode()).step
            0
        """
        found = json.loads(text)
        modules = [Module(**one) for one in found.pop("modules")]
        rows = [Row(*one) for one in found.pop("rows")]
        return Report(**found, modules=modules, rows=rows)


def text_of(report: Report, options: Options, style: Style) -> str:
    """Return the text that the command prints about a step: contract, timeline, picture and notes."""
    parts = [f"{module.contract}\n\n{module.words}" for module in report.modules]
    length = format_time(report.seconds)
    heading = f"Step {report.step} on rank 0, {length} from its first forward to its last work"
    parts.append("\n".join([heading, *picture(report.rows, report.seconds, style), legend(style)]))
    parts.append("\n".join(line for note in _notes(report, options) for line in wrapped(note)))
    return "\n\n".join(parts)


def _notes(report: Report, options: Options) -> list[str]:
    notes = []
    if report.num_ranks > 1:
        notes.append(
            f"The {report.num_ranks} ranks shared this host, so the waits are not those of a cluster: `syncline plan` "
            "predicts them. `syncline run --trace DIR` and `syncline report DIR` show the waits of a whole run."
        )
    if options.step and report.step < options.step:
        notes.append(
            f"The script ended after {format_count(report.step, 'step')}, before step {options.step}."
        )
    elif not options.step and report.num_ranks > 1 and not report.meets_others:
        notes.append(
            f"Up to step {report.step}, the ranks sent neither gradients nor parameters. --step N shows a later step; "
            "the timeline says when the next round comes, if that is known."
        )
    return notes


def nothing_shown(report: Report, program: str) -> str:
    """Return why no step can be shown, and what to do."""
    if report.uses_torch_class:
        remedy = (
            "It uses torch.nn.parallel.DistributedDataParallel: replace this class by sl.DistributedDataParallel, "
            "which takes the same arguments"
        )
    else:
        remedy = (
            "A step is a forward and a backward of an sl.DistributedDataParallel in training mode. Wrap the module, "
            "and check that the script trains when it is started like this. Processes that the script starts, and "
            "steps of an sl.EvolutionStrategy, cannot be shown"
        )
    return f"{program} ended, and no step of a wrapped module was complete, so there is nothing to show. {remedy}"
