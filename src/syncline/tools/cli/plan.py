"""`syncline plan`: predict what a training step takes on a cluster, for each way to synchronize, and recommend one."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

from syncline import environment
from syncline.tools.bench.results import total_memory_bytes
from syncline.tools.cli import values
from syncline.tools.cli.options import CommandParser, explained, refuse
from syncline.tools.cli.output import say
from syncline.tools.cli.report import machine_here, run_in
from syncline.tools.cli.run import check_program
from syncline.tools.plan.advice import advice_on, plan_json, plan_text
from syncline.tools.plan.cluster import Cluster
from syncline.tools.plan.job import Job, job_of_size
from syncline.tools.plan.machine import load_machine
from syncline.tools.plan.options import Option
from syncline.tools.plan.predict import Planner
from syncline.tools.report.analysis import figures_of
from syncline.tools.report.load import NoTrace, load
from syncline.tools.report.planned import cluster_of, job_of, option_of
from syncline.tools.report.run import Run, run_of
from syncline.tools.tune.trials import Setting, Trial, combined, settings_to_try, trials_text

_HELP = """\
usage: syncline plan FILE.py:FUNCTION [options]
       syncline plan --trace DIR [options]
       syncline plan --parameters N --compute TIME [options]
       syncline plan [-n N] [options] --tune SCRIPT [arguments]

Predict what a training step takes on a cluster for each way to synchronize
(buckets, sharding, compressions, local SGD, DiLoCo), recommend one, and say from
when the others pay. Nothing is sent: a plan for 100,000 ranks takes seconds.

  syncline plan model.py:build -n 2                      this machine
  syncline plan model.py:build --hosts 4 -n 2 --bandwidth 1Gbit
  syncline plan --trace runs/1 --hosts 4 --bandwidth 200Mbit
  syncline plan --parameters 7B --compute 0.9s --hosts 8 -n 8 --engine nccl \\
      --bandwidth 400Gbit --memory 80GB

what is trained
  FILE.py:FUNCTION      FUNCTION returns the module and its inputs, as in
                        return model, (tokens, targets). AdamW steps it. It is run
                        for some steps in as many processes as a host has ranks
  --trace DIR           the trace of a run (syncline run --trace DIR)
  --parameters N        only a size, such as 124M or 7B, with
  --compute TIME        the time of a step without synchronization: 80ms, 0.9s

where
  --hosts N             number of hosts (default: 1, or as in the trace)
  -n, --ranks N         ranks of a host (default: 2, or as in the trace)
  --cores N             cores of a host (default: those of this one)
  --bandwidth RATE      of each host's link: 100Mbit, 25Gbit, 3GB (a second)
  --latency TIME        of a message between hosts (default: 50us)
  --memory SIZE         of a host, or of a GPU: 64GB (default: that of this host)
  --engine ENGINE       what connects the ranks of a host: shm (default), gloo, nccl
  --machine FILE        what synchronization costs, measured by
                        syncline bench --calibrate (default: of this machine)

real runs
  --tune SCRIPT         run a program for a few steps with the best settings, and say
                        which has won; also with values of one of its options, with
                        --vary OPTION=A,B; see syncline plan --tune --help

  --format text|json    json has the same figures for other programs
  -h, --help            show this text

The page "Plan before you run" of the documentation says how the prediction is made,
and how good it is.
"""

_TUNE_HELP = """\
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


