"""Two hosts on one machine: network namespaces, joined by a virtual cable that can be slowed down or cut.

Ranks in different namespaces have different addresses and host names, and Syncline shares no memory between them. This
needs Linux and root. Without them, `two_hosts` raises `HostsUnavailable`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from syncline import environment
from syncline.environment import Environment

_LETTERS = ("a", "b")

_INTERFACE = "lan"

_PORT = 29555

_BURST_SECONDS = 0.01

_QUEUE_SECONDS = 0.4

_TOOLS = ("ip", "unshare", "tc")


class HostsUnavailable(RuntimeError):
    """An error that is raised if network namespaces are not available. Its text says why."""


@contextmanager
def two_hosts(*, megabits_per_second: float | None = None) -> Iterator[TwoHosts]:
    """Open hosts "a" and "b". All processes on them are killed when the context ends.

    Args:
        megabits_per_second: the bandwidth of the cable in each direction; None means no limit.

    Raises:
        HostsUnavailable: not root, no Linux, or a tool is missing.

    Example:
        >>> try:
        ...     with two_hosts(megabits_per_second=100) as hosts:
        ...         hosts.start(["sh", "-c", "echo rank $RANK of $WORLD_SIZE"], "aab")
        ...         [out for code, out, err in hosts.outputs(timeout_seconds=20)]
        ... except HostsUnavailable:
        ...     ["rank 0 of 3\\n", "rank 1 of 3\\n", "rank 2 of 3\\n"]
        ['rank 0 of 3\\n', 'rank 1 of 3\\n', 'rank 2 of 3\\n']
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or missing:
        reason = f"missing: {', '.join(missing)}" if missing else "this process is not root"
        raise HostsUnavailable(f"network namespaces need root and the tools {', '.join(_TOOLS)} ({reason})")
    hosts = TwoHosts({letter: f"syncline-{os.getpid()}-{letter}" for letter in _LETTERS})
    try:
        try:
            hosts._connect(megabits_per_second)
        except subprocess.CalledProcessError as error:
            raise HostsUnavailable(
                f"network namespaces are not available here: {error.stderr.strip()}"
            ) from error
        yield hosts
    finally:
        hosts._close()


@dataclass
class TwoHosts:
    """Two network namespaces, each with its own address; created by `two_hosts`."""

    names: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @staticmethod
    def address_of(letter: str) -> str:
        """Return the IP address of a host."""
        return f"10.213.77.{1 + _LETTERS.index(letter)}"

    def start(self, command: Sequence[str], on: str, variables: Mapping[str, str] | None = None) -> None:
        """Start one rank for each letter of `on`, on the host with this letter, with torchrun's environment variables.

        Args:
            command: program and arguments.
            on: the host of each rank. With "aabb", ranks 0 and 1 are on host a, ranks 2 and 3 on host b.
            variables: additional environment variables.
        """
        for rank, letter in enumerate(on):
            name = self.names[letter]
            env = {**self.variables_of_rank(rank, on), **(variables or {})}
            as_host = f'hostname {name} && exec "$0" "$@"'
            self.processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", as_host, *command],
                    env=environment.for_child(env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )

    def variables_of_rank(self, rank: int, on: str) -> dict[str, str]:
        """Return the environment variables of one rank of `start`."""
        torchrun = Environment(
            launcher="environment",
            rank=rank,
            size=len(on),
            local_rank=on[:rank].count(on[rank]),
            local_size=on.count(on[rank]),
            master_addr=self.address_of(on[0]),
            master_port=_PORT,
        )
        return {
            **torchrun.variables(),
            "GLOO_SOCKET_IFNAME": _INTERFACE,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # no warnings about host names that DNS cannot resolve
        }

    def wait_ready(self) -> None:
        """Wait until every rank has printed the line "ready"."""
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if line != "ready\n":
                raise RuntimeError(
                    f'expected rank {rank} to print "ready", got {line!r} and then {process.communicate()}'
                )

    def outputs(self, timeout_seconds: float) -> list[tuple[int, str, str]]:
        """Wait for all ranks that were started since the last call. Return their exit codes, outputs and errors.

        Raises:
            subprocess.TimeoutExpired: a rank has not ended in time.
        """
        deadline = time.monotonic() + timeout_seconds
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            found.append((process.returncode, out, err))
        self.processes.clear()
        return found

    def cut(self) -> None:
        """Cut the cable between the hosts."""
        _run("ip", "-n", self.names["b"], "link", "set", _INTERFACE, "down")

    def _connect(self, megabits_per_second: float | None) -> None:
        for name in self.names.values():
            _run("ip", "netns", "add", name)
        a, b = self.names.values()
        peer = ("peer", "name", _INTERFACE, "netns", b)
        _run("ip", "link", "add", _INTERFACE, "netns", a, "type", "veth", *peer)
        for letter, name in self.names.items():
            _run("ip", "-n", name, "addr", "add", f"{self.address_of(letter)}/24", "dev", _INTERFACE)
            for device in ("lo", _INTERFACE):
                _run("ip", "-n", name, "link", "set", device, "up")
            if megabits_per_second is not None:
                burst_bytes = max(16_000, int(megabits_per_second * 1e6 / 8 * _BURST_SECONDS))
                limits = ("rate", f"{megabits_per_second}mbit", "burst", str(burst_bytes))
                latency = ("latency", f"{_QUEUE_SECONDS * 1e3:.0f}ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limits, *latency)

    def _close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for name in self.names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
