"""Writes `fixtures/version-3`: what two ranks have saved of a sharded optimizer with version 3 of the format.

    python tests/state/write_fixture.py [DIRECTORY]

It was run once, when that version was new; and before, without the scheduler, for `fixtures/version-2`. What it wrote
has to be readable for ever, so run it for a new version only, into a new folder.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

import syncline as sl
from syncline import Checkpointer, TrainState
from syncline.transport import Transport, run_ranks

VERSION_2, VERSION_3 = (Path(__file__).with_name("fixtures") / f"version-{number}" for number in (2, 3))


def network() -> nn.Module:
    """Weights of which each rank gets a part, in another order than that of their dimensions."""
    conv = nn.Conv2d(2, 8, 3).to(memory_format=torch.channels_last)
    module = nn.Sequential(conv, nn.Flatten(), nn.Linear(8, 3, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 64 + number)
    return module


def momentum(index: int, parameter: torch.Tensor) -> torch.Tensor:
    """Made up, so that no arithmetic has to be the same for ever."""
    return torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape) + 1000 * index


def ordinary_state(module: nn.Module) -> dict[str, Any]:
    """What was saved, in torch's ordinary form."""
    optimizer = SGD(module.parameters(), lr=0.25, momentum=0.5)
    state = {i: {"momentum_buffer": momentum(i, p)} for i, p in enumerate(module.parameters())}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def scheduler_of(optimizer: Any) -> MultiStepLR:
    """Whose milestones are a Counter."""
    return MultiStepLR(optimizer, [10, 20, 20], gamma=0.5)


def write(directory: Path) -> None:
    """Save it there."""

    def program(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(network(), process_group=t, sharded=True)
        optimizer = ddp.attach(SGD(ddp.parameters(), lr=0.25, momentum=0.5))
        optimizer.load_state_dict(ordinary_state(network()))
        scheduler = scheduler_of(optimizer)
        scheduler.last_epoch = 12
        state = TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler)
        Checkpointer(directory, group=t).save(state, step=12)

    run_ranks(2, program)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else VERSION_3
    socket.gethostname = lambda: "host"
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        (saved,) = Path(folder).iterdir()
        shutil.copytree(saved, target)


if __name__ == "__main__":
    main()
