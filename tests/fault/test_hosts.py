"""Two hosts with two ranks each: network namespaces of this machine, joined by a cable of the kernel's.

Needs root, as whoever makes network namespaces; skipped otherwise. The same file is the program of the ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch

import syncline as sl
from syncline.errors import SynclineError
from syncline.world import transport_of

HOSTS = ("a", "b")
INTERFACE = "lan"
NUM_RANKS = 4
SHORT_SECONDS = 4.0


# ---------------------------------------------------------------------- the hosts


@dataclass
class TwoHosts:
    """Network namespaces with an address each."""

    names: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, program: str, hosts: str, **variables: str) -> None:
        """Start a rank for each letter of `hosts`, on that host."""
        for rank, host in enumerate(hosts):
            name = self.names[host]
            env = {
                **{key: value for key, value in os.environ.items() if not key.startswith("SYNCLINE")},
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_RANK": str(hosts[:rank].count(host)),
                "LOCAL_WORLD_SIZE": str(hosts.count(host)),
                "MASTER_ADDR": address_of(hosts[0]),
                "MASTER_PORT": "29555",
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # names that a server of names would know
                **variables,
            }
            as_host = f'hostname {name} && exec "$0" "$@"'
            command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", as_host]
            self.processes.append(
                subprocess.Popen(
                    [*command, sys.executable, __file__, program],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )

    def wait_ready(self) -> None:
        """Until every rank has said that it is."""
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", f"rank {rank}: {process.communicate(timeout=30)}"

    def outputs(self, timeout_seconds: float) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each rank."""
        deadline = time.monotonic() + timeout_seconds
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            found.append((process.returncode, out, err))
        return found

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.names["b"], "link", "set", INTERFACE, "down")

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for name in self.names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def address_of(host: str) -> str:
    return f"10.213.77.{1 + HOSTS.index(host)}"


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, ip and unshare, to make network namespaces")
    hosts = TwoHosts({host: f"syncline-{os.getpid()}-{host}" for host in HOSTS})
    try:
        try:
            for name in hosts.names.values():
                ip("netns", "add", name)
            a, b = hosts.names.values()
            ip("link", "add", INTERFACE, "netns", a, "type", "veth", "peer", "name", INTERFACE, "netns", b)
            for host, name in hosts.names.items():
                ip("-n", name, "addr", "add", f"{address_of(host)}/24", "dev", INTERFACE)
                for device in ("lo", INTERFACE):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be had here: {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.close()


# ---------------------------------------------------------------------- what the ranks do


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2)
    ).double()


def train(module: torch.nn.Module, net: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if isinstance(module, sl.DistributedDataParallel):
        optimizer = module.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs[step]), targets[step]).backward()
        optimizer.step()


def trained_as_by_one_process() -> None:
    world = sl.init(timeout=60)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 8 * world.size, 20, generator=generator, dtype=torch.float64)
    targets = torch.randn(4, 8 * world.size, 2, generator=generator, dtype=torch.float64)
    net = network()
    net[1].eval()  # type: ignore[index]  # its running statistics would be of a part of the batch
    ddp = sl.DistributedDataParallel(net, buffers="broadcast", sharded="SHARDED" in os.environ)
    mine = slice(8 * world.rank, 8 * world.rank + 8)
    train(ddp, net, inputs[:, mine], targets[:, mine])
    alone = network()
    alone[1].eval()  # type: ignore[index]
    train(alone, alone, inputs, targets)
    for (name, found), expected in zip(net.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12), name
    assert sl.mean(float(world.rank), weight=world.rank + 1.0) == pytest.approx(
        sum(rank * (rank + 1.0) for rank in range(world.size)) / sum(range(1, world.size + 1))
    )
    bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).digest()
    assert len(set(transport_of().all_gather_bytes(bits))) == 1
    print(ddp.contract)
    sl.shutdown()


def refused_as_shared_memory() -> None:
    sl.init(timeout=30, transport="shm")
    try:
        sl.mean(1.0)
    except SynclineError as error:
        print(error)
    else:
        raise AssertionError("several hosts share no memory")


