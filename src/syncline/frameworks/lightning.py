"""Strategies for the package `lightning`: `SynclineStrategy` for the Trainer, `SynclineFabricStrategy` for Fabric.

The import of this module registers both under the name "syncline". Lightning does not look for strategies of other
packages by itself.

    import syncline.frameworks.lightning

    trainer = lightning.Trainer(strategy="syncline", accelerator="cpu", devices=2)
    fabric = lightning.Fabric(strategy="syncline", accelerator="cpu", devices=2)
"""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from syncline.frameworks.lightning_methods import FabricMethods, TrainerMethods


class SynclineStrategy(TrainerMethods, DDPStrategy):  # type: ignore[misc]
    """Data-parallel training of Lightning's Trainer with `sl.DistributedDataParallel`.

    Args:
        transport: how tensors are sent, as in `sl.init`: "auto", "shm" or "c10d".
        kwargs: the other arguments of Lightning's `DDPStrategy`, and all arguments of `sl.DistributedDataParallel`,
            such as `strategy=sl.DiLoCo(...)`, `compression=`, `replica_check=` and `find_unused_parameters=`.

    Examples:
        trainer = lightning.Trainer(strategy=SynclineStrategy(strategy=sl.LocalSGD(every=8)), devices=2)
    """


class SynclineFabricStrategy(FabricMethods, FabricDDPStrategy):  # type: ignore[misc]
    """Data-parallel training of Lightning's Fabric with `sl.DistributedDataParallel`.

    Args:
        transport, kwargs: see `SynclineStrategy`.

    Examples:
        fabric = lightning.Fabric(strategy=SynclineFabricStrategy(compression=sl.compression.Cast()), devices=2)
    """


SynclineStrategy.register_strategies(StrategyRegistry)
SynclineFabricStrategy.register_strategies(STRATEGY_REGISTRY)
