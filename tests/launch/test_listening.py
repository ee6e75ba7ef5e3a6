"""Where a job of `syncline run` listens: with real processes, whose sockets the kernel lists."""

from __future__ import annotations

import os
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from forks import Forks
from syncline.session.listening import bound_socket, interface_of
from syncline.testing import held_port

JOINED = """
import os, sys, time
import syncline as sl, torch
with open(f"token {os.environ['RANK']}", "w") as file:
    file.write(os.environ["SYNCLINE_TOKEN"])
sl.init("c10d", timeout=60)  # Gloo listens as well, in each rank
sl.barrier()
sys.stdout.write(f"pid {os.getpid()}\\n")
sys.stdout.flush()
while not os.path.exists("end"):
    time.sleep(0.01)
"""
WAITS = """
import os, time
print("pid", os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
while not os.path.exists("end"):
    time.sleep(0.01)
"""
TOKENS: set[str] = set()
"""Of all jobs of this module: each has one of its own."""


def listening_addresses(pids: list[int]) -> set[str]:
    """Addresses at which these processes listen for connections over TCP."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # 0A: LISTEN
                words = bytes.fromhex(fields[1].split(":")[0])
                address = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(str(IPv4Address(address) if len(address) == 4 else IPv6Address(address)))
    return found


@pytest.mark.parametrize(
    "options", [(), ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "1")]
)
@pytest.mark.real
def test_a_job_on_one_host_listens_on_the_loopback_only(
    forks: Forks, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "program.py").write_text(JOINED)
    launcher = forks.launch(tmp_path, "-n", "2", *options, "program.py")
    pids = [int(line.split()[-1]) for line in launcher.wait_for_lines(2)]
    assert listening_addresses([launcher.pid]) == {"127.0.0.1"}
    assert listening_addresses(pids) == {"127.0.0.1"}
    (tmp_path / "end").touch()
    done = launcher.wait()
    assert (done.returncode, done.stderr) == (0, "")
    first, second = ((tmp_path / f"token {rank}").read_text() for rank in range(2))
    assert first == second
    assert len(bytes.fromhex(first)) == 32
    assert first not in TOKENS
    TOKENS.add(first)


def test_host_says_where_several_hosts_listen(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAITS)
    with held_port() as port:
        meeting = ["--nnodes", "2", "--master-addr", "localhost", "--master-port", str(port)]
        launchers = [
            forks.launch(tmp_path, *meeting, "--node-rank", rank, "--host", "127.0.0.1", "program.py")
            for rank in ("0", "1")
        ]
        for launcher in launchers:
            assert launcher.wait_for_lines(1)[0].endswith("lo")
    assert listening_addresses([launchers[0].pid]) == {"127.0.0.1"}
    assert listening_addresses([launchers[1].pid]) == set()
    (tmp_path / "end").touch()
    assert [launcher.wait().returncode for launcher in launchers] == [0, 0]


def test_a_bound_socket_holds_its_port() -> None:
    with bound_socket("localhost", 0) as bound:
        bound.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", bound.getsockname()[1])


def test_an_address_of_nobody_here_has_no_interface() -> None:
    assert interface_of("192.0.2.1") is None