def until_it_fails() -> None:
    """Say what went wrong, when, and how long the call took that raised it."""
    world = sl.init(timeout=float(os.environ["TIMEOUT_SECONDS"]))
    sl.mean(1.0)
    print("ready", flush=True)
    step, start = 0, time.monotonic()
    try:
        while True:
            step, start = step + 1, time.monotonic()
            sl.mean(float(step))
            if str(world.rank) == os.environ.get("VICTIM") and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
    except SynclineError as error:
        seconds = time.monotonic() - start
        print(json.dumps({"kind": type(error).__name__, "text": str(error), "seconds": seconds}), flush=True)


PROGRAMS: Mapping[str, Callable[[], None]] = {
    program.__name__: program
    for program in (trained_as_by_one_process, refused_as_shared_memory, until_it_fails)
}


# ---------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("hosts", "transport"),
    [
        ("aabb", "shared memory within 2 hosts, gloo across"),
        ("abb", "shared memory within 2 hosts, gloo across"),
        ("ab", "gloo"),
    ],
)
def test_two_hosts_train_as_one_process_does(two_hosts: TwoHosts, hosts: str, transport: str) -> None:
    two_hosts.start("trained_as_by_one_process", hosts)
    for rank, (code, out, err) in enumerate(two_hosts.outputs(90)):
        assert (code, err) == (0, ""), f"rank {rank}: {err}"
        head = out.splitlines()[0]
        assert head.endswith(f"{len(hosts)} ranks on 2 hosts, transport: {transport}"), head


@pytest.mark.parametrize(
    ("hosts", "copies"),
    [("aabb", "one copy on each of 2 hosts, values of rank 0"), ("abb", "then all_gather of the shares")],
)
def test_two_hosts_have_a_copy_each_where_both_can(two_hosts: TwoHosts, hosts: str, copies: str) -> None:
    two_hosts.start("trained_as_by_one_process", hosts, SHARDED="1")
    for rank, (code, out, err) in enumerate(two_hosts.outputs(90)):
        assert (code, err) == (0, ""), f"rank {rank}: {err}"
        assert copies in out, out


def test_shared_memory_over_two_hosts_is_refused_with_a_way_out(two_hosts: TwoHosts) -> None:
    two_hosts.start("refused_as_shared_memory", "aabb")
    outputs = two_hosts.outputs(60)
    texts = {out for _, out, _ in outputs}
    assert len(texts) == 1, outputs
    (text,) = texts
    assert "ranks 2, 3 run on another host" in text, outputs
    assert 'Use transport="auto": shared memory within each host, gloo between them' in text


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_an_error_on_both_hosts_within_seconds(two_hosts: TwoHosts, victim: int) -> None:
    two_hosts.start("until_it_fails", "aabb", TIMEOUT_SECONDS="60", VICTIM=str(victim))
    two_hosts.wait_ready()
    for rank, (code, out, err) in enumerate(two_hosts.outputs(30)):
        if rank == victim:
            assert code == -signal.SIGKILL
            continue
        told = json.loads(out)
        assert (code, told["kind"]) == (0, "PeerLost"), (rank, told, err)
        assert told["seconds"] < 10
        assert f"rank {victim}" in told["text"] or "connection to a peer is lost" in told["text"], told


def test_a_cable_that_is_pulled_is_an_error_and_no_hang(two_hosts: TwoHosts) -> None:
    two_hosts.start("until_it_fails", "aabb", TIMEOUT_SECONDS=str(SHORT_SECONDS))
    two_hosts.wait_ready()
    two_hosts.cut()
    for rank, (code, out, err) in enumerate(two_hosts.outputs(60)):
        told = json.loads(out)
        assert told["kind"] in ("CollectiveTimeout", "PeerLost"), (rank, told, err)
        assert told["seconds"] < SHORT_SECONDS + 10, (rank, told)
        assert code == 0, (rank, err)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
