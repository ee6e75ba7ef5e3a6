"""A training program for Lightning's Fabric on two ranks, which writes what each run has computed.

python fabric_program.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn

import syncline as sl
from syncline.frameworks.lightning import SynclineFabricStrategy


def train(
    strategy: Any,
    folder: Path,
    *,
    precision: str = "32-true",
    clip: bool = True,
    optimizer_class: Any = torch.optim.AdamW,
) -> dict[str, Any]:
    """Train twelve steps of two micro-batches each, with a checkpoint that is loaded again after the sixth."""
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=2, precision=precision)
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(module, optimizer_class(module.parameters(), lr=1e-2))
    losses, draw = [], torch.Generator().manual_seed(fabric.global_rank)
    for step in range(12):
        for micro in range(2):
            x = torch.randn(4, 8, generator=draw)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).to(x.dtype))
                fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach().float(), reduce_op="mean").item())
        if step == 5:
            fabric.save(folder / "half.ckpt", {"model": model, "optimizer": optimizer})
            with torch.no_grad():
                module[0].weight.fill_(9.0)
            fabric.load(folder / "half.ckpt", {"model": model, "optimizer": optimizer})
    own = torch.cat([p.detach().flatten().double() for p in module.parameters()])
    everyone = fabric.all_gather(own)
    return {
        "losses": losses,
        "values": everyone[0].tolist(),
        "equal": torch.equal(everyone[0], everyone[1]),
        "wrapper": type(model._forward_module).__module__,
    }


def main(folder: Path) -> None:
    found = {}
    for name, how in {"plain": {"clip": False}, "clip": {}, "bf16": {"precision": "bf16-mixed"}}.items():
        found[f"ddp, {name}"] = train(DDPStrategy(), folder, **how)  # type: ignore[arg-type]
        found[f"syncline, {name}"] = train(SynclineFabricStrategy(), folder, **how)  # type: ignore[arg-type]
    drifting = SynclineFabricStrategy(strategy=sl.DiLoCo(6))
    found["DiLoCo"] = train(drifting, folder, clip=False, optimizer_class=torch.optim.SGD)
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
