"""Ranks that train over Gloo, of which one is killed at a random moment: does every survivor name it, and how soon?

    python tests/fault/kills.py --kills 40 --seed 1

Prints one line a kill, and at the end how many of the survivors' errors were a `PeerLost` that names the lost rank with
step and phase. A survivor gives up its connections at once, as a program that ends does: others see that as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from syncline import PeerLost, SynclineError
from syncline.testing import RankPool, Task

__all__ = ["Kill", "one_rank"]

_DEADLINE_SECONDS = 60.0
_CLOCK_FILE = "moment"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What happens in one round."""

    size: int
    victim: int
    after_seconds: float
    """How long after the first step."""
    port: int
    """Of the store; 0: rank 0 has it, and it ends with rank 0."""

    @staticmethod
    def drawn(lots: random.Random, port: int) -> Kill:
        size = lots.choice([3, 4])
        return Kill(
            size=size,
            victim=lots.randrange(size),
            after_seconds=lots.uniform(0, 1.0),
            port=lots.choice([0, port]),
        )

    def __str__(self) -> str:
        store = "a launcher's store" if self.port else "the store on rank 0"
        return f"{self.size} ranks, {store}, rank {self.victim} killed after {self.after_seconds:.2f} s"


def one_rank(kill: Kill, folder: str) -> None:
    """Train until a rank is lost; write down what was raised."""
    rank = dist.get_rank()
    _meet_at_a_tcp_store(kill, folder)
    sl.init(transport="c10d", timeout=_DEADLINE_SECONDS)
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 256), nn.Linear(256, 4))
    ddp = sl.DistributedDataParallel(net, bucket_cap_mb=0.1)
    error: Exception | None = None
    try:
        ddp(torch.randn(32, 64)).square().mean().backward()
        if rank == kill.victim:
            threading.Timer(kill.after_seconds, _die, (folder,)).start()
        while True:
            ddp(torch.randn(32, 64)).square().mean().backward()
    except Exception as caught:
        error = caught
    seconds = time.monotonic() - float(Path(folder, _CLOCK_FILE).read_text())
    dist.destroy_process_group()
    text = str(error)
    found = {
        "is_named": isinstance(error, PeerLost)
        and f"rank {kill.victim}: its process has ended" in text
        and re.search(r"rank \d+[,:] step ", text) is not None,  # of this rank, or of the one that knew first
        "seconds": seconds,
        "text": f"{type(error).__name__}: {text}",
    }
    Path(folder, f"rank {rank}").write_text(json.dumps(found))


def _meet_at_a_tcp_store(kill: Kill, folder: str) -> None:
    """In place of the pool's, which is a file: a rank that is killed as it writes leaves it torn."""
    rank, timeout = dist.get_rank(), timedelta(seconds=_DEADLINE_SECONDS)
    pool_store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if kill.port:
        store = dist.TCPStore("127.0.0.1", kill.port, None, False, timeout, wait_for_workers=False)
    elif rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        pool_store.set("port", str(store.port))
    else:
        port = int(pool_store.get("port"))
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(folder, store), rank=rank, world_size=kill.size, timeout=timeout
    )


def _die(folder: str) -> None:
    Path(folder, _CLOCK_FILE).write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def kill_ranks(num_kills: int, seed: int, pool: RankPool) -> tuple[int, int]:
    """How many survivors named the lost rank, and how many there were."""
    lots = random.Random(seed)
    # As a launcher has it.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    all_seconds: list[float] = []
    num_named = 0
    for number in range(num_kills):
        kill = Kill.drawn(lots, store.port)
        with tempfile.TemporaryDirectory(prefix="syncline-kills-") as folder:
            found = _found(pool, kill, folder)
        named, seconds = sum(one["is_named"] for one in found), [one["seconds"] for one in found]
        print(
            f"{number + 1}: {kill}: named by {named} of {len(found)}, after at most {max(seconds):.2f} s",
            flush=True,
        )
        for one in found:
            if not one["is_named"]:
                print(one["text"], flush=True)
        num_named += named
        all_seconds += seconds
    middle = sorted(all_seconds)[len(all_seconds) // 2]
    print(
        f"{num_kills} kills: the lost rank was named in {num_named} of {len(all_seconds)} survivors' errors, after "
        f"{middle:.2f} s (median), {max(all_seconds):.2f} s (at most)"
    )
    return num_named, len(all_seconds)


def _found(pool: RankPool, kill: Kill, folder: str) -> list[dict[str, Any]]:
    task = Task(
        module="kills",
        qualname="one_rank",
        arguments={"kill": kill, "folder": folder},
        timeout_seconds=_DEADLINE_SECONDS,
    )
    outcomes = pool.run(kill.size, task, [kill.victim])
    bad = [
        f"rank {rank} {one.kind}:\n{one.text}"
        for rank, one in enumerate(outcomes)
        if one.kind not in ("passed", "killed")
    ]
    if bad:
        raise SynclineError("\n".join([f"{kill}:", *bad]))
    return [
        json.loads(Path(folder, f"rank {rank}").read_text())
        for rank in range(kill.size)
        if rank != kill.victim
    ]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # The ranks look for the module by this name; pickled plans must name it, too.
    from kills import kill_ranks as run

    with closing(RankPool()) as pool:
        num_named, num_survivors = run(options.kills, options.seed, pool)
    sys.exit(num_named < num_survivors)


if __name__ == "__main__":
    main()
