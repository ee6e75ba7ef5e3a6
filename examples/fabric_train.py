"""Train with Lightning's Fabric on two ranks, under Syncline's strategy.

python examples/fabric_train.py
"""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncline.frameworks.lightning import SynclineFabricStrategy


def main() -> None:
    fabric = L.Fabric(strategy=SynclineFabricStrategy(), accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    inputs = torch.randn(512, 8)
    batches = fabric.setup_dataloaders(
        DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    )
    for epoch in range(3):
        for index, (x, y) in enumerate(batches):
            is_last = index % 2 == 1  # two micro-batches for each step
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.print(f"epoch {epoch}: loss {mean:.3f}")


if __name__ == "__main__":
    main()
