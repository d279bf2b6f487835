"""Training: the objects that a checkpoint holds, checked once."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .state.names import check_wrappers
from .state.optimizer_extras import bare_optimizer


@dataclasses.dataclass
class Training:
    """The objects that a checkpoint holds. `extra` is a tree of plain values and tensors."""

    model: torch.nn.Module
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    dataloader: Any = None
    user_state: Any = None
    extra: Any = None

    def __post_init__(self) -> None:
        from ..optim.diloco import DiLoCo

        if isinstance(self.optimizer, DiLoCo):
            raise ValueError(
                "optimizer is a DiLoCo, whose ranks differ between exchanges: save after its synchronise(), with the DiLoCo in "
                "user_state={'trainer': ...}, which any number of ranks takes back, and in dataloader=[...], which holds each "
                "rank's own"
            )
        self.optimizer = bare_optimizer(self.optimizer)
        if not isinstance(self.model, torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got a {type(self.model).__name__}")
        check_wrappers(self.model)
        if not (self.optimizer is None or hasattr(self.optimizer, "param_groups")):
            raise ValueError(
                f"optimizer must be one torch.optim.Optimizer, got a {type(self.optimizer).__name__}: pass the others in user_state={{...}}"
            )
        user_state = self.user_state.values() if isinstance(self.user_state, dict) else (self.user_state,)
        if any(isinstance(each, DiLoCo) and each.is_sliced for each in user_state):
            raise ValueError(
                "user_state is saved from rank 0 only, but it contains a DiLoCo over a mesh, which has slices on each rank: pass it in "
                "dataloader=[...], and give each replica its own folder"
            )
