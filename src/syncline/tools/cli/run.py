"""`syncline run`: check the command line before any process is started, then run the job.

An import of torch takes seconds. Functions that need torch therefore import it themselves, so that help texts and most
errors appear without a wait for torch.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib.machinery
import importlib.util
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from syncline import environment
from syncline.session.listening import LOOPBACK, bound_socket, is_of_this_host
from syncline.tools.cli.options import UsageError, parse_run
from syncline.tools.cli.values import MOST_HOSTS, MOST_RANKS, check_input, check_number, is_text
from syncline.tools.launch.command import worker_command
from syncline.tools.launch.guardian import Guardian
from syncline.tools.watch.live import Live, terminal_fd
from syncline.tracing.file import SUFFIX

if TYPE_CHECKING:
    from syncline.tools.launch.display import Display
    from syncline.tools.launch.supervise import Job

_TRACE_MAX_MB = 64
"""The largest size of what one rank records with `--trace`."""

_LIVE_MAX_MB = 8
"""The largest size of what one rank records for `--live` alone. It is deleted at the end."""

_CHECKED_BACKENDS = ("static", "c10d")
"""The rendezvous backends whose endpoint is a host and a port. This module chooses or checks that port."""


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
    try:
        environment.token()
    except ValueError as error:
        raise UsageError(str(error)) from None
    from syncline.tools.launch.display import Display
    from syncline.tools.launch.output import say
    from syncline.tools.launch.supervise import supervise

    variables = {"OMP_NUM_THREADS": str(environment.threads_per_rank(num_processes))}
    if args.max_restarts > 0 and not args.resilient:
        # Otherwise, restarted workers would find addresses of ended workers in the launcher's store, and hang.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    before = environment.export(variables)
    try:
        late = _late_option(args.training_script_args)
        if num_processes == 1 and late is not None:
            say(
                f"1 process, because {late} stands after {args.training_script}, which gets it. For more: "
                "syncline run -n 2 SCRIPT [arguments of the script]"
            )
        if args.verbose and "OMP_NUM_THREADS" in before:
            say(f"OMP_NUM_THREADS was not set; it is now {variables['OMP_NUM_THREADS']} (cores / processes)")
        with Guardian(environment.for_child({})) as guardian, _display(args, guardian) as display:
            return supervise(_job(args, guardian, display or Display()))
    finally:
        environment.restore(before)


def _late_option(arguments: Sequence[str]) -> str | None:
    """Return the first argument that would set the number of processes if it stood before the script."""
    return next((one for one in arguments if re.fullmatch(r"-n\d*|--nproc.*", one)), None)


# ---------------------------------------------------------------------- the program


def check_system() -> None:
    """Raise a UsageError if the ranks of a program cannot be started on this system."""
    if sys.platform == "win32":
        raise UsageError("needs Linux or macOS, but this system is Windows: start the ranks with torchrun")


def check_program(program: str, *, is_module: bool, is_python: bool) -> None:
    """Check that a program exists.

    Args:
        program: the path of a script, or the name of a module or command.
        is_module: whether the program is a module.
        is_python: whether the program is a script or a module. False means that it is a command.

    Raises:
        UsageError: the program does not exist. For a script, the text suggests similar names if there are any.
    """
    if is_module and not is_python:
        raise UsageError(
            "-m and --no-python exclude each other: -m runs a module with python, and --no-python runs a program "
            "without python. Leave one of them out"
        )
    if not is_python:
        if shutil.which(program) is None:
            raise UsageError(
                f"there is no executable command {program!r} on PATH: check its name, or give its full path"
            )
    elif is_module:
        _check_module(program)
    else:
        _check_script(Path(program))


def _check_script(script: Path) -> None:
    if script.exists() and not script.is_dir():
        check_input("", script)
        if not is_text(script):
            raise UsageError(
                f"{script} is a binary file, not a script in Python: to run it as it is, use syncline run --no-python"
            )
        return
    if script.is_dir():
        has_main = (script / "__main__.py").is_file()
        remedy = f"use {script / '__main__.py'}" if has_main else "name a script in this directory"
        raise UsageError(f"{script} is a directory, not a script: {remedy}")
    if not script.parent.is_dir():
        raise UsageError(f"there is no script {script}: {Path.cwd()} has no folder {script.parent}")
    names = [entry.name for entry in script.parent.iterdir() if entry.suffix == ".py"]
    near = difflib.get_close_matches(script.name, names, n=3)
    remedy = ""
    if near:
        remedy = f": did you mean {' or '.join(str(script.with_name(name)) for name in near)}?"
    elif script.suffix != ".py" and script.parent == Path():
        remedy = ": write -m before the name of a module, or --no-python before a command"
    raise UsageError(f"there is no script {script} in {script.parent.resolve()}{remedy}")


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    found = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())]) or (
        importlib.util.find_spec(top) if top else None
    )
    if found is None:
        raise UsageError(f"there is no module {name!r} in {Path.cwd()} or in {sys.prefix}")


# ---------------------------------------------------------------------- number of processes, rendezvous


def _num_processes(text: str) -> int:
    count = int(text) if re.fullmatch(r"\s*[+-]?\d{1,20}\s*", text) else _num_devices(text)
    check_number(
        "-n", count, 1, MOST_RANKS, "processes on this host" if count > 1 else "process on this host"
    )
    return count


def _num_devices(text: str) -> int:
    """Return the number of processes that torchrun would start if its option -n had the value `text`, such as "gpu"."""
    from torch.distributed.run import determine_local_world_size

    try:
        count: int = determine_local_world_size(text)
    except ValueError as error:
        if "available" in str(error):
            raise UsageError(
                f"-n {text}: torch finds no device of this kind on this host: use -n auto, or a number of processes"
            ) from None
        raise UsageError(
            f"-n {text}: expected a number of processes of at least 1, or one of the words auto, cpu and gpu"
        ) from None
    return count


def _num_hosts(text: str) -> tuple[int, int]:
    """Parse a text such as "1:4" or "2". Return the smallest and the largest number of hosts."""
    least, colon, most = text.partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        raise UsageError(f"--nnodes {text}: expected a number of hosts, or MIN:MAX") from None


def _choose_rendezvous(args: argparse.Namespace) -> None:
    """Choose the rendezvous of the ranks from the options in `args`, as torchrun does, and store it in `args`.

    Raises:
        UsageError: an option is invalid, or this host cannot listen at the port that it must open.
    """
    least, most = _num_hosts(args.nnodes)
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {args.nnodes}: expected at least 1 host, and MIN <= MAX in MIN:MAX")
    check_number("--nnodes", most, 1, MOST_HOSTS, "hosts")
    if args.rdzv_backend == "static" and args.node_rank >= most:
        raise UsageError(
            f"--node-rank {args.node_rank}: expected a number below --nnodes {most}: hosts count from 0"
        )
    check_number("--node-rank", args.node_rank, 0, MOST_HOSTS)
    check_number("--max-restarts", args.max_restarts, 0, 1_000_000, "restarts")
    check_number("--monitor-interval", args.monitor_interval, 0, 3600, "seconds")
    check_number("--shutdown-timeout", args.shutdown_timeout, 0, 1_000_000, "seconds")
    if args.master_port is not None and not 1 <= args.master_port <= 65535:
        raise UsageError(
            f"--master-port {args.master_port}: expected a port from 1 to 65535. Leave the option out for any free port"
        )
    if args.host is not None and not is_of_this_host(args.host):
        raise UsageError(f"--host {args.host}: expected an address of this host")
    is_one_host = most == 1
    is_checked = args.rdzv_backend in _CHECKED_BACKENDS
    has_endpoint = args.rdzv_endpoint or (args.rdzv_backend != "c10d" and args.master_port is not None)
    if args.standalone or (is_one_host and is_checked and not has_endpoint):
        # The kernel selects the port, and the id is unique, so that two jobs on one host never connect to each other.
        # Ranks cannot connect to a wildcard address.
        args.rdzv_backend, args.rdzv_id = "static", uuid.uuid4().hex
        args.rdzv_endpoint = f"{LOOPBACK if args.host in (None, '0.0.0.0', '::') else args.host}:0"
    if is_one_host and args.rdzv_backend == "c10d" and is_of_this_host(_endpoint(args)[1]):
        args.rdzv_backend = "static"  # torch's c10d rendezvous would listen on every interface
    if args.rdzv_backend == "static" and is_one_host:
        args.host = args.host or _endpoint(args)[1]
    elif args.host is not None and args.rdzv_backend != "static":
        raise UsageError(
            f"--host {args.host}: --rdzv-backend {args.rdzv_backend} cannot use --host. Use --master-addr and "
            "--master-port instead of --rdzv-backend, or leave --host out"
        )
    if is_one_host or (args.rdzv_backend == "static" and args.node_rank == 0):
        _check_port(
            args, "leave it out, or choose another" if is_one_host else "choose another, on all hosts"
        )
    if args.master_port is None:
        args.master_port = 29500  # torchrun's default for several hosts


def _endpoint(args: argparse.Namespace) -> tuple[str, str, int]:
    """Return the endpoint of the rendezvous.

    Returns:
        The name of the option that sets the endpoint, and the host and the port of the endpoint. Port 0 means any free
        port.
    """
    if not args.rdzv_endpoint:
        return "--master-port", args.master_addr, args.master_port or 29500
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint {args.rdzv_endpoint}: {error}") from None
    return "--rdzv-endpoint", host, port


def _check_port(args: argparse.Namespace, remedy: str) -> None:
    """Check that this host can listen at the endpoint of the rendezvous, if the endpoint is on this host.

    Raises:
        UsageError: this host cannot listen there. The text ends with `remedy`.
    """
    option, host, port = _endpoint(args)
    if args.rdzv_backend not in _CHECKED_BACKENDS or port == 0 or not is_of_this_host(host):
        return
    dual = socket.has_dualstack_ipv6()
    try:
        if args.host is not None:
            bound_socket(args.host, port).close()
        else:  # the store will listen on every interface
            family = socket.AF_INET6 if dual else socket.AF_INET
            socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        reasons = {errno.EADDRINUSE: "is in use on this host", errno.EACCES: "needs more privileges"}
        reason = reasons.get(error.errno or 0, f"cannot be used ({error})")
        raise UsageError(f"port {port} ({option}) {reason}: {remedy}") from None


# ---------------------------------------------------------------------- the job


def _display(args: argparse.Namespace, guardian: Guardian) -> AbstractContextManager[Display | None]:
    """Return a context with the display that `--live` asks for, or with None."""
    if not args.live:
        return nullcontext()
    from syncline.tools.launch.output import say

    if (fd := terminal_fd()) is None:
        say(
            "--live needs a terminal, but neither stderr nor stdout is one: the run goes on without it. With "
            "--trace DIR, syncline watch DIR shows the same in another terminal"
        )
        args.live = False
        return nullcontext()
    directory = guardian.folder / "trace" if args.trace is None else Path(args.trace)
    return Live(directory, fd, has_other_hosts=_num_hosts(args.nnodes)[1] > 1)


def _job(args: argparse.Namespace, guardian: Guardian, display: Display) -> Job:
    from torch.distributed.run import config_from_args, get_args_parser

    from syncline.tools.launch.supervise import Job, listen_at

    wants_torch_logs = _wants_torch_logs(args)
    keep_in = Path(args.log_dir) if args.log_dir else None
    if keep_in is not None and keep_in.exists() and not keep_in.is_dir():
        raise UsageError(f"--log-dir {keep_in}: expected a folder, got a file")
    # Without a folder, torch creates one of its own that is never removed.
    args.log_dir = str(keep_in or guardian.folder) if wants_torch_logs else os.devnull
    # A newer torch may expect an option that `parse_run` does not know.
    for action in get_args_parser()._actions:
        if not hasattr(args, action.dest):
            setattr(args, action.dest, action.default)
    try:
        config, command, arguments = config_from_args(args)
    except (ValueError, RuntimeError, AssertionError, KeyError) as error:
        raise UsageError(f"{error}; see syncline run --help") from None
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
        text = argument(guardian.folder / "trace", _LIVE_MAX_MB)
    else:
        text = argument(_trace_directory(args), _TRACE_MAX_MB)
    return "syncline.tracing.launched", text


def _check_output_options(args: argparse.Namespace) -> None:
    """Check that the options `--trace` and `--live` fit to the others."""
    for name, is_given in (("--live", args.live), ("--trace", args.trace is not None)):
        if is_given and (args.no_python or args.run_path):
            raise UsageError(f"{name} needs a program in Python: call sl.trace in the program instead")
    if args.live and _wants_torch_logs(args):
        raise UsageError(
            "--live cannot be combined with --tee, --redirects and the other options of torch's own log files: leave "
            "--live out, and use --trace DIR and syncline watch DIR"
        )
    if args.log_line_prefix_template == "" and args.tee != "0":
        raise UsageError(
            "--log-line-prefix-template '': with --tee, torch prints the lines, and always with a text before them: "
            "leave one of the two options out"
        )


def _trace_directory(args: argparse.Namespace) -> Path:
    text = args.trace
    directory = Path(text)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--trace {text}: expected a folder, got a file")
    is_alone = args.nnodes in ("1", "1:1")  # a host that joins later finds files of the others
    if is_alone and directory.is_dir() and any(path.name.endswith(SUFFIX) for path in directory.iterdir()):
        raise UsageError(
            f"--trace {text}: this folder has the trace of another run: delete it, or name another folder"
        )
    return directory.absolute()


def _wants_torch_logs(args: argparse.Namespace) -> bool:
    """Check the options that request torch's own log files. Return True if the user has set any of them."""
    for option, text in (("--tee", args.tee), ("--redirects", args.redirects)):
        if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
            raise UsageError(
                f"{option} {text}: expected 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or such a number for "
                "each local rank, as in 0:3,1:2"
            )
    return (
        (args.tee, args.redirects) != ("0", "0")
        or bool(args.local_ranks_filter or args.duplicate_stdout_filters or args.duplicate_stderr_filters)
        or args.logs_specs is not None
    )
