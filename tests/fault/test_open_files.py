"""What is open on a rank for each further rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.transport import C10dTransport
from syncline.transport.shared_memory import SharedMemoryTransport


def open_files() -> Counter[str]:
    """By kind: "socket", "pipe", "anon_inode" (descriptors of processes are such), or the path."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing itself, or what another thread has read
            kinds[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return kinds


def assert_shared_memory_adds_a_socket_for_each_neighbour() -> None:
    beneath = C10dTransport()
    beneath.barrier().wait()  # Gloo's connections are made
    before = open_files()
    t = SharedMemoryTransport.over(beneath)
    ddp = sl.DistributedDataParallel(nn.Linear(200, 100), process_group=t)
    for _ in range(2):
        ddp(torch.ones(3, 200)).sum().backward()
    expected = Counter({"socket": 1 if t.rank in (0, t.size - 1) else 2})
    deadline = time.monotonic() + 10
    while (added := open_files() - before) != expected and time.monotonic() < deadline:
        pass  # another thread may just be reading a file
    assert added == expected
    t.barrier().wait()
    t.close()


@pytest.mark.ranks(2)
def test_with_two_ranks_there_is_one_more_socket() -> None:
    assert_shared_memory_adds_a_socket_for_each_neighbour()


@pytest.mark.ranks(4)
def test_with_four_ranks_there_is_one_more_on_rank_0_and_no_more_than_two() -> None:
    assert_shared_memory_adds_a_socket_for_each_neighbour()
