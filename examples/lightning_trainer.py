"""Train with Lightning's Trainer on two ranks, under Syncline's strategy.

python examples/lightning_trainer.py
python examples/lightning_trainer.py --local-sgd 8
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.frameworks.lightning import SynclineStrategy


class Regression(L.LightningModule):  # type: ignore[misc]
    """A small network that learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            print(self.trainer.strategy.model.contract)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(num: int) -> DataLoader[Any]:
    inputs = torch.randn(num, 8)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local-sgd", type=int, default=0, help="steps between two parameter syncs")
    steps = parser.parse_args().local_sgd
    L.seed_everything(0)
    strategy = SynclineStrategy(strategy=sl.LocalSGD(steps)) if steps else "syncline"
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(), batches(512), batches(128))
    if trainer.global_rank == 0:
        print(f"validation loss {trainer.callback_metrics['val']:.3f}")


if __name__ == "__main__":
    main()
