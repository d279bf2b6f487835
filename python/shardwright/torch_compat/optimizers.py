"""Checks of optimizers that are torch's or the user's own."""

from __future__ import annotations

from typing import Any

import torch

from .._engine import Error


def on_meta(parameter: torch.Tensor, position: int) -> str:
    """Return the reason why an optimizer has no effect if it was made before its module had memory."""
    return (
        f"optimizer: a parameter of shape {tuple(parameter.shape)} in group {position} is on the meta device, where nothing can be stepped "
        "on: give module and optimizer to sw.wrap with init= or weights=, or make the optimizer after sw.materialize, whose parameters are new"
    )


def check_steppable(optimizer: torch.optim.Optimizer) -> None:
    """Raise Error if an optimizer of no parameter of a wrapped module holds meta parameters, or ones that fully_shard has cut."""
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if getattr(parameter, "_shardwright_sharded", parameter) is not parameter:
                raise Error(
                    f"optimizer: a parameter of shape {tuple(parameter.shape)} in group {position} is one that sw.fully_shard has cut since, "
                    "and is no longer in its module: make the optimizer after sw.fully_shard, over module.parameters()"
                )
            if parameter.is_meta:
                raise Error(on_meta(parameter, position))


def takes_hooks(optimizer: Any) -> bool:
    """Return False also for a class that leaves out Optimizer.__init__(), as some do that wrap another optimizer."""
    is_torchs = isinstance(optimizer, torch.optim.Optimizer)
    return hasattr(optimizer, "_optimizer_step_pre_hooks" if is_torchs else "register_step_pre_hook")


def hooks_around(optimizer: torch.optim.Optimizer, what: str) -> tuple[list[Any], list[Any]]:
    """Return the hooks that run before and after state_dict() or load_state_dict(), named by `what`, in their order."""
    before, after = (getattr(optimizer, f"_optimizer_{what}_{when}_hooks", {}) for when in ("pre", "post"))
    return [*before.values()], [*after.values()]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the hooks that run before each step of an optimizer, in their order."""
    return list(optimizer._optimizer_step_pre_hooks.values())
