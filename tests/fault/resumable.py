"""A training run that may be killed, or asked to stop, at any step.

Arguments: DIRECTORY REPORT STRATEGY NUM_STEPS [EVENT...]. It goes on from what is saved in DIRECTORY. Rank 0 appends to
REPORT, for each step, a line of the step's number and loss, and when it is done one of the final weights.

An event is SIGNAL@STEP@RANK: before that step this rank gets the signal; for PAUSE it says so, and waits until it was
asked to stop; for FULL the disk is full from then on.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.checkpoint.files import Files

STRATEGIES: dict[str, Any] = {
    "every-step": {},
    "diloco-4bit": {"strategy": sl.DiLoCo(3, compression=sl.compression.Quantize(4))},
    "int8": {"compression": sl.compression.Quantize(8)},
    "sharded": {"sharded": True},
    "local-sgd": {"strategy": sl.LocalSGD(5)},
    "gossip": {"strategy": sl.Gossip("ring")},
    "workers": {},
}


class Disk(Files):
    """It may be full."""

    is_full = False

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().write(path, parts)


def happen(event: str, disk: Disk, checkpointer: sl.Checkpointer) -> None:
    if event == "FULL":
        disk.is_full = True
    elif event == "PAUSE":
        print("pauses", flush=True)
        while not checkpointer._stop.request.is_asked:
            time.sleep(0.01)
    else:
        os.kill(os.getpid(), signal.Signals[event])


def tell(report: str, line: str) -> None:
    with open(report, "a") as file:
        file.write(f"{line}\n")


def main() -> None:
    directory, report, strategy = sys.argv[1:4]
    num_steps = int(sys.argv[4])
    world = sl.init(device="cpu")
    events = [event.split("@") for event in sys.argv[5:]]
    own_events = [(name, int(step)) for name, step, rank in events if int(rank) == world.rank]
    torch.manual_seed(world.rank)
    g = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(53, 6, generator=g), torch.randn(53, 1, generator=g))
    sampler = sl.DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2 if strategy == "workers" else 0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    ddp = sl.DistributedDataParallel(model, **STRATEGIES[strategy])
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    state = sl.TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    disk = Disk()
    checkpointer = sl.Checkpointer(directory, keep=2, files=disk)
    checkpointer.load(state)
    checkpointer.stop_if_asked(state)
    while state.step < num_steps:
        for x, y in loader:
            for event, step in own_events:
                if step == state.step:
                    happen(event, disk, checkpointer)
            loss = nn.functional.mse_loss(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state.commit(len(x))
            if world.rank == 0:
                tell(report, f"{state.step} {loss.item().hex()}")
            if state.step % 4 == 0:
                checkpointer.save(state, blocking=state.step % 8 == 0)
            checkpointer.stop_if_asked(state)
            if state.step == num_steps:
                break
    checkpointer.wait()
    ddp.sync_parameters_()
    if world.rank == 0:
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        tell(report, f"weights {weights.numpy().tobytes().hex()}")
    sl.shutdown()


if __name__ == "__main__":
    main()
