"""`syncline plan --tune SCRIPT`: run a program for a few steps with the best settings, and say which has won."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from syncline import environment
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.output import say
from syncline.tools.cli.report import machine_here
from syncline.tools.cli.run import check_program
from syncline.tools.cli.values import MOST_RANKS, check_number
from syncline.tools.plan import Option, Planner
from syncline.tools.report.analysis import figures_of
from syncline.tools.report.load import NoTrace, load
from syncline.tools.report.planned import cluster_of, job_of, option_of
from syncline.tools.report.run import Run, run_of
from syncline.tools.tune.trials import Setting, Trial, combined, settings_to_try, trials_text

_HELP = """\
usage: syncline plan [-n N] [options] --tune SCRIPT [arguments]

Run a program for a few steps with each of the settings that are worth a trial, in
turns, and say which has won: the bucket sizes that the planner finds best, shared
memory or Gloo, the number of threads, and values of an option of the program. The
program is ended after these steps. What it writes before is written: let it write to
a folder of its own.

  syncline plan -n 2 --tune train.py --lr 0.1
  syncline plan -n 2 --vary batch-size=16,32,64 --tune train.py

  -n, --ranks N           number of processes on this host (default: 2)
  --steps N               steps of each run (default: 15, of which the first 3 do not count)
  --rounds N              runs of each setting (default: 2)
  --vary OPTION=A,B,...   also try these values of --OPTION of the program. Times are
                          compared for the same work, which is taken to grow with the
                          value; the first value is that of the program as it is
  -h, --help              show this text
"""


def tune(argv: Sequence[str], program: Sequence[str]) -> int:
    """Run `syncline plan --tune`, and return the exit code.

    Args:
        argv: the options before `--tune`.
        program: the script and its arguments.

    Raises:
        UsageError: the arguments are invalid.
    """
    args = _parse(argv, program)
    option, values = args.vary
    trials = _Trials(args, program, option, values[0] if values else None)
    with tempfile.TemporaryDirectory(prefix="syncline-tune-") as folder:
        first = trials.run(Setting(), Path(folder))
        if first is None:
            say("", trials.output.rstrip("\n"))
            return trials.code or 1
        planner = _planner(first)
        settings = settings_to_try(
            planner, num_cores=environment.num_cores(), num_ranks=args.n, values=values[1:]
        )
        found = trials.in_turns(settings, args.rounds, Path(folder))
        together = combined(found, trials.base_value)
        if together is not None:
            found += trials.in_turns([together], args.rounds, Path(folder))
    predicted = {} if planner is None else _predicted(planner, settings)
    print(trials_text(found, predicted, option, trials.base_value))
    return 0


def _parse(argv: Sequence[str], program: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("syncline plan --tune", _HELP)
    parser.add_argument("-n", "--ranks", type=int, default=2, dest="n")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vary", type=_varied, default=("", []))
    args = parser.parse_all(argv)
    if not program:
        raise UsageError("expected a script: syncline plan --tune SCRIPT [arguments]")
    check_program(program[0], is_module=False, is_python=True)
    check_number("-n", args.n, 1, MOST_RANKS)
    check_number("--steps", args.steps, 5, 1_000_000)
    check_number("--rounds", args.rounds, 1, 1000)
    return args


def _varied(text: str) -> tuple[str, list[float]]:
    option, _, values = text.rpartition("=")
    try:
        found = [float(value) for value in values.split(",")]
    except ValueError:
        found = []
    if not option or len(found) < 2 or not all(0 < one < math.inf for one in found):
        raise argparse.ArgumentTypeError(
            f"{text}: expected an option and at least two positive numbers, as in --vary batch-size=16,32"
        )
    return (option if option.startswith("-") else f"--{option}"), found


class _Trials:
    """Runs of the program.

    Args:
        args: the options of the command.
        program: the script and its arguments.
        option: the option that is varied; empty if there is none.
        base_value: the value of this option in the program as it is.
    """

    def __init__(
        self, args: argparse.Namespace, program: Sequence[str], option: str, base_value: float | None
    ) -> None:
        self._args = args
        self._program = program
        self._option = option
        self.base_value = base_value
        self.code = 0
        """The exit code of the last run."""
        self.output = ""
        """What the last run printed."""
        self._num_runs = 0

    def in_turns(self, settings: Sequence[Setting], num_rounds: int, folder: Path) -> list[Trial]:
        """Run all settings in each round, and return what each took. A setting whose run fails is not tried again."""
        steps: dict[Setting, list[float]] = {setting: [] for setting in settings}
        failed: set[Setting] = set()
        for number in range(1, num_rounds + 1):
            for setting in settings:
                if setting in failed:
                    continue
                run = self.run(setting, folder)
                if run is None or not run.steady:
                    failed.add(setting)
                    say("", f"  {setting.words(self._option)}: failed with exit code {self.code}")
                    continue
                step = median(map(run.length, run.steady))
                steps[setting].append(step / 1e6)
                words = f"{setting.words(self._option)}: {step / 1e3:.1f} ms, the median step"
                say("", f"  round {number} of {num_rounds}, {words}")
        return [Trial(setting=one, steps=[] if one in failed else steps[one]) for one in settings]

    def run(self, setting: Setting, folder: Path) -> Run | None:
        """Run the program once with a setting. Return what it recorded; None if it failed, or recorded no step."""
        self._num_runs += 1
        directory = folder / str(self._num_runs)
        value = self.base_value if setting.value is None else setting.value
        varied = [] if value is None else [self._option, f"{value:g}"]
        job = {
            "num_ranks": self._args.n,
            "num_threads": setting.num_threads or environment.threads_per_rank(self._args.n),
            "program": [*self._program, *varied],
            "directory": str(directory),
            "num_steps": self._args.steps,
        }
        done = subprocess.run(
            [sys.executable, "-m", "syncline.tools.tune.job", json.dumps(job)],
            env=environment.for_child(setting.variables()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.code, self.output = done.returncode, done.stdout
        if done.returncode:
            return None
        try:
            run = run_of(load(directory))
        except NoTrace:
            self.output += "syncline plan --tune: the program has not run a step of a wrapped module\n"
            return None
        return run if run.steps else None


def _planner(run: Run) -> Planner | None:
    """Return the planner of a run; None if it does not average gradients in every step."""
    figures, option = figures_of(run), option_of(run)
    if figures is None or option is None or not figures.buckets:
        return None
    return Planner.of(job_of(run, figures), cluster_of(run, figures), machine_here())


def _predicted(planner: Planner, settings: Sequence[Setting]) -> dict[Setting, float]:
    return {
        one: planner.predict(Option(cap_mb=one.cap_mb)).step
        for one in settings
        if one in (Setting(), Setting(cap_mb=one.cap_mb))
    }
