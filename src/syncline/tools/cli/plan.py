"""`syncline plan`: predict what a training step takes on a cluster, for each way to synchronize, and recommend one."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from syncline.environment import num_cores, threads_per_rank
from syncline.tools.bench.machine import total_memory_bytes
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.report import run_in
from syncline.tools.cli.run import check_program
from syncline.tools.cli.tune import tune
from syncline.tools.cli.values import MOST_HOSTS, MOST_RANKS, check_input, check_number
from syncline.tools.plan import (
    Cluster,
    Job,
    Machine,
    Planner,
    advice_on,
    job_of_size,
    load_machine,
    parse_rate,
    parse_seconds,
    plan_json,
    plan_text,
    usual_path,
)
from syncline.tools.report.analysis import figures_of
from syncline.tools.report.planned import cluster_of, job_of

T = TypeVar("T")

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

_USUAL_LATENCY = 50e-6

_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def main(argv: Sequence[str]) -> int:
    """Run `syncline plan` with these arguments, and return the exit code.

    Raises:
        UsageError: the arguments are invalid.
    """
    if "--tune" in argv:
        at = list(argv).index("--tune")
        options, program = argv[:at], argv[at + 1 :]
        return (
            tune([*options, *program], []) if program[:1] in (["-h"], ["--help"]) else tune(options, program)
        )
    args = _parse(argv)
    machine = _machine(args)
    if args.trace is not None:
        job, cluster = _traced(args)
    else:
        cluster = _cluster(args)
        if args.model is None:
            job = job_of_size(args.parameters, compute=args.compute)
        else:
            from syncline.tools.bench.measured import MeasurementFailed

            try:
                job = _measured(args, cluster)
            except MeasurementFailed as failed:
                return failed.code
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
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--parameters", type=_checked(_count))
    parser.add_argument("--compute", type=_checked(parse_seconds))
    parser.add_argument("--hosts", type=int)
    parser.add_argument("-n", "--ranks", type=int)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--bandwidth", type=_checked(parse_rate))
    parser.add_argument("--latency", type=_checked(parse_seconds))
    parser.add_argument("--memory", type=_checked(_size))
    parser.add_argument("--engine", choices=("shm", "gloo", "nccl"))
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_all(argv)
    given = [args.model is not None, args.trace is not None, args.parameters is not None]
    if sum(given) != 1:
        raise UsageError(
            "expected one of FILE.py:FUNCTION, --trace DIR and --parameters N --compute TIME; see syncline plan --help"
        )
    if (args.parameters is None) != (args.compute is None):
        raise UsageError("--parameters and --compute belong together: --parameters 124M --compute 80ms")
    _check_numbers(args)
    if args.trace is None and (args.hosts or 1) > 1 and args.bandwidth is None:
        raise UsageError(
            "--hosts: how fast is the link between them? Pass --bandwidth, for example --bandwidth 10Gbit"
        )
    _check_engine(args)
    if args.machine is not None:
        check_input("--machine ", args.machine)
    if args.model is not None:
        path, found, name = args.model.rpartition(":")
        if not found or not name.isidentifier() or not Path(path).is_file():
            raise UsageError(
                f"{args.model}: expected FILE.py:FUNCTION, with a file that exists; FUNCTION returns the module and "
                "its inputs"
            )
        check_program(path, is_module=False, is_python=True)
    return args


def _check_numbers(args: argparse.Namespace) -> None:
    for option, value, least, most, what in (
        ("--hosts", args.hosts, 1, MOST_HOSTS, "hosts"),
        ("-n", args.ranks, 1, MOST_RANKS, "ranks of a host"),
        ("--cores", args.cores, 1, 100_000, "cores"),
        ("--parameters", args.parameters, 1, 10**15, "parameters"),
        ("--compute", args.compute, 1e-9, 1e6, "seconds"),
        ("--latency", args.latency, 0, 1000, "seconds"),
        ("--bandwidth", args.bandwidth, 1, 10**15, "bytes a second"),
        ("--memory", args.memory, 1, 10**18, "bytes"),
    ):
        check_number(option, value, least, most, what)


def _check_link(args: argparse.Namespace, hosts: int) -> None:
    """Raise an error if an option describes a link between hosts, but there is one host."""
    for option, value in (("--bandwidth", args.bandwidth), ("--latency", args.latency)):
        if hosts == 1 and value is not None:
            raise UsageError(
                f"{option} is that of the link between hosts, but this plan has one host: pass --hosts, or leave it out"
            )


def _check_engine(args: argparse.Namespace) -> None:
    """Raise an error if an option cannot have an effect together with --engine."""
    if args.engine == "nccl":
        if args.cores is not None:
            raise UsageError(
                "--cores has no effect with --engine nccl, whose ranks compute on accelerators: leave it out"
            )
        if args.model is not None:
            raise UsageError(
                f"--engine nccl: {args.model} would be measured on the cores of this host. Pass the time of a step "
                "on an accelerator: --parameters N --compute TIME"
            )
    elif args.engine is not None and args.ranks == 1:
        raise UsageError(
            f"--engine {args.engine} connects the ranks of a host, but -n 1 has one: leave it out"
        )


def _checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the parser of a value, whose error is the text of its ValueError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _count(text: str) -> int:
    """Return a number such as 124M."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _COUNTS else (text, "")
    try:
        found = round(float(number) * _COUNTS[unit])
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ValueError(f"{text}: expected a number of parameters such as 124M or 7B")
    return found


