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
from syncline.tools.cli.options import CommandParser, refuse
from syncline.tools.cli.output import say
from syncline.tools.cli.report import machine_here
from syncline.tools.cli.run import check_program
from syncline.tools.cli.values import RANKS, checked, integer
from syncline.tools.plan.options import Option
from syncline.tools.plan.predict import Planner
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
    with tempfile.TemporaryDirectory(prefix="syncline-tune-") as folder:
        trials = _Trials(args, program, Path(folder))
        first = trials.run(Setting())
        if first is None:
            say("", trials.output.rstrip("\n"))
            return trials.code or 1
        figures, recorded = figures_of(first), option_of(first)
        planner = None
        if figures is not None and recorded is not None and figures.buckets:  # it averages in every step
            planner = Planner.of(job_of(first, figures), cluster_of(first, figures), machine_here())
        cores = environment.num_cores()
        settings = settings_to_try(planner, num_cores=cores, num_ranks=args.n, values=values[1:])
        found = trials.in_turns(settings)
        together = combined(found, trials.base_value)
        if together is not None:
            found += trials.in_turns([together])
    predicted = {
        one: planner.predict(Option(cap_mb=one.cap_mb)).step
        for one in settings
        if planner is not None and one == Setting(cap_mb=one.cap_mb)
    }
    print(trials_text(found, predicted, option, trials.base_value))
    return 0


def _parse(argv: Sequence[str], program: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("syncline plan --tune", _HELP)
    parser.add_argument("-n", "--ranks", type=RANKS, default=2, dest="n")
    parser.add_argument("--steps", type=integer("a number of steps", 5, 1_000_000), default=15)
    parser.add_argument("--rounds", type=integer("a number of rounds", 1, 1000), default=2)
    parser.add_argument("--vary", type=_VARIED, default=("", []))
    args = parser.parse_all(argv)
    refuse(not program, "expected a script: syncline plan --tune SCRIPT [arguments]")
    check_program(program[0], is_module=False)
    return args


def _varied(text: str) -> tuple[str, list[float]]:
    option, _, values = text.rpartition("=")
    found = [float(value) for value in values.split(",")]
    if not option or len(found) < 2 or not all(0 < one < math.inf for one in found):
        raise ValueError
    return (option if option.startswith("-") else f"--{option}"), found


_VARIED = checked(_varied, "an option and at least two positive numbers, as in batch-size=16,32")


class _Trials:
    """Runs of the program.

    Args:
        args: the options of the command.
        program: the script and its arguments.
        folder: the folder for the traces.
    """

    def __init__(self, args: argparse.Namespace, program: Sequence[str], folder: Path) -> None:
        self._args = args
        self._program = program
        self._folder = folder
        self._option, values = args.vary
        self.base_value: float | None = values[0] if values else None
        """The value of the varied option in the program as it is; None if no option is varied."""
        self.code = 0
        """The exit code of the last run."""
        self.output = ""
        """What the last run printed."""

    def in_turns(self, settings: Sequence[Setting]) -> list[Trial]:
        """Run all settings in each round, and return what each took. A setting whose run fails is not tried again."""
        steps: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for number in range(1, self._args.rounds + 1):
            for setting in list(steps):
                name, run = setting.words(self._option), self.run(setting)
                if run is None or not run.steady:
                    del steps[setting]
                    say("", f"  {name}: failed with exit code {self.code}")
                    continue
                step = median(map(run.length, run.steady))
                steps[setting].append(step / 1e6)
                say(
                    "",
                    f"  round {number} of {self._args.rounds}, {name}: {step / 1e3:.1f} ms, the median step",
                )
        return [Trial(setting=one, steps=steps.get(one, [])) for one in settings]

    def run(self, setting: Setting) -> Run | None:
        """Run the program once with a setting. Return what it recorded; None if it failed, or recorded no step."""
        directory = tempfile.mkdtemp(dir=self._folder)
        value = self.base_value if setting.value is None else setting.value
        varied = [] if value is None else [self._option, f"{value:g}"]
        job = {
            "num_ranks": self._args.n,
            "num_threads": setting.num_threads or environment.threads_per_rank(self._args.n),
            "program": [*self._program, *varied],
            "directory": directory,
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
            run = run_of(load(Path(directory)))
        except NoTrace:
            self.output += "syncline plan --tune: the program has not run a step of a wrapped module\n"
            return None
        return run if run.steps else None
