"""A function that runs one job from start to exit code, and the rendezvous that opens the store of the job.

The job runs on torch's elastic launcher.

[Note: why not torch's rendezvous]

Torch's own rendezvous opens two stores that listen on every interface of the host. A store has no password, so every
process that can connect to it can read and write its values. A job on one host needs only one store, on the loopback
interface. With several hosts, the user can choose the address (`--host`). A restart on one host creates a new store, so
that ranks never find addresses of ranks that have ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from syncline import environment, tracebacks
from syncline._torch.process_groups import PrefixStore, Store, TCPStore
from syncline.liveness.connection import interruptibly
from syncline.liveness.folder_store import FolderStore
from syncline.session.listening import LOOPBACK, bound_socket, interface_of
from syncline.session.stop_request import EXIT_STOPPED
from syncline.tools.launch.display import EXIT_OUTPUT_LOST, Display
from syncline.tools.launch.failures import Failure, describe, first_failure, read_error_file
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.losses import Losses
from syncline.tools.launch.output import DEFAULT_PREFIX, RankLogs, TorchLogs, say
from syncline.tools.launch.stopping import Interruption, Workers

_BACKEND = "syncline"

_ADDRESS = "listen_at"

_TIMEOUT_SECONDS = 600

_PROBE_SECONDS = 5.0


def listen_at(config: LaunchConfig, address: str | None) -> None:
    """Change the configuration of a job so that the store of host 0 listens at `address` only, and signals end waits.

    Args:
        config: the configuration, with a static rendezvous. Other hosts connect to the endpoint of the rendezvous. Port
            0 in the endpoint means any free port.
        address: an address of this host; None for all addresses.
    """
    config.rdzv_backend = _BACKEND
    config.rdzv_configs[_ADDRESS] = address
    rendezvous_handler_registry.register(_BACKEND, _Rendezvous)


class _Rendezvous(StaticTCPRendezvous):
    """A rendezvous in which each host gets its number from the command line. Host 0 opens the store."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        config = parameters.config
        super().__init__(
            *parse_rendezvous_endpoint(parameters.endpoint, default_port=0),
            rank=int(config.get("rank", 0)),
            world_size=parameters.max_nodes,
            run_id=parameters.run_id,
            timeout=int(config.get("timeout", _TIMEOUT_SECONDS)),
        )
        self._listen_at: str | None = config[_ADDRESS]
        self._opened: TCPStore | None = None

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._opened is None or self.master_port == 0:
            # The wait for the launchers of other hosts can last minutes. A signal to this one must end it.
            self._opened = interruptibly(self._open)
        store: Store = _Interruptible(self.run_id, self._opened)
        address = RendezvousStoreInfo(self.master_addr, self._opened.port)
        return RendezvousInfo(store, self.rank, self.world_size, address)

    def _open(self) -> TCPStore:
        bound, port = None, self.master_port
        if self.rank == 0 and self._listen_at is not None:
            bound = bound_socket(self._listen_at, port)
            port = bound.getsockname()[1]
            _check_that_it_connects(bound)
        return TCPStore(
            self.master_addr,
            port,
            self.world_size,
            self.rank == 0,
            self.timeout,
            multi_tenant=True,
            master_listen_fd=None if bound is None else bound.detach(),
        )


