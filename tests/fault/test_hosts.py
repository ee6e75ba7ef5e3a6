"""Two hosts with two ranks each: network namespaces of this machine, joined by a cable of the kernel's.

Needs root, as whoever makes network namespaces; skipped otherwise. The same file is the program of the ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import syncline as sl
from syncline import SynclineError
from syncline.environment import patience
from syncline.session import transport_of
from syncline.testing import SimulatedHosts, simulated_hosts

if TYPE_CHECKING:
    from forks import Forks, Process

pytestmark = pytest.mark.real

SHORT_SECONDS = 4.0
WITHOUT_A_NAME = re.compile(r"^\[W.*\[c10d\] The hostname of the client socket cannot be retrieved.*\n", re.M)
"""A warning of torch's, whose level was set before the fork: DNS does not know the hosts."""


@dataclass(frozen=True)
class Ranks:
    """Ranks on two hosts, forked: they begin at once, and enter their hosts themselves."""

    processes: list[Process]

    def outputs(self) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each, once all have ended."""
        from forks import wait_for_all  # not above: the ranks run this file, and do not find it

        ended = wait_for_all(self.processes)
        return [(one.returncode, one.stdout, WITHOUT_A_NAME.sub("", one.stderr)) for one in ended]


Start = Callable[..., Ranks]


@pytest.fixture
def start(hosts: SimulatedHosts, forks: Forks, tmp_path: Path) -> Start:
    """Starts a program of this file on ranks; "aab" is two on host a, one on host b."""

    def started(program: str, ranks: str, **variables: str) -> Ranks:
        return Ranks(
            [
                forks.start(
                    tmp_path,
                    Path(__file__),
                    program,
                    variables={**hosts.variables_of_rank(rank, ranks), **variables},
                    host=hosts.names[letter],
                )
                for rank, letter in enumerate(ranks)
            ]
        )

    return started


# ---------------------------------------------------------------------- what the ranks do


def mount_disk() -> None:
    disk = Path(os.environ["DISKS"], os.environ["ONE_FOR_ALL"] or socket.gethostname())
    subprocess.run(["mount", "--bind", disk, os.environ["MOUNTED"]], check=True)


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
    print(ddp.contract.long())
    sl.shutdown()


def drift_between_hosts() -> None:
    """Every strategy at work on both hosts; hosts that average gradients in every step, and meet every third."""
    world = sl.init(timeout=60)
    host = transport_of().split(sorted({"a", "b"}).index(os.environ["HOSTS"][world.rank]))
    for strategy in (
        sl.LocalSGD(3, every_step_within="host"),
        sl.DiLoCo(3, every_step_within="host", fragments=3, compression=sl.compression.Quantize(4)),
        sl.DiLoCo(3, delay=1),
        sl.Gossip("ring"),
        sl.ParameterServer(2),
    ):
        ddp = sl.DistributedDataParallel(network(), strategy=strategy)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.01))
        for step in range(8):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            ddp(torch.randn(8, 20, generator=generator, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            if "every_step_within" in str(strategy):
                sl.check_replicas(list(ddp.parameters()), group=host)
        try:
            sl.check_replicas(list(ddp.parameters()))
        except sl.ReplicaDivergence:
            pass
        else:
            raise AssertionError(f"{strategy}: after 8 steps the hosts have drifted apart")
        ddp.sync_parameters_()
        sl.check_replicas(ddp.module)
    print(ddp.contract.long())
    sl.shutdown()


def refused_as_shared_memory() -> None:
    try:
        sl.init(timeout=30, transport="shm")
    except SynclineError as error:
        print(error)
    else:
        raise AssertionError("several hosts share no memory")


def saves_and_loads() -> None:
    """Shards, of which each host has all: one host writes them."""
    world = sl.init(timeout=60)

    def make() -> tuple[sl.DistributedDataParallel, torch.optim.Optimizer]:
        ddp = sl.DistributedDataParallel(network(), sharded=True)
        return ddp, ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))

    ddp, optimizer = make()
    ddp(torch.ones(4, 20, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    checkpointer = sl.Checkpointer(os.environ["DIRECTORY"])
    checkpointer.save(sl.TrainState(model=ddp, optimizer=optimizer), step=3)
    expected = optimizer.state_dict()
    again, other = make()
    assert checkpointer.load(sl.TrainState(model=again, optimizer=other)) == 3
    assert repr(other.state_dict()) == repr(expected)
    assert len(expected["state"]) == 6
    for a, b in zip(ddp.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)
    print(f"rank {world.rank} of {world.size} was there")
    sl.shutdown()


def refused_without_a_common_directory() -> None:
    world = sl.init(timeout=60)
    try:
        sl.Checkpointer(os.environ["DIRECTORY"])
    except SynclineError as error:
        print(error)
    else:
        raise AssertionError(
            f"rank {world.rank}: hosts that see different disks save nothing that can be loaded"
        )
    sl.shutdown()


def until_it_fails() -> None:
    """Say what went wrong, when, and how long the call took that raised it."""
    sl.init(timeout=60)  # not yet the short timeout, because a rank may begin seconds later than another
    sl.barrier()
    sl.shutdown()
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
    for program in (
        trained_as_by_one_process,
        drift_between_hosts,
        refused_as_shared_memory,
        saves_and_loads,
        refused_without_a_common_directory,
        until_it_fails,
    )
}


# ---------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        ("aabb", "shared memory within 2 hosts, gloo across"),
        ("abb", "shared memory within 2 hosts, gloo across"),
        ("ab", "gloo"),
    ],
)
def test_two_hosts_train_as_one_process_does(start: Start, ranks: str, transport: str) -> None:
    for rank, (code, out, err) in enumerate(start("trained_as_by_one_process", ranks).outputs()):
        assert (code, err) == (0, ""), f"rank {rank}: {err}"
        head = out.splitlines()[0]
        assert head.endswith(f"{len(ranks)} ranks on 2 hosts, transport: {transport}"), head


@pytest.mark.parametrize(
    ("ranks", "copies"),
    [("aabb", "one copy on each of 2 hosts, values of rank 0"), ("abb", "then all_gather of the shards")],
)
def test_two_hosts_have_a_copy_each_where_both_can(start: Start, ranks: str, copies: str) -> None:
    job = start("trained_as_by_one_process", ranks, SHARDED="1")
    for rank, (code, out, err) in enumerate(job.outputs()):
        assert (code, err) == (0, ""), f"rank {rank}: {err}"
        assert copies in out, out


def test_four_hosts_reach_each_other() -> None:
    from virtual_hosts import (  # not above: the ranks run this file, and do not find it
        hosts_or_skip,
        outputs_of,
    )

    program = "import syncline as sl; w = sl.init(device='cpu'); print(sl.mean(float(w.rank)), w.size); sl.shutdown()"
    with hosts_or_skip(4, megabits_per_second=200) as hosts:
        hosts.start([sys.executable, "-c", program], "abcd")
        outputs = outputs_of(hosts)
    assert [out.splitlines()[-1] for _, out, _ in outputs] == ["1.5 4"] * 4, outputs
    assert [code for code, _, _ in outputs] == [0] * 4
    with pytest.raises(ValueError, match="expected a number from 2 to 26"), simulated_hosts(27):
        raise AssertionError


@pytest.mark.parametrize("ranks", ["aabb", "abab"])
def test_hosts_drift_apart_and_meet(start: Start, ranks: str) -> None:
    for rank, (code, _, err) in enumerate(start("drift_between_hosts", ranks, HOSTS=ranks).outputs()):
        assert (code, err) == (0, ""), f"rank {rank}: {err}"


def test_shared_memory_over_two_hosts_is_refused_with_a_way_out(start: Start) -> None:
    outputs = start("refused_as_shared_memory", "aabb").outputs()
    texts = {out for _, out, _ in outputs}
    assert len(texts) == 1, outputs
    (text,) = texts
    assert "ranks 2, 3 run on another host" in text, outputs
    assert 'Use transport="auto": shared memory within each host, gloo between the hosts' in text


def start_with_disks(
    start: Start, program: str, disks: Path, hosts: SimulatedHosts, *, one_for_all: bool
) -> tuple[Ranks, Path]:
    """Two ranks on each host, which find a disk at the same path: each host its own, or all the same one."""
    mounted = disks / "mounted"
    mounted.mkdir()
    for name in hosts.names.values():
        (disks / name).mkdir()
    variables = {"MOUNTED": str(mounted), "DIRECTORY": str(mounted / "runs")}
    variables |= {"DISKS": str(disks), "ONE_FOR_ALL": hosts.names["a"] if one_for_all else ""}
    return start(program, "aabb", **variables), mounted


def test_hosts_that_see_one_disk_save_and_load(start: Start, hosts: SimulatedHosts, tmp_path: Path) -> None:
    job, mounted = start_with_disks(start, "saves_and_loads", tmp_path, hosts, one_for_all=True)
    for rank, (code, out, err) in enumerate(job.outputs()):
        assert (code, out, err) == (0, f"rank {rank} of 4 was there\n", ""), f"rank {rank}: {err}"
    assert not list(mounted.iterdir()), "it was mounted there for the ranks alone"
    (saved,) = (tmp_path / hosts.names["a"] / "runs").iterdir()
    text = (saved / "manifest.json").read_text().rstrip("\n").rpartition("\n")[0]
    files = json.loads(text)["files"]
    writers = [
        rank
        for rank in range(4)
        if any(
            "momentum" in name for name in files.get(f"rank-{rank}.safetensors", {"tensors": ()})["tensors"]
        )
    ]
    assert writers == [0, 1], "host b has the same shares, and they are there once"


def test_hosts_that_see_different_disks_are_refused_with_a_way_out(
    start: Start, hosts: SimulatedHosts, tmp_path: Path
) -> None:
    program = "refused_without_a_common_directory"
    job, mounted = start_with_disks(start, program, tmp_path, hosts, one_for_all=False)
    outputs = job.outputs()
    texts = {out for _, out, _ in outputs}
    assert [code for code, _, _ in outputs] == [0] * 4, outputs
    assert len(texts) == 1, "every rank says the same"
    (text,) = texts
    runs, a, b = mounted / "runs", hosts.names["a"], hosts.names["b"]
    assert f"that rank 0 wrote into {runs} on {a}, but it is not in {runs} on {b} (ranks 2, 3)" in text
    assert "on a file system that all hosts have mounted at the same path" in text


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_an_error_on_both_hosts_within_seconds(start: Start, victim: int) -> None:
    from failure_rows import (
        record,
    )  # not above: the ranks, which run this file, have only its folder in their path

    job = start("until_it_fails", "aabb", TIMEOUT_SECONDS="60", VICTIM=str(victim))
    for rank, (code, out, err) in enumerate(job.outputs()):
        if rank == victim:
            assert code == -signal.SIGKILL
            continue
        told = json.loads(out.removeprefix("ready\n"))
        assert (code, told["kind"]) == (0, "PeerLost"), (rank, told, err)
        assert told["seconds"] < patience(10)
        record("killed elsewhere", "", f"{told['kind']}: {told['text']}", told["seconds"])
        assert f"rank {victim}" in told["text"] or "connection to a peer is lost" in told["text"], told


def test_a_cable_that_is_pulled_is_an_error_and_no_hang(hosts: SimulatedHosts) -> None:
    """Of programs that the hosts start, as benchmarks do."""
    from failure_rows import record  # not above: see the other test
    from virtual_hosts import outputs_of

    command = [sys.executable, __file__, "until_it_fails"]
    hosts.start(command, "aabb", {"TIMEOUT_SECONDS": str(SHORT_SECONDS)})
    hosts.wait_ready()
    hosts.cut()
    for rank, (code, out, err) in enumerate(outputs_of(hosts)):
        told = json.loads(out)
        assert told["kind"] in ("CollectiveTimeout", "PeerLost"), (rank, told, err)
        assert told["seconds"] < SHORT_SECONDS + patience(10), (rank, told)
        record("cable", "", f"{told['kind']}: {told['text']}", told["seconds"])
        assert code == 0, (rank, err)


if __name__ == "__main__":
    if "DISKS" in os.environ:
        mount_disk()
    PROGRAMS[sys.argv[1]]()
