"""A training program for Lightning's Trainer on two ranks, which writes what each run has computed.

    python lightning_program.py FOLDER RUN...

Each run is trained under Lightning's own strategy and under ours, where both can. Rank 0 writes one JSON file.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import syncline as sl
from syncline.frameworks.lightning import SynclineStrategy

MAKERS: dict[str, Callable[..., Any]] = {"ddp": DDPStrategy, "syncline": SynclineStrategy}


class Net(L.LightningModule):
    """A small network with batch norm, trained by AdamW, whose learning rate changes after each step."""

    def __init__(self, *, with_batch_norm: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(16)] if with_batch_norm else []
        self.net = nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 1))
        self.losses: list[float] = []
        self.wrappers: set[str] = set()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.wrappers.add(type(self.trainer.strategy.model).__module__)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Tensor:
        found: Tensor = self.net(batch[0])
        return found

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class SgdNet(Net):
    """The same network under an optimizer without a state of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class UnusedNet(Net):
    """The same network with a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 1)


class Gan(L.LightningModule):
    """Two networks and two optimizers, stepped by hand, the second one only in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = (
            nn.Linear(8, 8),
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
        )
        self.losses: list[float] = []
        self.wrappers: set[str] = set()

    def training_step(self, batch: Any, index: int) -> None:
        self.wrappers.add(type(self.trainer.strategy.model).__module__)
        steps_of_generator, steps_of_critic = self.optimizers()
        self.toggle_optimizer(steps_of_critic)
        loss = self.critic(self.generator(batch[0]).detach()).mean() - self.critic(batch[0]).mean()
        self.step(steps_of_critic, loss)
        if index % 2:
            self.toggle_optimizer(steps_of_generator)
            self.step(steps_of_generator, -self.critic(self.generator(batch[0])).mean())

    def step(self, optimizer: Any, loss: Tensor) -> None:
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)], []


def data(num: int = 64) -> DataLoader[Any]:
    x = torch.randn(num, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def trainer(strategy: Any, **how: Any) -> L.Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=2, **{"max_epochs": 2} | quiet | how)


def values(module: nn.Module) -> list[list[float]]:
    """Return the sums of the module's parameters and buffers on each rank."""
    own = torch.tensor([v.double().sum().item() for v in module.state_dict().values()], dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(2)]
    torch.distributed.all_gather(everyone, own)
    return [one.tolist() for one in everyone]


def fit(
    make: Callable[..., Any],
    *,
    options: dict[str, Any] | None = None,
    model: Callable[[], Any] = Net,
    num: int = 64,
    **how: Any,
) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = model()
    trainer(make(**options or {}), **how).fit(module, data(num))
    return {"losses": module.losses, "values": values(module), "wrappers": sorted(module.wrappers)}


class HalfOfEachBatch(Sampler[int]):
    """The rows of this rank: the first or the second eight of each sixteen rows."""

    def __iter__(self) -> Iterator[int]:
        return (row for row in range(64) if row // 8 % 2 == torch.distributed.get_rank())

    def __len__(self) -> int:
        return 32


def sync_batch_norm(make: Callable[..., Any]) -> dict[str, Any]:
    """Train on two ranks, and then on one process with the rows of both ranks in each batch."""
    L.seed_everything(1, verbose=False)
    module = SgdNet(with_batch_norm=True)
    start = copy.deepcopy(module.net)
    batches = DataLoader(data().dataset, batch_size=8, sampler=HalfOfEachBatch())
    trainer(make(), sync_batchnorm=True, use_distributed_sampler=False).fit(module, batches)
    optimizer = torch.optim.SGD(start.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in DataLoader(data().dataset, batch_size=16):
            optimizer.zero_grad()
            nn.functional.mse_loss(start(x), y).backward()
            optimizer.step()
    return {"values": values(module), "one process": values(start)[0]}


def unused(make: Callable[..., Any]) -> dict[str, Any]:
    """Train with an unused layer, without the argument for it. This ends the session of the ranks."""
    try:
        fit(make, model=UnusedNet)
    except sl.UnreducedGradients as error:
        return {"error": str(error), "notes": error.__notes__}
    return {}


def evaluate(make: Callable[..., Any]) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module, own = Net(with_batch_norm=True), trainer(make(), max_epochs=1)
    own.fit(module, data(), data(32))
    return {
        "fit": own.callback_metrics["val"].item(),
        "validate": own.validate(module, data(32), verbose=False)[0]["val"],
        "test": own.test(module, data(32), verbose=False)[0]["val"],
        "predict": torch.cat([batch.flatten() for batch in own.predict(module, data(32))]).tolist(),
    }


def resume(
    make: Callable[..., Any],
    *,
    folder: Path,
    model: Callable[[], Any] = Net,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train for four epochs at once, and again in two halves with a checkpoint in between."""
    path = folder / "half.ckpt"
    whole = fit(make, options=options, model=model, max_epochs=4)
    L.seed_everything(1, verbose=False)
    saving = LambdaCallback(on_train_end=lambda own, module: own.save_checkpoint(path))
    first, half, second = model(), trainer(make(**options or {}), callbacks=[saving]), model()
    half.fit(first, data())
    half.save_checkpoint(folder / "after.ckpt")
    trainer(make(**options or {}), max_epochs=4).fit(second, data(), ckpt_path=path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(make(**options or {}), max_epochs=3).fit(model(), data(), ckpt_path=folder / "after.ckpt")
    return {
        "whole": whole["losses"],
        "halves": first.losses + second.losses,
        "whole values": whole["values"],
        "halves values": values(second),
        "has state": "syncline" in torch.load(path, weights_only=True),
        "begins anew after fit": any("both begin anew" in str(found.message) for found in caught),
    }


RUNS: dict[str, Callable[..., Any]] = {
    "plain": fit,
    "batch norm": partial(fit, model=partial(Net, with_batch_norm=True)),
    "accumulate and clip": partial(fit, accumulate_grad_batches=3, gradient_clip_val=0.1),
    "clip by value": partial(fit, gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "bf16": partial(fit, precision="bf16-mixed"),
    "unused parameters": partial(fit, model=UnusedNet, options={"find_unused_parameters": True}),
    "gan": partial(fit, model=Gan, options={"find_unused_parameters": True}),
    "gan, static graph": partial(fit, model=Gan, num=8, max_epochs=1, options={"static_graph": True}),
    "uneven": partial(fit, num=59),
    "evaluate": evaluate,
    "resume": resume,
}
OWN_RUNS: dict[str, Callable[..., Any]] = {
    "sync batch norm": sync_batch_norm,
    "sharded": partial(fit, options={"sharded": True}, accumulate_grad_batches=3, gradient_clip_val=0.1),
    "sharded, resume": partial(resume, options={"sharded": True}),
    "LocalSGD": partial(fit, options={"strategy": sl.LocalSGD(3)}),
    "DiLoCo, resume": partial(resume, model=SgdNet, options={"strategy": sl.DiLoCo(2)}),
    "compression": partial(fit, options={"compression": sl.compression.Cast(torch.bfloat16)}),
    "replica check": partial(fit, options={"replica_check": sl.ReplicaCheck(every=1)}),
    "unused parameters, not announced": unused,
}


def main(folder: Path, names: list[str]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        run = {**RUNS, **OWN_RUNS}[name]
        if getattr(run, "func", run) is resume:
            run = partial(run, folder=folder)
        for kind in MAKERS if name in RUNS else ("syncline",):
            found.setdefault(name, {})[kind] = run(MAKERS[kind])
    if os.environ["LOCAL_RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [*RUNS, *OWN_RUNS])
