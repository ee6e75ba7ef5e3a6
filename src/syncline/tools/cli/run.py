"""`syncline run`: check the command line before any process is started, then run the job.

An import of torch takes seconds. Functions that need torch therefore import it themselves, so that help texts and most
errors appear without a wait for torch.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from syncline import environment
from syncline.regular_files import open_regular
from syncline.session.listening import LOOPBACK, bound_socket, is_of_this_host
from syncline.tools.cli.options import UsageError, explained, parse_run, refuse
from syncline.tools.cli.output import say
from syncline.tools.cli.values import num_hosts
from syncline.tools.launch.display import Display
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.worker import worker_command
from syncline.tools.watch.live import Live, terminal_fd
from syncline.tracing.file import SUFFIX

if TYPE_CHECKING:
    from syncline.tools.launch.supervise import Job

_NAME = "syncline run"

_TRACE_MAX_MB = 64
"""The largest size of what one rank records with `--trace`."""

_LIVE_MAX_MB = 8
"""The largest size of what one rank records for `--live` alone. It is deleted at the end."""


def main(argv: Sequence[str]) -> int:
    """Run `syncline run` with these arguments.

    Returns:
        The exit code. 0 means that all ranks succeeded. 75 (`EXIT_STOPPED`) means that all ranks stopped as requested.
        After a failure, the result is the exit code of the rank that failed first. If a signal ended the launcher, the
        result is 128 + the number of the signal.

    Raises:
        UsageError: the arguments are invalid. No rank was started.
    """
    args = parse_run(argv)
    check_system()
    check_program(args.training_script, is_module=args.module, is_python=not args.no_python)
    num_processes = _num_processes(args.nproc_per_node)
    _check_output_options(args)
    _choose_rendezvous(args)
    with explained(ValueError):
        environment.token()
    from syncline.tools.launch.supervise import supervise

    variables = {"OMP_NUM_THREADS": str(environment.threads_per_rank(num_processes))}
    if args.max_restarts > 0 and not args.resilient:
        # Otherwise, restarted workers would find addresses of ended workers in the launcher's store, and hang.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The first argument that would set the number of processes if it stood before the script.
    late = next((one for one in args.training_script_args if re.fullmatch(r"-n\d*|--nproc.*", one)), None)
    if num_processes == 1 and late is not None:
        say(_NAME, f"1 process, because {late} stands after {args.training_script}: write it before")
    before = environment.export(variables)
    try:
        if args.verbose and "OMP_NUM_THREADS" in before:
            say(_NAME, f"OMP_NUM_THREADS is now {variables['OMP_NUM_THREADS']}: cores / processes")
        with Guardian(environment.for_child({})) as guardian, _display(args, guardian) as display:
            return supervise(_job(args, guardian, display))
    finally:
        environment.restore(before)


# ---------------------------------------------------------------------- the program


def check_system() -> None:
    """Raise a UsageError if the ranks of a program cannot be started on this system."""
    refuse(sys.platform == "win32", "needs Linux or macOS: on Windows, start the ranks with torchrun")


def check_program(program: str, *, is_module: bool, is_python: bool = True) -> None:
    """Check that a program exists.

    Args:
        program: the path of a script, or the name of a module or command.
        is_module: whether the program is a module.
        is_python: whether the program is a script or a module. False means that it is a command.

    Raises:
        UsageError: the program does not exist. For a script, the text suggests similar names if there are any.
        OSError: the script is no regular file, or this user may not read it.
    """
    refuse(is_module and not is_python, "-m and --no-python exclude each other: leave one of them out")
    if is_module:
        top, here = program.partition(".")[0], str(Path.cwd())
        found = PathFinder.find_spec(top, [here]) or (top and find_spec(top))
        refuse(not found, f"there is no module {program!r} in {here} or in {sys.prefix}")
    elif is_python:
        _check_script(Path(program))
    else:
        is_there = shutil.which(program)
        refuse(
            not is_there, f"there is no command {program!r} on PATH: check its name, or give its full path"
        )


def _check_script(script: Path) -> None:
    if script.exists():
        with open_regular(script)[0] as file:
            is_binary = b"\0" in file.read(4096)  # a program in Python has no null bytes
        refuse(is_binary, f"{script} is a binary file, not a script: run a command with --no-python")
        return
    names = [entry.name for entry in script.parent.iterdir() if entry.suffix == ".py"]
    near = [str(script.with_name(name)) for name in difflib.get_close_matches(script.name, names, n=3)]
    remedy = f": did you mean {' or '.join(near)}?" if near else ""
    if not near and script.suffix != ".py" and script.parent == Path():
        remedy = ": write -m before the name of a module, or --no-python before a command"
    raise UsageError(f"there is no script {script} in {script.parent.resolve()}{remedy}")


# ---------------------------------------------------------------------- number of processes, rendezvous


def _num_processes(text: str) -> int:
    """Return the number of processes that torchrun would start if its option -n had the value `text`, such as "gpu"."""
    if not text.isalpha():
        return int(text)
    from torch.distributed.run import determine_local_world_size

    with explained(ValueError, before=f"-n {text}: expected a number, auto, cpu, or gpu if there are GPUs: "):
        return int(determine_local_world_size(text))


def _choose_rendezvous(args: argparse.Namespace) -> None:
    """Choose the rendezvous of the ranks from the options in `args`, as torchrun does, and store it in `args`.

    Raises:
        UsageError: an option is invalid, or this host cannot listen at the port that it must open.
    """
    is_foreign = args.host is not None and not is_of_this_host(args.host)
    refuse(is_foreign, f"--host {args.host}: expected an address of this host")
    most = num_hosts(args.nnodes)[1]
    has_endpoint = args.rdzv_endpoint or (args.rdzv_backend != "c10d" and args.master_port is not None)
    if args.standalone or (most == 1 and args.rdzv_backend in ("static", "c10d") and not has_endpoint):
        # The kernel selects the port, and the id is unique, so that two jobs on one host never connect to each other.
        # Ranks cannot connect to a wildcard address.
        args.rdzv_backend, args.rdzv_id = "static", uuid.uuid4().hex
        args.rdzv_endpoint = f"{LOOPBACK if args.host in (None, '0.0.0.0', '::') else args.host}:0"
    option, host, port = _endpoint(args)
    if most == 1 and args.rdzv_backend == "c10d" and is_of_this_host(host):
        args.rdzv_backend = "static"  # torch's c10d rendezvous would listen on every interface
    if args.rdzv_backend == "static":
        text = f"--node-rank {args.node_rank}: expected a number below --nnodes {most}: hosts count from 0"
        refuse(args.node_rank >= most, text)
        args.host = args.host or (host if most == 1 else None)
        if args.node_rank == 0 and port and is_of_this_host(host):
            _check_port(args.host, port, f"port {port} ({option})")
    elif args.host:
        text = f"--host {args.host}: --rdzv-backend {args.rdzv_backend} cannot use --host"
        raise UsageError(f"{text}: use --master-addr and --master-port instead, or leave --host out")
    args.master_port = args.master_port or 29500  # torchrun's default for several hosts


def _endpoint(args: argparse.Namespace) -> tuple[str, str, int]:
    """Return the endpoint of the rendezvous.

    Returns:
        The name of the option that sets the endpoint, and the host and the port of the endpoint. Port 0 means any free
        port.
    """
    if not args.rdzv_endpoint:
        return "--master-port", args.master_addr, args.master_port or 29500
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    with explained(ValueError, before=f"--rdzv-endpoint {args.rdzv_endpoint}: "):
        return "--rdzv-endpoint", *parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)


def _check_port(host: str | None, port: int, name: str) -> None:
    """Check that the store can listen at a port. A host of None means every interface."""
    family = socket.AF_INET6 if (dual := socket.has_dualstack_ipv6()) else socket.AF_INET
    try:
        if host is not None:
            bound_socket(host, port).close()
        else:
            socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error})"
        raise UsageError(f"{name} {reason} on this host: choose another one, on all hosts") from None


# ---------------------------------------------------------------------- the job


def _display(args: argparse.Namespace, guardian: Guardian) -> AbstractContextManager[Display]:
    """Return a context with the display that `--live` asks for, or with the usual one."""
    fd = terminal_fd() if args.live else None
    if args.live and fd is None:
        say(
            _NAME,
            "--live needs a terminal, but neither stderr nor stdout is one: the run goes on without it. With "
            "--trace DIR, syncline watch DIR shows the same in another terminal",
        )
    args.live = fd is not None
    if fd is None:
        return nullcontext(Display())
    return Live(Path(args.trace or guardian.folder / "trace"), fd)


def _job(args: argparse.Namespace, guardian: Guardian, display: Display) -> Job:
    from torch.distributed.run import config_from_args, get_args_parser

    from syncline.tools.launch.supervise import Job, listen_at

    wants_torch_logs = _wants_torch_logs(args)
    keep_in = Path(args.log_dir) if args.log_dir else None
    # Without a folder, torch creates one of its own that is never removed.
    args.log_dir = str(keep_in or guardian.folder) if wants_torch_logs else os.devnull
    # A newer torch may have more options. Its parser does not read the environment: that of `syncline run` has.
    defaults = argparse.Namespace(**{one.dest: one.default for one in get_args_parser()._actions})
    vars(defaults).update(vars(args))
    with explained(ValueError, RuntimeError, AssertionError, KeyError):
        config, command, arguments = config_from_args(defaults)
    if args.log_line_prefix_template is not None:  # torch before 2.15 reads it from the environment only
        config.log_line_prefix_template = args.log_line_prefix_template
    if config.rdzv_backend == "static":
        listen_at(config, args.host)
    is_python = not args.no_python
    if not args.run_path:
        command = command if is_python else sys.executable
        program = [args.training_script, *args.training_script_args]
        before = _trace_call(args, guardian)
        arguments = worker_command(program, is_module=args.module, is_python=is_python, before=before)
    return Job(
        config=config,
        command=command,
        arguments=arguments,
        guardian=guardian,
        torch_logs=config.logs_specs if wants_torch_logs else None,
        keep_logs_in=keep_in,
        is_python=is_python,
        shutdown_seconds=args.shutdown_timeout,
        is_resilient=args.resilient,
        verbose=args.verbose,
        display=display,
    )


def _trace_call(args: argparse.Namespace, guardian: Guardian) -> tuple[str, str] | None:
    """Return the module and the argument that start the trace in each rank; None if there is no trace."""
    if args.trace is None and not args.live:
        return None
    from syncline.tracing.launched import argument

    if args.trace is None:
        return "syncline.tracing.launched", argument(guardian.folder / "trace", _LIVE_MAX_MB)
    return "syncline.tracing.launched", argument(Path(args.trace).absolute(), _TRACE_MAX_MB)


def _check_output_options(args: argparse.Namespace) -> None:
    """Check that the options `--trace`, `--live` and `--log-line-prefix-template` fit to the others."""
    option = "--live" if args.live else "--trace"
    is_foreign = (args.live or args.trace is not None) and (args.no_python or args.run_path)
    refuse(is_foreign, f"{option} needs a program in Python: call sl.trace in the program instead")
    is_both = args.live and _wants_torch_logs(args)
    refuse(is_both, "--live cannot be combined with --tee, --redirects or a filter: use --trace DIR instead")
    is_both = args.log_line_prefix_template == "" and args.tee != "0"
    refuse(
        is_both, "--log-line-prefix-template '': with --tee, torch prints the lines: leave one of them out"
    )
    # If there can be several hosts, one that joins later finds files of the others.
    is_used = args.trace and num_hosts(args.nnodes) == (1, 1) and any(Path(args.trace).glob(f"*{SUFFIX}"))
    refuse(is_used, f"--trace {args.trace}: has the trace of another run: delete it, or name another folder")


def _wants_torch_logs(args: argparse.Namespace) -> bool:
    """Return whether an option requests torch's own log files."""
    return (args.tee, args.redirects, args.logs_specs) != ("0", "0", None) or bool(
        args.local_ranks_filter or args.duplicate_stdout_filters or args.duplicate_stderr_filters
    )
