"""The strategy for the Fabric of the package `lightning_fabric`. `syncline.frameworks.lightning` documents it."""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from syncline.frameworks.lightning_methods import FabricMethods


class SynclineFabricStrategy(FabricMethods, DDPStrategy):  # type: ignore[misc]
    """Data-parallel training of lightning_fabric's Fabric with `sl.DistributedDataParallel`."""


SynclineFabricStrategy.register_strategies(STRATEGY_REGISTRY)
