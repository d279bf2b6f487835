"""Lightning's Trainer and Fabric with shardwright, for the package `pytorch_lightning`.

import shardwright.integrations.pytorch_lightning
trainer = Trainer(strategy="shardwright_zero2", accelerator="cpu", devices=2)     # the rest stays unchanged
"""

from __future__ import annotations

import lightning_fabric.strategies
import pytorch_lightning.strategies

from .lightning_mixins import FabricMixin, TrainerMixin, register

__all__ = ["FabricStrategy", "ShardwrightStrategy"]


class ShardwrightStrategy(TrainerMixin, pytorch_lightning.strategies.DDPStrategy):
    """A strategy of the Trainer that trains with shardwright; see TrainerMixin."""


class FabricStrategy(FabricMixin, lightning_fabric.strategies.DDPStrategy):
    """A strategy of Fabric that trains with shardwright; see FabricMixin."""


register(pytorch_lightning.strategies.StrategyRegistry, ShardwrightStrategy)
register(lightning_fabric.strategies.STRATEGY_REGISTRY, FabricStrategy)
