"""The arms of bench_ddp and bench_zero: a module, the wrapper that averages its gradients, and AdamW(fused=True)."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from models import CASES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
VIEW_STATIC = {"gradient_as_bucket_view": True, "static_graph": True}
TORCH_SETTINGS: dict[str, dict[str, Any]] = {
    "torch DDP default": {},
    "torch DDP view": {"gradient_as_bucket_view": True},
    **{f"torch DDP view static cap {cap}": {**VIEW_STATIC, "bucket_cap_mb": cap} for cap in (1, 5, 25, 100)},
}
QUICK_SETTINGS = ["torch DDP view static cap 5", "torch DDP view static cap 25"]
#: keyword arguments of sw.wrap
STAGES: dict[str, dict[str, Any]] = {
    "ours": {"zero": 0},
    "zero=1": {"zero": 1},
    "zero=2": {"zero": 2},
    "zero=3": {"zero": 3},
    "zero=3 private": {"zero": 3, "share_parameters": False},
}
#: the same with steps in the backward, by arm, and the arm of ordinary steps
STEPPING = {f"{arm} in the backward": arm for arm in ("ours", "zero=1", "zero=2", "zero=3")}
STAGES |= {stepping: {**STAGES[arm], "step_in_backward": True} for stepping, arm in STEPPING.items()}
#: ZeroRedundancyOptimizer over DDP with bucket views; True: parameters_as_bucket_view
REDUNDANCY = {"ZeroRedundancyOptimizer": False, "ZeroRedundancyOptimizer view": True}
#: FSDP2: reshard_after_forward of each block or layer; the root keeps FSDP2's default
FSDP2 = {"FSDP2 resharded": True, "FSDP2 kept": False}
#: the same program with sw.fully_shard
ROWS = {"fully_shard resharded": True, "fully_shard kept": False}
#: DeepSpeed's ZeRO stages, if DeepSpeed is installed
DEEPSPEED = {f"DeepSpeed {stage}": stage for stage in (1, 2, 3)}


def torch_settings(quick: bool) -> list[str]:
    return QUICK_SETTINGS if quick else list(TORCH_SETTINGS)


def best_of(times: dict[str, common.Timing], family: str) -> str:
    """Return the fastest arm whose name begins with `family`."""
    return min((name for name in times if name.startswith(family)), key=lambda name: times[name].median)


def missing_deepspeed() -> str:
    """Return the reason why the DeepSpeed arms are missing, or ""."""
    return "" if importlib.util.find_spec("deepspeed") else "deepspeed is not installed"


def build(arm: str, module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the wrapped module and its optimizer.

    Collective, except for the arm `none`, which never communicates.
    """
    if arm in FSDP2 or arm in ROWS:
        _shard_fully(module, {**FSDP2, **ROWS}[arm], arm in ROWS)
    if arm in REDUNDANCY:
        outer = TorchDDP(module, **VIEW_STATIC)
        settings = {**ADAMW, "parameters_as_bucket_view": REDUNDANCY[arm]}
        return outer, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **settings)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    if arm in STAGES:
        return sw.wrap(module, optimizer, **STAGES[arm])
    return TorchDDP(module, **TORCH_SETTINGS[arm]) if arm in TORCH_SETTINGS else module, optimizer


def _shard_fully(module: nn.Module, reshard_after_forward: bool, is_ours: bool) -> None:
    from torch.distributed.fsdp import fully_shard  # imported here because the import is slow

    if is_ours:
        fully_shard = sw.fully_shard  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [layer for layer in module.children() if isinstance(layer, nn.Linear)]
    units: Any = getattr(module, "blocks", layers)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)


def _deepspeed_engine(module: nn.Module, optimizer: torch.optim.Optimizer, stage: int, batch_size: int) -> Any:
    """Return a DeepSpeed engine on the CPU over torch's Gloo group.

    DeepSpeed's shared memory extension serves inference alone, and compiling it takes minutes when the first engine is
    created. DeepSpeed's own table of compatible extensions is therefore told that this machine cannot run it.
    """
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
    import deepspeed  # imported here because the import takes seconds

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    deepspeed.logger.setLevel("ERROR")
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)[0]


class DeepSpeedTrainer:
    """A Trainer whose DeepSpeed engine runs backward and step and zeroes gradients."""

    def __init__(self, case: str, arm: str, rank: int) -> None:
        self._case = CASES[case]
        self._batch = self._case.batch(rank)
        module = self._case.model()
        optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
        self._engine = _deepspeed_engine(module, optimizer, DEEPSPEED[arm], len(self._batch[0]))

    def step(self) -> Tensor:
        loss = self._case.loss(self._engine, self._batch)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()


class Trainer:
    """One arm: a copy of the case's model, and its training step."""

    def __init__(self, case: str, arm: str, rank: int) -> None:
        self._case = CASES[case]
        self.module = self._case.model()
        self.outer, self._optimizer = build(arm, self.module)
        self._batch = self._case.batch(rank)

    def backward(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._case.loss(self.outer, self._batch)
        loss.backward()
        return loss

    def step(self) -> Tensor:
        """Take one step and return this rank's loss before it."""
        loss = self.backward()
        self._optimizer.step()
        return loss.detach()