class _Interruptible(PrefixStore):
    """A store with whose waits torch's agent waits for other hosts, so that signals are handled meanwhile."""

    def get(self, key: str) -> bytes:
        return interruptibly(partial(super().get, key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return interruptibly(partial(super().multi_get, keys))

    def wait(self, *arguments: Any) -> None:
        interruptibly(partial(super().wait, *arguments))


def _check_that_it_connects(bound: socket.socket) -> None:
    """Check that this host can connect to a socket of its own. torch would try it again and again for minutes.

    Raises:
        OSError: it cannot, because the network interface is down.
    """
    bound.listen()
    with socket.socket(bound.family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(bound.getsockname())
        except OSError as error:
            host, port, *_ = bound.getsockname()
            raise OSError(
                f"this host cannot connect to its own port {port} at {host} ({error}). The network interface of this "
                "address is down, as in a network namespace without `ip link set lo up`, or a firewall closes the port"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of one job."""

    config: LaunchConfig
    """Torch's configuration of the job. `supervise` replaces its `logs_specs` and `signals_to_handle`."""
    command: str | Callable[..., object] = sys.executable
    """The command or function that torch starts as each rank."""
    arguments: Sequence[str]
    """The arguments of the command or function."""
    guardian: Guardian
    """The guardian, which cleans up if this process is killed. The job's temporary files are in its folder."""
    torch_logs: LogsSpecs | None = None
    """Torch's own handling of the ranks' output by log files. It is None unless the user requested it."""
    keep_logs_in: Path | None = None
    """The folder in which to keep the ranks' output. None means that no logs are kept."""
    is_python: bool = True
    """Whether the process of each rank is itself a Python program. False means a command that can start Python."""
    shutdown_seconds: float | None = None
    """The time that ranks have to end after a signal. None means the defaults of `Interruption`."""
    is_resilient: bool = False
    """Whether the other ranks continue if one is lost in `sl.steps`."""
    verbose: bool = False
    """Whether to show the log lines of torch's launcher."""
    display: Display = field(default_factory=Display)
    """The display for the lines of the ranks, unless torch's own log files are used."""


def run_on_this_host(
    num_ranks: int,
    arguments: Sequence[str],
    guardian: Guardian,
    *,
    num_threads: int | None = None,
    prefix: str | None = None,
    display: Display | None = None,
) -> int:
    """Run a Python program as a job whose ranks are all on this host. Other hosts cannot connect to the job's store.

    Args:
        num_ranks: the number of ranks.
        arguments: the result of `worker_command`.
        guardian: the guardian of this process.
        num_threads: the number of threads of each rank. None means OMP_NUM_THREADS if the user has set it, and
            otherwise cores / ranks.
        prefix: the template of the text before each line of output. None means the default.
        display: where the output appears. None means on stdout and stderr.

    Returns:
        The exit code, as `supervise` returns it.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_endpoint=f"{LOOPBACK}:0",
        max_restarts=0,
        log_line_prefix_template=prefix,
    )
    listen_at(config, LOOPBACK)
    threads = str(num_threads or environment.threads_per_rank(num_ranks))
    before = environment.export({"OMP_NUM_THREADS": threads}, replace=num_threads is not None)
    try:
        job = Job(config=config, arguments=arguments, guardian=guardian, display=display or Display())
        return supervise(job)
    finally:
        environment.restore(before)


def supervise(job: Job) -> int:
    """Run `job` until all its ranks on this host have ended. Failures are printed on stderr, and are not raised.

    Returns:
        The exit code. 0 means success. `EXIT_STOPPED` means that all ranks stopped as requested. If a signal ended the
        job in another way, the result is 128 + the number of the signal. If a rank failed, the result is the exit code
        of the rank that failed first. If the ranks could not be started, the result is 1. If only their output could
        not be written, it is `EXIT_OUTPUT_LOST`.
    """
    mark = f"{os.getpid()}-{uuid.uuid4().hex}"
    config = job.config
    if config.log_line_prefix_template is None:
        config.log_line_prefix_template = DEFAULT_PREFIX
    logs: RankLogs | TorchLogs
    if job.torch_logs is None:
        logs = RankLogs(
            scratch=job.guardian.folder,
            keep_in=job.keep_logs_in,
            prefix=config.log_line_prefix_template,
            display=job.display,
        )
    else:
        logs = TorchLogs(job.torch_logs)
    config.logs_specs = logs
    names = [name.strip() for name in config.signals_to_handle.split(",") if name.strip()]
    # With an empty list, torch's launcher installs no handlers. `Interruption` raises torch's own exception.
    config.signals_to_handle = ""
    workers = Workers(
        mark,
        job.guardian,
        whole_groups=not job.is_python,
        note_ended=logs.note_ended,
        losses=Losses(config.max_restarts) if job.is_resilient else None,
    )
    interruption = Interruption(workers, names, job.shutdown_seconds)
    own = {environment.RUN_MARK: mark, environment.STORE_FOLDER: _store_folder(job)}
    before = environment.export(own, replace=True)
    before |= environment.export(_variables(job))
    try:
        if not job.verbose:
            _hide_torch_logs()
        with workers, interruption:
            failure: Exception | None = None
            try:
                elastic_launch(config, job.command)(*job.arguments)
            except Exception as error:
                failure = error
            interruption.end()
            workers.kill()
            if failure is not None or interruption.received is not None:
                workers.kill_left_behind()
            logs.stop()
            job.display.end()
            code = _report(job, logs, failure, workers, interruption)
            if (lost := job.display.writer.failure) is not None:
                say(f"some output of the ranks is lost: it could not be written: {lost.strerror}")
                code = code or EXIT_OUTPUT_LOST
            return code
    finally:
        environment.restore(before)


def _variables(job: Job) -> dict[str, str]:
    """Return the defaults of environment variables of the ranks. A variable that the user has set keeps its value."""
    address = job.config.rdzv_configs.get(_ADDRESS)
    interface = interface_of(address) if address else None
    # Gloo and NCCL then use the same network interface as the store.
    found = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    if job.verbose:
        found[environment.WHOLE_TRACEBACKS] = "1"
    if job.config.max_nodes == 1:  # with several hosts, only the user can distribute a token safely
        found[environment.TOKEN] = secrets.token_hex(32)
    return found


def _store_folder(job: Job) -> str:
    """Return the run id and the folder by which ranks of this host agree without this launcher; "" if they cannot."""
    if job.is_resilient and job.config.max_nodes == 1:
        folder = job.guardian.folder / "store"
        with contextlib.suppress(OSError):  # a file system without links: they use the store of this launcher
            FolderStore(folder)
            return f"{job.config.run_id} {folder}"
    return ""


def _report(
    job: Job,
    logs: RankLogs | TorchLogs,
    failure: Exception | None,
    workers: Workers,
    interruption: Interruption,
) -> int:
    """Print how the job ended, and return the exit code."""
    if job.keep_logs_in is not None and logs.kept is not None:
        say(f"logs are in {logs.kept}")
    if workers.have_stopped and failure is None:
        say(f"all ranks on this host have stopped, exit code {EXIT_STOPPED}: start again to resume")
        return EXIT_STOPPED
    if interruption.received is not None:
        say(f"stopped by {interruption.received.name}, all ranks on this host have ended")
        return 128 + interruption.received
    if failure is None:
        return 0
    if isinstance(failure, ChildFailedError):
        failures = []
        for rank, child in failure.failures.items():
            found = Failure(
                rank=rank,
                pid=child.pid,
                return_code=child.exitcode,
                record=read_error_file(child.error_file),
                stderr_tail=logs.stderr_tail(child.local_rank),
            )
            failures.append(replace(found, is_shown=logs.has_shown(found)))
        say(describe(failures, host=socket.gethostname(), more_hosts=job.config.max_nodes > 1))
        return first_failure(failures).exit_code
    if job.verbose:
        print(tracebacks.describe(failure).whole, file=sys.stderr)
    text = str(failure)
    first_line = text.strip().partition("\n")[0]
    if "address already in use" in text.lower() or "EADDRINUSE" in text:
        say(f"another process uses the port of the ranks' rendezvous ({first_line}): start the job again")
    else:
        say(
            f"could not start the ranks: {type(failure).__name__}: {first_line} (--verbose shows the traceback)"
        )
    return 1


def _hide_torch_logs() -> None:
    """Hide the log lines of torch's elastic launcher in this process. `say` reports the same events."""
    # Not their common parent "torch.distributed", to which torch adds a handler of its own.
    for name in ("elastic", "launcher", "run"):
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
