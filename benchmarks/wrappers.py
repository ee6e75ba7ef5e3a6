"""Does a freed wrapper leave anything behind?

    syncline run -n 2 benchmarks/wrappers.py [--wrappers 200] [--transport c10d]

Wrappers are made, train two steps and are dropped, with the garbage collector switched off. Open files, mappings,
threads and keys of the store must be at the end what they were after the first tenth (a few are allowed: threads that
are just ending, mappings of the allocator), and resident memory may grow by at most 40 kB a wrapper.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import syncline as sl

MAX_MORE = {"files": 2, "maps": 8, "threads": 2, "keys": 8}
MAX_BYTES_PER_WRAPPER = 40_000


def left() -> dict[str, int]:
    """Count what this process holds."""
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "keys": store.num_keys(),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def train() -> None:
    """Make a wrapper, train two steps, and drop it."""
    ddp = sl.DistributedDataParallel(nn.Sequential(nn.Linear(300, 100), nn.BatchNorm1d(100)))
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()


def main() -> None:
    """Print both counts on rank 0, and raise where they grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrappers", type=int, default=200)
    parser.add_argument("--transport", default="auto")
    arguments = parser.parse_args()
    world = sl.init(arguments.transport)
    gc.disable()
    num_first = max(1, arguments.wrappers // 10)
    for _ in range(num_first):
        train()
    sl.barrier()
    first = left()
    for _ in range(arguments.wrappers - num_first):
        train()
    sl.barrier()
    last = left()
    if world.rank == 0:
        print(f"after {num_first} wrappers: {first}\nafter {arguments.wrappers}: {last}")
    more = {name: last[name] - first[name] for name in MAX_MORE}
    assert all(more[name] <= most for name, most in MAX_MORE.items()), more
    grown = (last["bytes"] - first["bytes"]) / (arguments.wrappers - num_first)
    assert grown <= MAX_BYTES_PER_WRAPPER, f"{grown:.0f} bytes a wrapper"
    sl.shutdown()


if __name__ == "__main__":
    main()
