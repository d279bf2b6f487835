"""Lightning's Trainer and Fabric with shardwright, for the package `lightning`.

import shardwright.integrations.lightning
trainer = Trainer(strategy="shardwright_zero2", accelerator="cpu", devices=2)     # the rest stays unchanged
"""

from __future__ import annotations

import lightning.fabric.strategies
import lightning.pytorch.strategies

from .lightning_mixins import FabricMixin, TrainerMixin, register

__all__ = ["FabricStrategy", "ShardwrightStrategy"]


class ShardwrightStrategy(TrainerMixin, lightning.pytorch.strategies.DDPStrategy):
    """A strategy of the Trainer that trains with shardwright; see TrainerMixin."""


class FabricStrategy(FabricMixin, lightning.fabric.strategies.DDPStrategy):
    """A strategy of Fabric that trains with shardwright; see FabricMixin."""


register(lightning.pytorch.strategies.StrategyRegistry, ShardwrightStrategy)
register(lightning.fabric.strategies.STRATEGY_REGISTRY, FabricStrategy)
