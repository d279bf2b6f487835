"""DeepSpeed's stages as arms of bench_zero: on the CPU, over Gloo. Optional: `pip install deepspeed`."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from arms import ADAMW
from models import CASES
from torch import Tensor

STAGES = {f"DeepSpeed {stage}": stage for stage in (1, 2, 3)}


def absence() -> str:
    """Why there are no such arms; empty if there are."""
    return "" if importlib.util.find_spec("deepspeed") else "deepspeed is not installed: pip install deepspeed"


class DeepSpeedTrainer:
    """As arms.Trainer. The optimizer is torch's AdamW(fused=True), as everywhere, not DeepSpeed's own."""

    def __init__(self, case: str, arm: str, rank: int) -> None:
        os.environ.update(
            DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size())
        )
        import deepspeed  # seconds, and it looks at the environment

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        self._case = CASES[case]
        module: Any = self._case.model()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": STAGES[arm]},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
        self.outer, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self._batch = self._case.batch(rank)

    def step(self) -> Tensor:
        """The loss, which is also this rank's before the step."""
        loss = self._case.loss(self.outer, self._batch)
        self.outer.backward(loss)
        self.outer.step()
        return loss.detach()
