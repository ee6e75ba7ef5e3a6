"""The strategy for the Trainer of the package `pytorch_lightning`. `syncline.frameworks.lightning` documents it."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from syncline.frameworks.lightning_methods import TrainerMethods


class SynclineStrategy(TrainerMethods, DDPStrategy):  # type: ignore[misc]
    """Data-parallel training of pytorch_lightning's Trainer with `sl.DistributedDataParallel`."""


SynclineStrategy.register_strategies(StrategyRegistry)
