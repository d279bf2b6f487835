"""Optimizers that are torch's or the user's own: checks, hooks, and torch's private names around their steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._engine import Error

#: (optimizer, inverse of the scale, found_inf, allow_fp16) -> found_inf by device; None: torch's own method is used
Unscale = Callable[[torch.optim.Optimizer, torch.Tensor, torch.Tensor, bool], dict[torch.device, torch.Tensor] | None]


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
            cut = getattr(parameter, "_shardwright_sharded", None)
            if cut is not None and parameter is not cut.sharded and parameter is not cut.whole:
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


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Step without hooks, profiler and what schedulers put around `optimizer.step`."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def optimizers_of(parameter: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Return the optimizers that _apply_optimizer_in_backward made an attribute of `parameter`, but none that has taken over."""
    found = getattr(parameter, "_in_backward_optimizers", ())  # a torch without it has none
    return [each for each in found if not getattr(each, "has_taken_over", False)]


def give_optimizer(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer` what torch's _get_in_backward_optimizers finds."""
    parameter._in_backward_optimizers[:] = [optimizer]  # type: ignore[attr-defined]


def options_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the options with which _apply_optimizer_in_backward made the first of them."""
    return next(iter(getattr(parameter, "_optimizer_kwargs", ())), {})


def take_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the hooks with which torch steps these optimizers on this rank's gradient alone."""
    try:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles
    except ImportError:
        return
    for parameter in parameters:
        for handle in handles.pop(parameter, []):
            handle.remove()


def unscale_by(unscale: Unscale) -> None:
    """Make every GradScaler call `unscale` first. Only the first call has an effect.

    torch's own method calls one kernel for each dtype, and a collective in each if the first gradient is a DTensor. It
    refuses plain gradients beside DTensors.
    """
    original = getattr(torch.amp.GradScaler, "_unscale_grads_", None)
    if original is None or hasattr(original, "_shardwright"):
        return

    @functools.wraps(original)
    def method(self: Any, *given: Any) -> dict[torch.device, torch.Tensor]:
        found = unscale(*given)
        return original(self, *given) if found is None else found

    method._shardwright = True  # type: ignore[attr-defined]
    setattr(torch.amp.GradScaler, "_unscale_grads_", method)  # noqa: B010 # mypy has no other word for it
