"""The commands of docs/guides/many-hosts.md, word for word, on two hosts that are network namespaces. Needs root."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from syncline.testing import HostsUnavailable, SimulatedHosts, simulated_hosts
from virtual_hosts import outputs_of

pytestmark = pytest.mark.real

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "many-hosts.md"

# One write for a line: torchrun runs Python with -u, and print() then writes each word on its own, between those of
# the other ranks.
PROGRAM = """
import os, sys, torch, syncline as sl
from syncline import launchers
found = launchers.current()
world = sl.init(timeout=60)
ddp = sl.DistributedDataParallel(torch.nn.Linear(1, 1))
ddp(torch.full((1, 1), float(world.rank))).sum().backward()
assert ddp.module.weight.grad.item() == 1.5
assert len(os.environ["SYNCLINE_TOKEN"]) == 32
sl.check_replicas(ddp.module)
sys.stdout.write(f"{found.launcher} {world.rank} {world.size} {world.local_size} {ddp.contract.title}\\n")
sl.shutdown()
"""


def commands() -> str:
    (block,) = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.S)
    return "\n".join(line.removeprefix("$ ") for line in block.splitlines())


@contextmanager
def names_resolved(hosts: SimulatedHosts) -> Iterator[None]:
    """Give both hosts an /etc/hosts with their names, as hosts of a cluster have. `ip netns exec` mounts the file."""
    lines = [f"{hosts.address_of(letter)} {name}\n" for letter, name in hosts.names.items()]
    folders = [Path("/etc/netns", name) for name in hosts.names.values()]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def test_the_commands_of_the_page_train_on_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    torchrun = tmp_path / "torchrun"  # where it is not beside this Python
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    # A host has no launcher's variables, and one thread is enough.
    clean = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
    script = f'{clean}; export PATH="{tmp_path}:$PATH"; cd {tmp_path}\n{commands()}'
    try:
        with simulated_hosts() as hosts, names_resolved(hosts):
            hosts.start(["bash", "-c", script], "ab")
            outputs = outputs_of(hosts)
    except HostsUnavailable as error:
        pytest.skip(str(error))
    expected = re.search(r"```text\n(.*?)\n```", PAGE.read_text(), re.S)
    assert expected is not None
    lines = sorted(line for _, out, _ in outputs for line in out.splitlines() if line.startswith("torchrun"))
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    assert [line.split()[:4] for line in lines] == [["torchrun", str(rank), "4", "2"] for rank in range(4)]
    assert all(expected[1] in line for line in lines), lines
