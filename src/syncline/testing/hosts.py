"""Simulated hosts on one machine: network namespaces, joined by a switch and cables that can be slowed or cut.

Ranks in different namespaces have different addresses and host names, and Syncline shares no memory between them. Only
root can create such namespaces, and only on Linux. Elsewhere `simulated_hosts` raises `HostsUnavailable`.
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
from syncline.launchers import Environment

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_SWITCH = "switch"
"""The name of the bridge, and the end of the name of its namespace."""

_INTERFACE = "lan"

_PORT = 29555

_BURST_SECONDS = 0.01

_QUEUE_SECONDS = 0.4

_TOOLS = ("ip", "unshare", "tc")


class HostsUnavailable(RuntimeError):
    """An error that `simulated_hosts` raises if it cannot create network namespaces. Its text says why."""


@contextmanager
def simulated_hosts(
    num_hosts: int = 2, *, megabits_per_second: float | None = None
) -> Iterator[SimulatedHosts]:
    """Create simulated hosts "a", "b", and so on.

    At the end of the context, the ranks on them are killed, and the hosts are removed.

    Args:
        num_hosts: the number of hosts, from 2 to 26.
        megabits_per_second: the bandwidth of each host's cable in each direction. None means no limit.

    Raises:
        ValueError: the number of hosts is not between 2 and 26.
        HostsUnavailable: the system is not Linux, the user is not root, or a required tool is missing.

    Examples:
        >>> try:
        ...     with simulated_hosts(2, megabits_per_second=100) as hosts:
        ...         hosts.start(["sh", "-c", "echo rank $RANK of $WORLD_SIZE"], "aab")
        ...         [out for code, out, err in hosts.outputs(timeout_seconds=20)]
        ... except HostsUnavailable:
        ...     ["rank 0 of 3\\n", "rank 1 of 3\\n", "rank 2 of 3\\n"]
        ['rank 0 of 3\\n', 'rank 1 of 3\\n', 'rank 2 of 3\\n']
    """
    if not 2 <= num_hosts <= len(_LETTERS):
        raise ValueError(f"num_hosts={num_hosts!r}: expected a number from 2 to {len(_LETTERS)}")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or missing:
        reason = f"PATH has no {', '.join(missing)}" if missing else "this process does not run as root"
        raise HostsUnavailable(
            f"simulated_hosts needs Linux, root and the programs {', '.join(_TOOLS)}, but {reason}"
        )
    hosts = SimulatedHosts({letter: f"syncline-{os.getpid()}-{letter}" for letter in _LETTERS[:num_hosts]})
    try:
        try:
            hosts._connect(megabits_per_second)
        except subprocess.CalledProcessError as error:
            raise HostsUnavailable(
                f"this system did not allow simulated_hosts to create network namespaces: {error.stderr.strip()}"
            ) from error
        yield hosts
    finally:
        hosts._close()


@dataclass
class SimulatedHosts:
    """Simulated hosts, which are network namespaces with one address each. `simulated_hosts` creates this object."""

    names: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @staticmethod
    def address_of(letter: str) -> str:
        """Return the IP address of a host, which is named by its letter."""
        return f"10.213.77.{1 + _LETTERS.index(letter)}"

    def start(self, command: Sequence[str], on: str, variables: Mapping[str, str] | None = None) -> None:
        """Start the ranks of a job on the hosts, with torchrun's environment variables.

        Args:
            command: the program that each rank runs, and its arguments.
            on: one letter per rank, which names the host of this rank. With "aabb", ranks 0 and 1 run on host a, and
                ranks 2 and 3 run on host b.
            variables: additional environment variables of all ranks.
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
        """Return the environment variables with which `start` starts one rank.

        Args:
            rank: the rank.
            on: one letter per rank, which names the host of this rank.
        """
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
        """Wait until every rank has printed "ready" as its next line on stdout."""
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if line != "ready\n":
                raise RuntimeError(
                    f'expected rank {rank} to print the line "ready", got the line {line!r} and then this rest of '
                    f"stdout and stderr: {process.communicate()}"
                )

    def outputs(self, timeout_seconds: float) -> list[tuple[int, str, str]]:
        """Wait until all ranks that were started since the previous call of this method have ended.

        Args:
            timeout_seconds: the time limit for all ranks together.

        Returns:
            For each rank, its exit code and the texts that it wrote to stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: a rank has not ended within `timeout_seconds`.
        """
        deadline = time.monotonic() + timeout_seconds
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            found.append((process.returncode, out, err))
        self.processes.clear()
        return found

    def cut(self) -> None:
        """Cut the cable of host "b". It stays cut until `mend`."""
        _run(f"ip -n {self.names['b']} link set {_INTERFACE} down")

    def mend(self) -> None:
        """Connect host "b" again, after `cut`."""
        _run(f"ip -n {self.names['b']} link set {_INTERFACE} up")

    @property
    def _switch(self) -> str:
        """The namespace of the switch, which is not a host."""
        return f"{self.names['a'].removesuffix('-a')}-{_SWITCH}"

    def _connect(self, megabits_per_second: float | None) -> None:
        _run(f"ip netns add {self._switch}")
        _run(f"ip -n {self._switch} link add {_SWITCH} type bridge")
        _run(f"ip -n {self._switch} link set {_SWITCH} up")
        for letter, name in self.names.items():
            port = f"to-{letter}"
            _run(f"ip netns add {name}")
            _run(f"ip link add {_INTERFACE} netns {name} type veth peer name {port} netns {self._switch}")
            _run(f"ip -n {self._switch} link set {port} master {_SWITCH} up")
            _run(f"ip -n {name} addr add {self.address_of(letter)}/24 dev {_INTERFACE}")
            for device in ("lo", _INTERFACE):
                _run(f"ip -n {name} link set {device} up")
            if megabits_per_second is not None:
                _limit(name, _INTERFACE, megabits_per_second)
                _limit(self._switch, port, megabits_per_second)

    def _close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for name in (*self.names.values(), self._switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(f"ip netns del {name}")


def _limit(name: str, device: str, megabits_per_second: float) -> None:
    """Limit what a device of a namespace sends."""
    burst_bytes = max(16_000, int(megabits_per_second * 1e6 / 8 * _BURST_SECONDS))
    limits = f"rate {megabits_per_second}mbit burst {burst_bytes} latency {_QUEUE_SECONDS * 1e3:.0f}ms"
    _run(f"tc -n {name} qdisc add dev {device} root tbf {limits}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20)
