"""The run of one job from start to exit code, on torch's elastic launcher, with a store at which its processes meet.

[Note: why not torch's rendezvous]

Torch's own rendezvous opens two stores that listen on every interface of the host. A store has no password: every
process that can connect can read and write. A job on one host needs one store, on the loopback interface. With several
hosts, the user may set the address (`--host`). A restart on one host creates a new store, so that ranks never find
addresses of ranks that have ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from syncline import environment
from syncline._torch.process_groups import PrefixStore, Store, TCPStore
from syncline.session.listening import LOOPBACK, bound_socket, interface_of
from syncline.session.stop_request import EXIT_STOPPED
from syncline.tools.launch.failures import Failure, describe, first_failure, read_last_words
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.output import DEFAULT_PREFIX, RankLogs, TorchLogs
from syncline.tools.launch.stopping import (
    Interruption,
    Stops,
    kill_left_behind,
    kill_workers,
    time_for_last_words,
    worker_groups,
)

_BACKEND = "syncline"

_ADDRESS = "listen_at"

_TIMEOUT_SECONDS = 600.0


def listen_at(config: LaunchConfig, address: str) -> None:
    """Make the store of the first host listen at `address` only.

    Args:
        config: configuration of a static rendezvous. Other hosts connect to its endpoint; port 0 means any free port.
        address: an address of this host.
    """
    config.rdzv_backend = _BACKEND
    config.rdzv_configs[_ADDRESS] = address
    rendezvous_handler_registry.register(_BACKEND, _Meeting)


def config_for_this_host(num_processes: int, **others: Any) -> LaunchConfig:
    """Return torch's configuration of a job on this host that other hosts cannot reach."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_endpoint=f"{LOOPBACK}:0",
        max_restarts=0,
        **others,
    )
    listen_at(config, LOOPBACK)
    return config


def socket_variables(config: LaunchConfig) -> dict[str, str]:
    """Return the variables that make Gloo and NCCL use the same network interface as the store."""
    address = config.rdzv_configs.get(_ADDRESS)
    interface = interface_of(address) if address else None
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


class _Meeting(RendezvousHandler):
    """A rendezvous of hosts whose numbers, from 0, are set on the command line. The first host opens the store."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._host_rank = int(parameters.config.get("rank", 0))
        self._num_hosts = parameters.max_nodes
        self._listen_at = str(parameters.config[_ADDRESS])
        self._timeout = timedelta(seconds=float(parameters.config.get("timeout", _TIMEOUT_SECONDS)))
        self._host, self._port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None or self._port == 0:
            self._store = self._open()
        store: Store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(
            store, self._host_rank, self._num_hosts, RendezvousStoreInfo(self._host, self._store.port)
        )

    def _open(self) -> TCPStore:
        is_first = self._host_rank == 0
        bound = bound_socket(self._listen_at, self._port) if is_first else None
        port = self._port if bound is None else bound.getsockname()[1]
        return TCPStore(
            self._host,
            port,
            self._num_hosts,
            is_first,
            self._timeout,
            multi_tenant=True,
            master_listen_fd=None if bound is None else bound.detach(),
        )

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


WORKER = Path(__file__).with_name("worker.py")

_LAST_WORDS_SECONDS = 1.0
"""How long the peers of a killed worker have to report their own errors."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The description of one job."""

    config: LaunchConfig
    """Torch's configuration of the job. Its `logs_specs` and `signals_to_handle` are replaced."""
    command: str | Callable[..., object]
    """Command or function that torch starts in each rank."""
    arguments: Sequence[str]
    """Arguments of the command."""
    scratch: Path
    """An empty folder, the guardian's folder or one inside it."""
    guardian: Guardian
    """The guardian, which cleans up if this process is killed."""
    torch_logs: LogsSpecs | None = None
    """Torch's own handling of the ranks' output (by log files), if the user requested it."""
    keep_logs_in: Path | None = None
    """A folder in which to keep the ranks' output; None keeps no logs."""
    is_python: bool = True
    """Whether each worker is a Python program, not a command that may start one."""
    grace_seconds: float = 5.0
    """How long workers may run after a signal."""
    saving_seconds: float = 30.0
    """How long workers may run after SIGTERM, at which they may save."""
    verbose: bool = False
    """Whether torch's own log lines are shown."""


