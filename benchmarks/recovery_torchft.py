"""One replica group of one rank under torchft, for `recovery.py`. It needs torchft, and not Syncline.

    python benchmarks/recovery_torchft.py LIGHTHOUSE FOLDER INDEX PARAMETERS

It writes a line for each committed step to a file of FOLDER, which has its process number as name: the number, when
the step began, and when it ended.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)


def main() -> None:
    """Train until the process is killed."""
    lighthouse, folder, index, num_parameters = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    width = max(8, round((num_parameters / 4) ** 0.5))
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    inner = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=lambda state: (
            net.load_state_dict(state["net"]),
            inner.load_state_dict(state["inner"]),
        ),
        state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
        replica_id=f"recovery_{index}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
    )
    ddp, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    x = torch.randn(16, width) * (1 + int(index))
    with (folder / str(os.getpid())).open("w") as file:
        while True:
            before, began = manager.current_step(), time.monotonic()
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                file.write(f"{manager.current_step()} {began} {time.monotonic()}\n")
                file.flush()


if __name__ == "__main__":
    main()