def main(argv: Sequence[str]) -> int:
    """Run `syncline plan` with these arguments, and return the exit code.

    Raises:
        UsageError: the arguments are invalid.
    """
    if "--tune" in argv:
        at = list(argv).index("--tune")
        is_help = argv[at + 1 : at + 2] in (["-h"], ["--help"])
        return _tune(["--help"], []) if is_help else _tune(argv[:at], argv[at + 1 :])
    args = _parse(argv)
    with explained(ValueError):
        machine = load_machine(args.machine, engine=args.engine or "shm")
    if args.trace is not None:
        job, cluster = _traced(args)
    elif args.model is None:
        job, cluster = job_of_size(args.parameters, compute=args.compute), _cluster(args, _cluster_here(args))
    else:
        cluster = _cluster(args, _cluster_here(args))
        job = _measured(args, cluster)
    planner = Planner.of(job, cluster, machine)
    advice = advice_on(planner)
    if args.format == "json":
        print(json.dumps(plan_json(planner, advice), indent=1))
    else:
        print(plan_text(planner, advice))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("syncline plan", _HELP)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--trace", type=values.trace_folder)
    parser.add_argument("--parameters", type=values.PARAMETERS)
    parser.add_argument("--compute", type=values.TIME)
    parser.add_argument("--hosts", type=values.HOSTS)
    parser.add_argument("-n", "--ranks", dest="ranks_per_host", type=values.RANKS)
    cores = values.integer("a number of cores", 1, 100_000)
    parser.add_argument("--cores", dest="cores_per_host", type=cores)
    parser.add_argument("--bandwidth", dest="link_bytes_per_second", type=values.RATE)
    parser.add_argument("--latency", dest="latency_seconds", type=values.LATENCY)
    parser.add_argument("--memory", dest="memory_bytes", type=values.BYTES)
    parser.add_argument("--engine", choices=("shm", "gloo", "nccl"))
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_all(argv)
    model, engine, has_size = args.model, args.engine, args.parameters is not None
    is_one = [model, args.trace, args.parameters].count(None) == 2
    refuse(not is_one, "expected one of FILE.py:FUNCTION, --trace DIR and --parameters N --compute TIME")
    is_half = has_size != (args.compute is not None)
    refuse(is_half, "--parameters and --compute belong together: --parameters 124M --compute 80ms")
    if engine == "nccl":
        refuse(
            args.cores_per_host,
            "--engine nccl: --cores has no effect, because accelerators compute: leave it out",
        )
        refuse(model, f"--engine nccl: {model} would run on cores: use --parameters N --compute TIME instead")
    elif engine is not None:
        refuse(
            args.ranks_per_host == 1,
            f"--engine {engine} connects ranks of a host, but -n 1 has one: leave it out",
        )
    if model is not None:
        path, _, name = model.rpartition(":")
        is_right = name.isidentifier() and Path(path).is_file()
        refuse(not is_right, f"{model}: expected FILE.py:FUNCTION, which returns the module and its inputs")
        check_program(path, is_module=False)
    return args


def _cluster_here(args: argparse.Namespace) -> Cluster:
    """Return a host like this one, with the usual number of ranks."""
    has_memory = args.engine != "nccl" and hasattr(os, "sysconf")
    memory_bytes = total_memory_bytes() if has_memory else None
    return Cluster(ranks_per_host=2, cores_per_host=environment.num_cores(), memory_bytes=memory_bytes)