def say(text: str) -> None:
    """Print one message for the user on stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(f"syncline run: {text}", file=sys.stderr, flush=True)


def worker_command(
    program: Sequence[str],
    *,
    is_module: bool = False,
    is_python: bool = True,
    before: tuple[str, str] | None = None,
) -> list[str]:
    """Return the arguments with which Python runs `program` as a worker of this process.

    Args:
        program: a script, a module or a command, and its arguments.
        is_module: whether the program is a module, as in python -m.
        is_python: whether the program is a script or module, not a command.
        before: name of a module whose `main` is called first in the same process, and the argument of the call.
    """
    kind = ["-m"] if is_module else [] if is_python else ["--exec"]
    first = ["--before", *before] if before is not None else []
    return [str(WORKER), str(os.getpid()), *first, *kind, *program]


def supervise(job: Job) -> int:
    """Run `job` to its end. Failures are reported on stderr and not raised.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` if all ranks stopped as requested, or the exit code of the rank that failed
        first, or 128 + the number of the signal that ended the launcher.
    """
    mark = f"{os.getpid()}-{uuid.uuid4().hex}"
    config = job.config
    before = environment.export({environment.RUN_MARK: mark}, replace=True)
    before |= environment.export(socket_variables(config))
    if (
        config.max_nodes == 1
    ):  # with several hosts there is no safe way to distribute a token, so the user sets it or there is none
        before |= environment.export({environment.TOKEN: secrets.token_hex(32)})
    logs: RankLogs | TorchLogs
    config.log_line_prefix_template = prefix = config.log_line_prefix_template or DEFAULT_PREFIX
    if job.torch_logs is None:
        logs = RankLogs(scratch=job.scratch, keep_in=job.keep_logs_in, prefix=prefix, say=say)
    else:
        logs = TorchLogs(job.torch_logs)
    config.logs_specs = logs
    names = [name.strip() for name in config.signals_to_handle.split(",")]
    # With an empty list, torch's launcher installs no handlers. Our handlers raise torch's own exception.
    config.signals_to_handle = ""
    groups: set[int] = set()
    stops = Stops(
        whole_groups=not job.is_python, on_start=lambda sessions: job.guardian.watch(mark, sessions)
    )
    interruption = Interruption(
        [name for name in names if name],
        grace_seconds=job.grace_seconds,
        saving_seconds=job.saving_seconds,
        pass_on=stops.pass_on,
        note=lambda: groups.update(worker_groups(mark)),
        kill=lambda: kill_workers(mark),
    )
    try:
        with (
            stops,
            interruption,
            _without_torch_logs(job.verbose),
            time_for_last_words(_LAST_WORDS_SECONDS, logs.note_ended),
        ):
            failure = _launch(job)
            interruption.end()
            kill_workers(mark)
            if isinstance(failure, ChildFailedError):
                groups.update(child.pid for child in failure.failures.values())
            kill_left_behind(mark, groups)
            logs.stop()
            if stops.have_stopped and failure is None:
                _say_where_logs_are(job, logs)
                say(f"all ranks on this host have stopped, exit code {EXIT_STOPPED}: start again to resume")
                return EXIT_STOPPED
            return _finish(job, logs, interruption.received, failure)
    finally:
        environment.restore(before)


def _launch(job: Job) -> Exception | None:
    """Run the job. Return the exception that ended it, or None after success."""
    try:
        elastic_launch(job.config, job.command)(*job.arguments)
    except Exception as error:
        return error
    return None


def _finish(
    job: Job,
    logs: RankLogs | TorchLogs,
    received: signal.Signals | None,
    failure: Exception | None,
) -> int:
    """Report how the job ended, and return the exit code."""
    _say_where_logs_are(job, logs)
    if received is not None:
        say(f"stopped by {received.name}, all workers on this host have ended")
        return 128 + received
    if failure is None:
        return 0
    if not isinstance(failure, ChildFailedError):
        if job.verbose:
            traceback.print_exception(failure)
        say(_could_not_run(failure))
        return 1
    failures = _failures(failure.failures, logs)
    say(describe(failures, host=socket.gethostname(), more_hosts=job.config.max_nodes > 1))
    return first_failure(failures).exit_code


def _say_where_logs_are(job: Job, logs: RankLogs | TorchLogs) -> None:
    if job.keep_logs_in is not None and logs.kept is not None:
        say(f"logs are in {logs.kept}")


def _failures(failures: Mapping[int, ProcessFailure], logs: RankLogs | TorchLogs) -> list[Failure]:
    return [
        Failure(
            rank=rank,
            pid=failure.pid,
            return_code=failure.exitcode,
            words=read_last_words(failure.error_file),
            stderr_tail=logs.stderr_tail(failure.local_rank),
        )
        for rank, failure in failures.items()
    ]


def _could_not_run(failure: Exception) -> str:
    text = str(failure)
    first_line = text.strip().partition("\n")[0]
    if "address already in use" in text.lower() or "EADDRINUSE" in text:
        return f"the port of the ranks' rendezvous was taken meanwhile ({first_line}): start again"
    return f"could not run the workers: {type(failure).__name__}: {first_line} (--verbose shows more)"


@contextlib.contextmanager
def _without_torch_logs(verbose: bool) -> Iterator[None]:
    """Hide the log lines of torch's elastic launcher unless `verbose`, because `say` reports the same events."""
    if verbose:
        yield
        return
    nowhere = logging.NullHandler()
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher", "run")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nowhere)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(nowhere)
