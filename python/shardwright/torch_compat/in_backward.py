"""Optimizers that step inside a backward: torch.distributed.optim._apply_optimizer_in_backward.

torch keeps such an optimizer as an attribute of its parameter. A hook on the parameter's gradient accumulator steps it
with this rank's gradient alone. In a torch without these private names a step in a backward is an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def optimizers_of(parameter: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step on `parameter` inside the backward."""
    found: list[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", [])
    return found


def take_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the hooks with which torch steps these optimizers."""
    try:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles
    except ImportError:
        return
    for parameter in parameters:
        for handle in handles.get(parameter, []):
            handle.remove()
        handles.pop(parameter, None)
