"""The arms of bench_ddp and bench_zero: a module, what makes it train with the other ranks, and AdamW(fused=True)."""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
from models import CASES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import shardwright as sw

ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
VIEW_STATIC = {"gradient_as_bucket_view": True, "static_graph": True}
TORCH_SETTINGS: dict[str, dict[str, Any]] = {
    "torch DDP default": {},
    "torch DDP view": {"gradient_as_bucket_view": True},
    **{f"torch DDP view static cap {cap}": {**VIEW_STATIC, "bucket_cap_mb": cap} for cap in (1, 5, 25, 100)},
}
QUICK_SETTINGS = ["torch DDP view static cap 5", "torch DDP view static cap 25"]
#: keywords of sw.wrap
STAGES: dict[str, dict[str, Any]] = {
    "ours": {"zero": 0},
    "zero=1": {"zero": 1},
    "zero=2": {"zero": 2},
    "zero=3": {"zero": 3},
    "zero=3 private": {"zero": 3, "share_parameters": False},
}
#: ZeroRedundancyOptimizer over DDP with bucket views: whether its parameters are views of buckets too
REDUNDANCY = {"ZeroRedundancyOptimizer": False, "ZeroRedundancyOptimizer view": True}
#: FSDP2: reshard_after_forward of each block or layer; the root keeps its own, as is FSDP2's default
FSDP2 = {"FSDP2 resharded": True, "FSDP2 kept": False}


def torch_settings(quick: bool) -> list[str]:
    return QUICK_SETTINGS if quick else list(TORCH_SETTINGS)


def best_of(times: dict[str, common.Timing], family: str) -> str:
    """The fastest of the arms whose names begin with `family`."""
    return min((name for name in times if name.startswith(family)), key=lambda name: times[name].median)


def build(arm: str, module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What is called for a forward, and what steps. Collective, but for the arm `none`, which never communicates."""
    if arm in FSDP2:
        _shard_fully(module, FSDP2[arm])
    if arm in REDUNDANCY:
        outer = TorchDDP(module, **VIEW_STATIC)
        settings = {**ADAMW, "parameters_as_bucket_view": REDUNDANCY[arm]}
        return outer, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **settings)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    if arm in STAGES:
        return sw.wrap(module, optimizer, **STAGES[arm])
    return TorchDDP(module, **TORCH_SETTINGS[arm]) if arm in TORCH_SETTINGS else module, optimizer


def _shard_fully(module: nn.Module, reshard_after_forward: bool) -> None:
    from torch.distributed.fsdp import fully_shard  # takes seconds to import

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [layer for layer in module.children() if isinstance(layer, nn.Linear)]
    units: Any = getattr(module, "blocks", layers)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)


class Trainer:
    """One arm: a copy of the case's model and its step."""

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
        """The loss, which is also this rank's before the step."""
        loss = self.backward()
        self._optimizer.step()
        return loss.detach()