def _cluster(args: argparse.Namespace, there: Cluster) -> Cluster:
    """Return the cluster of the options, which is like `there` where there are none."""
    if args.link_bytes_per_second is not None:  # this is another link
        there = replace(there, latency_seconds=Cluster.latency_seconds)
    names = [one.name for one in fields(Cluster)]
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    found = replace(there, **given)
    if found.hosts == 1:
        has_link = args.link_bytes_per_second is not None or args.latency_seconds is not None
        refuse(has_link, "--bandwidth and --latency are those of the link between hosts: pass --hosts, too")
    else:
        has_link = found.link_bytes_per_second is not None
        refuse(not has_link, "--hosts: pass the bandwidth of the link between them, as in --bandwidth 10Gbit")
    if args.trace is not None:
        return found
    return replace(found, threads_per_rank=max(1, found.cores_per_host // found.ranks_per_host))


def _measured(args: argparse.Namespace, cluster: Cluster) -> Job:
    """Measure the model on this machine: with all ranks of a host if this machine is like the hosts of the plan."""
    from syncline.tools.bench.measured import measured_model

    if args.cores_per_host is None:
        ranks, threads = cluster.ranks_per_host, cluster.threads_per_rank
        return measured_model(args.model, num_ranks=ranks, num_threads=threads)
    threads = min(environment.num_cores(), cluster.threads_per_rank)
    return measured_model(args.model, num_ranks=1, num_threads=threads).slower(cluster.crowding)


def _traced(args: argparse.Namespace) -> tuple[Job, Cluster]:
    """Return the job of a trace, and the cluster of the options, or of the trace where there are none."""
    run = run_in(args.trace)
    figures = figures_of(run)
    text = f"{args.trace} has no step with a synchronized backward: trace a run that has some"
    refuse(not figures.buckets, text)
    there = cluster_of(run, figures)
    cluster = _cluster(args, there)
    return job_of(run, figures).slower(cluster.crowding / there.crowding), cluster


# ---------------------------------------------------------------------- trials


def _tune(argv: Sequence[str], program: Sequence[str]) -> int:
    """Run `syncline plan --tune`, and return the exit code.

    Args:
        argv: the options before `--tune`.
        program: the script and its arguments.

    Raises:
        UsageError: the arguments are invalid.
    """
    args = _parse_tune(argv, program)
    option, given = args.vary
    base_value = given[0] if given else None
    try:
        first = _trial(args, program, Setting())
    except _TrialFailed as failed:
        say("", failed.output.rstrip("\n"))
        return failed.code or 1
    figures, planner = figures_of(first), None
    if option_of(first) is not None and figures.buckets:  # it averages in every step
        planner = Planner.of(job_of(first, figures), cluster_of(first, figures), machine_here())
    cores = environment.num_cores()
    settings = settings_to_try(planner, num_cores=cores, num_ranks=args.n, values=given[1:])
    found = _in_turns(args, program, settings)
    together = combined(found, base_value)
    if together is not None:
        found += _in_turns(args, program, [together])
    predicted = {
        one: planner.predict(Option(cap_mb=one.cap_mb)).step
        for one in settings
        if planner is not None and one == Setting(cap_mb=one.cap_mb)
    }
    print(trials_text(found, predicted, option, base_value))
    return 0


def _parse_tune(argv: Sequence[str], program: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("syncline plan --tune", _TUNE_HELP)
    parser.add_argument("-n", "--ranks", type=values.RANKS, default=2, dest="n")
    parser.add_argument("--steps", type=values.integer("a number of steps", 5, 1_000_000), default=15)
    parser.add_argument("--rounds", type=values.integer("a number of rounds", 1, 1000), default=2)
    parser.add_argument("--vary", type=_VARIED, default=("", []))
    args = parser.parse_all(argv)
    refuse(not program, "expected a script: syncline plan --tune SCRIPT [arguments]")
    check_program(program[0], is_module=False)
    return args


def _varied(text: str) -> tuple[str, list[float]]:
    option, _, after = text.rpartition("=")
    found = [float(value) for value in after.split(",")]
    if not option or len(found) < 2 or not all(0 < one < math.inf for one in found):
        raise ValueError
    return (option if option.startswith("-") else f"--{option}"), found


_VARIED = values.checked(_varied, "an option and at least two positive numbers, as in batch-size=16,32")


class _TrialFailed(Exception):
    """A run of the program has failed, or has recorded no step. It has its exit code, and what it printed."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__()
        self.code, self.output = code, output


def _in_turns(args: argparse.Namespace, program: Sequence[str], settings: Sequence[Setting]) -> list[Trial]:
    """Run all settings in each round, and return what each took. A setting whose run fails is not tried again."""
    steps: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number in range(1, args.rounds + 1):
        for setting in list(steps):
            name = setting.words(args.vary[0])
            try:
                run = _trial(args, program, setting)
            except _TrialFailed as failed:
                del steps[setting]
                say("", f"  {name}: failed with exit code {failed.code}")
                continue
            step = median(map(run.length, run.steady))
            steps[setting].append(step / 1e6)
            say("", f"  round {number} of {args.rounds}, {name}: {step / 1e3:.1f} ms, the median step")
    return [Trial(setting=one, steps=steps.get(one, [])) for one in settings]


def _trial(args: argparse.Namespace, program: Sequence[str], setting: Setting) -> Run:
    """Run the program once with a setting, and return what it recorded.

    Raises:
        _TrialFailed: it failed, or recorded no step.
    """
    option, given = args.vary
    value = given[0] if given and setting.value is None else setting.value
    with tempfile.TemporaryDirectory(prefix="syncline-tune-") as directory:
        job = {
            "num_ranks": args.n,
            "num_threads": setting.num_threads or environment.threads_per_rank(args.n),
            "program": [*program, *([] if value is None else [option, f"{value:g}"])],
            "directory": directory,
            "num_steps": args.steps,
        }
        done = subprocess.run(
            [sys.executable, "-m", "syncline.tools.tune.ranks", json.dumps(job)],
            env=environment.for_child(setting.variables()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        with suppress(NoTrace):
            if not done.returncode and (run := run_of(load(Path(directory)))).steady:
                return run
    none = (
        ""
        if done.returncode
        else "syncline plan --tune: the program has not run a step of a wrapped module\n"
    )
    raise _TrialFailed(done.returncode, done.stdout + none)