def _size(text: str) -> int:
    """Return a size in bytes."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    try:
        return _count(number)
    except ValueError:
        raise ValueError(f"{text}: expected a size such as 64GB") from None


def _machine(args: argparse.Namespace) -> Machine:
    try:
        return load_machine(args.machine, engine=args.engine or "shm")
    except OSError as error:
        raise UsageError(f"cannot read {args.machine or usual_path()}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _cluster(args: argparse.Namespace) -> Cluster:
    _check_link(args, args.hosts or 1)
    cores, ranks = args.cores or num_cores(), args.ranks or 2
    return Cluster(
        hosts=args.hosts or 1,
        ranks_per_host=ranks,
        cores_per_host=cores,
        threads_per_rank=max(1, cores // ranks) if args.cores else threads_per_rank(ranks),
        link_bytes_per_second=args.bandwidth,
        latency_seconds=_USUAL_LATENCY if args.latency is None else args.latency,
        memory_bytes=args.memory or _memory_here(args.engine),
        engine=args.engine or "shm",
    )


def _memory_here(engine: str | None) -> int | None:
    """Return the memory of this host; None if it is not that of the plan, or if the system does not say it."""
    return total_memory_bytes() if engine != "nccl" and hasattr(os, "sysconf") else None


def _measured(args: argparse.Namespace, cluster: Cluster) -> Job:
    """Measure the model on this machine: with all ranks of a host if this machine is like the hosts of the plan."""
    from syncline.tools.bench.measured import measured_model

    if args.cores is None:
        ranks, threads = cluster.ranks_per_host, cluster.threads_per_rank
        return measured_model(args.model, num_ranks=ranks, num_threads=threads)
    threads = min(num_cores(), cluster.threads_per_rank)
    return measured_model(args.model, num_ranks=1, num_threads=threads).slower(cluster.crowding)


def _traced(args: argparse.Namespace) -> tuple[Job, Cluster]:
    """Return the job of a trace, and the cluster of the options, or of the trace where there are none."""
    run = run_in(args.trace)
    figures = figures_of(run)
    if figures is None or not figures.buckets:
        raise UsageError(
            f"{args.trace} has no step with a synchronized backward: trace a run that averages gradients in every step"
        )
    job, there = job_of(run, figures), cluster_of(run, figures)
    hosts = args.hosts or there.hosts
    _check_link(args, hosts)
    bandwidth = args.bandwidth or there.link_bytes_per_second
    if hosts > 1 and bandwidth is None:
        raise UsageError("--hosts: the trace has one host, so pass the --bandwidth of the link between hosts")
    cluster = Cluster(
        hosts=hosts,
        ranks_per_host=args.ranks or there.ranks_per_host,
        cores_per_host=args.cores or there.cores_per_host,
        threads_per_rank=there.threads_per_rank,
        link_bytes_per_second=bandwidth,
        latency_seconds=_latency(args, there),
        memory_bytes=args.memory,
        engine=args.engine or there.engine,
    )
    return job.slower(cluster.crowding / there.crowding), cluster


def _latency(args: argparse.Namespace, there: Cluster) -> float:
    """Return the latency of the options, or that of the trace if its link is the one of the plan."""
    if args.latency is not None:
        return float(args.latency)
    return _USUAL_LATENCY if args.bandwidth else there.latency_seconds
