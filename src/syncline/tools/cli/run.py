"""`syncline run`: look at everything that can be wrong before a process starts, then start the job.

Torch takes seconds to import. So functions import it, and what imports it, where they need it: help and most mistakes
are answered without.
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
from pathlib import Path
from typing import TYPE_CHECKING

from syncline import environment
from syncline.session.listening import LOOPBACK, bound_socket
from syncline.tools.cli import options
from syncline.tools.cli.options import UsageError
from syncline.tools.launch.guardian import Guardian

if TYPE_CHECKING:
    from syncline.tools.launch.supervise import Job


_GRACE_SECONDS = 5.0

_SAVING_SECONDS = 30.0


def main(argv: Sequence[str]) -> int:
    """Run `syncline run` with these arguments.

    Returns:
        0 if all ranks succeeded; 75 (`EXIT_STOPPED`) if all ranks stopped as requested; 2 for wrong usage, before any
        process is started; else the exit code of the rank that failed first, or 128 + the number of the signal that
        ended the launcher.
    """
    try:
        args = options.parse(argv)
        check_program(args.training_script, is_module=args.module, is_python=not args.no_python)
        num_processes = _num_processes(args.nproc_per_node)
        _choose_meeting_point(args)
        environment.token()
    except (UsageError, ValueError) as error:
        print(f"syncline run: {error}", file=sys.stderr)
        return 2
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)
    return _start(args, num_processes)


def _start(args: argparse.Namespace, num_processes: int) -> int:
    """Run the job that these arguments describe, and return the exit code."""
    from syncline.tools.launch.supervise import say, supervise

    variables = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_processes))}
    if args.max_restarts > 0:
        # Otherwise, restarted workers would find addresses of ended workers in the launcher's store, and hang.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    before = environment.export(variables)
    try:
        if args.verbose and "OMP_NUM_THREADS" in before:
            say(f"OMP_NUM_THREADS={variables['OMP_NUM_THREADS']} (cores / processes, as it was not set)")
        with Guardian(environment.for_child({})) as guardian:
            return supervise(_job(args, guardian))
    except UsageError as error:
        say(str(error))
        return 2
    finally:
        environment.restore(before)


# ---------------------------------------------------------------------- the program


def check_program(program: str, *, is_module: bool, is_python: bool) -> None:
    """Check that the script, module or command exists.

    Raises:
        UsageError: it does not exist. The text suggests what may be meant.
    """
    if is_module and not is_python:
        raise UsageError("-m and --no-python exclude each other: a module needs python")
    if not is_python:
        if shutil.which(program) is None:
            raise UsageError(f"no command {program!r} on PATH, or it is not executable")
    elif is_module:
        _check_module(program)
    else:
        _check_script(Path(program))


def _check_script(script: Path) -> None:
    if script.is_file():
        return
    if script.is_dir():
        has_main = (script / "__main__.py").is_file()
        remedy = f"name {script / '__main__.py'}" if has_main else "name a script in it"
        raise UsageError(f"{script} is a directory, not a script: {remedy}")
    if not script.parent.is_dir():
        raise UsageError(f"no script {script}: there is no folder {script.parent} in {Path.cwd()}")
    names = [entry.name for entry in script.parent.iterdir() if entry.suffix == ".py"]
    near = difflib.get_close_matches(script.name, names, n=3)
    remedy = ""
    if near:
        remedy = f": did you mean {' or '.join(str(script.with_name(name)) for name in near)}?"
    elif script.suffix != ".py" and script.parent == Path():
        remedy = ": a module is named after -m, a command after --no-python"
    raise UsageError(f"no script {script} in {script.parent.resolve()}{remedy}")


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    found = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())]) or (
        importlib.util.find_spec(top) if top else None
    )
    if found is None:
        raise UsageError(f"no module {name!r}: looked in {Path.cwd()} and in {sys.prefix}")


# ---------------------------------------------------------------------- number of processes, meeting point


def _num_processes(text: str) -> int:
    count = int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) else _num_devices(text)
    if count < 1:
        raise UsageError(f"-n {text}: expected at least 1 process on this host")
    return count


def _num_devices(text: str) -> int:
    """Return how many processes torchrun starts for a word, such as "gpu"."""
    from torch.distributed.run import determine_local_world_size

    try:
        count: int = determine_local_world_size(text)
    except ValueError as error:
        if "available" in str(error):
            raise UsageError(
                f"-n {text}: torch finds no {text} on this host; use -n auto, or a number"
            ) from None
        raise UsageError(f"-n {text}: expected a number from 1, or auto, cpu or gpu") from None
    return count


def _num_hosts(text: str) -> tuple[int, int]:
    """Return the least and the most hosts: "MIN:MAX", or one number for both."""
    least, colon, most = text.partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        raise UsageError(f"--nnodes {text}: expected a number of hosts, or MIN:MAX") from None


def _choose_meeting_point(args: argparse.Namespace) -> None:
    """Decide where the ranks meet, as torchrun does, and see that this host can offer it."""
    least, most = _num_hosts(args.nnodes)
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {args.nnodes}: expected 1 <= MIN <= MAX hosts")
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts {args.max_restarts}: expected 0 or more")
    if args.master_port is not None and not 1 <= args.master_port <= 65535:
        raise UsageError(
            f"--master-port {args.master_port}: expected 1 to 65535; leave it out for any free port"
        )
    if args.host is not None and not _is_this_host(args.host):
        raise UsageError(f"--host {args.host}: expected an address of this host")
    one_host = most == 1
    nowhere_named = not args.rdzv_endpoint and (args.rdzv_backend == "c10d" or args.master_port is None)
    if args.standalone or (one_host and nowhere_named and args.rdzv_backend in ("static", "c10d")):
        # The kernel selects the port and the name is unique, so that two jobs on one host never meet.
        args.rdzv_backend, args.rdzv_id = "static", uuid.uuid4().hex
        args.rdzv_endpoint = f"{_address_for_ranks(args)}:0"
    if one_host and args.rdzv_backend == "c10d" and _is_this_host(_endpoint(args)[1]):
        args.rdzv_backend = "static"  # torch's c10d rendezvous would listen on every interface
    if args.rdzv_backend == "static" and one_host:
        args.host = args.host or _endpoint(args)[1]
    elif args.host is not None and args.rdzv_backend != "static":
        raise UsageError(
            f"--host {args.host}: not known to --rdzv-backend {args.rdzv_backend}. Meet at --master-addr and "
            "--master-port, or leave it out"
        )
    if one_host or (args.rdzv_backend == "static" and args.node_rank == 0):
        _check_port(
            args, remedy="leave it out, or choose another" if one_host else "choose another, on all hosts"
        )
    if args.master_port is None:
        args.master_port = 29500  # torchrun's default for several hosts


def _address_for_ranks(args: argparse.Namespace) -> str:
    """Return the address to which ranks on this host connect. They cannot connect to a wildcard address."""
    return LOOPBACK if args.host in (None, "0.0.0.0", "::") else args.host


def _endpoint(args: argparse.Namespace) -> tuple[str, str, int]:
    """Return the endpoint at which the hosts meet: the option that sets it, the host, and the port (0 for any)."""
    if not args.rdzv_endpoint:
        return "--master-port", args.master_addr, args.master_port or 29500
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint {args.rdzv_endpoint}: {error}") from None
    return "--rdzv-endpoint", host, port


def _check_port(args: argparse.Namespace, *, remedy: str) -> None:
    """Raise a UsageError if this host must listen at the endpoint and cannot."""
    option, host, port = _endpoint(args)
    if args.rdzv_backend not in ("static", "c10d") or port == 0 or not _is_this_host(host):
        return
    reason = _why_not_listen(args.host, port)
    if reason:
        raise UsageError(f"port {port} ({option}) {reason}: {remedy}")


def _is_this_host(host: str) -> bool:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _why_not_listen(address: str | None, port: int) -> str | None:
    """Return why a store cannot listen at an address of this host (None means every interface); None if it can."""
    dual = socket.has_dualstack_ipv6()
    try:
        if address is not None:
            bound_socket(address, port).close()
        else:
            family = socket.AF_INET6 if dual else socket.AF_INET
            socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        reasons = {errno.EADDRINUSE: "is in use on this host", errno.EACCES: "needs more rights"}
        return reasons.get(error.errno or 0, f"cannot be had ({error})")
    return None


# ---------------------------------------------------------------------- the job


def _job(args: argparse.Namespace, guardian: Guardian) -> Job:
    from torch.distributed.run import config_from_args, get_args_parser

    from syncline.tools.launch.supervise import Job, listen_at, worker_command

    wants_torch_logs = (
        args.tee != "0"
        or args.redirects != "0"
        or bool(args.local_ranks_filter or args.duplicate_stdout_filters or args.duplicate_stderr_filters)
        or args.logs_specs is not None
    )
    for option, text in (("--tee", args.tee), ("--redirects", args.redirects)):
        if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
            raise UsageError(
                f"{option} {text}: expected 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or that for each "
                "local rank, such as 0:3,1:2"
            )
    keep_in = Path(args.log_dir) if args.log_dir else None
    if keep_in is not None and keep_in.exists() and not keep_in.is_dir():
        raise UsageError(f"--log-dir {keep_in}: expected a folder, got a file")
    # Without a folder, torch creates one of its own that is never removed.
    args.log_dir = str(keep_in or guardian.folder) if wants_torch_logs else os.devnull
    for action in get_args_parser()._actions:  # a newer torch may expect an option that we do not know
        if not hasattr(args, action.dest):
            setattr(args, action.dest, action.default)
    grace_seconds = args.shutdown_timeout
    try:
        config, command, arguments = config_from_args(args)
    except (ValueError, RuntimeError, AssertionError, KeyError) as error:
        raise UsageError(f"{error}; see syncline run --help") from None
    if args.log_line_prefix_template:  # torch before 2.15 reads it from the environment only
        config.log_line_prefix_template = args.log_line_prefix_template
    if args.host is not None and config.rdzv_backend == "static":
        listen_at(config, args.host)
    if not args.run_path:
        program = [args.training_script, *args.training_script_args]
        is_python = not args.no_python
        arguments = worker_command(program, is_module=args.module, is_python=is_python)
        command = command if is_python else sys.executable
    return Job(
        config=config,
        command=command,
        arguments=arguments,
        scratch=guardian.folder,
        guardian=guardian,
        torch_logs=config.logs_specs if wants_torch_logs else None,
        keep_logs_in=keep_in,
        is_python=not args.no_python,
        grace_seconds=_GRACE_SECONDS if grace_seconds is None else float(grace_seconds),
        saving_seconds=_SAVING_SECONDS if grace_seconds is None else float(grace_seconds),
        verbose=args.verbose,
    )
