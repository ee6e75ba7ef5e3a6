"""What is open on a rank for each further rank."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from syncline.transport import C10dTransport
from syncline.transport.shared_memory import SharedMemoryTransport


def open_files() -> set[tuple[str, str]]:
    """The number and target of each: what an earlier test left, and is closed later, is then no difference."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing itself, or what another thread has read
            files.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return files


def kinds(files: set[tuple[str, str]]) -> Counter[str]:
    """Count them by kind: "socket", "pipe", "anon_inode" (descriptors of processes are such), or the path."""
    return Counter(target.partition(":")[0] for _, target in files)


@pytest.mark.ranks(4)
def test_shared_memory_adds_a_socket_for_each_neighbour() -> None:
    beneath = C10dTransport(exchanges_notices=False)  # as in sl.init
    beneath.barrier().wait()  # Gloo's connections are made
    before = open_files()
    t = SharedMemoryTransport.over(beneath)
    ddp = sl.DistributedDataParallel(nn.Linear(200, 100), process_group=t)
    for _ in range(2):
        ddp(torch.ones(3, 200)).sum().backward()
    expected = Counter({"socket": 1 if t.rank in (0, t.size - 1) else 2})
    deadline = time.monotonic() + 10
    while (added := kinds(open_files() - before)) != expected and time.monotonic() < deadline:
        pass  # another thread may just be reading a file
    assert added == expected
    t.barrier().wait()
    t.close()


def store_traffic(port: int) -> tuple[int, int, int]:
    """Return how many connections this process has to the store, how many files of the store, and how many requests.

    The kernel counts the segments with data of each connection. torch sends a small request as one segment.
    """
    connections = files = requests = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself, or a socket that is not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                files += one.getsockname()[1] == port
                if one.getpeername()[1] == port:
                    connections += 1
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    requests += struct.unpack_from("=156xI", info)[0]
    return connections, files, requests


@pytest.mark.ranks(8)
def test_a_rank_sends_few_requests_to_the_store_by_one_connection() -> None:
    dist.destroy_process_group()
    world = sl.init("shm")
    ddp = sl.DistributedDataParallel(nn.Linear(20, 10))
    for _ in range(3):
        ddp(torch.ones(3, 20)).sum().backward()
    sl.barrier()
    connections, files, requests = store_traffic(int(os.environ["MASTER_PORT"]))
    sl.barrier()
    sl.shutdown()
    assert connections == 1
    assert files <= (2 + world.size if world.rank == 0 else 0)  # the test holds the port, too
    assert 10 < requests <= 30  # Gloo alone sends 2 for each other rank
